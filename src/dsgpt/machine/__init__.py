"""The machine and the processes of a run: ranks, devices, launchers, GPUs, signals, the console."""
