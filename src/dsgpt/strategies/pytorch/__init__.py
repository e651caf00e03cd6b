"""Strategies of plain PyTorch: one device, DDP, FSDP. They never import DeepSpeed."""
