"""Runs a script with a driver of GPUs that is not there: ``with_stand_in_nvml.py SCRIPT ARGS...``."""

import runpy
import sys

import torch
from stand_in_nvml import StandInNvml

nvml = StandInNvml()
nvml.nvmlDeviceGetHandleByUUID = lambda _uuid: 0
sys.modules["pynvml"] = nvml
assert torch.cuda.is_available()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
