"""Predicts the bytes of activations: what a forward pass keeps, what the loss needs, what a backward pass adds.

For a block without dropout, in units of the residual stream (B, T, C) of a rank, with T tensor peers: the outputs of
both LayerNorms, of the attention's residual sum and of the block are 1 each; queries, keys and values are 3/T, the
attention's output 1/T, the MLP's inner layer before and after GELU 4/T each: 4 + 12/T. Korthikanti et al. 2022
(arXiv 2205.05198, section 4.1) count 17 without dropout, because they keep the softmax's input, which the fused attention
kernels do not, but no separate residual sums.
"""

from dsgpt.planning.setup import FULL, Setup

CHUNK = {"cpu": 32 << 20, "cuda": 256 << 20}
"""``model.linear_cross_entropy.CHUNKS``: most logits at a time. A test holds them together."""
CACHED = 256 << 10
"""``model.linear_cross_entropy.CACHED``: most logits in a step of the softmax on a CPU."""


def stream_bytes(setup: Setup) -> int:
    """One residual stream of a micro batch, (B, T, C), in the precision of the activations."""
    return setup.low * setup.tokens * setup.model.n_embd


def block_bytes(setup: Setup) -> int:
    """What the forward pass of a block keeps, its output included."""
    stream, tensor = stream_bytes(setup), setup.sizes.tensor
    split = 12 + (4 if setup.sizes.sequence > 1 else 0)  # all-to-all copies queries, keys, values and output
    statistics = FULL * setup.tokens * (4 + setup.model.n_head // tensor)  # of LayerNorms and of the softmax
    return 4 * stream + split * stream // tensor + statistics


def kept_bytes(setup: Setup, blocks: int) -> int:
    """What the forward pass of ``blocks`` blocks keeps until their backward pass, and the embedding's output."""
    stream = stream_bytes(setup)
    of_block = stream if setup.activation_checkpointing else block_bytes(setup)
    return stream + blocks * of_block + 2 * 8 * setup.tokens  # and the ids


def recomputed_bytes(setup: Setup) -> int:
    """What is recomputed of one block for its backward pass; 0 without activation checkpointing."""
    return block_bytes(setup) if setup.activation_checkpointing else 0


def block_gradient_bytes(setup: Setup) -> int:
    """The most that a block's backward pass adds: the gradient of the MLP's inner layer."""
    return 4 * stream_bytes(setup) // setup.sizes.tensor


def head_gradient_bytes(setup: Setup, *, device: str) -> int:
    """The gradient of the head's weights, which the loss computes; in fp32 if several chunks are added up."""
    model = setup.model
    width = FULL if _rows(setup, device) < setup.tokens else setup.low
    return width * model.padded_vocab_size * model.n_embd


def logits_bytes(setup: Setup, *, device: str) -> int:
    """The logits of a chunk, of the chunk before it, which is freed only afterwards, and the softmax's steps."""
    rows, vocabulary = _rows(setup, device), setup.model.vocab_size
    if setup.precision == "fp16" or setup.sizes.pipeline > 1:
        return (setup.low + 3 * FULL) * setup.tokens * vocabulary  # plain cross-entropy: logits, in fp32 and gradients
    second = min(rows, max(0, setup.tokens - rows))
    if device == "cuda":
        return vocabulary * (rows * (setup.low + FULL) + second * setup.low)
    in_softmax = 2 * FULL * min(CACHED, rows * vocabulary)
    return setup.low * vocabulary * rows + max(in_softmax, setup.low * vocabulary * second)


def _rows(setup: Setup, device: str) -> int:
    return min(setup.tokens, max(1, CHUNK[device] // setup.model.vocab_size))
