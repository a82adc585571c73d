"""The report of a run: report.html and report.json in its folder, and a model card beside its newest checkpoint.

python scripts/report.py                                     the newest run under runs/
python scripts/report.py runs/default/sft
python scripts/report.py runs/a/sft --against runs/b/sft     both runs' curves, and the settings that differ
"""

import argparse
from pathlib import Path

from sftkit.config.load import fail
from sftkit.errors import ConfigError
from sftkit.reports.write import newest_run, write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="run directory; default: the newest under runs/")
    parser.add_argument("--against", type=Path, metavar="RUN2", help="a second run to compare with")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write there (JSON beside it), not into the run")
    args = parser.parse_args()
    try:
        if args.out is not None and (args.out.suffix != ".html" or not args.out.absolute().parent.is_dir()):
            raise ConfigError(f"--out {args.out}: must be a file ending in .html in a folder that exists")
        print(write_report(args.run or newest_run(Path("runs")), args.against, args.out))
    except ConfigError as error:
        fail(str(error))
    except OSError as error:
        fail(f"the report cannot be written: {error}")


if __name__ == "__main__":
    main()
