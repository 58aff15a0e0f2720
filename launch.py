"""Composes one run or many from conf/ and the command line, checks every one, and dispatches them: `python launch.py --help`."""

import sys
from pathlib import Path

from opsd.launch.main import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent / "conf", sys.argv[1:]))
