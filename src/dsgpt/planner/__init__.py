"""Memory, time and money of a training before it runs; advice; calibration of a machine."""
