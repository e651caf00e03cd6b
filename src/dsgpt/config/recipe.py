"""What a DeepSpeed JSON means to EVERY strategy: batch, optimizer, schedule, precision, clipping, and how to split.

``recipe_reader.py`` makes these records of a file, whichever strategy will run: one recipe can be handed from a
laptop's baseline to a cluster. Imports neither torch nor DeepSpeed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsgpt.runtime.topology import ParallelSizes

DEFAULT_GRADIENT_CLIPPING = 1.0
"""DeepSpeed's default since 0.19.3; written out for every strategy so that none inherits another one."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """The ``optimizer`` block. Weight decay applies to matrices and embeddings only."""

    type: str
    """``AdamW`` or ``SGD``."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    torch_adam: bool = False
    """With optimizer offload: torch's AdamW, which needs no compiler, instead of DeepSpeed's faster one."""


@dataclass(frozen=True, kw_only=True)
class SchedulerRecipe:
    """The ``scheduler`` block, with DeepSpeed's own defaults."""

    type: str
    """``WarmupLR``, ``WarmupDecayLR`` or ``WarmupCosineLR``."""
    total_num_steps: int | None = None
    """Optimizer steps until the end of the decay; None for the steps of the run."""
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    """``log`` or ``linear``."""
    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None
    warmup_min_ratio: float = 0.0
    cos_min_ratio: float = 0.0001


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The ``fp16`` block: how the loss is scaled so that fp16 gradients do not vanish."""

    loss_scale: float = 0.0
    """A fixed scale; 0 for a dynamic one."""
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1


@dataclass(frozen=True, kw_only=True)
class DdpRecipe:
    """The block ``dsgpt.ddp``: how PyTorch's DistributedDataParallel moves gradients."""

    bucket_cap_mb: float = 25.0
    """Gradients are reduced in buckets of up to this many MiB, each as soon as it is full."""
    gradient_as_bucket_view: bool = True
    """Let gradients live in the buckets instead of beside them: one copy of the gradients less."""


@dataclass(frozen=True, kw_only=True)
class FsdpRecipe:
    """The block ``dsgpt.fsdp``: how PyTorch's FSDP2 (``fully_shard``) keeps and moves parameters."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass and gather them again for the backward pass: ZeRO-3.
    Without it they stay until the backward pass: ZeRO-2, with less communication and more memory."""
    reduce_dtype: str = "fp32"
    """``fp32``, or ``low`` for the precision of the activations: in which gradients are summed over ranks."""
    cpu_offload: bool = False
    """Keep the shards of weights, gradients and optimizer state in host memory."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A checked recipe file."""

    path: Path
    sha256: str
    raw: dict[str, Any]
    """The JSON as given."""
    optimizer: OptimizerRecipe
    scheduler: SchedulerRecipe | None
    gradient_clipping: float
    """Largest global gradient norm; 0 for no clipping."""
    precision: str | None
    """``fp32``, ``bf16``, ``fp16``, or None where the file leaves it open."""
    loss_scaling: LossScaling
    train_batch_size: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None
    steps_per_print: int | None
    zero_stage: int
    offload_optimizer: str
    """``none``, ``cpu`` or ``nvme``."""
    offload_param: str
    hpz_partition_size: int
    """Zero++: ranks over which each of them splits a second copy of the parameters; 1 for none."""
    quantized_weights: bool
    """Zero++: whether parameters travel in 8 bits."""
    quantized_gradients: bool
    """Zero++: whether gradients travel in 8 and 4 bits."""
    parallel: ParallelSizes
    """How the JSON splits the model: ``tensor_parallel``, ``pipeline`` and ``sequence_parallel_size``."""
    pipeline_partition: str
    """How layers are dealt to stages: ``parameters``, ``uniform``, or ``type:`` and a pattern."""
    activation_checkpointing: bool
    """Whether the JSON asks to recompute activations."""
    ddp: DdpRecipe
    fsdp: FsdpRecipe
    deepspeed_only: tuple[str, ...] = field(default=())
    """Keys present that mean nothing without DeepSpeed."""

    @property
    def nvme_blocks(self) -> tuple[str, ...]:
        """The blocks of ``zero_optimization`` that offload to nvme."""
        places = {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_param}
        return tuple(name for name, place in places.items() if place == "nvme")

    @property
    def zero_plus_plus(self) -> bool:
        """Whether Zero++ changes how stage 3 moves parameters or gradients."""
        return self.hpz_partition_size > 1 or self.quantized_weights or self.quantized_gradients
