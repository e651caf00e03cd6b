"""Generation from a checkpoint, and its latency."""
