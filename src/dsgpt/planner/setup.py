"""The training that a plan predicts, its parameters, and which rank holds which of them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from dsgpt.config.recipe import Recipe
from dsgpt.config.recipe_blocks import ZeroRecipe
from dsgpt.machine.topology import ParallelSizes
from dsgpt.model.config import GPT2Config

# The sizes of a GPT-2's parameters, and which of them a rank holds. Makes no tensor.

EMBEDDING = "wte.weight"
"""The token embedding, tied to the head."""


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """One parameter."""

    name: str
    """Canonical: the baseline's."""
    shape: tuple[int, ...]
    decays: bool
    """Whether weight decay applies: the optimizer has a group with it and one without."""
    splits: bool = False
    """Whether tensor ranks hold equal parts of it instead of all of it."""

    @cached_property
    def numel(self) -> int:
        """Elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product


def model_parameters(model: GPT2Config) -> list[ParameterSize]:
    """Every parameter, in the model's order; the embedding with its padded rows, and once although it is used twice."""
    return list(_parameters(model))


@lru_cache(maxsize=16)
def _parameters(model: GPT2Config) -> tuple[ParameterSize, ...]:
    width = model.n_embd
    found = [
        ParameterSize(name=EMBEDDING, shape=(model.padded_vocab_size, width), decays=True),
        ParameterSize(name="wpe.weight", shape=(model.block_size, width), decays=True),
    ]
    for layer in range(model.n_layer):
        found += [replace(part, name=f"blocks.{layer}.{part.name}") for part in _block(width)]
    return (*found, *_layer_norm("ln_f", width))


def _block(width: int) -> list[ParameterSize]:
    return [
        *_layer_norm("ln_1", width),
        *_linear("attn.qkv", width, 3 * width, bias_splits=True),
        *_linear("attn.proj", width, width, bias_splits=False),
        *_layer_norm("ln_2", width),
        *_linear("mlp.fc", width, 4 * width, bias_splits=True),
        *_linear("mlp.proj", 4 * width, width, bias_splits=False),
    ]


def _layer_norm(name: str, width: int) -> list[ParameterSize]:
    return [ParameterSize(name=f"{name}.{part}", shape=(width,), decays=False) for part in ("weight", "bias")]


def _linear(name: str, inputs: int, outputs: int, *, bias_splits: bool) -> list[ParameterSize]:
    """A layer split by its outputs splits the bias too; one split by its inputs adds the bias once, after the sum."""
    return [
        ParameterSize(name=f"{name}.weight", shape=(outputs, inputs), decays=True, splits=True),
        ParameterSize(name=f"{name}.bias", shape=(outputs,), decays=False, splits=bias_splits),
    ]


def on_tensor_rank(parameters: Iterable[ParameterSize], tensor: int) -> list[ParameterSize]:
    """The parameters of one of ``tensor`` ranks: its part of those that are split, and the others whole."""
    return [
        replace(part, shape=(part.shape[0] // tensor, *part.shape[1:])) if part.splits else part for part in parameters
    ]


def total(parameters: Iterable[ParameterSize]) -> int:
    """Elements of all of them."""
    return sum(part.numel for part in parameters)


def optimizer_groups(parameters: Sequence[ParameterSize]) -> list[list[ParameterSize]]:
    """Those with and those without weight decay, each in the model's order, as the optimizer gets them."""
    return [[part for part in parameters if part.decays], [part for part in parameters if not part.decays]]


# Which pipeline stage gets which layers, computed as DeepSpeed's ``PipelineModule._partition_layers`` does.


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the sequence that is split into stages."""

    kind: str
    """The name that patterns of ``pipeline.partition`` are matched with."""
    parameters: list[ParameterSize]


def pipeline_layers(model: GPT2Config) -> list[Layer]:
    """Embedding, positions, blocks, the last LayerNorm, and the embedding again as the head."""
    whole = model_parameters(model)

    def of(prefix: str) -> list[ParameterSize]:
        return [part for part in whole if part.name.startswith(f"{prefix}.")]

    return [
        Layer(kind="Embedding", parameters=of("wte")),
        Layer(kind="PositionEmbedding", parameters=of("wpe")),
        *(Layer(kind="StageBlock", parameters=of(f"blocks.{layer}")) for layer in range(model.n_layer)),
        Layer(kind="LayerNorm", parameters=of("ln_f")),
        Layer(kind="Embedding", parameters=of("wte")),
    ]


def stage_bounds(model: GPT2Config, *, stages: int, partition: str) -> list[int]:
    """The index in ``pipeline_layers`` at which each stage begins, and the number of layers.

    Args:
        model: the shape.
        stages: how many; at least 2.
        partition: ``parameters``, ``uniform``, or ``type:`` and a pattern.
    """
    layers = pipeline_layers(model)
    if partition.lower() == "uniform":
        return _even_bounds(len(layers), stages)
    if partition.lower() == "parameters":
        return _balanced_bounds([total(layer.parameters) for layer in layers], stages)
    pattern = re.compile(partition.split(":", 1)[1], re.IGNORECASE)
    return _balanced_bounds([int(pattern.search(layer.kind) is not None) for layer in layers], stages)


@lru_cache(maxsize=256)
def stage_parameters(model: GPT2Config, *, stages: int, partition: str) -> list[list[ParameterSize]]:
    """The parameters of every stage. The tied embedding comes first, as in ``PipelineModule``, and once per stage."""
    layers = pipeline_layers(model)
    bounds = stage_bounds(model, stages=stages, partition=partition)
    dealt = []
    for first, end in pairwise(bounds):
        held = {part.name: part for layer in layers[first:end] for part in layer.parameters}
        dealt.append(sorted(held.values(), key=lambda part: part.name != EMBEDDING))
    return dealt


def stages_with_embedding(dealt: Sequence[Sequence[ParameterSize]]) -> int:
    """The number of stages with a copy of the embedding, whose gradients are summed: the first and the last stage."""
    return sum(any(part.name == EMBEDDING for part in stage) for stage in dealt)


def _even_bounds(items: int, parts: int) -> list[int]:
    size, more = divmod(items, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]


def _balanced_bounds(weights: Sequence[int], parts: int) -> list[int]:
    """The bounds with the least difference between the heaviest and the lightest part (``partition_balanced``).

    The dynamic programming is DeepSpeed's, so that ties are broken in the same way.
    """
    count, sums = len(weights), [0, *accumulate(weights)]
    heaviest = [[float("inf")] * (parts + 1) for _ in range(count + 1)]
    lightest = [[float("inf")] * (parts + 1) for _ in range(count + 1)]
    least = [[float("inf")] * (parts + 1) for _ in range(count + 1)]
    cut = [[0] * (parts + 1) for _ in range(count + 1)]
    heaviest[0][0] = least[0][0] = 0
    for items in range(1, count + 1):
        for used in range(1, min(items, parts) + 1):
            for before in range(items):
                high = max(heaviest[before][used - 1], sums[items] - sums[before])
                low = min(lightest[before][used - 1], sums[items] - sums[before])
                if least[items][used] >= high - low:
                    least[items][used], heaviest[items][used], lightest[items][used] = high - low, high, low
                    cut[items][used] = before
    bounds = [count]
    for used in range(parts, 0, -1):
        bounds.append(cut[bounds[-1]][used])
    return bounds[::-1]


# The training that a plan predicts: model, recipe, ranks, precision and batch.

FULL = 4
"""Bytes of an fp32 number."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train one model, which ``run_config.resolve`` would accept."""

    run_type: str
    """``baseline``, ``ddp``, ``fsdp`` or ``optimized``."""
    model: GPT2Config
    recipe: Recipe
    world_size: int
    """Ranks; the recipe's parallel sizes divide them."""
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""
    micro_batch_size: int
    """Sequences per data rank and forward pass."""
    gradient_accumulation_steps: int
    """Micro batches per optimizer step."""
    seq_length: int
    """Tokens per sequence."""
    activation_checkpointing: bool = False
    """Whether blocks are recomputed in the backward pass."""

    def __post_init__(self) -> None:
        """Refuse a recipe without a formula.

        Raises:
            ValueError: Zero++, which runs only on GPUs and was never measured.
        """
        if self.run_type == "optimized" and self.recipe.zero_plus_plus:
            raise ValueError(f"{self.recipe.path}: no formula predicts Zero++: plan with ds_configs/zero3.json")

    @cached_property
    def sizes(self) -> ParallelSizes:
        """How the model is split."""
        return self.recipe.parallel_of(self.run_type)

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks with one copy of the model, that read different data."""
        return self.world_size // self.sizes.ranks_per_copy

    @property
    def zero_ranks(self) -> int:
        """Ranks that hold the same parameters, among which ZeRO divides and gradients are averaged.

        Sequence ranks are among them: they read different positions with the same weights.
        """
        return self.data_parallel_size * self.sizes.sequence

    @property
    def low(self) -> int:
        """Bytes of a number in the precision of parameters and activations."""
        return FULL if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch whose activations a rank holds."""
        return self.micro_batch_size * self.seq_length // self.sizes.sequence

    @cached_property
    def stages(self) -> list[list[ParameterSize]]:
        """The parameters of a tensor rank, for each pipeline stage; one stage without a pipeline."""
        if self.sizes.pipeline == 1:
            dealt = [model_parameters(self.model)]
        else:
            partition = self.recipe.pipeline.partition
            dealt = stage_parameters(self.model, stages=self.sizes.pipeline, partition=partition)
        return [on_tensor_rank(stage, self.sizes.tensor) for stage in dealt]

    @property
    def moments(self) -> int:
        """Numbers that the optimizer keeps per weight: Adam's two moments, or the momentum of SGD."""
        if self.recipe.optimizer.type == "AdamW":
            return 2
        return int(self.recipe.optimizer.momentum > 0)

    @property
    def uses_deepspeed_adam(self) -> bool:
        """Whether DeepSpeed's CPU Adam steps."""
        return self.run_type == "optimized" and self.recipe.uses_deepspeed_adam

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed uses its ``BF16_Optimizer``, which has no buckets, instead of ZeRO-1's optimizer."""
        recipe = self.recipe
        return recipe.zero_stage == 1 and self.precision == "bf16" and recipe.offload_optimizer == "none"

    @property
    def contiguous_gradients(self) -> bool:
        """Whether ZeRO collects gradients in a bucket; unless the recipe says so, a single rank of stage 1 does not."""
        zero = self.recipe.zero_optimization
        given = "contiguous_gradients" in self.recipe.raw.get("zero_optimization", {})
        return zero.contiguous_gradients and (given or zero.stage > 1 or self.world_size > 1)

    @property
    def reduce_bucket_size(self) -> int:
        """Elements of DeepSpeed's bucket, as it is allocated."""
        return self.recipe.zero_optimization.bucket_elements(self.model.padded_parameter_count())

    @property
    def first_ranks(self) -> range:
        """The first rank of every pipeline stage. All ranks of a stage have the same traffic."""
        return range(0, self.world_size, self.world_size // self.sizes.pipeline)

    def stage(self, rank: int) -> int:
        """The pipeline stage of ``rank``; stages are the outermost dimension of the ranks."""
        return rank * self.sizes.pipeline // self.world_size

    def computes_loss(self, rank: int) -> bool:
        """Whether ``rank`` is in the last pipeline stage."""
        return self.stage(rank) == self.sizes.pipeline - 1

    def held(self, rank: int) -> list[ParameterSize]:
        """The parameters of ``rank``, whole or in pieces."""
        return self.stages[self.stage(rank)]

    def blocks(self, rank: int) -> int:
        """Transformer blocks that ``rank`` computes."""
        return sum(part.name.endswith(".ln_1.weight") for part in self.held(rank))

    def micro_batches_in_flight(self, rank: int) -> int:
        """Micro batches whose activations ``rank`` has at a time: in a pipeline, one for each stage from its own on."""
        return min(self.gradient_accumulation_steps, self.sizes.pipeline - self.stage(rank))


# How FSDP and ZeRO-3 shard parameters: each parameter by itself, into one piece per rank.


def fsdp_piece(part: ParameterSize, ranks: int) -> int:
    """Elements of a rank's piece under FSDP, which shards rows evenly and pads short pieces."""
    return part.numel // part.shape[0] * -(-part.shape[0] // ranks)


def fsdp_elements(parameters: Iterable[ParameterSize], ranks: int) -> int:
    """Elements of a rank's pieces of all ``parameters``."""
    return sum(fsdp_piece(part, ranks) for part in parameters)


def zero_piece(part: ParameterSize, ranks: int) -> int:
    """Elements of a rank's piece under ZeRO-3: the flat parameter in equal pieces, the last one padded."""
    return -(-part.numel // ranks)


def persistent(zero: ZeroRecipe, parameters: Iterable[ParameterSize]) -> list[ParameterSize]:
    """Those of ``parameters`` that ZeRO-3 keeps whole on every rank, because they are small."""
    each, together = zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
    found: list[ParameterSize] = []
    elements = 0
    for part in parameters:
        if part.numel <= each and elements + part.numel <= together:
            found.append(part)
            elements += part.numel
    return found


@dataclass(frozen=True, kw_only=True)
class Shards:
    """One rank's pieces under ZeRO-3."""

    sub_groups: tuple[int, ...]
    """Elements of each group of pieces that the optimizer steps on at a time."""

    @property
    def own(self) -> int:
        """Elements of all pieces."""
        return sum(self.sub_groups)

    @classmethod
    def of(cls, setup: Setup, parameters: Sequence[ParameterSize]) -> "Shards":
        """The pieces of ``parameters``. A sub-group ends as soon as it has ``sub_group_size`` elements."""
        limit, ranks, found = setup.recipe.zero_optimization.sub_group_size, setup.zero_ranks, list[int]()
        for group in filter(None, optimizer_groups(parameters)):
            elements = 0
            for part in group:
                elements += zero_piece(part, ranks)
                if elements >= limit:
                    found.append(elements)
                    elements = 0
            if elements:
                found.append(elements)
        return cls(sub_groups=tuple(found))


# The layout of parameters in ZeRO-1 and 2: one flat buffer per optimizer group, in equal parts, one per rank.

_ALIGNMENT = 2
"""Each rank's part is padded to a multiple of this many elements (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """One optimizer group in one buffer."""

    sizes: tuple[int, ...]
    """Elements of its parameters, in the order of the buffer."""
    ranks: int

    @property
    def part(self) -> int:
        """Elements that a rank holds, padding included."""
        unit = _ALIGNMENT * self.ranks
        return -(-sum(self.sizes) // unit) * _ALIGNMENT

    @property
    def padded(self) -> int:
        """Elements of the whole buffer."""
        return self.part * self.ranks

    def touched(self, rank: int) -> int:
        """Elements of the parameters that lie in ``rank``'s part, counted whole even where only a piece does."""
        return sum(size for size, _, _ in self._inside(rank))

    def is_one_piece(self, rank: int) -> bool:
        """Whether ``rank``'s part lies within a single parameter."""
        first, end = self._bounds(rank)
        return any(start <= first and start + size >= end for size, start, _ in self._inside(rank))

    def _bounds(self, rank: int) -> tuple[int, int]:
        return rank * self.part, (rank + 1) * self.part

    def _inside(self, rank: int) -> list[tuple[int, int, int]]:
        """Size, start and end of the parameters of which ``rank`` has at least a piece."""
        first, end = self._bounds(rank)
        ends = list(accumulate(self.sizes))
        spans = [(size, stop - size, stop) for size, stop in zip(self.sizes, ends, strict=True)]
        return [(size, start, stop) for size, start, stop in spans if start < end and stop > first]


def flat_groups(parameters: Sequence[ParameterSize], ranks: int) -> list[FlatGroup]:
    """The two groups of ``parameters``, over ``ranks``."""
    groups = filter(None, optimizer_groups(parameters))
    return [FlatGroup(sizes=tuple(part.numel for part in group), ranks=ranks) for group in groups]


def parts(groups: Iterable[FlatGroup]) -> int:
    """Elements of a rank's parts of all groups."""
    return sum(group.part for group in groups)
