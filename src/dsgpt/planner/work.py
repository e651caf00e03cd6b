"""The work of one micro batch on one rank: FLOPs, bytes, operations, activations, passes over gradients.

Predicts the bytes of activations: what a forward pass keeps, what the loss needs, what a backward pass adds. For a
block without dropout, they are in units of the residual stream (B, T, C) of a rank, with T tensor peers. The
outputs of both LayerNorms, of the attention's residual sum and of the block are 1 each. Queries, keys and values are
3/T, the attention's output 1/T, the MLP's inner layer before and after GELU 4/T each: 4 + 12/T. Those are the 16
numbers of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), whose 34 bytes are 16 numbers in 16 bits and two
dropout masks. Their quadratic term does not exist: fused attention keeps one number per token and head of its scores.

The work of one micro batch on one rank: FLOPs, bytes and operations of a block, of the head and of the embedding.
Letters: M tokens of a micro batch on a rank, T tokens of a sequence, C width, V vocabulary, t tensor ranks, w bytes of
a number in the precision of the activations. A stream is the residual stream of a micro batch, wMC bytes.

Bytes that a step reads and writes in passes over gradients and weights: sums, copies, norm, clipping, optimizer.
Letters: w bytes of a number in the precision of the activations, n ranks that reduce, a micro batches of a step.
Counts are bytes per element. They describe this package, PyTorch 2.13 and DeepSpeed 0.19.8.
"""

import math
from dataclasses import dataclass

from dsgpt.planner.rates import Rates
from dsgpt.planner.setup import FULL, Setup, Shards, flat_groups, fsdp_elements, parts, total
from dsgpt.planner.traffic import gradient_width, step_traffic

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
    gradients of queries, keys and values. 2 + 7/t are for the sums that are the gradients of biases, 16 around the
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


_UNFUSED_ADAM = 20
"""Numbers that PyTorch's AdamW reads and writes for each weight in nine operations, as it does in pipelines."""


def stepped_elements(setup: Setup, rank: int) -> int:
    """Elements on which the optimizer of ``rank`` steps."""
    held = setup.held(rank)
    if setup.run_type == "fsdp":
        return fsdp_elements(held, setup.world_size)
    if setup.run_type != "optimized" or setup.recipe.zero_stage == 0:
        return total(held)
    if setup.recipe.zero_stage == 3:
        return Shards.of(setup, held).own
    return parts(flat_groups(held, setup.zero_ranks))


def gradient_bytes(setup: Setup, rank: int, *, kind: str) -> float:
    """Gradients added up, copied to buckets and back, and copies of gathered weights.

    In low precision every micro batch's gradients are added to a sum in fp32, w + 8; in fp32 those after the first are,
    12. On a GPU, whose memory is a hundred times as fast, only ZeRO's copies to buckets count, 2w.
    """
    elements, micro_batches = total(setup.held(rank)), setup.gradient_accumulation_steps
    adding = 12 * (micro_batches - 1) if setup.precision == "fp32" else (setup.low + 8) * micro_batches
    if kind == "cpu":
        return elements * (adding + _copied(setup)) + _gathered(setup, rank)
    copies = 0
    if setup.run_type == "optimized" and setup.recipe.zero_stage:
        copies = 2 * setup.low * _reductions(setup)
    return elements * (adding + copies)


def low_arithmetic_bytes(setup: Setup, rank: int, *, kind: str) -> int:
    """Arithmetic on gradients in 16-bit precision, which a CPU does at the rate of elementwise operations.

    DeepSpeed divides them by the ranks, 2w. ZeRO-0 also looks for their least and their largest, 2w.
    """
    if kind != "cpu" or setup.run_type != "optimized" or gradient_width(setup) == FULL:
        return 0
    searched = 2 * setup.low if setup.recipe.zero_stage == 0 else 0
    return total(setup.held(rank)) * (_divided(setup) + searched)


def norm_bytes(setup: Setup, rank: int) -> float:
    """The norm reads every gradient, 4 bytes; clipping reads and writes it again, 8 bytes."""
    return stepped_elements(setup, rank) * (FULL + (2 * FULL if setup.recipe.gradient_clipping else 0))


def optimizer_bytes(setup: Setup, rank: int) -> float:
    """The optimizer reads the gradient, reads and writes the weight and each moment: 28 bytes for Adam, fused.

    In low precision it also writes the weight in that precision.
    """
    numbers = 1 + 2 * (1 + setup.moments)
    if setup.sizes.pipeline > 1 and setup.recipe.optimizer.type == "AdamW":
        numbers = _UNFUSED_ADAM
    size = FULL * numbers + (0 if setup.precision == "fp32" else FULL + setup.low)
    return stepped_elements(setup, rank) * size


def _reductions(setup: Setup) -> int:
    """How often a step reduces each gradient."""
    is_each = setup.run_type == "optimized" and setup.recipe.zero_stage > 1
    return setup.gradient_accumulation_steps if is_each else 1


def _copied(setup: Setup) -> float:
    """Passes around the reductions of a step.

    * DDP: into the bucket, 2w; divided by the ranks in fp32, 8.
    * FSDP: into the buffer of the reduce-scatter, w + 4; the own part divided, 8/n.
    * ZeRO 0 to 3: see ``_zero_copied``.
    """
    if setup.run_type == "baseline":
        return 0
    if setup.run_type == "ddp":
        return 2 * setup.low + 2 * FULL
    if setup.run_type == "fsdp":
        return setup.low + FULL + 2 * FULL / setup.world_size
    return _zero_copied(setup)


def _zero_copied(setup: Setup) -> float:
    """Passes around the reductions of DeepSpeed.

    * ZeRO-0: a flat copy, 2w, and back, 2w. In low precision the sum of several micro batches is rounded, w + 4, and
      every gradient is copied to fp32, w + 4.
    * ZeRO-1: the same with a bucket, unless a rank is alone, and the own part in fp32 made flat, 8/n.
    * ZeRO-2: to the bucket and from it to a flat copy, 4w; the own part added to its sum, (w + 8)/n.
    * ZeRO-3: to the bucket, 2w; the own part added to its sum.
    * In fp32 the division by the ranks.
    """
    low, ranks, stage = setup.low, setup.zero_ranks, setup.recipe.zero_stage
    divided = _divided(setup) if gradient_width(setup) == FULL else 0
    if setup.uses_bf16_optimizer:
        return _bf16_optimizer_copied(setup) + divided
    if stage == 0:
        rounded = low + FULL if setup.gradient_accumulation_steps > 1 else 0
        return 4 * low + divided + (0 if setup.precision == "fp32" else rounded + low + FULL)
    if stage == 1:
        return (4 * low if ranks > 1 else 0) + divided + 2 * FULL / ranks
    return _reductions(setup) * ((4 if stage == 2 else 2) * low + (low + 2 * FULL) / ranks) + divided


def _bf16_optimizer_copied(setup: Setup) -> float:
    """``BF16_Optimizer``: a flat copy of the fp32 sums and back, 16; in between to bf16 and back, 2w + 8.

    Sequence ranks stay in fp32. With several micro batches the gradients in bf16 stay: each is set to zero, w, and
    later ones are added to it, 3w.
    """
    micro_batches, low = setup.gradient_accumulation_steps, setup.low
    kept = low * micro_batches + 3 * low * (micro_batches - 1) if micro_batches > 1 else 0
    if setup.world_size == 1:
        return kept
    return kept + 4 * FULL + (2 * low + 2 * FULL if gradient_width(setup) == low else 0)


def _divided(setup: Setup) -> int:
    """DeepSpeed divides what it reduces by the ranks: 2w."""
    is_alone = setup.world_size == 1 if setup.uses_bf16_optimizer else setup.zero_ranks == 1
    if is_alone and setup.recipe.zero_stage == 1:
        return 0
    return 2 * gradient_width(setup) * _reductions(setup)


def _gathered(setup: Setup, rank: int) -> float:
    """Under FSDP and ZeRO-3 each gather reads and writes the own part before, and all parts after it."""
    if setup.run_type != "fsdp" and (setup.run_type != "optimized" or setup.recipe.zero_stage != 3):
        return 0
    gathers = [each for each in step_traffic(setup, rank=rank) if each.operation == "all_gather"]
    return sum(2 * each.payload_bytes * (1 + 1 / each.group_size) for each in gathers)
