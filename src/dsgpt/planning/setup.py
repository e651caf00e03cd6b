"""What a plan is made for: a model, a recipe, ranks, a precision and a batch."""

from dataclasses import dataclass
from functools import cached_property

from dsgpt.config.recipe import Recipe
from dsgpt.model.config import GPT2Config
from dsgpt.planning.parameters import ParameterSize, model_parameters, on_tensor_rank
from dsgpt.planning.stages import stage_parameters
from dsgpt.runtime.topology import ParallelSizes

FULL = 4
"""Bytes of an fp32 number."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train one model; such that ``config.resolve`` would accept it."""

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
    """Whether blocks are computed a second time in the backward pass."""

    def __post_init__(self) -> None:
        """Refuse what has no formula.

        Raises:
            ValueError: Zero++, of which nothing could be measured.
        """
        if self.run_type == "optimized" and self.recipe.zero_plus_plus:
            raise ValueError(f"{self.recipe.path}: there is no formula for Zero++: plan with ds_configs/zero3.json")

    @property
    def sizes(self) -> ParallelSizes:
        """How the model is split; PyTorch's strategies do not split it."""
        return self.recipe.parallel_of(self.run_type)

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of them, that read different data."""
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
        """What a tensor rank of each pipeline stage holds of the model; one stage where there is no pipeline."""
        if self.sizes.pipeline == 1:
            dealt = [model_parameters(self.model)]
        else:
            partition = self.recipe.pipeline.partition
            dealt = stage_parameters(self.model, stages=self.sizes.pipeline, partition=partition)
        return [on_tensor_rank(stage, self.sizes.tensor) for stage in dealt]

    @property
    def moments(self) -> int:
        """Numbers that the optimizer keeps per weight: Adam's two, the momentum of SGD if it has one."""
        if self.recipe.optimizer.type == "AdamW":
            return 2
        return int(self.recipe.optimizer.momentum > 0)

    @property
    def uses_deepspeed_adam(self) -> bool:
        """Whether DeepSpeed's CPU Adam steps."""
        return self.run_type == "optimized" and self.recipe.uses_deepspeed_adam

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed takes its ``BF16_Optimizer``, which knows no buckets, instead of ZeRO-1's own."""
        recipe = self.recipe
        return recipe.zero_stage == 1 and self.precision == "bf16" and recipe.offload_optimizer == "none"

    @property
    def first_ranks(self) -> range:
        """The first rank of every pipeline stage; all ranks of a stage send the same."""
        return range(0, self.world_size, self.world_size // self.sizes.pipeline)

    def stage(self, rank: int) -> int:
        """The pipeline stage of ``rank``; stages are the outermost dimension of the ranks."""
        return rank * self.sizes.pipeline // self.world_size

    def held(self, rank: int) -> list[ParameterSize]:
        """What ``rank`` holds of the model, whole or in pieces."""
        return self.stages[self.stage(rank)]

    def blocks(self, rank: int) -> int:
        """Transformer blocks that ``rank`` computes."""
        return sum(part.name.endswith(".ln_1.weight") for part in self.held(rank))
