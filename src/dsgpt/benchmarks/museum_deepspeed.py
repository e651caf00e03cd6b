"""Exhibits of the museum: bugs that DeepSpeed shipped.

Where its fix replaced a line, the old line is put back into the installed release (``edited``). The years are those in
which a fix was merged, or a thread opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.museum import Exhibit, edited, replaced, show

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO_12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
ZERO, TENSOR = "dsgpt.strategies.deepspeed.zero:Zero", "dsgpt.strategies.deepspeed.zero:TensorParallel"
PULLS, ISSUES = "deepspeedai/DeepSpeed/pull/", "deepspeedai/DeepSpeed/issues/"
sgd = partial(Cell, ranks=2, optimizer="sgd")
bf16 = partial(sgd, precision="bf16")


def _scale_at_every_stage(_original: Any, stage: Any, gradient: Any) -> Any:
    """What every engine without a pipeline does."""
    return gradient if gradient is None else gradient / stage.gradient_accumulation_steps()


def _scale_without_loss_scale(build: Any, strategy: Any, *given: Any, **named: Any) -> None:
    """Unscale by the scale of fp16, and keep the gradients of one step in the next."""
    build(strategy, *given, **named)
    strategy._optimizer.loss_scale_config.cur_scale = 2.0**16
    strategy._optimizer.zero_grad = lambda *_, **__: None


def _lookup_without_gradient(build: Any, model: Any, *given: Any, **named: Any) -> None:
    """A model whose tied weight gets the gradient of the head alone."""
    build(model, *given, **named)
    model.wte.register_forward_hook(lambda _module, _ids, embedded: embedded.detach())


def _not_clipped(*_: Any) -> None:
    """What the optimizer does in bf16."""


def _skip_on_one_rank(step: Any, strategy: Any) -> Any:
    """Rank 1 skips the optimizer's fourth step."""
    from torch import distributed  # noqa: PLC0415 - takes seconds

    skips = distributed.get_rank() == 1 and strategy._optimizer_steps == 3
    with mock.patch.object(strategy._optimizer, "step") if skips else nullcontext():
        return step(strategy)


def _norm_of_first_tensor_rank(_original: Any, strategy: Any) -> Any:
    """The step without this project's workaround."""
    from dsgpt.strategies.deepspeed.zero import Zero  # noqa: PLC0415 - needs DeepSpeed

    return Zero._before_step(strategy)


def _first_group_alone(set_rate: Any, optimizer: Any, lr: float) -> None:
    """Before the schedule has begun, set the rate of the first parameter group alone."""
    if lr:
        set_rate(optimizer, lr)
    else:
        optimizer.param_groups[0]["lr"] = lr


@contextmanager
def _counter_from_zero() -> Iterator[None]:
    with mock.patch("deepspeed.runtime.zero.stage_1_and_2.INITIAL_MICRO_STEP_ID", 0):
        yield


show(
    Exhibit(
        thread=f"{PULLS}8154",
        year=2026,
        effect="Earlier stages of a pipeline got gradients that were too small by the accumulation steps.",
        mechanism="Every stage divides the gradient of its output by the accumulation steps, not the last one alone.",
        plant=replaced(
            "deepspeed.runtime.pipe.engine:PipelineEngine", "_backward_prologue_per_tensor", _scale_at_every_stage
        ),
        where=sgd(strategy="pipeline2-zero1"),
    ),
    Exhibit(
        thread=f"{PULLS}7985",
        year=2026,
        effect="Runs of equal global batches but other micro batches drifted apart, in 0.18.6 to 0.18.10.",
        mechanism="The last micro batch is added to the fp32 sums after they were reduced over the ranks.",
        plant=edited(
            ENGINE,
            "_backward_epilogue",
            "bf16_optimizer = isinstance(self.optimizer, BF16_Optimizer)",
            "bf16_optimizer = False",
        ),
        where=bf16(strategy="zero1"),
    ),
    Exhibit(
        thread=f"{PULLS}7981",
        year=2026,
        effect="With optimizer offload, a step of several backward passes was that of the last one alone.",
        mechanism="Gradients of earlier passes are not kept in host memory, because a step is said to have one pass.",
        reduced="the engine is told how many passes there are, and the condition is closed by hand.",
        plant=edited(
            ZERO_12,
            "copy_grads_in_partition",
            "if self.micro_step_id > 0 or not self.is_gradient_accumulation_boundary():",
            "if False:",
        ),
        where=sgd(strategy="zero2-offload"),
    ),
    Exhibit(
        thread=f"{PULLS}7967",
        year=2026,
        effect="With optimizer offload, norms were too small and fine-tuning was worse, for 18 months.",
        mechanism="Of the micro batches in host memory only the first and the last are added up.",
        plant=edited(
            ZERO_12,
            "async_accumulate_grad_in_cpu_via_gpu",
            "        accumulate_gradients()\n    copy_gradients_to_cpu()",
            "        accumulate_gradients()\n    else:\n        copy_gradients_to_cpu()",
        ),
        where=sgd(strategy="zero2-offload"),
    ),
    Exhibit(
        thread=f"{PULLS}6550",
        year=2024,
        effect="With optimizer offload, gradients of micro batches were added up wrongly.",
        mechanism="The counter of micro batches is one too high, so a step begins with the sums of the step before.",
        reduced="the counter is too high in every step, not in the first alone.",
        plant=_counter_from_zero,
        where=sgd(strategy="zero2-offload"),
    ),
    Exhibit(
        thread=f"{PULLS}7839",
        year=2026,
        effect="In bf16 at stage 0, gradient norms grew from step to step and nothing was learned, in 0.18.5.",
        mechanism="Gradients are divided by a loss scale that the loss never had, and stay for the next step.",
        plant=replaced(ZERO, "__init__", _scale_without_loss_scale),
        where=bf16(strategy="zero0", accumulation=1),
    ),
    Exhibit(
        thread=f"{PULLS}7724",
        year=2025,
        effect="Trainers that divide the loss themselves got gradients that were divided twice.",
        mechanism="A hook divides by the accumulation steps although the loss was divided already.",
        plant=edited(ENGINE, "_backward_prologue_per_tensor", "if graph_loss_scaled:", "if False:"),
        where=sgd(strategy="zero2"),
    ),
    Exhibit(
        thread=f"{ISSUES}7718",
        year=2025,
        effect="At stage 2 norms were a third to a half of the right ones, in 0.17.6 to 0.18.2.",
        mechanism="An affected release is installed.",
        reduced="its cause was not published.",
        plant=replaced("dsgpt.config.compatibility", "version", lambda *_: "0.18.2"),
        where=sgd(strategy="zero2"),
        ends="issues/7718",
    ),
    Exhibit(
        thread=f"{ISSUES}8224",
        year=2026,
        effect="A module that is used twice in a step trained on a part of its gradient, in 0.18.3 to 0.19.3.",
        mechanism="Of the tied embedding's two gradients in a backward pass, one is lost.",
        reduced="the gradient of the lookup is dropped before the reduction, not in it.",
        plant=replaced("dsgpt.model.gpt2:GPT2", "__init__", _lookup_without_gradient),
        where=bf16(strategy="zero2"),
    ),
    Exhibit(
        thread=f"{PULLS}5170",
        year=2024,
        effect="In bf16 each rank trained on its own gradients.",
        mechanism="The engine reduces the bf16 gradients, and the optimizer steps on its fp32 sums of this rank's own.",
        reduced="planted at stage 1, because stage 0 has another optimizer now.",
        plant=edited(
            ENGINE, "buffered_allreduce_fallback", 'if hasattr(self.optimizer, "get_grads_for_reduction"):', "if False:"
        ),
        where=bf16(strategy="zero1"),
    ),
    Exhibit(
        thread=f"{PULLS}5150",
        year=2024,
        effect="Small gradients were enlarged to the bound of clipping, and large ones were not clipped.",
        mechanism="The factor of clipping is the larger of 1 and bound over norm, not the smaller.",
        plant=edited(
            "deepspeed.runtime.engine",
            "clip_grad_norm_",
            "clip_coef = torch.min(tmp_tensor, clip_coef)",
            "clip_coef = torch.max(tmp_tensor, clip_coef)",
        ),
        where=sgd(strategy="zero0"),
    ),
    Exhibit(
        thread=f"{PULLS}3790",
        year=2023,
        effect="In bf16, gradients were not clipped, whatever the configuration said.",
        mechanism="Scaling and clipping are one function, and only fp16 calls it.",
        plant=replaced(ZERO_12, "unscale_and_clip_grads", _not_clipped),
        where=bf16(strategy="zero2"),
    ),
    Exhibit(
        thread=f"{PULLS}4321",
        year=2023,
        effect="A model whose matrices had exactly the size of a bucket trained without reducing their gradients.",
        mechanism="A gradient of the bucket's size is not copied into the bucket that is reduced: < instead of <=.",
        plant=edited(
            ZERO_3,
            "__add_grad_to_ipg_bucket",
            "bucket.elements + param.grad.numel() <= self.reduce_bucket_size",
            "bucket.elements + param.grad.numel() < self.reduce_bucket_size",
        ),
        changes={"zero_optimization": {"reduce_scatter": False, "reduce_bucket_size": 4 * 34 * 34}},
        where=sgd(strategy="zero3"),
    ),
    Exhibit(
        thread=f"{PULLS}5411",
        year=2024,
        effect="With tensor parallelism the norm was half of what it should be, and so clipping was wrong.",
        mechanism="Of the split matrices, the norm counts the part of the first tensor rank alone.",
        reduced="it lives on in 0.19.8 (FP16_UnfusedOptimizer): this project's workaround is taken away.",
        plant=replaced(TENSOR, "_before_step", _norm_of_first_tensor_rank),
        where=bf16(strategy="tensor2-zero0"),
    ),
    Exhibit(
        thread=f"{PULLS}5555",
        year=2024,
        effect="With sequence parallelism at stage 0, gradients were too small by the number of sequence ranks.",
        mechanism="Gradients are averaged over sequence ranks, which have to be summed.",
        plant=edited(
            ENGINE,
            "_reduce_non_expert_gradients",
            "dist.get_world_size(dp_group) / float(self.sequence_parallel_size)",
            "dist.get_world_size(dp_group)",
        ),
        where=sgd(strategy="sequence2-zero0"),
    ),
    Exhibit(
        thread=f"{PULLS}5664",
        year=2024,
        effect="Queries, keys and values of different positions and heads were mixed up, and the loss still fell.",
        mechanism="After attention, ranks and heads are laid out in the wrong order.",
        plant=edited(
            "deepspeed.sequence.layer",
            "_generate_layout_params",
            "post_all2all_permute_idx = (1, 2, 0, 3, 4)\n            post_all2all_res_shape = [bs,",
            "post_all2all_permute_idx = (1, 0, 2, 3, 4)\n            post_all2all_res_shape = [bs,",
        ),
        where=sgd(strategy="sequence2-zero1"),
    ),
    Exhibit(
        thread=f"{PULLS}7969",
        year=2026,
        effect="All parameter groups but the first took their first step at the full rate, or later ones at another's.",
        mechanism="Before the schedule begins, it gives one rate for all groups, and only the first is set.",
        reduced="8171, in the same file, gave later groups the base rate of the first.",
        plant=replaced("dsgpt.strategies.deepspeed.engine", "set_learning_rate", _first_group_alone),
        where=sgd(strategy="zero1"),
    ),
    Exhibit(
        thread=f"{PULLS}7580",
        year=2025,
        effect="At stage 1 in fp16, ranks skipped a step that others took, and their weights went apart.",
        mechanism="The rank whose gradients overflow skips the step, and does not tell the others.",
        reduced="a rank under DDP is made to skip; fp16 is refused on a CPU.",
        plant=replaced("dsgpt.strategies.pytorch:TorchStrategy", "_clip_and_step", _skip_on_one_rank),
        where=sgd(strategy="ddp"),
    ),
    Exhibit(
        thread=f"{PULLS}551",
        year=2020,
        effect="The norm was too large by the root of the number of ranks, and so gradients were clipped too much.",
        mechanism="Without a model-parallel group, the squares of the norm are summed over all ranks a second time.",
        plant=edited(
            ZERO_12,
            "_model_parallel_all_reduce",
            "if pg_utils.is_parallel(self.model_parallel_group):",
            "if True:",
        ),
        where=sgd(strategy="zero2"),
    ),
    Exhibit(
        thread=f"{PULLS}7371",
        year=2025,
        effect="With overlap_comm, the loss fell to 0 in the third step, or norms were wrong.",
        mechanism="The reduction reads a buffer that has the gradients of another bucket by then.",
        reduced="on a GPU this is a race; here the reduction always reads the other of the two buffers.",
        plant=edited(
            ZERO_12,
            "reduce_ipg_grads",
            "self.average_tensor(bucket.buffer[bucket.index].narrow(",
            "self.average_tensor(bucket.buffer[1 - bucket.index].narrow(",
        ),
        where=sgd(strategy="zero2-overlap", optimizer="adamw"),
    ),
)
