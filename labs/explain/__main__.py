"""python -m labs.explain RECIPE [key=value ...] [--bisect] [--kernels], or --labs"""

from sftkit.runtime.script import script


def main() -> int:
    """Explain the subject of the arguments and return the exit code."""
    from labs.explain import run

    return run.main()


if __name__ == "__main__":
    script(main)
