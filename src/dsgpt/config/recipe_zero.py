"""The blocks ``zero_optimization`` and ``aio`` of a recipe: the ZeRO stage, offload, and Zero++ (DeepSpeed 0.19.8)."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Strict, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from dsgpt.config.recipe_values import Block, Elements, Flag, Limit, Positive, Text, must_be, no_null, one_of

_Place = Annotated[Literal["none", "cpu", "nvme"], one_of("none", "cpu", "nvme")]


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(Block):
    """The block ``zero_optimization.offload_optimizer``."""

    device: _Place = "none"
    nvme_path: Annotated[Text | None, no_null] = None
    """The folder under which DeepSpeed swaps; None for the run folder."""
    buffer_count: Annotated[Limit | None, no_null] = None
    """Buffers for swapping, each as large as a sub-group; None for as many as are needed."""
    pin_memory: Flag = True
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

    device: _Place = "none"
    nvme_path: Annotated[Text | None, no_null] = None
    """As in ``OffloadOptimizer``."""
    buffer_count: Limit = 5
    buffer_size: Annotated[Limit | None, no_null] = None
    """Elements of a buffer; None for the size of a rank's part of the largest parameter."""
    max_in_cpu: Limit = 10**9
    pin_memory: Flag = True


@dataclass(frozen=True, kw_only=True)
class ZeroRecipe(Block):
    """The ``zero_optimization`` block. Sizes are in elements."""

    REFUSED: ClassVar = {  # ``_link_all_hp_params`` of stages 1 and 2 expects the parameters in their original order
        "round_robin_gradients": "DeepSpeed then loses track of where each parameter is and would save wrong "
        "weights; leave it out",
    }

    stage: Annotated[int, Strict(), Field(ge=0, le=3), must_be("a whole number from 0 to 3")] = 0
    contiguous_gradients: Flag = True
    reduce_scatter: Flag = True
    reduce_bucket_size: Elements = 500_000_000
    use_multi_rank_bucket_allreduce: Flag = True
    allgather_partitions: Flag = True
    allgather_bucket_size: Elements = 500_000_000
    overlap_comm: Flag = False
    """DeepSpeed's own default is true at stage 3. Strategies always pass this value."""
    load_from_fp32_weights: Flag = True
    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    sub_group_size: Limit = 10**9
    stage3_prefetch_bucket_size: Limit = 50_000_000
    stage3_param_persistence_threshold: Limit = 100_000
    stage3_model_persistence_threshold: Limit = 2**63 - 1
    stage3_max_live_parameters: Limit = 10**9
    stage3_max_reuse_distance: Limit = 10**9
    stage3_gather_16bit_weights_on_model_save: Flag = False
    stage3_allgather_sequential: Flag = False
    ignore_unused_parameters: Flag = True
    memory_efficient_linear: Flag = True
    log_trace_cache_warnings: Flag = False
    zero_hpz_partition_size: Positive = 1
    """Zero++: ranks that together hold a secondary copy of the parameters; 1 for no such copy."""
    zero_quantized_weights: Flag = False
    """Zero++: send parameters in 8 bits, which changes the training."""
    zero_quantized_gradients: Flag = False
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


AIO_BLOCK_MULTIPLE = 4096
"""Direct I/O transfers whole sectors of the drive. A sector has at most this many bytes."""


@dataclass(frozen=True, kw_only=True)
class AioRecipe(Block):
    """The ``aio`` block: how files are read and written while state is swapped."""

    REFUSED: ClassVar = {
        "use_gds": "GPUDirect Storage needs a driver, which this program does not look for; leave it out"
    }

    block_size: Annotated[
        Elements, Field(multiple_of=AIO_BLOCK_MULTIPLE), must_be(f"a multiple of {AIO_BLOCK_MULTIPLE} bytes")
    ] = 2**20
    queue_depth: Elements = 8
    intra_op_parallelism: Elements = 1
    single_submit: Flag = False
    overlap_events: Flag = True
