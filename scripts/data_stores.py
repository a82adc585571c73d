"""List, verify or prune the tokenized data that is kept in data.cache_dir. (`sftkit prepare RECIPE` makes it.)

.venv/bin/python scripts/data_stores.py list
.venv/bin/python scripts/data_stores.py verify
.venv/bin/python scripts/data_stores.py prune --keep-size 200G
"""

from pathlib import Path

from sftkit.runtime.script import script


def main() -> int:
    """Do what the word asks for."""
    from sftkit.config.commands import Parser
    from sftkit.config.schema import DataConfig
    from sftkit.data.store import keeping

    parser = Parser(__doc__)
    parser.add_argument("do", choices=("list", "verify", "prune"))
    parser.add_argument("--cache-dir", type=Path, default=Path(DataConfig.cache_dir), metavar="DIR")
    parser.add_argument("--keep-size", metavar="SIZE", help="prune: what may stay, such as 200G; the least used go")
    flags = parser.parse_args()
    if flags.do == "prune" and flags.keep_size is None:
        parser.error("prune needs --keep-size, such as --keep-size 200G")
    if flags.do != "prune" and flags.keep_size is not None:
        parser.error(f"--keep-size is for prune, not for {flags.do}")
    if flags.do == "prune":
        keeping.remove_least_used(flags.cache_dir, flags.keep_size)
        return 0
    return 0 if keeping.print_kept(flags.cache_dir, verify=flags.do == "verify") else 1


if __name__ == "__main__":
    script(main)
