"""python -m sftkit.launch SCRIPT RECIPE [key=value ...]"""

from sftkit.runtime.script import script


def main() -> int:
    """Start what the command line names, and return the exit code."""
    # Imported here: runtime/script.py answers a Ctrl-C before it.
    from sftkit.launch import launch

    return launch.main()


if __name__ == "__main__":
    script(main)
