"""Optimizer, learning-rate schedule and gradient clipping, used by all strategies."""
