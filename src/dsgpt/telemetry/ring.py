"""Bytes that a rank sends, from the payload of a collective operation. Imports no torch: planning starts fast."""

_FACTORS = {
    "all_reduce": (2, 1),
    "all_gather": (1, 1),
    "reduce_scatter": (1, 1),
    "all_to_all": (1, 1),
    "gather": (1, 1),
    "scatter": (1, 1),
    "broadcast": (1, 0),
    "reduce": (1, 0),
    "send": (1, 0),
    "recv": (0, 0),
    "barrier": (0, 0),
}
"""(a, b) of the factor a (n - b) / n among n ranks."""


def ring_factor(operation: str, group_size: int) -> float:
    """Bytes that a rank sends per byte of payload; 0 in a group of one.

    The payload is what a rank receives from an all-gather, what it gives to a reduce-scatter or all-to-all, and the
    tensor of any other operation. The factors are those of the bus bandwidth of NCCL's tests
    (``nccl-tests/doc/PERFORMANCE.md``): 2(n-1)/n for an all-reduce, (n-1)/n for all-gather, reduce-scatter, all-to-all,
    gather and scatter, 1 for broadcast, reduce and send. What a rank receives is counted at the rank that sent it.
    """
    factor, missing = _FACTORS[operation]
    return 0.0 if group_size == 1 else factor * (group_size - missing) / group_size
