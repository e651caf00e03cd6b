"""Measurements while a run trains: time, memory, bytes sent."""
