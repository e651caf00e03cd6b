"""Optimizer, learning-rate schedule and gradient clipping, the same objects for every strategy."""
