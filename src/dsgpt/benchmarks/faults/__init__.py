"""Kills, signals, damaged files and full disks: the next ``--resume`` succeeds."""
