"""Checkpoints of a run: one portable form for every strategy, verified before it is loaded."""
