"""The training that a plan predicts, its parameters, and which rank holds which of them."""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.text import divisors
from dsgpt.config.recipe import Recipe
from dsgpt.config.recipe_blocks import ZeroRecipe
from dsgpt.machine.topology import ParallelSizes
from dsgpt.model.config import GPT2Config, decays

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
    splits: bool
    """Whether tensor ranks hold equal parts of it instead of all of it."""

    @cached_property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def of_rank(self, tensor: int) -> "ParameterSize":
        """What each of ``tensor`` ranks has of it: its rows of what splits, and everything else whole."""
        return replace(self, shape=(-(-self.shape[0] // tensor), *self.shape[1:])) if self.splits else self


_SPLIT = re.compile(r"wte\.weight|.*\.(qkv|fc)\.\w+|.*\.proj\.weight")
"""Names of what tensor ranks divide. A layer that is split by its outputs splits its bias too; one that is split by its
inputs adds its bias once, after the sum."""


@lru_cache(maxsize=16)
def model_parameters(model: GPT2Config) -> list[ParameterSize]:
    """Every parameter, in the model's order; the embedding with its padded rows, and once although it is used twice."""
    width = model.n_embd
    of_block: dict[str, tuple[int, ...]] = {
        **{"ln_1": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width)},
        **{"ln_2": (width,), "mlp.fc": (4 * width, width), "mlp.proj": (width, 4 * width)},
    }
    layers = {f"blocks.{block}.{name}": shape for block in range(model.n_layer) for name, shape in of_block.items()}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.padded_vocab_size, width)}
    shapes["wpe.weight"] = (model.block_size, width)
    for name, shape in (layers | {"ln_f": (width,)}).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return [
        ParameterSize(name=name, shape=shape, decays=decays(name), splits=_SPLIT.fullmatch(name) is not None)
        for name, shape in shapes.items()
    ]


def total(parameters: Iterable[ParameterSize]) -> int:
    """Elements of all of them."""
    return sum(part.numel for part in parameters)


def optimizer_groups(parameters: Sequence[ParameterSize]) -> list[list[ParameterSize]]:
    """Parameters with and without weight decay, each in the model's order, as the optimizer gets them."""
    return [[part for part in parameters if part.decays], [part for part in parameters if not part.decays]]


# Which pipeline stage gets which layers, computed as DeepSpeed's ``PipelineModule._partition_layers`` does.


@lru_cache(maxsize=256)
def stage_parameters(model: GPT2Config, *, stages: int, partition: str) -> list[list[ParameterSize]]:
    """The parameters of every stage. The tied embedding comes first, as in ``PipelineModule``, and once per stage.

    Args:
        model: the shape.
        stages: how many; at least 2.
        partition: ``parameters``, ``uniform``, or ``type:`` and a pattern.
    """
    whole = model_parameters(model)
    names = [("Embedding", "wte"), ("PositionEmbedding", "wpe")]
    names += [("StageBlock", f"blocks.{layer}") for layer in range(model.n_layer)]
    names += [("LayerNorm", "ln_f"), ("Embedding", "wte")]  # patterns of a partition are matched with the first
    layers = [(kind, [part for part in whole if part.name.startswith(f"{prefix}.")]) for kind, prefix in names]
    if partition.lower() == "uniform":
        size, more = divmod(len(layers), stages)
        bounds = [stage * size + min(stage, more) for stage in range(stages + 1)]
    elif partition.lower() == "parameters":
        bounds = _balanced_bounds([total(parameters) for _, parameters in layers], stages)
    else:
        pattern = re.compile(partition.split(":", 1)[1], re.IGNORECASE)
        bounds = _balanced_bounds([int(pattern.search(kind) is not None) for kind, _ in layers], stages)
    dealt = []
    for first, end in pairwise(bounds):
        by_name = {part.name: part for _, parameters in layers[first:end] for part in parameters}
        dealt.append(sorted(by_name.values(), key=lambda part: part.name != EMBEDDING))
    return dealt


def _balanced_bounds(weights: Sequence[int], parts: int) -> list[int]:
    """The bounds with the least difference between the heaviest and the lightest part (``partition_balanced``).

    The dynamic programming is DeepSpeed's, so that ties are broken in the same way.
    """
    count, sums, unknown = len(weights), [0, *accumulate(weights)], float("inf")
    # of the first items in so many parts: the least difference, its heaviest and lightest part, the start of the last
    best = [[(unknown, unknown, unknown, 0)] * (parts + 1) for _ in range(count + 1)]
    best[0][0] = (0, 0, unknown, 0)
    for items in range(1, count + 1):
        for used in range(1, min(items, parts) + 1):
            for before in range(items):
                weight, (_, heaviest, lightest, _) = sums[items] - sums[before], best[before][used - 1]
                high, low = max(heaviest, weight), min(lightest, weight)
                if best[items][used][0] >= high - low:
                    best[items][used] = (high - low, high, low, before)
    bounds = [count]
    for used in range(parts, 0, -1):
        bounds.append(best[bounds[-1]][used][3])
    return bounds[::-1]


# The training that a plan predicts: model, recipe, ranks, precision and batch.

FULL = 4
"""Bytes of an fp32 number."""


WORK = ("run_type", "precision", "micro_batch_size", "gradient_accumulation_steps", "seq_length")
"""Fields of ``Setup`` that records of work have under the same names."""


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
    compiled: bool = False
    """Whether blocks are compiled. ZeRO-3 then gathers the weights of a whole block at a time."""
    pad_logits: bool = False
    """Whether padded rows of the embedding have logits, too."""
    attended: float | None = None
    """Tokens of its document in a window, the mean over tokens, where none sees another document; None without
    ``--mask_documents``."""
    kernels: str = "fused"
    """``fused``: LayerNorm, GELU and the softmax are an operation each, as in this package, which calls PyTorch's;
    ``compiled``: sums are parts of their neighbours too; ``eager``: each is several, as in Hugging Face's GPT-2."""
    attention: str = "flash"
    """``flash``: scores never are in memory, as in this package, which calls PyTorch's fused attention; ``stored``."""
    accumulation: str = "whole"
    """Gradients of earlier micro batches. ``whole``: in fp32 on every rank, as in this package. ``sharded``, as others
    do: FSDP reduces those of each micro batch, DDP, ZeRO 0 and 1 add up in the precision of activations."""
    fused_adam: bool = False
    """Whether Adam is one operation in pipelines too, and the loss's gradient needs no memory, as in Megatron."""
    selective: bool = False
    """Whether every second matrix product of a block, and what is no product, is recomputed, as torchtitan does with
    selective activation checkpointing; no strategy here does."""
    checkpoints_kept: float = 1.0
    """Share of the inputs of recomputed blocks that waits on a rank. Less than 1, as others do, if the tensor ranks
    divide them or host memory has them; no strategy here does either."""

    def __post_init__(self) -> None:
        """Refuse a recipe without a formula.

        Raises:
            UserError: Zero++, which runs only on GPUs and was never measured.
        """
        if self.run_type == "optimized" and self.recipe.zero_plus_plus:
            raise UserError(f"{self.recipe.path}: no formula predicts Zero++: plan with ds_configs/zero3.json")

    @cached_property
    def computed(self) -> dict[Any, Any]:
        """Results of formulas that are asked for again at other rates."""
        return {}

    @cached_property
    def sizes(self) -> ParallelSizes:
        """Tensor, sequence and pipeline sizes."""
        return self.recipe.parallel_of(self.run_type)

    @property
    def strategy_name(self) -> str:
        """Name of the strategy, as in records."""
        return self.recipe.strategy_name(self.run_type)

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
    def logits(self) -> int:
        """Logits of a token on a tensor rank."""
        return -(-(self.model.padded_vocab_size if self.pad_logits else self.model.vocab_size) // self.sizes.tensor)

    @property
    def scores(self) -> int:
        """Scores that the attention of a block stores on a rank, the masked half as well."""
        if self.attention == "flash":
            return 0
        return self.tokens * self.seq_length * self.model.n_head // self.sizes.tensor

    @property
    def embedding_elements(self) -> int:
        """Elements of the token embedding, padded rows included, on a tensor rank."""
        return -(-self.model.padded_vocab_size // self.sizes.tensor) * self.model.n_embd

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
            dealt = stage_parameters(self.model, stages=self.sizes.pipeline, partition=self.recipe.pipeline.partition)
        return [[part.of_rank(self.sizes.tensor) for part in stage] for stage in dealt]

    @property
    def moments(self) -> int:
        """Numbers that the optimizer keeps per weight: Adam's two moments, or the momentum of SGD."""
        optimizer = self.recipe.optimizer
        return 2 if optimizer.type == "AdamW" else int(optimizer.momentum > 0)

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

    def parameters(self, rank: int) -> list[ParameterSize]:
        """Parameters of which ``rank`` holds all or a piece."""
        return self.stages[self.stage(rank)]

    @cached_property
    def _blocks_by_stage(self) -> list[int]:
        return [sum(part.name.endswith(".ln_1.weight") for part in stage) for stage in self.stages]

    def blocks(self, rank: int) -> int:
        """Transformer blocks that ``rank`` computes."""
        return self._blocks_by_stage[self.stage(rank)]

    @cached_property
    def group_sizes(self) -> list[list[tuple[int, ...]]]:
        """Elements of the parameters of a rank of every stage, for each group of its optimizer that has some."""
        return [
            [tuple(part.numel for part in group) for group in optimizer_groups(stage) if group] for stage in self.stages
        ]

    @property
    def gathers(self) -> "Gathers":
        """Parameters that ZeRO-3 gathers in a micro batch."""
        again, zero = self.activation_checkpointing, self.recipe.zero_optimization
        return _gathers(self.model, zero, tensor=self.sizes.tensor, recompute=again, whole_blocks=self.compiled)

    def micro_batches_in_flight(self, rank: int) -> int:
        """Micro batches whose activations ``rank`` has at a time: in a pipeline, one for each stage from its own on."""
        return min(self.gradient_accumulation_steps, self.sizes.pipeline - self.stage(rank))

    def arrangements(self) -> Iterator[tuple[list[str], "Setup"]]:
        """The same training with every micro batch, the largest first, and then the same with recomputation.

        Yields the flags that ask for each of them.
        """
        share = self.micro_batch_size * self.gradient_accumulation_steps
        for checkpointing in sorted({self.activation_checkpointing, True}):
            flags = ["--activation_checkpointing"] if checkpointing > self.activation_checkpointing else []
            for micro in sorted(divisors(share), reverse=True):
                batch: dict[str, Any] = {"micro_batch_size": micro, "gradient_accumulation_steps": share // micro}
                setup = replace(self, **batch, activation_checkpointing=checkpointing)
                yield [*flags, f"--micro_batch_size_per_gpu {micro}"], setup


# How FSDP and ZeRO-3 shard parameters: each parameter by itself, into one piece per rank.


def fsdp_elements(parameters: Iterable[ParameterSize], ranks: int) -> int:
    """Elements of a rank's pieces under FSDP, which shards rows evenly and pads short pieces."""
    return sum(part.numel // part.shape[0] * -(-part.shape[0] // ranks) for part in parameters)


def persistent(zero: ZeroRecipe, parameters: Iterable[ParameterSize]) -> list[ParameterSize]:
    """Members of ``parameters`` that ZeRO-3 keeps whole on every rank, because they are small."""
    each, together = zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
    small: list[ParameterSize] = []
    elements = 0
    for part in parameters:
        if part.numel <= each and elements + part.numel <= together:
            small.append(part)
            elements += part.numel
    return small


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
        return -(-sum(self.sizes) // (_ALIGNMENT * self.ranks)) * _ALIGNMENT

    @property
    def padded(self) -> int:
        """Elements of the whole buffer."""
        return self.part * self.ranks

    def touched(self, rank: int) -> int:
        """Elements of the parameters that lie in ``rank``'s part, counted whole even where only a piece does."""
        return sum(end - start for start, end in self._inside(rank))

    def is_one_piece(self, rank: int) -> bool:
        """Whether ``rank``'s part lies within a single parameter."""
        return any(start <= rank * self.part and end >= (rank + 1) * self.part for start, end in self._inside(rank))

    def _inside(self, rank: int) -> list[tuple[int, int]]:
        """Start and end of the parameters of which ``rank`` has at least a piece."""
        bounds = pairwise(accumulate(self.sizes, initial=0))
        return [(start, end) for start, end in bounds if start < (rank + 1) * self.part and end > rank * self.part]


# How often ZeRO-3 gathers each parameter, computed as DeepSpeed's ``PartitionedParameterCoordinator`` does. A layer's
# parameters are gathered before its forward and its backward pass, and freed after each. Small ones persist, and those
# that are soon needed again are kept. From the second step on DeepSpeed knows the order of all layers. It prefetches as
# far as ``stage3_prefetch_bucket_size`` and ``stage3_max_live_parameters`` allow. It keeps what recurs within
# ``stage3_max_reuse_distance`` elements, or was seen while it looked ahead.

Layer = tuple[ParameterSize, ...]
"""The parameters of a module itself, without those of its children."""

_NOTHING: Layer = ()
"""A module without parameters: a block, dropout. DeepSpeed prefetches there too."""


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """Parameters that one forward and backward pass gathers."""

    all: list[ParameterSize]
    """Each parameter as often as it is gathered."""
    forward: list[ParameterSize]
    """Parameters gathered in the forward pass, some of them ahead for the backward pass."""
    most_live: int
    """Most elements of gathered parameters that are whole at a time, without those that persist."""


@lru_cache(maxsize=16)
def _gathers(model: GPT2Config, zero: ZeroRecipe, *, tensor: int, recompute: bool, whole_blocks: bool) -> Gathers:
    """Parameters that ZeRO-3 gathers, which are equal for every micro batch size and number of ranks.

    The modules of a forward and a backward pass are in the order in which they begin; the head is the embedding again.

    Args:
        model: the shape.
        zero: the recipe's block.
        tensor: ranks that share out what splits.
        recompute: with activation checkpointing a block runs forward once more in its backward pass.
        whole_blocks: whether a block is one module, without children.
    """
    parts = {part.name: part.of_rank(tensor) for part in model_parameters(model)}
    head: Layer = (parts[EMBEDDING],)
    tail: Layer = (parts["ln_f.weight"], parts["ln_f.bias"])
    positions: Layer = (parts["wpe.weight"],)
    forward, backward = [_NOTHING, head, positions, _NOTHING], list[Layer]()
    for layer in range(model.n_layer):
        ln_1, qkv, proj, ln_2, fc, back = layers = [
            tuple(parts[f"blocks.{layer}.{name}.{kind}"] for kind in ("weight", "bias"))
            for name in ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")
        ]
        if whole_blocks:
            whole = sum(layers, _NOTHING)
            forward.append(whole)
            backward = [whole, *([whole] if recompute else []), *backward]
            continue
        block = [_NOTHING, ln_1, _NOTHING, qkv, proj, _NOTHING, ln_2, _NOTHING, fc, back, _NOTHING]
        forward += block
        again = block[:-1] if recompute else []  # begins, and ends, when the last matrix needs its input
        nothing = [_NOTHING, _NOTHING]
        backward = [_NOTHING, *nothing, back, *again, fc, ln_2, *nothing, proj, qkv, ln_1, *backward]
    forward, backward = [*forward, tail, head], [_NOTHING, head, tail, *backward, _NOTHING, positions, head]
    return _simulated(tuple(parts.values()), zero, [*forward, *backward], turn=len(forward))


def _simulated(every: Layer, zero: ZeroRecipe, order: Sequence[Layer], *, turn: int) -> Gathers:
    """What DeepSpeed gathers for the modules of ``order``, of which the backward pass begins at ``turn``."""
    stay = {part.name for part in persistent(zero, every)}
    queue = deque((part, step) for step, layer in enumerate(order) for part in layer)
    seen: dict[str, int] = {}  # the last use of each parameter that prefetching has passed
    available, live, most_live = set(stay), 0, 0
    gathered, in_forward = list[ParameterSize](), list[ParameterSize]()
    for step, layer in enumerate(order):
        wanted = {part.name: part for part in layer if part.name not in available}
        ahead = {part.name for part in layer if seen.get(part.name, -1) < step}
        while ahead:
            part, use = queue.popleft()
            seen[part.name] = use
            ahead.discard(part.name)
        own = total(wanted.values())
        room = own + min(zero.stage3_max_live_parameters - live - own, zero.stage3_prefetch_bucket_size)
        while queue and total(wanted.values()) < room:
            part, use = queue.popleft()
            seen[part.name] = max(use, seen.get(part.name, use))
            if part.name not in available:
                wanted[part.name] = part
        gathered += wanted.values()
        available |= wanted.keys()
        live += total(wanted.values())
        most_live = max(most_live, live)
        kept = stay | {part.name for part in layer if seen.get(part.name, -1) > step + 1}
        passed, is_block = 0, len(layer) > 2
        for number, later in enumerate(order[step + 1 :], step + 1):
            if passed >= zero.stage3_max_reuse_distance:
                break
            # After a whole block it looks into the children of all modules, where the backward pass begins into those
            # of the model. After other modules it looks into no children, not even those of blocks.
            found = later if is_block or len(later) <= 2 else _NOTHING
            found = every if is_block and number == turn else found
            kept |= {part.name for part in found}
            passed += total(found)
        released = [part for part in layer if part.name not in kept]
        available -= {part.name for part in released}
        live -= total(released)
        if step + 1 == turn:
            in_forward = list(gathered)
    return Gathers(all=gathered, forward=in_forward, most_live=most_live)
