"""The training loop and what surrounds it: the run folder, resuming, saving, the journal."""
