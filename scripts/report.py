"""Write the report of a run: report.html and report.json in its folder, and a model card next to its
newest checkpoint.

.venv/bin/python scripts/report.py                                     the newest run under runs/
.venv/bin/python scripts/report.py runs/default/sft
.venv/bin/python scripts/report.py runs/a/sft --against runs/b/sft     both runs' curves, and the settings that differ
"""

from sftkit.runtime.script import script


def main() -> None:
    """Write report.html, or compare runs."""
    from pathlib import Path

    from sftkit.config.commands import Parser, path
    from sftkit.config.terminal import print_text
    from sftkit.errors import ConfigError
    from sftkit.reports.collect import newest_run_under
    from sftkit.reports.page import checks_of, write_report

    parser = Parser(__doc__)
    parser.takes_second_word = "--against"
    parser.add_argument("run", nargs="?", type=path, help="run directory; default: the newest under runs/")
    parser.add_argument("--against", type=path, metavar="RUN2", help="a second run to compare with")
    parser.add_argument(
        "--out", type=path, metavar="FILE.html", help="write to this file (JSON next to it) instead of the run"
    )
    args = parser.parse_args()
    try:
        if args.out is not None and (args.out.suffix != ".html" or not args.out.absolute().parent.is_dir()):
            raise ConfigError(f"--out {args.out}: must be a file ending in .html in a folder that exists")
        run = args.run or newest_run_under(Path("runs"))
        page = write_report(run, args.against, args.out)
        print_text(str(page))
        print_text(f"checks: {checks_of(run)}", error=True)
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}") from error


if __name__ == "__main__":
    script(main)
