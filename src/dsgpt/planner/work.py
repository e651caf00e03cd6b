"""The work of one micro batch on one rank: FLOPs, bytes, operations, activations.

Predicts the bytes of activations: what a forward pass keeps, what the loss needs, what a backward pass adds. For a
block without dropout, they are in units of the residual stream (B, T, C) of a rank, with T tensor peers. The
outputs of both LayerNorms, of the attention's residual sum and of the block are 1 each. Queries, keys and values are
3/T, the attention's output 1/T, the MLP's inner layer before and after GELU 4/T each: 4 + 12/T. Those are the 16
numbers of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), whose 34 bytes are 16 numbers in 16 bits and two
dropout masks. Their quadratic term does not exist: fused attention keeps one number per token and head of its scores.

The work of one micro batch on one rank: FLOPs, bytes and operations of a block, of the head and of the embedding.
Letters: M tokens of a micro batch on a rank, T tokens of a sequence, C width, V vocabulary, t tensor ranks, w bytes of
a number in the precision of the activations. A stream is the residual stream of a micro batch, wMC bytes.
"""

import math
from dataclasses import dataclass

from dsgpt.planner.rates import Rates
from dsgpt.planner.setup import FULL, Setup

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


_FORWARD_KERNELS, _BACKWARD_KERNELS = 14, 26
"""Operations of a block."""


@dataclass(frozen=True, kw_only=True)
class OpCounts:
    """What a device does; the parts run one after another."""

    matrix_flops: float = 0.0
    matrix_bytes: float = 0.0
    """Read and written by the matrix products: factors and results, once each."""
    attention_flops: float = 0.0
    elementwise_bytes: float = 0.0
    logits: float = 0.0
    kernels: int = 0

    def __add__(self, other: "OpCounts") -> "OpCounts":
        return OpCounts(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def times(self, count: float) -> "OpCounts":
        """The same work again and again."""
        return OpCounts(**{name: value * count for name, value in vars(self).items()})

    def seconds(self, rates: Rates, setup: Setup) -> float:
        """The time of all parts. Matrix products take the longer of computing and reading (a roofline)."""
        precision, model = setup.precision, setup.model
        attention = rates.attention_at(precision, head_size=model.n_embd // model.n_head, length=setup.seq_length)
        width = model.n_embd / math.sqrt(setup.sizes.tensor)  # of a square with as many weights as a rank has
        computing = self.matrix_flops / rates.matrix_at(precision, width=width, rows=setup.tokens)
        return (
            max(computing, self.matrix_bytes / rates.memory)
            + self.attention_flops / attention
            + self.elementwise_bytes / rates.elementwise[precision]
            + self.logits / rates.logits[precision]
            + self.kernels * rates.kernel_sec
        )


def block_forward(setup: Setup) -> OpCounts:
    """A block's forward pass: 24MC²/t FLOPs of matrices, 2MTC/t of causal attention, 10 + 10/t streams.

    Streams read and written: 2 by each LayerNorm, 3 by each residual sum, 8/t by GELU, 2/t by the transposed output of
    attention. The layers of tensor ranks add their biases after the product, 4 + 14/t. Sequence ranks arrange the
    tensors of four all-to-alls before and after each, 16.
    """
    model, tokens, tensor = setup.model, setup.tokens, setup.sizes.tensor
    stream = setup.low * tokens * model.n_embd
    matrices = 12 * model.n_embd**2 // tensor
    biases = 4 + 14 / tensor if tensor > 1 else 0
    arranged = 16 if setup.sizes.sequence > 1 else 0
    return OpCounts(
        matrix_flops=2 * matrices * tokens,
        matrix_bytes=setup.low * matrices + stream * (4 + 12 / tensor),
        attention_flops=2 * tokens * setup.seq_length * model.n_embd / tensor,
        elementwise_bytes=stream * (10 + 10 / tensor + biases + arranged),
        kernels=_FORWARD_KERNELS,
    )


def block_backward(setup: Setup) -> OpCounts:
    """A block's backward pass: twice the matrices, 2.5 times the attention, 18 + 25/t streams.

    Attention multiplies five times instead of twice, because it computes its scores again (FlashAttention, Dao et al.
    2022, algorithm 4). Streams: 5 by each LayerNorm, 3 by each sum of gradients, 12/t by GELU, 6/t to join the
    gradients of queries, keys and values. 2 + 7/t are for the sums that are the gradients of biases, 16 around the
    all-to-alls of sequence ranks.
    """
    forward, tensor = block_forward(setup), setup.sizes.tensor
    stream = setup.low * setup.tokens * setup.model.n_embd
    arranged = 16 if setup.sizes.sequence > 1 else 0
    return OpCounts(
        matrix_flops=2 * forward.matrix_flops,
        matrix_bytes=2 * forward.matrix_bytes,
        attention_flops=2.5 * forward.attention_flops,
        elementwise_bytes=stream * (18 + 25 / tensor + arranged),
        kernels=_BACKWARD_KERNELS,
    )


def head_and_loss(setup: Setup, *, kind: str) -> OpCounts:
    """The head, the loss and their gradients: 6MCV FLOPs, all in the forward pass. No rank splits the head.

    The gradient of the head is added up over chunks of tokens, in low precision through fp32; then the gradient of the
    lookup, which has its size too, is set to zero, filled and added.

    Args:
        setup: the training.
        kind: ``cpu`` or ``cuda``, on which the size of a chunk depends.
    """
    model, tokens, low = setup.model, setup.tokens, setup.low
    head = model.padded_vocab_size * model.n_embd
    logits = tokens * model.vocab_size
    chunks = -(-logits // CHUNK[kind])
    summing = chunks * (2 * low + 2 * FULL) + FULL + low if chunks > 1 and low != FULL else 0
    return OpCounts(
        matrix_flops=6 * head * tokens,
        matrix_bytes=3 * low * (head + logits),
        elementwise_bytes=head * (summing + 4 * low),
        logits=logits,
        kernels=12 * chunks,
    )


def embedding(setup: Setup) -> OpCounts:
    """Looking up and adding the two embeddings, the gradients of both, and the last LayerNorm: 16 streams."""
    stream = setup.low * setup.tokens * setup.model.n_embd
    return OpCounts(elementwise_bytes=16 * stream, kernels=16)


def validation_forward(setup: Setup, blocks: int, *, kind: str) -> OpCounts:
    """The forward pass of all blocks and the loss without gradients, for a micro batch."""
    head = head_and_loss(setup, kind=kind)
    loss = OpCounts(matrix_flops=head.matrix_flops / 3, logits=head.logits / 2, kernels=head.kernels)
    return block_forward(setup).times(blocks) + loss
