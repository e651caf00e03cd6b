"""What the planner predicts, held against measurements."""
