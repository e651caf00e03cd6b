"""The work of one micro batch on one rank: FLOPs, bytes and operations of a block, of the head and of the embedding.

Letters: M tokens of a micro batch on a rank, T tokens of a sequence, C width, V vocabulary, t tensor ranks, w bytes of
a number in the precision of the activations. A stream is the residual stream of a micro batch, wMC bytes.
"""

import math
from dataclasses import dataclass

from dsgpt.planning.activations import CHUNK
from dsgpt.planning.rates import Rates
from dsgpt.planning.setup import FULL, Setup

_FORWARD_KERNELS, _BACKWARD_KERNELS = 14, 26
"""Operations of a block."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a device does; the parts run one after another."""

    matrix_flops: float = 0.0
    matrix_bytes: float = 0.0
    """Read and written by the matrix products: factors and results, once each."""
    attention_flops: float = 0.0
    elementwise_bytes: float = 0.0
    logits: float = 0.0
    kernels: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def times(self, count: float) -> "Work":
        """The same work again and again."""
        return Work(**{name: value * count for name, value in vars(self).items()})

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


def block_forward(setup: Setup) -> Work:
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
    return Work(
        matrix_flops=2 * matrices * tokens,
        matrix_bytes=setup.low * matrices + stream * (4 + 12 / tensor),
        attention_flops=2 * tokens * setup.seq_length * model.n_embd / tensor,
        elementwise_bytes=stream * (10 + 10 / tensor + biases + arranged),
        kernels=_FORWARD_KERNELS,
    )


def block_backward(setup: Setup) -> Work:
    """A block's backward pass: twice the matrices, 2.5 times the attention, 18 + 25/t streams.

    Attention multiplies five times instead of twice, because it computes its scores again (FlashAttention, Dao et al.
    2022, algorithm 4). Streams: 5 by each LayerNorm, 3 by each sum of gradients, 12/t by GELU, 6/t to join the
    gradients of queries, keys and values, 2 + 7/t for the sums that are the gradients of biases, 16 around the
    all-to-alls of sequence ranks.
    """
    forward, tensor = block_forward(setup), setup.sizes.tensor
    stream = setup.low * setup.tokens * setup.model.n_embd
    arranged = 16 if setup.sizes.sequence > 1 else 0
    return Work(
        matrix_flops=2 * forward.matrix_flops,
        matrix_bytes=2 * forward.matrix_bytes,
        attention_flops=2.5 * forward.attention_flops,
        elementwise_bytes=stream * (18 + 25 / tensor + arranged),
        kernels=_BACKWARD_KERNELS,
    )


def head_and_loss(setup: Setup, *, kind: str) -> Work:
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
    return Work(
        matrix_flops=6 * head * tokens,
        matrix_bytes=3 * low * (head + logits),
        elementwise_bytes=head * (summing + 4 * low),
        logits=logits,
        kernels=12 * chunks,
    )


def embedding(setup: Setup) -> Work:
    """Looking up and adding the two embeddings, the gradients of both, and the last LayerNorm: 16 streams."""
    stream = setup.low * setup.tokens * setup.model.n_embd
    return Work(elementwise_bytes=16 * stream, kernels=16)


def validation_forward(setup: Setup, blocks: int, *, kind: str) -> Work:
    """The forward pass of all blocks and the loss without gradients, for a micro batch."""
    head = head_and_loss(setup, kind=kind)
    loss = Work(matrix_flops=head.matrix_flops / 3, logits=head.logits / 2, kernels=head.kernels)
    return block_forward(setup).times(blocks) + loss
