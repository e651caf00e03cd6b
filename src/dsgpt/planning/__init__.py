"""What is predicted before a run starts, by formula: memory, bytes sent, time and cost."""
