"""Scores a checkpoint or a model and prints where the samples are: `python evaluate.py --help`."""

import sys
from pathlib import Path

from opsd.launch.score import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent / "conf", sys.argv[1:]))
