"""python -m sftkit.launch SCRIPT RECIPE [key=value ...]"""

from sftkit.runtime.script import script


def main() -> int:
    from sftkit.launch import launch

    return launch.main()


if __name__ == "__main__":
    script(main)
