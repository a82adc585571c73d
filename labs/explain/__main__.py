"""python -m labs.explain RECIPE [key=value ...] [--bisect] [--kernels], or --labs"""

from sftkit.runtime.script import script


def main() -> int:
    """Explain what the words name, and return the exit code."""
    from labs.explain.flags import parse

    args, cfg = parse()  # whatever is wrong with words and recipe is refused here, before torch is imported

    from labs.explain.run import run_explain

    return run_explain(args, cfg)


if __name__ == "__main__":
    script(main)
