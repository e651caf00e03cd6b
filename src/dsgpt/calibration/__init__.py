"""Measures what a machine can do: matrices, memory, disk, and sums over its devices."""
