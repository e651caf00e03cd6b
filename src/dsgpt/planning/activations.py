"""Predicts the bytes of activations: what a forward pass keeps, what the loss needs, what a backward pass adds.

For a block without dropout, in units of the residual stream (B, T, C) of a rank, with T tensor peers: the outputs of
both LayerNorms, of the attention's residual sum and of the block are 1 each; queries, keys and values are 3/T, the
attention's output 1/T, the MLP's inner layer before and after GELU 4/T each: 4 + 12/T. Those are the 16 numbers of
Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), whose 34 bytes are 16 numbers in 16 bits and two dropout masks.
Their quadratic term does not exist: fused attention keeps one number per token and head of its scores.
"""

from dsgpt.planning.setup import FULL, Setup

CHUNK = {"cpu": 32 << 20, "cuda": 256 << 20}
"""``model.linear_cross_entropy.CHUNKS``: most logits at a time. A test holds them together."""
CACHED = 256 << 10
"""``model.linear_cross_entropy.CACHED``: most logits in a step of the softmax on a CPU."""
_ID = 8
"""Bytes of a token id."""
_MOMENTS = 2
"""Numbers that a LayerNorm keeps per token: mean and inverse deviation."""


def stream_bytes(setup: Setup) -> int:
    """One residual stream of a micro batch, (B, T, C), in the precision of the activations."""
    return setup.low * setup.tokens * setup.model.n_embd


def block_bytes(setup: Setup) -> int:
    """What the forward pass of a block keeps, its output included."""
    stream, tensor = stream_bytes(setup), setup.sizes.tensor
    split = 12 + (1 if setup.sizes.sequence > 1 else 0)  # the output before all-to-all; other copies replace theirs
    statistics = FULL * setup.tokens * (2 * _MOMENTS + setup.model.n_head // tensor)  # the softmax has one per head
    return 4 * stream + split * stream // tensor + statistics


def kept_bytes(setup: Setup, blocks: int) -> int:
    """What the forward pass of ``blocks`` blocks keeps for their backward pass, with ids and the embedding's output."""
    stream = stream_bytes(setup)
    of_block = stream if setup.activation_checkpointing else block_bytes(setup)
    return stream + blocks * of_block + 2 * _ID * setup.tokens


def recomputed_bytes(setup: Setup) -> int:
    """What is recomputed of one block for its backward pass; 0 without activation checkpointing.

    Not its output, and that of the last block has been freed by then.
    """
    return block_bytes(setup) - 2 * stream_bytes(setup) if setup.activation_checkpointing else 0


def block_gradient_bytes(setup: Setup) -> int:
    """The most that a block's backward pass adds: the gradient of the MLP's inner layer."""
    return 4 * stream_bytes(setup) // setup.sizes.tensor


def head_gradient_bytes(setup: Setup, *, device: str) -> int:
    """The gradient of the head's weights, which the loss computes; in fp32 if several chunks are added up."""
    if _plain_loss(setup):
        return 0
    model = setup.model
    width = FULL if _rows(setup, device) < setup.tokens else setup.low
    return width * model.padded_vocab_size * model.n_embd


def logits_bytes(setup: Setup, *, device: str, gradients: bool = True) -> int:
    """The logits of a chunk and the steps of its softmax, with their ``gradients`` or without.

    Without chunks: the softmax of all tokens, its gradient and that of the loss, in fp32; and in a pipeline, which
    keeps what its last stage put out, the logits of two micro batches. A GPU casts a chunk in bf16 to fp32 before its
    softmax, of which it makes a second one; only for fp16 has PyTorch one operation (``log_softmax`` in ATen).
    """
    vocabulary = setup.model.vocab_size
    if _plain_loss(setup):
        return (3 if gradients else 2) * FULL * setup.tokens * vocabulary + kept_logits_bytes(setup)
    rows = _rows(setup, device)
    chunk = setup.low * rows * vocabulary
    if device == "cuda":
        softmax = FULL * (1 + (setup.low != FULL)) * rows * vocabulary
    else:
        step = max(1, CACHED // vocabulary)
        copies = 1 + (rows > step) + (setup.low != FULL)  # of this step, the one before, and the cast to fp32
        softmax = FULL * copies * min(rows, step) * vocabulary
    return max(chunk + softmax, _product_bytes(setup, device) if gradients else 0)


def kept_logits_bytes(setup: Setup) -> int:
    """Logits that the last stage of a pipeline keeps all the time."""
    return 2 * setup.low * setup.tokens * setup.model.vocab_size if setup.sizes.pipeline > 1 else 0


def _product_bytes(setup: Setup, device: str) -> int:
    """A chunk's logits and its part of the head's gradient, in the low precision, which is added to the sum in fp32.

    On a CPU the part is cast to fp32 first, except the first one, which is copied.
    """
    rows, head = _rows(setup, device), setup.model.vocab_size * setup.model.n_embd
    if setup.low == FULL or rows == setup.tokens:
        return 0
    later = min(rows, setup.tokens - rows)
    vocabulary, cast = setup.model.vocab_size, FULL * head if device == "cpu" else 0
    return setup.low * head + max(setup.low * rows * vocabulary, setup.low * later * vocabulary + cast)


def _plain_loss(setup: Setup) -> bool:
    """Whether the loss is PyTorch's cross-entropy of all logits."""
    return setup.precision == "fp16" or setup.sizes.pipeline > 1


def _rows(setup: Setup, device: str) -> int:
    return min(setup.tokens, max(1, CHUNK[device] // setup.model.vocab_size))
