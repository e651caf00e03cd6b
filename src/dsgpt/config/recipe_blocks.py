"""The blocks of a recipe: which keys of DeepSpeed's JSON each may hold, and what they mean (DeepSpeed 0.19.8's schema).

A field has the name and the default of DeepSpeed's key, except in ``dsgpt``, which DeepSpeed does not have. Keys that
are not fields are refused.
"""

import contextlib
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Strict, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from dsgpt.config.recipe_values import (
    Block,
    Flag,
    Fraction,
    NamedBlock,
    Number,
    Positive,
    must_be,
    one_of,
)

Beta = Annotated[float, Strict(), Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], must_be("two numbers of at least 0 and below 1")]


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe(NamedBlock):
    """The ``optimizer`` block. Weight decay applies to matrices and embeddings only."""

    PARAMS: ClassVar = {
        "AdamW": ("lr", "betas", "eps", "weight_decay", "torch_adam"),
        "SGD": ("lr", "momentum", "nesterov", "weight_decay"),
    }
    MISSING: ClassVar = {"type": f"; one of {', '.join(PARAMS)}"}

    type: Annotated[Literal["AdamW", "SGD"], one_of(*PARAMS)]
    lr: Number
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    momentum: Fraction = 0.0
    nesterov: Flag = False
    torch_adam: Flag = False
    """With optimizer offload: use torch's AdamW, which needs no compiler, instead of DeepSpeed's faster one."""

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
    """How the loss is scaled so that fp16 gradients do not vanish."""

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

    enabled: Flag = False


@dataclass(frozen=True, kw_only=True)
class Bf16(Block):
    """The ``bf16`` block."""

    enabled: Flag = False
    check_grad_overflow: Flag = True
    immediate_grad_update: Flag = False
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

    autotp_size: Positive = 1


PIPELINE_LAYERS = ("Embedding", "PositionEmbedding", "StageBlock", "LayerNorm")
"""Names of the layers that a pipeline distributes over stages, for patterns in ``pipeline.partition``."""


@dataclass(frozen=True, kw_only=True)
class PipelineRecipe(Block):
    """The ``pipeline`` block."""

    REFUSED: ClassVar = dict.fromkeys(
        ("seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned", "use_reentrant"),
        "give only stages and partition",
    )

    stages: Positive = 1
    partition: str = "parameters"
    """How layers are distributed over stages: ``parameters``, ``uniform``, or ``type:`` and a pattern."""

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


def _only_false(value: Any) -> bool:
    if value is False:
        return value
    raise ValueError("is not supported; blocks are recomputed whole, so leave it out or set it to false")


_Off = Annotated[bool, BeforeValidator(_only_false)]


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Block):
    """The ``activation_checkpointing`` block. Its presence turns recomputation on, for whole blocks of the model."""

    partition_activations: _Off = False
    cpu_checkpointing: _Off = False
    contiguous_memory_optimization: _Off = False
    number_checkpoints: _Off = False
    synchronize_checkpoint_boundary: _Off = False
    profile: _Off = False


@dataclass(frozen=True, kw_only=True)
class DdpRecipe(Block):
    """The block ``dsgpt.ddp``: how PyTorch's DistributedDataParallel reduces gradients."""

    bucket_cap_mb: Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False), must_be("a number above 0")] = 25.0
    """Gradients are reduced in buckets of up to this many MiB, each as soon as it is full."""
    gradient_as_bucket_view: Flag = True
    """Store gradients in the buckets, not in tensors of their own. This saves one copy of the gradients."""


@dataclass(frozen=True, kw_only=True)
class FsdpRecipe(Block):
    """The block ``dsgpt.fsdp``: how PyTorch's FSDP2 (``fully_shard``) shards and gathers parameters."""

    reshard_after_forward: Flag = True
    """Free a block's gathered weights after its forward pass and gather them again for the backward pass, as in
    ZeRO-3. If false, they stay until the backward pass, as in ZeRO-2: less communication and more memory."""
    reduce_dtype: Annotated[Literal["fp32", "low"], one_of("fp32", "low")] = "fp32"
    """Precision in which gradients are summed over ranks; ``low`` is that of the activations."""
    cpu_offload: Flag = False
    """Keep the shards of weights, gradients and optimizer state in host memory."""


@dataclass(frozen=True, kw_only=True)
class TorchStrategies(Block):
    """The ``dsgpt`` block: settings of PyTorch's strategies, for which DeepSpeed's schema has no keys."""

    ddp: DdpRecipe = DdpRecipe()
    fsdp: FsdpRecipe = FsdpRecipe()
