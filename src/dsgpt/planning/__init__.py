"""What is predicted before a run starts: bytes of model state and bytes sent, by formula."""
