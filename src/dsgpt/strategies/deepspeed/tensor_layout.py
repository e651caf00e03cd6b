"""Which part of which parameter a tensor-parallel rank holds (Shoeybi et al. 2019, "Megatron-LM", section 3).

Queries, keys, values and the wide layer of the MLP are split by their outputs: every rank computes some of the heads
and some of the hidden units. The two projections back into the residual stream are split by their inputs: every rank
computes what its heads and units contribute, and the sum over ranks is the layer's output. Their biases are added once,
after the sum, so every rank holds them whole, like embeddings and LayerNorms.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsgpt.model.gpt2 import Attend

SPLIT = {
    "attn.qkv.weight": (3, 0),
    "attn.qkv.bias": (3, 0),
    "attn.proj.weight": (1, 1),
    "mlp.fc.weight": (1, 0),
    "mlp.fc.bias": (1, 0),
    "mlp.proj.weight": (1, 1),
}
"""Name inside a block to the number of matrices fused along the first dimension, and the dimension along which each of
them is split. Every rank has whole heads, with the query, key and value of each."""


def _rule(name: str) -> tuple[int, int] | None:
    """The entry of ``SPLIT`` for a canonical name; None for a parameter that every rank holds whole."""
    if not name.startswith("blocks."):
        return None
    return SPLIT.get(name.split(".", 2)[2])


def is_split(name: str) -> bool:
    """Whether each tensor rank holds a different part of the parameter with this canonical name."""
    return _rule(name) is not None


def take_part(name: str, whole: Tensor, *, rank: int, size: int) -> Tensor:
    """What tensor rank ``rank`` of ``size`` holds of a ``whole`` parameter; all of it if it is not split."""
    rule = _rule(name)
    if rule is None or size == 1:
        return whole
    fused, dimension = rule
    return torch.cat([matrix.chunk(size, dimension)[rank] for matrix in whole.chunk(fused)])


def join_parts(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The whole of a split parameter from every rank's part, by rank: undoes ``take_part``.

    Raises:
        ValueError: the parameter is not split.
    """
    rule = _rule(name)
    if rule is None:
        raise ValueError(f"{name} is not split over tensor ranks: take any rank's copy")
    fused, dimension = rule
    matrices = zip(*(part.chunk(fused) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, dimension) for pieces in matrices])


def attend_with_own_dropout(attend: Attend, *, rank: int) -> Attend:
    """``attend`` with dropout masks that differ between tensor ranks, although their random streams are the same.

    The streams are the same so that all ranks drop the same elements of the activations that all of them hold. But each
    rank has different heads, which need different masks. The seed of these masks is drawn from the common stream, and
    the rank is added to it. So the streams stay equal, and a recomputed forward pass draws the same masks again.
    """

    def attend_with_own_dropout(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> Tensor:
        if dropout == 0:
            return attend(q, k, v, dropout, causal)
        seed = int(torch.randint(2**62, ()))  # from the CPU's stream, so that nothing waits for a GPU
        with torch.random.fork_rng(devices=[q.device] if q.device.type == "cuda" else []):
            torch.manual_seed(seed + rank)
            return attend(q, k, v, dropout, causal)

    return attend_with_own_dropout
