"""A model by its sizes, and the one that several suites measure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model."""

    name: str
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int


NARROW = Shape(name="4 x 256", n_layer=4, n_head=4, n_embd=256, vocab_size=8192)
