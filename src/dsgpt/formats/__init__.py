"""What other projects write: Hugging Face checkpoints, safetensors, tokenizers, hub folders."""
