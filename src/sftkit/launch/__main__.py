"""python -m sftkit.launch SCRIPT RECIPE [key=value ...]"""

import sys

from sftkit.launch.launch import main

if __name__ == "__main__":
    sys.exit(main())
