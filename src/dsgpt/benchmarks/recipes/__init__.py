"""Which learning rate, batch and schedule a small model learns most with."""
