"""Predicts what a rank sends in one optimizer step, and how often ZeRO-3 gathers.

Predicts what a rank sends in one optimizer step, for every strategy; ``dsgpt.telemetry.communication`` measures it. An
element of ``step_traffic`` is all traffic of one kind: the operation, the number of ranks that take part, and the
payload as ``dsgpt.telemetry.ring`` defines it. Losses, norms and counters, a few bytes each, are left out. The
formulas describe this package, PyTorch 2.13 and DeepSpeed 0.19.8. P is the number of parameters of a rank, w the bytes
of a number in the precision of the activations, a the gradient accumulation steps.

How often ZeRO-3 gathers each parameter, computed as DeepSpeed's ``PartitionedParameterCoordinator`` does. A layer's
parameters are gathered before its forward and its backward pass, and freed after each. Small ones persist, and those
that are soon needed again are kept. From the second step on DeepSpeed knows the order of all layers. It prefetches as
far as ``stage3_prefetch_bucket_size`` and ``stage3_max_live_parameters`` allow. It keeps what recurs within
``stage3_max_reuse_distance`` elements, or was seen while it looked ahead.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dsgpt.config.recipe_blocks import ZeroRecipe
from dsgpt.model.config import GPT2Config
from dsgpt.planner.setup import (
    EMBEDDING,
    FULL,
    ParameterSize,
    Setup,
    flat_groups,
    fsdp_elements,
    model_parameters,
    persistent,
    stages_with_embedding,
    total,
    zero_piece,
)
from dsgpt.telemetry.ring import ring_factor

Layer = tuple[ParameterSize, ...]
"""The parameters of a module itself, without those of its children."""

_NOTHING: Layer = ()
"""A module without parameters: a block, dropout. DeepSpeed prefetches there too."""


def gathered(setup: Setup) -> list[ParameterSize]:
    """The parameters that one micro batch gathers, each as often as it is gathered."""
    return list(_walk_of(setup).gathered)


def gathered_forward(setup: Setup) -> list[ParameterSize]:
    """Those of ``gathered`` that are gathered during the forward pass, prefetching for the backward pass included."""
    walk = _walk_of(setup)
    return walk.gathered[: walk.forward]


def most_gathered(setup: Setup) -> int:
    """The most elements of gathered parameters that are whole at a time, those that persist left out."""
    return _walk_of(setup).most_live


def _walk_of(setup: Setup) -> "_Walk":
    return _walk(setup.model, setup.recipe.zero_optimization, setup.activation_checkpointing)


@lru_cache(maxsize=16)
def _walk(model: GPT2Config, zero: ZeroRecipe, recompute: bool) -> "_Walk":
    """The walk, which is the same for every micro batch size and number of ranks."""
    return _Walk(model, zero, *_order(model, recompute=recompute))


def _order(model: GPT2Config, *, recompute: bool) -> tuple[list[Layer], list[Layer]]:
    """The modules of a forward and a backward pass, in the order in which they begin; the head is the embedding again.

    With activation checkpointing a block runs forward once more in its backward pass.
    """
    parts = {part.name: part for part in model_parameters(model)}
    head: Layer = (parts[EMBEDDING],)
    tail: Layer = (parts["ln_f.weight"], parts["ln_f.bias"])
    positions: Layer = (parts["wpe.weight"],)
    forward, backward = [_NOTHING, head, positions, _NOTHING], [_NOTHING, head, tail]
    for layer in range(model.n_layer):
        forward += _block(parts, layer)
    for layer in reversed(range(model.n_layer)):
        backward += _block_backward(parts, layer, recompute=recompute)
    return [*forward, tail, head], [*backward, _NOTHING, positions, head]


def _block(parts: dict[str, ParameterSize], layer: int) -> list[Layer]:
    ln_1, qkv, proj, ln_2, fc, back = _block_layers(parts, layer)
    return [_NOTHING, ln_1, _NOTHING, qkv, proj, _NOTHING, ln_2, _NOTHING, fc, back, _NOTHING]


def _block_backward(parts: dict[str, ParameterSize], layer: int, *, recompute: bool) -> list[Layer]:
    ln_1, qkv, proj, ln_2, fc, back = _block_layers(parts, layer)
    again = _block(parts, layer)[:-1] if recompute else []  # begins, and ends, when the last matrix needs its input
    return [_NOTHING, _NOTHING, _NOTHING, back, *again, fc, ln_2, _NOTHING, _NOTHING, proj, qkv, ln_1]


def _block_layers(parts: dict[str, ParameterSize], layer: int) -> list[Layer]:
    names = ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")
    return [tuple(parts[f"blocks.{layer}.{name}.{kind}"] for kind in ("weight", "bias")) for name in names]


class _Walk:
    """One forward and backward pass."""

    def __init__(
        self, model: GPT2Config, zero: ZeroRecipe, forward: Sequence[Layer], backward: Sequence[Layer]
    ) -> None:
        order = self._order = [*forward, *backward]
        self._persistent = {part.name for part in persistent(zero, model_parameters(model))}
        self._zero = zero
        self._queue = deque((part, step) for step, layer in enumerate(order) for part in layer)
        self._seen: dict[str, int] = {}
        """The last use of each parameter that prefetching has passed."""
        self._available = set(self._persistent)
        self._live = self.most_live = 0
        self.gathered: list[ParameterSize] = []
        self.forward = 0
        """How many of ``gathered`` belong to the forward pass."""
        for step, layer in enumerate(order):
            self._use(step, layer)
            if step < len(forward):
                self.forward = len(self.gathered)

    def _use(self, step: int, layer: Layer) -> None:
        for part in layer:
            self._gather(part)
        ahead = {part.name for part in layer if self._seen.get(part.name, -1) < step}
        while ahead:
            part, use = self._queue.popleft()
            self._seen[part.name] = use
            ahead.discard(part.name)
        self._look_ahead()
        self._release(step, layer)

    def _gather(self, part: ParameterSize) -> None:
        if part.name not in self._available:
            self._available.add(part.name)
            self._live += part.numel
            self.most_live = max(self.most_live, self._live)
            self.gathered.append(part)

    def _look_ahead(self) -> None:
        room = min(self._zero.stage3_max_live_parameters - self._live, self._zero.stage3_prefetch_bucket_size)
        taken, wanted = 0, list[ParameterSize]()
        while self._queue and taken < room:
            part, use = self._queue.popleft()
            self._seen[part.name] = max(use, self._seen.get(part.name, use))
            if part.name not in self._available and part not in wanted:
                wanted.append(part)
                taken += part.numel
        for part in wanted:
            self._gather(part)

    def _release(self, step: int, layer: Layer) -> None:
        kept = self._persistent | {part.name for part in layer if self._seen.get(part.name, -1) > step + 1}
        passed = 0
        for later in self._order[step + 1 :]:
            if passed >= self._zero.stage3_max_reuse_distance:
                break
            kept |= {part.name for part in later}
            passed += sum(part.numel for part in later)
        for part in layer:
            if part.name not in kept:
                self._available.discard(part.name)
                self._live -= part.numel


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All operations of one kind of one rank in one optimizer step."""

    what: str
    """``gradients`` (of weights), ``weights``, or ``activations`` and their gradients."""
    operation: str
    """A name that ``ring_factor`` knows."""
    group_size: int
    """Ranks that take part."""
    payload_bytes: int
    summed_width: int = FULL
    """Bytes of a number of a sum: summing 16-bit numbers may take longer than sending them."""
    axis: str = "data"
    """Which ranks take part: those of ``data``, or of a ``tensor``, ``sequence`` or ``pipeline`` group."""

    @property
    def ring_bytes(self) -> int:
        """Bytes that the rank sends if the collectives are rings."""
        return round(self.payload_bytes * ring_factor(self.operation, self.group_size))


def step_traffic(setup: Setup, *, rank: int = 0) -> list[Traffic]:
    """What ``rank`` sends in one optimizer step. Groups of one rank send nothing and are left out."""
    if setup.run_type == "baseline":
        found = []
    elif setup.run_type == "ddp":
        found = _ddp(setup)
    elif setup.run_type == "fsdp":
        found = _fsdp(setup)
    else:
        found = [*_split_model(setup, rank), *_zero(setup, rank)]
    return [traffic for traffic in found if traffic.group_size > 1 and traffic.payload_bytes]


def sent_bytes(setup: Setup, *, rank: int = 0) -> int:
    """Bytes that ``rank`` sends in one optimizer step."""
    return sum(traffic.ring_bytes for traffic in step_traffic(setup, rank=rank))


def most_sent_bytes(setup: Setup) -> int:
    """Bytes that the rank with the most traffic sends in one optimizer step."""
    return max(sent_bytes(setup, rank=rank) for rank in setup.first_ranks)


def _ddp(setup: Setup) -> list[Traffic]:
    """DDP: all gradients once per step, in fp32: 4P."""
    size = FULL * total(model_parameters(setup.model))
    return [Traffic(what="gradients", operation="all_reduce", group_size=setup.world_size, payload_bytes=size)]


def _fsdp(setup: Setup) -> list[Traffic]:
    """FSDP: a block's weights in every micro batch, for the forward and again for the backward pass; gradients once.

    Weights are sent in the precision of the computation. Embeddings and the last LayerNorm stay gathered for the step,
    and so do the blocks if ``reshard_after_forward`` is off. Activation checkpointing adds no third gather, because a
    block is recomputed while its weights are gathered for its backward pass.
    """
    whole, ranks, recipe = model_parameters(setup.model), setup.world_size, setup.recipe.dsgpt.fsdp
    blocks = [part for part in whole if part.name.startswith("blocks.")]
    rest = [part for part in whole if not part.name.startswith("blocks.")]
    times = 2 * setup.gradient_accumulation_steps if recipe.reshard_after_forward else 1
    weights = times * fsdp_elements(blocks, ranks) + fsdp_elements(rest, ranks)
    width = FULL if recipe.reduce_dtype == "fp32" else setup.low
    gradients = width * fsdp_elements(whole, ranks)
    return [
        Traffic(what="weights", operation="all_gather", group_size=ranks, payload_bytes=setup.low * weights * ranks),
        Traffic(
            what="gradients",
            operation="reduce_scatter",
            group_size=ranks,
            payload_bytes=gradients * ranks,
            summed_width=width,
        ),
    ]


def _zero(setup: Setup, rank: int) -> list[Traffic]:
    """Traffic between the ranks that hold the same parameters: gradients, and at stages 1 to 3 weights."""
    held = setup.held(rank)
    return _zero3(setup, held) if setup.recipe.zero_stage == 3 else _zero012(setup, held)


def gradient_width(setup: Setup) -> int:
    """Bytes per gradient: sent in the precision of the activations, but with sequence ranks in fp32."""
    return FULL if setup.sizes.sequence > 1 else setup.low


def _zero012(setup: Setup, held: list[ParameterSize]) -> list[Traffic]:
    """ZeRO-0 and 1: gradients once per step, wP. ZeRO-2: in every micro batch. Stages 1 and 2: then weights, wP.

    Stages 1 and 2 all-reduce gradients, although a rank needs only its part, unless ``_reduces_to_owner``.
    """
    stage, ranks = setup.recipe.zero_stage, setup.zero_ranks
    times = setup.gradient_accumulation_steps if stage == 2 else 1
    width = gradient_width(setup)
    size = times * width * total(held)
    operation = "reduce" if _reduces_to_owner(setup) else "all_reduce"
    found = [
        Traffic(what="gradients", operation=operation, group_size=ranks, payload_bytes=size, summed_width=width),
    ]
    if stage > 0:
        padded = setup.low * sum(group.padded for group in flat_groups(held, ranks))
        found.append(Traffic(what="weights", operation="all_gather", group_size=ranks, payload_bytes=padded))
    return found


def _reduces_to_owner(setup: Setup) -> bool:
    """Whether ZeRO-1 or 2 reduces each piece of a bucket to the one rank that steps on it."""
    zero = setup.recipe.zero_optimization
    if zero.stage == 0 or setup.uses_bf16_optimizer:
        return False
    return zero.reduce_scatter and zero.contiguous_gradients and not zero.use_multi_rank_bucket_allreduce


def _zero3(setup: Setup, held: list[ParameterSize]) -> list[Traffic]:
    """ZeRO-3: in every micro batch weights for the forward and the backward pass, and gradients; persistent ones once.

    About a x (2wP + wP) + w x what persists, the gradients by reduce-scatter.
    """
    ranks, micro_batches = setup.zero_ranks, setup.gradient_accumulation_steps

    def pieces(parameters: list[ParameterSize]) -> int:
        return ranks * sum(zero_piece(part, ranks) for part in parameters)

    after_step = pieces(persistent(setup.recipe.zero_optimization, held))
    weights = setup.low * (micro_batches * pieces(gathered(setup)) + after_step)
    width = gradient_width(setup)
    bucketed = [part for part in held if _is_all_reduced(setup, part)]
    alone = [part for part in held if not _is_all_reduced(setup, part)]
    reduced = {"reduce_scatter": pieces(alone), "all_reduce": total(bucketed)}
    return [
        Traffic(what="weights", operation="all_gather", group_size=ranks, payload_bytes=weights),
        *(
            Traffic(
                what="gradients",
                operation=operation,
                group_size=ranks,
                payload_bytes=micro_batches * width * elements,
                summed_width=width,
            )
            for operation, elements in reduced.items()
        ),
    ]


def _is_all_reduced(setup: Setup, part: ParameterSize) -> bool:
    """Whether ZeRO-3 all-reduces the gradient, in a bucket, instead of reducing each piece to its rank."""
    zero = setup.recipe.zero_optimization
    return zero.contiguous_gradients and not zero.reduce_scatter and part.numel <= setup.reduce_bucket_size


def _split_model(setup: Setup, rank: int) -> list[Traffic]:
    """Traffic between the ranks that share a copy of the model: activations, and the tied embedding's gradient."""
    sizes = setup.sizes
    found: list[Traffic] = []
    if sizes.tensor > 1:
        found.append(_tensor(setup, rank))
    if sizes.sequence > 1:
        found.append(_sequence(setup))
    if sizes.pipeline > 1:
        found += _pipeline(setup, rank)
    return found


def _activations(setup: Setup) -> int:
    """Bytes of the residual stream that a rank holds, over a step's micro batches, (B, T, C) each: waBTC."""
    return setup.low * setup.gradient_accumulation_steps * setup.tokens * setup.model.n_embd


def _tensor(setup: Setup, rank: int) -> Traffic:
    """Two sums of the residual stream per block in the forward pass, and two in the backward pass.

    Recomputing a block repeats the forward pass without its last sum, which nothing in the block needs.
    """
    sums = 5 if setup.activation_checkpointing else 4
    size = sums * setup.blocks(rank) * _activations(setup)
    return Traffic(
        what="activations",
        operation="all_reduce",
        group_size=setup.sizes.tensor,
        payload_bytes=size,
        summed_width=setup.low,
        axis="tensor",
    )


def _sequence(setup: Setup) -> Traffic:
    """Per block one all-to-all each of queries, keys, values and the result, and the same for their gradients."""
    passes = 3 if setup.activation_checkpointing else 2
    size = 4 * passes * setup.model.n_layer * _activations(setup)
    return Traffic(
        what="activations", operation="all_to_all", group_size=setup.sizes.sequence, payload_bytes=size, axis="sequence"
    )


def _pipeline(setup: Setup, rank: int) -> list[Traffic]:
    """The residual stream to the next stage, its gradient to the previous one; the embedding's gradient, in fp32.

    Each tensor peer sends its part of the residual stream. The peers gather what they receive, and before the backward
    pass what they sent.
    """
    sizes, stage = setup.sizes, setup.stage(rank)
    has_next, has_previous = stage < sizes.pipeline - 1, stage > 0
    stream, dealt = _activations(setup), setup.stages
    sent = (has_next + has_previous) * stream // sizes.tensor
    gathered_again = (2 * has_next + has_previous) * stream
    found = [
        Traffic(what="activations", operation="send", group_size=2, payload_bytes=sent, axis="pipeline"),
        Traffic(
            what="activations",
            operation="all_gather",
            group_size=sizes.tensor,
            payload_bytes=gathered_again,
            axis="tensor",
        ),
    ]
    embedding = next((part for part in dealt[stage] if part.name == EMBEDDING), None)
    if embedding is not None:
        ranks = stages_with_embedding(dealt)
        size = FULL * embedding.numel
        found.append(
            Traffic(what="gradients", operation="all_reduce", group_size=ranks, payload_bytes=size, axis="pipeline")
        )
    return found
