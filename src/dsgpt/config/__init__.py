"""Turns flags and a recipe into the resolved description of a run, or reports all mistakes in them."""
