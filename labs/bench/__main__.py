"""python -m labs.bench PLAN.yaml [--out DIR] [--only NAME ...] [--ahead], or --report results.json"""

from sftkit.runtime.script import script


def main() -> int:
    """Start the bench, and return the exit code."""
    from labs.bench import run

    return run.main()


if __name__ == "__main__":
    script(main)
