"""python -m labs.patterns [--out FILE.json] [--processes N ...], or --show FILE.json"""

from sftkit.runtime.script import script


def main() -> int:
    """Start the measurement, and return the exit code."""
    from labs.patterns import run

    return run.main()


if __name__ == "__main__":
    script(main)
