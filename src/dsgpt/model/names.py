"""Names that decide what happens to a parameter and its optimizer state. Imports no torch."""

STATE_NAMES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The state of a parameter, as torch and DeepSpeed both name it: Adam's two moments, SGD's momentum."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter: to matrices and embeddings, not to biases and LayerNorms.

    The name decides, not the dimensions: a ZeRO-3 or FSDP shard of a matrix is flat.
    """
    return name.endswith(".weight") and ".ln_" not in f".{name}"
