"""Advises before a run is paid for: memory, time and cost of a setup, and the best setup."""
