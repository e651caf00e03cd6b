"""The network: its shape, its layers, its initial weights."""
