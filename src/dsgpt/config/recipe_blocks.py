"""The keys of a recipe, block by block, and the messages about wrong values.

The blocks of a recipe: which keys of DeepSpeed's JSON each may hold, and what they mean (DeepSpeed 0.19.8's schema). A
field has the name and the default of DeepSpeed's key, except in ``dsgpt``, which DeepSpeed does not have. Keys that
are not fields are refused.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, Strict, ValidationError, ValidationInfo
from pydantic.dataclasses import dataclass
from pydantic.functional_validators import BeforeValidator, WrapValidator, field_validator, model_validator

from dsgpt.common.errors import MOST_KEYS, did_you_mean
from dsgpt.common.json_files import clipped, clipped_text
from dsgpt.config.options import EXECUTES, PLACES, PRINTS, SPLITS, SWAPS
from dsgpt.config.options import ChangesTraining as Changes
from dsgpt.config.options import ExecutionOnly as Only
from dsgpt.machine.topology import ParallelSizes

# Types of the values in a recipe, and the messages about wrong values. pydantic finds all mistakes at once.

IN_A_FILE = "in a file"
"""The context of a validation of JSON: unknown keys and null are mistakes."""
WITHOUT_UNKNOWN_KEYS = "without unknown keys"
"""The context of a validation of JSON whose unknown keys were already reported: they are ignored."""
_NO_OBJECT = (NoneType, bool, int, float, str, list)
"""The types of JSON values other than objects."""
_MISSING = "is missing"
_AUTO = 'is "auto": write the value, or leave the key out for its default'


class Mistake(NamedTuple):
    """A value or key that is wrong."""

    place: tuple[int | str, ...]
    """The keys that lead to it."""
    text: str
    """The mistake, without its place in the file, which a message puts first."""


def mistakes_of(error: ValidationError) -> list[Mistake]:
    """All mistakes of a validation."""
    return [
        Mistake(each["loc"], _MISSING if each["type"] == "missing" else each["msg"].removeprefix("Value error, "))
        for each in error.errors(include_url=False)
    ]


def must_be(words: str, cure: Callable[[Any], str] = lambda _: "") -> WrapValidator:
    """Reports a wrong value as ``must be WORDS, not VALUE``, followed by ``cure(VALUE)``."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        """The value, converted to its type."""
        if value == "auto":
            raise ValueError(_AUTO)
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {words}, not {clipped(value)}{cure(value)}") from None

    return WrapValidator(check)


def one_of(*allowed: str) -> WrapValidator:
    """``must_be`` for a ``Literal`` of ``allowed``. It suggests the nearest of them."""
    return must_be(f"one of {', '.join(allowed)}", lambda value: did_you_mean(str(value), allowed))


def _whole(value: Any) -> Any:
    """The value, as an integer if it is a whole float such as 5e8. DeepSpeed accepts those too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Flag = Annotated[bool, Strict(), must_be("true or false")]
Text = Annotated[str, Strict(), must_be("a string")]
Positive = Annotated[int, Strict(), Field(ge=1), must_be("a whole number of at least 1")]
_Whole = Annotated[int, Strict(), Field(lt=2**63), BeforeValidator(_whole)]
Elements = Annotated[_Whole, Field(ge=1), must_be("a whole number of at least 1")]
"""A number of elements, bytes or requests, of at least 1."""
Limit = Annotated[_Whole, Field(ge=0), must_be("a whole number of at least 0")]
Number = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False), must_be("a number of at least 0")]
Fraction = Annotated[float, Strict(), Field(ge=0, le=1), must_be("a number from 0 to 1")]


def _no_null(value: Any, info: ValidationInfo) -> Any:
    if value is None and info.context == IN_A_FILE:
        raise ValueError("is null: write the value, or leave the key out for its default")
    return value


no_null = BeforeValidator(_no_null)
"""Refuses JSON's ``null`` for a field whose ``None`` means that the key is absent."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Block:
    """An object in a recipe. Its fields are the keys that it may hold; all its mistakes are found together."""

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Keys that DeepSpeed knows and that are refused here, with the reason and what to do."""
    MISSING: ClassVar[Mapping[str, str]] = {}
    """Text that is added to the message about a missing required key."""
    INSIDE: ClassVar[tuple[str, ...]] = ()
    """The key in the block that holds all fields but ``type``."""
    WORK: ClassVar[Changes | Only | None] = None
    """Meaning of the block's keys for equal work, unless a key has its own."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_all_mistakes(cls, value: Any, handler: Callable[[Any], Self], info: ValidationInfo) -> Self:
        mistakes: list[Mistake] = []
        if isinstance(value, dict):
            value, unknown = cls._flat(value)
            mistakes = [] if info.context == WITHOUT_UNKNOWN_KEYS else unknown
        elif isinstance(value, _NO_OBJECT):
            raise ValueError(_AUTO if value == "auto" else f"must be an object in braces, not {clipped(value)}")
        try:
            block = handler(value)
        except ValidationError as error:
            for each in mistakes_of(error):
                hint = cls.MISSING.get(str(each.place[-1]), "") if each.text == _MISSING else ""
                inside = () if each.place == ("type",) else cls.INSIDE
                mistakes.append(Mistake((*inside, *each.place), each.text + hint))
        if mistakes:
            raise _together(mistakes)
        return block

    @classmethod
    def _flat(cls, value: dict[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
        """The keys that are fields, and a mistake for each of the others."""
        names = {each.name for each in fields(cls)}
        return {key: value[key] for key in value if key in names}, _unknown_keys(value, names, cls.REFUSED)


@dataclass(frozen=True, kw_only=True)
class NamedBlock(Block):
    """A block ``{"type": NAME, "params": {...}}``, whose parameters are fields like ``type``."""

    PARAMS: ClassVar[Mapping[str, Collection[str]]] = {}
    """The allowed parameters for each ``type``."""
    INSIDE: ClassVar = ("params",)

    @classmethod
    def _flat(cls, value: dict[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
        mistakes, params = _unknown_keys(value, ("type", *cls.INSIDE), {}), value.get("params", {})
        if not isinstance(params, dict):
            mistakes.append(Mistake(cls.INSIDE, f"must be an object in braces, not {clipped(params)}"))
            raise _together(mistakes)
        name = value.get("type")
        names = cls.PARAMS.get(name if isinstance(name, str) else "", set().union(*cls.PARAMS.values()))
        mistakes += [Mistake((*cls.INSIDE, *each.place), each.text) for each in _unknown_keys(params, names, {})]
        flat = {key: params[key] for key in params if key in names}
        return flat | {key: value[key] for key in ("type",) if key in value}, mistakes


def _unknown_keys(values: Mapping[str, Any], allowed: Collection[str], refused: Mapping[str, str]) -> list[Mistake]:
    """A mistake for each key that is not ``allowed``, with the nearest one that is, or the reason if ``refused``."""
    unknown, mistakes = [key for key in values if key not in allowed], []
    for key in unknown[:MOST_KEYS]:
        why = f"supported: {refused[key]}" if key in refused else f"a known key{did_you_mean(key, allowed)}"
        mistakes.append(Mistake((clipped_text(key),), f"is not {why}"))
    if len(unknown) > MOST_KEYS:
        mistakes.append(Mistake((), f"has {len(unknown) - MOST_KEYS:,} more unknown keys"))
    return mistakes


def _together(mistakes: list[Mistake]) -> ValidationError:
    """One error with all mistakes of a block. pydantic adds it to those of the other blocks."""
    return ValidationError.from_exception_data(
        "recipe",
        [
            {"type": "value_error", "loc": each.place, "input": None, "ctx": {"error": ValueError(each.text)}}
            for each in mistakes
        ],
    )


Beta = Annotated[float, Strict(), Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], must_be("two numbers of at least 0 and below 1")]


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe(NamedBlock):
    """The ``optimizer`` block. Weight decay applies to matrices and embeddings only."""

    WORK: ClassVar = Changes("optimizer settings")
    PARAMS: ClassVar = {
        "AdamW": ("lr", "betas", "eps", "weight_decay", "torch_adam"),
        "SGD": ("lr", "momentum", "nesterov", "weight_decay"),
    }
    MISSING: ClassVar = {"type": f"; one of {', '.join(PARAMS)}"}

    type: Annotated[Literal["AdamW", "SGD"], one_of(*PARAMS), Changes("optimizer type")]
    lr: Annotated[Number, Changes("learning rate")]
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    momentum: Fraction = 0.0
    nesterov: Flag = False
    torch_adam: Annotated[Flag, Only("chooses whose code computes the same AdamW")] = False
    """Use torch's AdamW with optimizer offload. It needs no compiler; DeepSpeed's CPU Adam is faster."""

    @field_validator("nesterov")
    @classmethod
    def _needs_momentum(cls, nesterov: bool, info: ValidationInfo) -> bool:
        if nesterov and info.data.get("momentum") == 0:
            raise ValueError("needs a momentum above 0")
        return nesterov


_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")


@dataclass(frozen=True, kw_only=True)
class SchedulerRecipe(NamedBlock):
    """The ``scheduler`` block."""

    WORK: ClassVar = Changes("scheduler")
    PARAMS: ClassVar = {
        "WarmupLR": _WARMUP,
        "WarmupDecayLR": ("total_num_steps", *_WARMUP),
        "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
    }
    MISSING: ClassVar = {"type": f"; one of {', '.join(PARAMS)}"}

    type: Annotated[Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"], one_of(*PARAMS)]
    total_num_steps: Positive | None = None
    """Optimizer steps until the end of the decay; None for the steps of the run."""
    warmup_num_steps: Positive = 1000
    warmup_type: Annotated[Literal["log", "linear"], one_of("log", "linear")] = "log"
    warmup_min_lr: Number = 0.0
    warmup_max_lr: Number | None = None
    warmup_min_ratio: Fraction = 0.0
    cos_min_ratio: Fraction = 0.0001


@dataclass(frozen=True, kw_only=True)
class LossScaling(Block):
    """Scaling of the loss, so that fp16 gradients do not vanish."""

    WORK: ClassVar = Changes("loss scaling")
    loss_scale: Number = 0.0
    """A fixed scale; 0 for a dynamic one."""
    initial_scale_power: Annotated[int, Strict(), Field(ge=0, le=32), must_be("a whole number from 0 to 32")] = 16
    loss_scale_window: Positive = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: Positive = 2
    consecutive_hysteresis: Flag = False
    min_loss_scale: Positive = 1


@dataclass(frozen=True, kw_only=True)
class Fp16(LossScaling):
    """The ``fp16`` block."""

    enabled: Annotated[Flag, Changes("precision")] = False


@dataclass(frozen=True, kw_only=True)
class Bf16(Block):
    """The ``bf16`` block."""

    enabled: Annotated[Flag, Changes("precision")] = False
    check_grad_overflow: Annotated[Flag, Only("gradients that are not finite end the run with or without it")] = True
    immediate_grad_update: Annotated[Flag, Only("adds the same gradients to the same fp32 sums, earlier")] = False
    """Add each gradient to the fp32 sum, and free it, as soon as it is computed."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelRecipe(Block):
    """The ``tensor_parallel`` block."""

    REFUSED: ClassVar = dict.fromkeys(
        (
            *("enabled", "tp_size", "tp", "tp_grain_size"),
            *("mpu", "keep_module_on_host", "injection_policy", "partition_config"),
        ),
        "this program knows how to split GPT-2's layers; give only autotp_size",
    )

    autotp_size: Annotated[Positive, EXECUTES] = 1


PIPELINE_LAYERS = ("Embedding", "PositionEmbedding", "StageBlock", "LayerNorm")
"""Names of the layers that a pipeline distributes over stages, for patterns in ``pipeline.partition``."""


@dataclass(frozen=True, kw_only=True)
class PipelineRecipe(Block):
    """The ``pipeline`` block."""

    REFUSED: ClassVar = dict.fromkeys(
        ("seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned", "use_reentrant"),
        "give only stages and partition",
    )

    stages: Annotated[Positive, EXECUTES] = 1
    partition: Annotated[str, EXECUTES] = "parameters"
    """Distribution of layers over stages: ``parameters``, ``uniform``, or ``type:`` and a pattern."""

    @field_validator("partition", mode="before")
    @classmethod
    def _check_partition(cls, value: Any) -> Any:
        """The value, if it is valid. A second colon is refused: DeepSpeed ignores what follows it."""
        kind, _, pattern = value.partition(":") if isinstance(value, str) else ("", "", "")
        if value in ("parameters", "uniform"):
            return value
        with contextlib.suppress(re.error):
            matches = any(re.search(pattern, name, re.IGNORECASE) for name in PIPELINE_LAYERS)
            if kind == "type" and ":" not in pattern and matches:
                return value
        raise ValueError(
            f'must be "parameters", "uniform", or "type:" followed by a pattern that matches one of '
            f'{", ".join(PIPELINE_LAYERS)}, such as "type:block"; not {value!r}'
        )


def _only_false(value: Any) -> Any:
    if value is not False:
        raise ValueError("is not supported; blocks are recomputed whole, so leave it out or set it to false")
    return value


_Off = Annotated[bool, BeforeValidator(_only_false)]


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Block):
    """The ``activation_checkpointing`` block. Its presence turns recomputation on, for whole blocks of the model."""

    WORK: ClassVar = Only("must be false")
    partition_activations: _Off = False
    cpu_checkpointing: _Off = False
    contiguous_memory_optimization: _Off = False
    number_checkpoints: _Off = False
    synchronize_checkpoint_boundary: _Off = False
    profile: _Off = False


@dataclass(frozen=True, kw_only=True)
class DdpRecipe(Block):
    """The block ``dsgpt.ddp``: how PyTorch's DistributedDataParallel reduces gradients."""

    WORK: ClassVar = PLACES
    bucket_cap_mb: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False), must_be("a number above 0")] = 25.0
    """Gradients are reduced in buckets of up to this many MiB, each as soon as it is full."""
    gradient_as_bucket_view: Flag = True
    """Store gradients in the buckets, not in tensors of their own. This saves one copy of the gradients."""


_ROUNDS = Only("rounds gradients no further than to the run's precision, which counts; ZeRO does so always")
_REORDERS = Only("adds up the same gradients in another order")


@dataclass(frozen=True, kw_only=True)
class FsdpRecipe(Block):
    """The block ``dsgpt.fsdp``: how PyTorch's FSDP2 (``fully_shard``) shards and gathers parameters."""

    reshard_after_forward: Annotated[Flag, PLACES] = True
    """Free a block's gathered weights after its forward pass and gather them again for the backward pass, as in
    ZeRO-3. If false, they stay until the backward pass, as in ZeRO-2: less communication and more memory."""
    reduce_dtype: Annotated[Literal["fp32", "low"], one_of("fp32", "low"), _ROUNDS] = "fp32"
    """Precision in which gradients are summed over ranks; ``low`` is that of the activations."""
    accumulation: Annotated[Literal["whole", "sharded"], one_of("whole", "sharded"), _REORDERS] = "whole"
    """Where the gradients of a step's micro batches are added up. ``whole``: on every rank, and reduced once a step.
    ``sharded``: each micro batch's are reduced at once, and added to the rank's shard: less memory, and as many
    reductions as micro batches."""
    cpu_offload: Annotated[Flag, PLACES] = False
    """Keep the shards of weights, gradients and optimizer state in host memory."""


@dataclass(frozen=True, kw_only=True)
class TorchStrategies(Block):
    """The ``dsgpt`` block: settings of PyTorch's strategies, for which DeepSpeed's schema has no keys."""

    ddp: DdpRecipe = DdpRecipe()
    fsdp: FsdpRecipe = FsdpRecipe()


# The blocks ``zero_optimization`` and ``aio`` of a recipe: the ZeRO stage, offload, and Zero++ (DeepSpeed 0.19.8).

_QUANTIZES = Changes("quantized communication")
_REDUCES = Only("sends the same sums by another collective")
_Place = Annotated[Literal["none", "cpu", "nvme"], one_of("none", "cpu", "nvme")]


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(Block):
    """The block ``zero_optimization.offload_optimizer``."""

    WORK: ClassVar = SWAPS
    device: Annotated[_Place, PLACES] = "none"
    nvme_path: Annotated[Text | None, no_null] = None
    """The folder under which DeepSpeed swaps; None for the run folder."""
    buffer_count: Annotated[Limit | None, no_null] = None
    """Buffers for swapping, each as large as a sub-group; None for as many as are needed."""
    pin_memory: Annotated[Flag, PLACES] = True
    pipeline_read: Flag = False
    pipeline_write: Flag = False
    fast_init: Flag = False

    @property
    def swap_buffers(self) -> int:
        """Buffers through which the optimizer's state is swapped, each as large as a sub-group.

        Weights, gradients and two moments need one each. With ``pipeline_read`` or ``pipeline_write``, the
        sub-groups that are read and written at the same time need their own: 12 buffers in total. DeepSpeed's default
        is 4.
        """
        if self.buffer_count is not None:
            return self.buffer_count
        return 12 if self.pipeline_read or self.pipeline_write else 4


@dataclass(frozen=True, kw_only=True)
class OffloadParam(Block):
    """The block ``zero_optimization.offload_param``."""

    WORK: ClassVar = PLACES
    device: _Place = "none"
    nvme_path: Annotated[Text | None, no_null, SWAPS] = None
    """The same as in ``OffloadOptimizer``."""
    buffer_count: Annotated[Limit, SWAPS] = 5
    buffer_size: Annotated[Limit | None, no_null, SWAPS] = None
    """Elements of a buffer; None for the size of a rank's part of the largest parameter."""
    max_in_cpu: Limit = 10**9
    pin_memory: Flag = True


@dataclass(frozen=True, kw_only=True)
class ZeroRecipe(Block):
    """The ``zero_optimization`` block. Sizes are in elements."""

    WORK: ClassVar = PLACES
    REFUSED: ClassVar = {  # ``_link_all_hp_params`` of stages 1 and 2 expects the parameters in their original order
        "round_robin_gradients": "DeepSpeed then loses track of where each parameter is and would save wrong "
        "weights; leave it out"
    }

    stage: Annotated[int, Strict(), Field(ge=0, le=3), must_be("a whole number from 0 to 3"), EXECUTES] = 0
    contiguous_gradients: Flag = True
    reduce_scatter: Annotated[Flag, _REDUCES] = True
    reduce_bucket_size: Elements = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[Flag, _REDUCES] = True
    allgather_partitions: Annotated[Flag, Only("sends the same weights by another collective")] = True
    allgather_bucket_size: Elements = 500_000_000
    overlap_comm: Annotated[Flag, Only("sends while computing; a run notes where no parity run has covered it")] = False
    """DeepSpeed's own default is true at stage 3. Strategies always pass this value."""
    load_from_fp32_weights: Annotated[Flag, Only("concerns DeepSpeed's own checkpoints, which are not used")] = True
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    sub_group_size: Limit = 10**9
    stage3_prefetch_bucket_size: Limit = 50_000_000
    stage3_param_persistence_threshold: Limit = 100_000
    stage3_model_persistence_threshold: Limit = 2**63 - 1
    stage3_max_live_parameters: Limit = 10**9
    stage3_max_reuse_distance: Limit = 10**9
    stage3_gather_16bit_weights_on_model_save: Annotated[Flag, Only("concerns DeepSpeed's own checkpoints")] = False
    stage3_allgather_sequential: Annotated[Flag, Only("sends the same weights in another order")] = False
    ignore_unused_parameters: Annotated[Flag, Only("GPT-2 uses every parameter in every step")] = True
    memory_efficient_linear: Annotated[Flag, Only("computes the same product, keeps less for the backward pass")] = True
    log_trace_cache_warnings: Annotated[Flag, PRINTS] = False
    zero_hpz_partition_size: Positive = 1
    """Zero++: ranks that together hold a secondary copy of the parameters; 1 for no such copy."""
    zero_quantized_weights: Annotated[Flag, _QUANTIZES] = False
    """Zero++: send parameters in 8 bits, which changes the training."""
    zero_quantized_gradients: Annotated[Flag, _QUANTIZES] = False
    """Zero++: send gradients in 8 and 4 bits, which changes the training."""

    def bucket_elements(self, parameters: int) -> int:
        """Elements of the bucket that DeepSpeed gets: ``reduce_bucket_size``, at most all gradients of the model.

        DeepSpeed allocates the bucket at its full size (``setup_buckets`` and ``_setup_for_real_optimizer`` of its
        optimizers). One that holds every gradient is never full before the backward pass ends, so a larger one sends
        the same messages.

        Args:
            parameters: of the whole model. Tensor and pipeline ranks hold fewer.
        """
        return min(self.reduce_bucket_size, parameters)

    @field_validator("offload_param", "offload_optimizer")
    @classmethod
    def _offload_fits_stage(cls, block: OffloadParam | OffloadOptimizer, info: ValidationInfo) -> Any:
        stage = info.data.get("stage", 3)
        if block.device == "none" or stage == 3:
            return block
        if info.field_name == "offload_param":
            raise ValueError("needs ZeRO stage 3")
        if block.device == "nvme":
            raise ValueError("to nvme needs ZeRO stage 3; at stages 1 and 2 take device cpu")
        if stage == 0:
            raise ValueError("needs ZeRO stage 1, 2 or 3")
        return block

    @field_validator("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
    @classmethod
    def _zero_plus_plus_fits_stage(cls, value: Any, info: ValidationInfo) -> Any:
        unused = 1 if info.field_name == "zero_hpz_partition_size" else False
        if value != unused and info.data.get("stage", 3) != 3:
            raise ValueError("needs ZeRO stage 3")
        return value


_SECTOR = 4096
"""Direct I/O transfers whole sectors of the drive. A sector has at most this many bytes."""


@dataclass(frozen=True, kw_only=True)
class AioRecipe(Block):
    """The ``aio`` block: how files are read and written while state is swapped."""

    WORK: ClassVar = SWAPS
    REFUSED: ClassVar = {
        "use_gds": "GPUDirect Storage needs a driver, which this program does not look for; leave it out"
    }

    block_size: Annotated[Elements, Field(multiple_of=_SECTOR), must_be(f"a multiple of {_SECTOR} bytes")] = 2**20
    queue_depth: Elements = 8
    intra_op_parallelism: Elements = 1
    single_submit: Flag = False
    overlap_events: Flag = True


# The recipe as a whole.


@dataclass(frozen=True, kw_only=True)
class RecipeSettings(Block):
    """The contents of a recipe. A field has the name of DeepSpeed's key; its default applies if the key is absent."""

    REFUSED: ClassVar = {
        "amp": "use a bf16 or fp16 block",
        "torch_autocast": "use a bf16 or fp16 block, which has the same meaning under every strategy",
        "data_types": "gradients are always accumulated in fp32, so that strategies can be compared; leave it out",
        "gradient_allreduce_op": "a sum over ranks would make the gradient depend on their number; leave it out",
        "managed_gradient_accumulation": "accumulation follows gradient_accumulation_steps; leave it out",
        "sparse_gradients": "GPT-2's tied embedding has dense gradients; leave it out",
        "dataloader_drop_last": "the data order is the same under every strategy; leave it out",
        "elasticity": "DeepSpeed is removing it; resume with --resume instead",
        "compression_training": "DeepSpeed is removing it",
        "communication_data_type": "another type rounds the gradients differently; leave it out",
        **dict.fromkeys(("curriculum_learning", "data_efficiency"), "it changes which samples are seen; leave it out"),
        "prescale_gradients": "it rounds the gradients differently; leave it out",
        "gradient_predivide_factor": "it rounds the gradients differently; leave it out",
        **dict.fromkeys(("comms_logger", "flops_profiler"), "this version does not implement it; leave it out"),
        "log_level": "this program decides what is printed; leave it out",
        "autotuning": "leave it out",
    }
    """Keys that would let strategies do different work, or that are not implemented here."""
    MISSING: ClassVar = {"optimizer": '; for example {"type": "AdamW", "params": {"lr": 0.0006}}'}

    train_batch_size: Annotated[Positive | None, Changes("global batch")] = None
    train_micro_batch_size_per_gpu: Annotated[Positive | None, SPLITS] = None
    gradient_accumulation_steps: Annotated[Positive | None, SPLITS] = None
    steps_per_print: Annotated[Positive | None, PRINTS] = None
    optimizer: OptimizerRecipe
    scheduler: Annotated[SchedulerRecipe | None, no_null] = None
    gradient_clipping: Annotated[Number, Changes("gradient clipping")] = 1.0
    """Largest global gradient norm; 0 for no clipping. The default is that of DeepSpeed since 0.19.3."""
    bf16: Annotated[Bf16 | None, no_null] = None
    fp16: Annotated[Fp16 | None, no_null] = None
    activation_checkpointing: Annotated[ActivationCheckpointing | None, no_null] = None
    dsgpt: TorchStrategies = TorchStrategies()
    zero_optimization: ZeroRecipe = ZeroRecipe()
    zero_allow_untested_optimizer: Annotated[Flag, Only("true in every run, whatever the recipe says")] = False
    zero_force_ds_cpu_optimizer: Annotated[Flag, Only("chooses whose code computes the same optimizer")] = True
    wall_clock_breakdown: Annotated[Flag, PRINTS] = False
    memory_breakdown: Annotated[Flag, PRINTS] = False
    dump_state: Annotated[Flag, PRINTS] = False
    aio: Annotated[AioRecipe | None, no_null] = None
    tensor_parallel: TensorParallelRecipe = TensorParallelRecipe()
    pipeline: PipelineRecipe = PipelineRecipe()
    sequence_parallel_size: Annotated[Positive, EXECUTES] = 1

    @field_validator("fp16")
    @classmethod
    def _one_precision(cls, fp16: Fp16 | None, info: ValidationInfo) -> Fp16 | None:
        bf16 = info.data.get("bf16")
        if fp16 and fp16.enabled and bf16 and bf16.enabled:
            raise ValueError("and bf16 are both enabled; keep one")
        return fp16

    @field_validator("aio")
    @classmethod
    def _swaps_files(cls, aio: AioRecipe | None, info: ValidationInfo) -> AioRecipe | None:
        zero = info.data.get("zero_optimization")
        if aio and zero and "nvme" not in {zero.offload_optimizer.device, zero.offload_param.device}:
            raise ValueError("has no effect without offload to nvme: leave it out")
        return aio

    @property
    def precision(self) -> str | None:
        """``fp32``, ``bf16``, ``fp16``, or None if the file does not set it."""
        blocks = {"bf16": self.bf16, "fp16": self.fp16}
        enabled = [name for name, block in blocks.items() if block and block.enabled]
        return enabled[0] if enabled else ("fp32" if any(blocks.values()) else None)

    @property
    def loss_scaling(self) -> LossScaling:
        """The settings of the ``fp16`` block, or their defaults."""
        rules = asdict(self.fp16 or Fp16())
        del rules["enabled"]
        return LossScaling(**rules)

    def parallel_of(self, run_type: str) -> ParallelSizes:
        """Tensor, sequence and pipeline sizes of a run of ``run_type``: those of the JSON for ``optimized``, else 1."""
        if run_type != "optimized":
            return ParallelSizes()
        tensor, pipeline = self.tensor_parallel.autotp_size, self.pipeline.stages
        return ParallelSizes(tensor=tensor, pipeline=pipeline, sequence=self.sequence_parallel_size)

    def strategy_name(self, run_type: str) -> str:
        """Name of the strategy, one word: ``baseline``, ``fsdp``, ``zero2-offload``, ``tensor2-zero1`` ..."""
        if run_type != "optimized":
            return run_type
        sizes = sorted(asdict(self.parallel_of(run_type)).items())
        place = ["nvme"] if self.nvme_blocks else ["offload"] if self.offloads else []
        return "-".join([*[f"{name}{size}" for name, size in sizes if size > 1], f"zero{self.zero_stage}", *place])

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return self.zero_optimization.stage

    @property
    def offload_optimizer(self) -> str:
        """``none``, ``cpu`` or ``nvme``."""
        return self.zero_optimization.offload_optimizer.device

    @property
    def offload_param(self) -> str:
        """``none``, ``cpu`` or ``nvme``."""
        return self.zero_optimization.offload_param.device

    @property
    def offloads(self) -> bool:
        """Whether optimizer or parameters are kept off the device."""
        return (self.offload_optimizer, self.offload_param) != ("none", "none")

    @property
    def nvme_blocks(self) -> tuple[str, ...]:
        """The blocks of ``zero_optimization`` that offload to nvme."""
        return tuple(name for name in ("offload_optimizer", "offload_param") if getattr(self, name) == "nvme")

    @property
    def zero_plus_plus(self) -> bool:
        """Whether Zero++ changes how stage 3 moves parameters or gradients."""
        zero = self.zero_optimization
        return zero.zero_hpz_partition_size > 1 or zero.zero_quantized_weights or zero.zero_quantized_gradients

    @property
    def uses_deepspeed_adam(self) -> bool:
        """Whether DeepSpeed's CPU Adam updates the weights (offload only). A C++ compiler builds it at first use."""
        return self.offload_optimizer != "none" and self.optimizer.type == "AdamW" and not self.optimizer.torch_adam
