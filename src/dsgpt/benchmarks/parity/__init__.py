"""Every strategy against plain PyTorch, step by step."""
