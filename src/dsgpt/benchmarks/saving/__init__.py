"""How long training waits for a checkpoint."""
