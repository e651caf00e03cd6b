"""Generation from a checkpoint, its evaluation, and weights for other tools."""
