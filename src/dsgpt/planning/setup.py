"""The training that a plan predicts: model, recipe, ranks, precision and batch."""

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

    def held(self, rank: int) -> list[ParameterSize]:
        """The parameters of ``rank``, whole or in pieces."""
        return self.stages[self.stage(rank)]

    def blocks(self, rank: int) -> int:
        """Transformer blocks that ``rank`` computes."""
        return sum(part.name.endswith(".ln_1.weight") for part in self.held(rank))

    def micro_batches_in_flight(self, rank: int) -> int:
        """Micro batches whose activations ``rank`` has at a time: in a pipeline, one for each stage from its own on."""
        return min(self.gradient_accumulation_steps, self.sizes.pipeline - self.stage(rank))
