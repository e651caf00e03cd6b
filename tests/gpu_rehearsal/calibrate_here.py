"""Calibrates the stand-in GPU into the file that is named. Its process is forked, so that it has the stand-in, too."""

import sys
from pathlib import Path

from dsgpt.planner import calibrate

start = calibrate.start_processes
calibrate.start_processes = lambda *words, **options: start(*words, **options | {"start_method": "fork"})
calibrate.WIDTHS, calibrate.TOKENS = {"cuda": (64, 128)}, {"cuda": 256}
calibrate.ROWS, calibrate.WEIGHT_BYTES = {"cuda": (64, 128, 256)}, {"cuda": 1 << 20}
calibrate.ELEMENTS, calibrate.SENT_BYTES = {"cuda": 1 << 20}, {"cuda": 1 << 20}
calibrate.calibrate(Path(sys.argv[1]), seconds=2, devices=1)
