"""The network: its shape, its layers, its loss, its initial weights, the names of its state."""
