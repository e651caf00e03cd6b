"""Weights in the forms that other tools read: Hugging Face, portable, DeepSpeed."""
