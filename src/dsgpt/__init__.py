"""Train GPT-2-class models from scratch with DeepSpeed or PyTorch, and compare parallel strategies on equal work."""
