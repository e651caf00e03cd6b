"""The machine and the processes of a run: ranks, devices, launchers, process groups, signals."""
