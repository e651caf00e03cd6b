"""Exhibits of the museum: bugs that DeepSpeed shipped.

Each is a function that returns what plants it. Where a fix replaced a line, the old line is put back into the installed
release (``edited``). The years are those in which a fix was merged, or a thread opened.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.museum import Plant, built, edited, exhibit, replaced

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ZERO_12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_OURS = "dsgpt.strategies.deepspeed."
_PULL, _ISSUE = "deepspeedai/DeepSpeed/pull/", "deepspeedai/DeepSpeed/issues/"

_sgd = partial(Cell, ranks=2, optimizer="sgd")
_bf16 = partial(_sgd, precision="bf16")


@exhibit(f"{_PULL}8154", 2026, _sgd(strategy="pipeline2-zero1"))
def _scaled_at_every_stage() -> Plant:
    """Earlier stages of a pipeline got gradients that were too small by the accumulation steps.

    Every stage divides the gradient of its output by the accumulation steps, not the last one alone.
    """

    def scale(_original: Any, stage: Any, gradient: Any) -> Any:
        return gradient if gradient is None else gradient / stage.gradient_accumulation_steps()

    return replaced("deepspeed.runtime.pipe.engine:PipelineEngine", "_backward_prologue_per_tensor", scale)


@exhibit(f"{_PULL}7985", 2026, _bf16(strategy="zero1"))
def _last_micro_batch_not_reduced() -> Plant:
    """Runs of equal global batches but other micro batches drifted apart, in 0.18.6 to 0.18.10.

    The last micro batch is added to the fp32 sums after they were reduced over the ranks.
    """
    return edited(_ENGINE, "_backward_epilogue", "isinstance(self.optimizer, BF16_Optimizer)", "False")


@exhibit(f"{_PULL}7981", 2026, _sgd(strategy="zero2-offload"))
def _only_the_last_backward_pass() -> Plant:
    """With optimizer offload, a step of several backward passes was that of the last one alone.

    Gradients of earlier passes are not kept in host memory.

    DeepSpeed did so where it was told that a step has one pass; here it is told the number, and does so all the same.
    """
    condition = "if self.micro_step_id > 0 or not self.is_gradient_accumulation_boundary():"
    return edited(_ZERO_12, "copy_grads_in_partition", condition, "if False:")


@exhibit(f"{_PULL}7967", 2026, _sgd(strategy="zero2-offload"))
def _micro_batches_between_are_lost() -> Plant:
    """With optimizer offload, norms were too small and fine-tuning was worse, for 18 months.

    Of the micro batches in host memory only the first and the last are added up.
    """
    add, copy = "        accumulate_gradients()\n", "    copy_gradients_to_cpu()"
    return edited(_ZERO_12, "async_accumulate_grad_in_cpu_via_gpu", f"{add}{copy}", f"{add}    else:\n    {copy}")


@exhibit(f"{_PULL}6550", 2024, _sgd(strategy="zero2-offload"))
def _counter_too_high() -> Plant:
    """With optimizer offload, gradients of micro batches were added up wrongly.

    The counter of micro batches is one too high, so that a step begins with the sums of the step before.

    The counter is too high in every step, not in the first alone.
    """
    return lambda: mock.patch("deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID", 0)


@exhibit(f"{_PULL}7839", 2026, _bf16(strategy="zero0", accumulation=1))
def _unscaled_by_a_scale_of_fp16() -> Plant:
    """In bf16 at stage 0, gradient norms were wrong and grew from step to step, in 0.18.5.

    Gradients are divided by a loss scale that the loss never had, and stay for the next step.
    """

    def scale(strategy: Any) -> None:
        strategy._optimizer.loss_scale_config.cur_scale = 2.0**16
        strategy._optimizer.zero_grad = lambda *_, **__: None

    return built(f"{_OURS}zero:Zero", scale)


@exhibit(f"{_PULL}7724", 2025, _sgd(strategy="zero2"))
def _divided_twice() -> Plant:
    """Trainers that divide the loss themselves got gradients that were divided twice.

    A hook divides by the accumulation steps although the loss was divided already.
    """
    return edited(_ENGINE, "_backward_prologue_per_tensor", "if graph_loss_scaled:", "if False:")


@exhibit(f"{_ISSUE}7718", 2025, _sgd(strategy="zero2"), ends="issues/7718")
def _affected_release() -> Plant:
    """At stage 2, norms were a third to a half of the right ones, in 0.17.6 to 0.18.2.

    A release is installed that has the bug.

    Its cause was not published. The run is refused before its first step.
    """
    return replaced("dsgpt.config.compatibility", "version", lambda *_: "0.18.2")


@exhibit(f"{_ISSUE}8224", 2026, _bf16(strategy="zero2"))
def _half_of_a_shared_gradient() -> Plant:
    """A module that is used twice in a step trained on a part of its gradient, in 0.18.3 to 0.19.3.

    Of the two gradients of the tied embedding, that of the lookup is lost.

    It is lost before the reduction, not in it.
    """

    def detach(_module: Any, _ids: Any, embedded: Any) -> Any:
        return embedded.detach()

    return built("dsgpt.model.gpt2:GPT2", lambda model: model.wte.register_forward_hook(detach))


@exhibit(f"{_PULL}5170", 2024, _bf16(strategy="zero1"))
def _fp32_sums_not_reduced() -> Plant:
    """In bf16 each rank trained on its own gradients.

    The engine reduces the bf16 gradients, but the optimizer steps on fp32 sums of this rank's own.

    It is planted at stage 1, because stage 0 has another optimizer now.
    """
    condition = 'if hasattr(self.optimizer, "get_grads_for_reduction"):'
    return edited(_ENGINE, "buffered_allreduce_fallback", condition, "if False:")


@exhibit(f"{_PULL}5150", 2024, _sgd(strategy="zero0"))
def _clipped_the_wrong_way() -> Plant:
    """Small gradients were enlarged to the bound of clipping, and large ones were not clipped.

    The factor of clipping is the larger of 1 and bound over norm, not the smaller.
    """
    return edited("deepspeed.runtime.engine", "clip_grad_norm_", "torch.min(tmp", "torch.max(tmp")


@exhibit(f"{_PULL}3790", 2023, _bf16(strategy="zero2"))
def _not_clipped() -> Plant:
    """In bf16, gradients were not clipped, whatever the configuration said.

    Unscaling and clipping are one function, and only fp16 calls it.
    """
    return replaced(_ZERO_12, "unscale_and_clip_grads", lambda *_: None)


_BUCKET = {"zero_optimization": {"reduce_scatter": False, "reduce_bucket_size": 4 * 34 * 34}}
"""As large as a matrix of the model."""


@exhibit(f"{_PULL}4321", 2023, _sgd(strategy="zero3"), changes=_BUCKET)
def _bucket_of_a_matrix() -> Plant:
    """A model whose matrices had exactly the size of a bucket trained without reducing their gradients.

    A gradient of the bucket's size is not copied into the bucket that is reduced: < instead of <=.
    """
    return edited(_ZERO_3, "__add_grad_to_ipg_bucket", "<= self.reduce_bucket_size", "< self.reduce_bucket_size")


@exhibit(f"{_PULL}5411", 2024, _bf16(strategy="tensor2-zero0"))
def _norm_of_the_first_tensor_rank() -> Plant:
    """With tensor parallelism the norm was half of what it should be, and so clipping was wrong.

    Of the split matrices, the norm counts the part of the first tensor rank alone.

    It lives on in 0.19.8 (``FP16_UnfusedOptimizer``): the workaround of this project is taken away.
    """
    return replaced(f"{_OURS}zero:TensorParallel", "_before_step", lambda _, own: super(type(own), own)._before_step())


@exhibit(f"{_PULL}5555", 2024, _sgd(strategy="sequence2-zero0"))
def _averaged_over_sequence_ranks() -> Plant:
    """With sequence parallelism at stage 0, gradients were too small by the number of sequence ranks.

    Gradients are averaged over sequence ranks, though they have to be summed.
    """
    return edited(_ENGINE, "_reduce_non_expert_gradients", " / float(self.sequence_parallel_size)", "")


@exhibit(f"{_PULL}5664", 2024, _sgd(strategy="sequence2-zero1"))
def _heads_in_the_wrong_order() -> Plant:
    """With sequence parallelism the data of positions and heads were mixed up after attention.

    After the second all-to-all, ranks, positions and heads are laid out in the wrong order.
    """
    order, shape = "post_all2all_permute_idx = ", "\n            post_all2all_res_shape = [bs, global_seq_len //"
    right, wrong = (f"{order}{places}{shape}" for places in ("(1, 2, 0, 3, 4)", "(1, 0, 2, 3, 4)"))
    return edited("deepspeed.sequence.layer", "_generate_layout_params", right, wrong)


@exhibit(f"{_PULL}7969", 2026, _sgd(strategy="zero1"))
def _rate_of_the_first_group_alone() -> Plant:
    """All parameter groups but the first took their first step at the full rate.

    Before the schedule begins, it gives one rate for all groups, and only the first is set.

    In pull request 8171, of the same file, later groups got the base rate of the first; here groups have equal ones.
    """

    def set_rate(original: Any, optimizer: Any, lr: float) -> None:
        if lr:
            original(optimizer, lr)
        else:
            optimizer.param_groups[0]["lr"] = lr

    return replaced(f"{_OURS}engine", "set_learning_rate", set_rate)


@exhibit(f"{_PULL}7580", 2025, _sgd(strategy="ddp"))
def _one_rank_skips() -> Plant:
    """At stage 1 in fp16, a rank skipped a step that the others took.

    The rank whose gradients overflow skips the fourth step, and does not tell the others.

    fp16 is refused on a CPU, so a rank of DDP is made to skip.
    """

    def step(original: Any, strategy: Any) -> Any:
        from torch import distributed  # noqa: PLC0415 - takes seconds

        skips = distributed.get_rank() == 1 and strategy._optimizer_steps == 3
        with mock.patch.object(strategy._optimizer, "step") if skips else nullcontext():
            return original(strategy)

    return replaced("dsgpt.strategies.pytorch:TorchStrategy", "_clip_and_step", step)


@exhibit(f"{_PULL}551", 2020, _sgd(strategy="zero2"))
def _norm_summed_twice() -> Plant:
    """The norm was too large by the root of the number of ranks, and so gradients were clipped too much.

    Without a model-parallel group, the squares of the norm are summed over all ranks a second time.
    """
    condition = "if pg_utils.is_parallel(self.model_parallel_group):"
    return edited(_ZERO_12, "_model_parallel_all_reduce", condition, "if True:")


@exhibit(f"{_PULL}7371", 2025, _sgd(strategy="zero2-overlap", optimizer="adamw"))
def _buffer_of_another_bucket() -> Plant:
    """With ``overlap_comm``, the loss fell to 0 in the third step, or norms were wrong.

    The reduction reads a buffer that has the gradients of another bucket.

    On a GPU this is a race; here the reduction always reads the other of the two buffers.
    """
    buffer = "self.average_tensor(bucket.buffer[{}bucket.index].narrow("
    return edited(_ZERO_12, "reduce_ipg_grads", buffer.format(""), buffer.format("1 - "))
