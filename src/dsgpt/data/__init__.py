"""Token files: their format, the loader, and the preparation of text."""
