"""Experiment trackers as sinks of a run's journal, each through its own library."""
