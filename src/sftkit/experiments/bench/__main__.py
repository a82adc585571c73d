"""python -m sftkit.experiments.bench PLAN.yaml [--out DIR] [--only NAME ...] [--ahead], or --report results.json"""

from sftkit.runtime.script import script


def main() -> int:
    """Start the bench, and return the exit code."""
    from sftkit.experiments.bench import run

    return run.main()


if __name__ == "__main__":
    script(main)
