"""The shape of a GPT-2, its published sizes, its parameter count, and what the names of parameters decide.

Imports no torch, so planning starts fast.
"""

from dataclasses import asdict, dataclass
from typing import Any

from dsgpt.common.text import divisors_around

VOCAB_MULTIPLE = 64
"""The embedding's rows are padded to a multiple of this, so that GPUs can use their matrix units. No data contains a
padded id."""


SHAPE_FLAGS = {
    "n_layer": "--num_layers",
    "n_head": "--num_heads",
    "n_embd": "--embedding_size",
    "block_size": "--max_position_embeddings",
    "vocab_size": "--vocab_size",
}
"""The flag for each integer field of a shape."""


LARGEST = {"n_layer": 1_000, "n_head": 65_536, "n_embd": 1 << 31, "block_size": 1 << 31, "vocab_size": 1 << 31}
"""Limits far above every GPT. Without them a typo would take minutes to fail."""


def shape_problems(shape: dict[str, Any]) -> list[str]:
    """A line for each mistake in ``shape``, the fields of a ``GPT2Config``; it names the flag."""
    given = [(flag, shape[field], LARGEST[field]) for field, flag in SHAPE_FLAGS.items()]
    problems = [f"{flag} must be at least 1, not {value}" for flag, value, _ in given if value < 1]
    problems += [f"{flag} must be at most {most:,}, not {value:,}" for flag, value, most in given if value > most]
    width, heads = shape["n_embd"], shape["n_head"]
    if not problems and width % heads:
        nearest = divisors_around(width, heads)
        problems.append(f"--num_heads {heads} does not divide --embedding_size {width}: take {nearest} heads")
    if not 0 <= shape["dropout"] < 1:
        problems.append(f"--dropout must be at least 0 and below 1, not {shape['dropout']}")
    return problems


def length_problems(seq_length: int, positions: int) -> list[str]:
    """A line if sequences of ``seq_length`` tokens do not fit into the ``positions`` of a model."""
    wrong = f"--seq_length {seq_length} is longer than the model's {positions} positions"
    return [f"{wrong}: lower it, or add --max_position_embeddings {seq_length}"] if seq_length > positions else []


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The shape of one GPT-2."""

    n_layer: int
    """Transformer blocks."""
    n_head: int
    """Attention heads per block; divides ``n_embd``."""
    n_embd: int
    """Width of the residual stream."""
    block_size: int
    """Positions with an embedding: the longest sequence that the model can read."""
    vocab_size: int
    """Ids that the model can read and predict."""
    dropout: float = 0.0
    """Probability of dropping an activation in training. GPT-2 used 0.1; models that see data once or twice use 0."""

    def __post_init__(self) -> None:
        problems = shape_problems(asdict(self))
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: ``vocab_size`` rounded up to a multiple of 64."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def parameter_count(self) -> int:
        """Parameters of the model without the padded vocabulary rows, as the published sizes are counted."""
        width = self.n_embd
        block = 12 * width * width + 13 * width  # qkv, projection, two MLP matrices; their biases; two LayerNorms
        return (self.vocab_size + self.block_size) * width + self.n_layer * block + 2 * width

    def padded_parameter_count(self) -> int:
        """Parameters of the model with the padded vocabulary rows, as they are in memory."""
        return self.parameter_count() + (self.padded_vocab_size - self.vocab_size) * self.n_embd

    def flops_per_token(self, seq_length: float) -> int:
        """FLOPs of forward and backward pass, by the PaLM paper's appendix B: 6 N + 12 L H Q T.

        N leaves out the positions, whose embedding is only looked up, and padded rows; the token embedding counts,
        because the head multiplies by it. Recomputed activations do not count.

        Args:
            seq_length: tokens of a training sequence, T; of a document in it, if no token sees another.
        """
        multiplied = self.parameter_count() - self.block_size * self.n_embd
        return round(6 * multiplied + 12 * self.n_layer * self.n_embd * seq_length)

    def largest_parameter(self) -> int:
        """Elements of the largest parameter: an embedding, with its padded rows, or a matrix of the MLP."""
        return self.n_embd * max(self.padded_vocab_size, self.block_size, 4 * self.n_embd)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for records and checkpoints."""
        return asdict(self)


GPT2_VOCAB_SIZE = 50_257


def _preset(n_layer: int, n_head: int, n_embd: int, block_size: int = 1024) -> GPT2Config:
    return GPT2Config(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, vocab_size=GPT2_VOCAB_SIZE)


PRESETS = {
    "demo": _preset(4, 4, 128, 256),
    "tiny": _preset(8, 6, 192),
    "small": _preset(12, 12, 768),
    "medium": _preset(24, 16, 1024),
    "large": _preset(36, 20, 1280),
    "xl": _preset(48, 25, 1600),
}
"""``small`` to ``xl`` are the four sizes of the GPT-2 paper (table 2); ``tiny`` and ``demo`` are our own, for small
machines."""

STATE_NAMES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The state of a parameter, as torch and DeepSpeed both name it: Adam's two moments, SGD's momentum."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter: to matrices and embeddings, not to biases and LayerNorms.

    The name decides, not the dimensions: a ZeRO-3 or FSDP shard of a matrix is flat.
    """
    return name.endswith(".weight") and ".ln_" not in f".{name}"
