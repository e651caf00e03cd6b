"""What a rank sends in one optimizer step, for every strategy: what ``cost`` in ``training_metrics.json`` measures.

Each line of ``step_traffic`` is one kind of transfer: an operation, the ranks that take part, and the payload as
``dsgpt.telemetry.ring`` defines it. Losses, norms and counters, a few bytes each, are left out. The formulas are of the
implementation as it is: of this package, PyTorch 2.13 and DeepSpeed 0.19.8.
"""

from dataclasses import dataclass

from dsgpt.planning.flat_groups import flat_groups
from dsgpt.planning.gathering import gathered
from dsgpt.planning.parameters import EMBEDDING, ParameterSize, model_parameters, total
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import fsdp_elements, persistent, zero_piece
from dsgpt.planning.stages import stages_with_embedding
from dsgpt.telemetry.ring import ring_factor


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One kind of transfer of one rank in one optimizer step."""

    what: str
    """``gradients``, ``weights`` or ``activations``, in which activations stand for their gradients too."""
    operation: str
    """A name that ``ring_factor`` knows."""
    ranks: int
    """How many take part."""
    payload_bytes: int

    @property
    def ring_bytes(self) -> int:
        """What the rank sends."""
        return round(self.payload_bytes * ring_factor(self.operation, self.ranks))


def step_traffic(setup: Setup, *, rank: int = 0) -> list[Transfer]:
    """What ``rank`` sends in one optimizer step; nothing in a group of one."""
    if setup.run_type == "baseline":
        found = []
    elif setup.run_type == "ddp":
        found = _ddp(setup)
    elif setup.run_type == "fsdp":
        found = _fsdp(setup)
    else:
        found = [*_split_model(setup, rank), *_zero(setup, rank)]
    return [transfer for transfer in found if transfer.ranks > 1 and transfer.payload_bytes]


def sent_bytes(setup: Setup, *, rank: int = 0) -> int:
    """The sum over everything that ``rank`` sends in one optimizer step."""
    return sum(transfer.ring_bytes for transfer in step_traffic(setup, rank=rank))


def most_sent_bytes(setup: Setup) -> int:
    """That of the rank that sends most."""
    return max(sent_bytes(setup, rank=rank) for rank in setup.first_ranks)


def _ddp(setup: Setup) -> list[Transfer]:
    """DDP: all gradients once per step, in fp32: 4P."""
    size = FULL * total(model_parameters(setup.model))
    return [Transfer(what="gradients", operation="all_reduce", ranks=setup.world_size, payload_bytes=size)]


def _fsdp(setup: Setup) -> list[Transfer]:
    """FSDP: a block's weights, in every micro batch, for the forward and again for the backward pass; gradients once.

    Weights travel in the precision of the computation. Embeddings and the last LayerNorm stay for the step, and the
    blocks too where ``reshard_after_forward`` is off. With activation checkpointing the backward pass needs no third
    copy: the block is computed again while its weights are there.
    """
    whole, ranks, recipe = model_parameters(setup.model), setup.world_size, setup.recipe.dsgpt.fsdp
    blocks = [part for part in whole if part.name.startswith("blocks.")]
    rest = [part for part in whole if not part.name.startswith("blocks.")]
    times = 2 * setup.gradient_accumulation_steps if recipe.reshard_after_forward else 1
    weights = times * fsdp_elements(blocks, ranks) + fsdp_elements(rest, ranks)
    width = FULL if recipe.reduce_dtype == "fp32" else setup.low
    gradients = width * fsdp_elements(whole, ranks)
    return [
        Transfer(what="weights", operation="all_gather", ranks=ranks, payload_bytes=setup.low * weights * ranks),
        Transfer(what="gradients", operation="reduce_scatter", ranks=ranks, payload_bytes=gradients * ranks),
    ]


def _zero(setup: Setup, rank: int) -> list[Transfer]:
    """What the ranks that hold the same parameters send: gradients, and at stages 1 to 3 weights."""
    held = setup.held(rank)
    return _zero3(setup, held) if setup.recipe.zero_stage == 3 else _zero012(setup, held)


def _gradient_width(setup: Setup) -> int:
    """Gradients travel in the precision of the activations; between sequence ranks DeepSpeed takes fp32."""
    return FULL if setup.sizes.sequence > 1 else setup.low


def _zero012(setup: Setup, held: list[ParameterSize]) -> list[Transfer]:
    """ZeRO-0 and 1: gradients once per step, wP. ZeRO-2: in every micro batch. Stages 1 and 2: then weights, wP.

    Stages 1 and 2 all-reduce gradients although a rank needs its part alone, unless the recipe says otherwise.
    """
    stage, ranks = setup.recipe.zero_stage, setup.zero_ranks
    times = setup.gradient_accumulation_steps if stage == 2 else 1
    size = times * _gradient_width(setup) * total(held)
    operation = "reduce" if _goes_to_the_owner(setup) else "all_reduce"
    found = [Transfer(what="gradients", operation=operation, ranks=ranks, payload_bytes=size)]
    if stage > 0:
        padded = setup.low * sum(group.padded for group in flat_groups(held, ranks))
        found.append(Transfer(what="weights", operation="all_gather", ranks=ranks, payload_bytes=padded))
    return found


def _goes_to_the_owner(setup: Setup) -> bool:
    """Whether ZeRO-1 or 2 sends every piece of a bucket to the rank whose part it is, and to no other."""
    zero = setup.recipe.zero_optimization
    if zero.stage == 0 or setup.uses_bf16_optimizer:
        return False
    return zero.reduce_scatter and zero.contiguous_gradients and not zero.use_multi_rank_bucket_allreduce


def _zero3(setup: Setup, held: list[ParameterSize]) -> list[Transfer]:
    """ZeRO-3: in every micro batch weights for the forward and the backward pass, and gradients; persistent ones once.

    About a x (2wP + wP) + w x what persists, the gradients by reduce-scatter.
    """
    ranks, micro_batches = setup.zero_ranks, setup.gradient_accumulation_steps

    def pieces(parameters: list[ParameterSize]) -> int:
        return ranks * sum(zero_piece(part, ranks) for part in parameters)

    after_step = pieces(persistent(setup, held))
    weights = setup.low * (micro_batches * pieces(gathered(setup)) + after_step)
    width = micro_batches * _gradient_width(setup)
    bucketed = [part for part in held if _is_all_reduced(setup, part)]
    alone = [part for part in held if not _is_all_reduced(setup, part)]
    return [
        Transfer(what="weights", operation="all_gather", ranks=ranks, payload_bytes=weights),
        Transfer(what="gradients", operation="reduce_scatter", ranks=ranks, payload_bytes=width * pieces(alone)),
        Transfer(what="gradients", operation="all_reduce", ranks=ranks, payload_bytes=width * total(bucketed)),
    ]


def _is_all_reduced(setup: Setup, part: ParameterSize) -> bool:
    """Whether ZeRO-3 reduces the gradient in a bucket that goes to all ranks whole."""
    zero = setup.recipe.zero_optimization
    return zero.contiguous_gradients and not zero.reduce_scatter and part.numel <= zero.reduce_bucket_size


def _split_model(setup: Setup, rank: int) -> list[Transfer]:
    """What the ranks that share a copy of the model send each other: activations, and the tied embedding's gradient."""
    sizes = setup.sizes
    found: list[Transfer] = []
    if sizes.tensor > 1:
        found.append(_tensor(setup, rank))
    if sizes.sequence > 1:
        found.append(_sequence(setup))
    if sizes.pipeline > 1:
        found += _pipeline(setup, rank)
    return found


def _activations(setup: Setup) -> int:
    """Bytes of the residual stream that a rank holds, over all micro batches of a step: w x a x B x T x C."""
    return setup.low * setup.gradient_accumulation_steps * setup.tokens * setup.model.n_embd


def _tensor(setup: Setup, rank: int) -> Transfer:
    """Two sums of the residual stream per block in the forward pass, and two in the backward pass.

    A block that is computed again repeats the first; its last sum is needed by nothing in it, and left out.
    """
    sums = 5 if setup.activation_checkpointing else 4
    size = sums * setup.blocks(rank) * _activations(setup)
    return Transfer(what="activations", operation="all_reduce", ranks=setup.sizes.tensor, payload_bytes=size)


def _sequence(setup: Setup) -> Transfer:
    """Per block queries, keys, values there and the result back, and the same of their gradients."""
    passes = 3 if setup.activation_checkpointing else 2
    size = 4 * passes * setup.model.n_layer * _activations(setup)
    return Transfer(what="activations", operation="all_to_all", ranks=setup.sizes.sequence, payload_bytes=size)


def _pipeline(setup: Setup, rank: int) -> list[Transfer]:
    """The residual stream to the next stage, its gradient to the one before; the embedding's gradient, in fp32.

    Each tensor peer sends its part of the residual stream, and the peers put together again what they receive; and
    before the backward pass, what they sent.
    """
    sizes, stage = setup.sizes, setup.stage(rank)
    has_next, has_previous = stage < sizes.pipeline - 1, stage > 0
    stream, dealt = _activations(setup), setup.stages
    sent = (has_next + has_previous) * stream // sizes.tensor
    gathered_again = (2 * has_next + has_previous) * stream
    found = [
        Transfer(what="activations", operation="send", ranks=2, payload_bytes=sent),
        Transfer(what="activations", operation="all_gather", ranks=sizes.tensor, payload_bytes=gathered_again),
    ]
    embedding = next((part for part in dealt[stage] if part.name == EMBEDDING), None)
    if embedding is not None:
        ranks = stages_with_embedding(dealt)
        size = FULL * embedding.numel
        found.append(Transfer(what="gradients", operation="all_reduce", ranks=ranks, payload_bytes=size))
    return found
