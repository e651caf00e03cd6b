"""Predictions of the planner held against measurements."""
