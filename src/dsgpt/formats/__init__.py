"""Formats of other projects: Hugging Face checkpoints, safetensors, tokenizers, hub folders."""
