"""The command `sftkit`, or python -m sftkit; what it does stands in launch/cli.py."""

from sftkit.runtime.script import script


def main() -> None:
    """Run a command as a script: what a user did wrong ends with a line, not a traceback."""
    script(_main)


def _main() -> None:
    from sftkit.launch import cli

    cli.main()


if __name__ == "__main__":
    main()
