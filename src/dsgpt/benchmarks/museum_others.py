"""Exhibits of the museum from Megatron-LM, torchtitan, PyTorch, Hugging Face and smaller trainers."""

from collections.abc import Callable
from typing import Any

from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.museum import EXHIBITS, Exhibit, Plant, built, edited, exhibit, replaced
from dsgpt.benchmarks.resume import Pair

_BASE, _TORCH, _DEEPSPEED = (f"dsgpt.strategies.{name}" for name in ("base", "pytorch", "deepspeed"))
_STEP, _DDP, _FSDP = (f"{_TORCH}:{name}" for name in ("TorchStrategy", "Ddp", "Fsdp"))
_ZERO, _SEQUENCE, _TENSOR = (f"{_DEEPSPEED}.zero:{name}" for name in ("Zero", "SequenceParallel", "TensorParallel"))
_STAGES, _PIPELINE = (f"{_DEEPSPEED}.pipeline:{name}" for name in ("StageModule", "PipelineParallel"))

_ALONE, _DATA = Cell(strategy="baseline", ranks=1), Cell(strategy="ddp", ranks=2)
_SHARDS = Cell(strategy="fsdp", ranks=2, optimizer="sgd")
_SEQUENCES, _TENSORS = Cell(strategy="sequence2-zero1", ranks=2), Cell(strategy="tensor2-zero1", ranks=2)
_STAGED, _STAGED_DATA = (Cell(strategy="pipeline2-zero1", ranks=ranks) for ranks in (2, 4))
_RESUMED = Pair(source=_ALONE, target=Cell(strategy="ddp", ranks=2, accumulation=1))
"""Exhibits share trainings: without a bug, each runs once."""


def _faster(steps: Callable[[int], int]) -> Plant:
    """Plants a schedule that is at ``steps(n)`` in step n."""

    def build(original: Callable[..., Callable[[int], float]], *given: Any, **named: Any) -> Callable[[int], float]:
        schedule = original(*given, **named)
        return lambda step: schedule(steps(step))

    return replaced(_BASE, "build_schedule", build)


@exhibit("NVIDIA/Megatron-LM/issues/844", 2024, _STAGED_DATA)
def _tied_gradients_summed_last() -> Plant:
    """With the distributed optimizer, both copies of GPT-2's embedding trained on partial gradients.

    The tied gradients of two stages are summed after data ranks have reduced and split theirs.
    """
    tied, others = "schedule.ReduceTiedGrads", "schedule.ReduceGrads"
    swapped = f"instructions | {{{tied}: instructions[{others}], {others}: instructions[{tied}]}}"
    return edited(_PIPELINE, "_mend_schedule", "_MAP = instructions", f"_MAP = {swapped}")


@exhibit("NVIDIA/Megatron-LM/issues/656", 2024, _STAGED)
def _tied_gradients_summed_once() -> Plant:
    """Embedding and head of a model with tied weights became different weights during training.

    The tied gradients are summed in the first step only.

    What untied them is not in the part of the thread that could be read.
    """

    def once(original: Callable[..., Any], module: Any) -> Any:
        module.tied_sums = getattr(module, "tied_sums", 0) + 1
        return original(module) if module.tied_sums == 1 else []

    return replaced(_STAGES, "get_tied_weights_and_groups", once)


@exhibit("NVIDIA/Megatron-LM/issues/1446", 2025, Cell(strategy="sequence2-zero0", ranks=2))
def _own_final_layer_norm() -> Plant:
    """Under tensor and sequence parallelism each rank trained a final LayerNorm of its own.

    The gradients of the last LayerNorm are not summed over the ranks that share a sequence.
    """

    def leave_out(strategy: Any) -> None:
        reduce, own = strategy._engine.allreduce_gradients, strategy._parameters["ln_f.weight"]

        def reduce_others(*given: Any, **named: Any) -> None:
            before = own.grad.clone()
            reduce(*given, **named)
            own.grad.copy_(before)

        strategy._engine.allreduce_gradients = reduce_others

    return built(_SEQUENCE, leave_out)


@exhibit("NVIDIA/Megatron-LM/issues/906", 2024, _SEQUENCES)
def _loss_times_sequence_ranks() -> Plant:
    """With context parallelism gradients were larger by the number of ranks that share a sequence (also 673).

    The loss is multiplied by those ranks, though gradients are averaged over data ranks alone.
    """
    return built(_SEQUENCE, lambda strategy: setattr(strategy, "_loss_factor", strategy._slices))


@exhibit("NVIDIA/Megatron-LM/issues/7452#8", 2026, _TENSORS)
def _split_weight_left_out_of_the_norm() -> Plant:
    """Clipping used a norm that lacked the attention sinks of all tensor ranks but one.

    A weight that tensor ranks split counts in the gradient norm on the first of them only.

    The embedding is such a weight here.
    """
    return edited(_TENSOR, "_spread", "mark_split(weight, split=True)", "mark_split(weight, split=False)")


@exhibit("NVIDIA/Megatron-LM/pull/5338", 2026, _TENSORS)
def _sum_of_a_copy() -> Plant:
    """Tensor ranks went on with their own parts of activations, as if these had been summed.

    The sum is taken of a contiguous copy, and the input that is not contiguous is returned.
    """
    right = "summed = x.contiguous()\n    dist.all_reduce(summed, group=group)\n    return summed"
    wrong = "x = x.mT.contiguous().mT\n    dist.all_reduce(x.contiguous(), group=group)\n    return x"
    return edited(f"{_DEEPSPEED}.tensor_layers:ContiguousRowParallel", "forward", right, wrong)


@exhibit("pytorch/torchtitan/pull/2206", 2026, _DATA)
def _mean_of_means() -> Plant:
    """Tokens of ranks and micro batches with few targets weighed more than others.

    The loss is a mean of the ranks' means, though they have unequal numbers of targets.

    In validation: in training every target counts here, so all ranks have as many.
    """
    mean = "self._sum_over_ranks(sums[0] / sums[1].clamp(min=1)) / self._ranks"
    wrong = f"tokens = self._sum_over_ranks(sums[1].clone())\n    loss_sum = {mean} * tokens\n"
    return edited(_STEP, "eval_step", "loss_sum, tokens = self._sum_over_ranks(sums)\n", wrong)


@exhibit("pytorch/torchtitan/pull/4167", 2026, _DATA)
def _mean_of_batches() -> Plant:
    """The validation loss gave too much weight to batches with few targets.

    Validation averages the means of batches, the last of which is not full.
    """
    right, mean = "loss_sum, tokens = by_source.sum(dim=0).tolist()", "sum(float(one[0] / one[1]) for one in sums)"
    wrong = f"tokens = by_source.sum(dim=0)[1].item()\n    loss_sum = tokens * {mean} / len(sums)"
    return edited("dsgpt.benchmarks.parity_rank", "validation_loss", right, wrong)


@exhibit("pytorch/torchtitan/pull/3412", 2026, _TENSORS)
def _partial_gradient_of_a_chunked_loss() -> Plant:
    """With a chunked loss under tensor parallelism the loss fell far more slowly than on one GPU.

    The gradient of the hidden states is each tensor rank's own part, and is taken for the sum.
    """
    return edited(f"{_DEEPSPEED}.zero", "vocabulary_part", "size), share, gather", "size), lambda x: x, gather")


@exhibit("pytorch/torchtitan/pull/3257", 2026, _SEQUENCES)
def _targets_counted_after_the_split() -> Plant:
    """The validation loss was wrong under context parallelism.

    Targets are counted after the sequence was split, losses before.
    """
    counted = "(targets != IGNORED_TARGET).sum()"
    return edited(_SEQUENCE, "_micro_batch_sums", counted, f"{counted} / self._slices")


@exhibit("pytorch/torchtitan/pull/3206", 2026, _SEQUENCES)
def _gathered_along_the_heads() -> Plant:
    """Under context parallelism attention did not see the other ranks' positions.

    Keys and values are gathered along the heads, not along the positions. The shapes fit.
    """
    right, wrong = (f"scatter_idx={one}, gather_idx={other}" for one, other in ((2, 1), (1, 2)))
    return edited(f"{_DEEPSPEED}.zero", "ulysses_attention", right, wrong)


@exhibit("pytorch/torchtitan/pull/3174", 2026, _DATA)
def _tied_gradient_twice() -> Plant:
    """Tied embeddings trained on twice their gradient.

    The gradient of a tied weight is added once for each of its two names.
    """
    norm = "norm = self._global_norm(gradients)"
    return edited(_STEP, "_clip_and_step", norm, f'self._weights.parameters["wte.weight"].grad.mul_(2)\n    {norm}')


@exhibit("pytorch/torchtitan/pull/4245", 2026, _TENSORS)
def _bias_of_every_rank() -> Plant:
    """A bias acted as often as there were tensor ranks.

    Every tensor rank adds the whole bias before the sum over ranks.
    """
    layer = "deepspeed.module_inject.layers:LinearAllreduce"
    return edited(layer, "forward", "output, self.bias)", "output, self.bias + self.bias.detach())")


@exhibit("pytorch/torchtitan/pull/4194", 2026, _STAGED)
def _divided_for_the_report() -> Plant:
    """Gradients of pipelines were too large by the number of targets. The reported loss was right.

    The loss is divided for the report, after the schedule's backward passes.
    """
    trains, loss = "loss = self._engine.train_batch(iter(self._draw(batches)))", "self._module.loss_fn"
    before = f"mean = {loss}\n    {loss} = lambda *given: 8 * mean(*given)"
    return edited(_PIPELINE, "_execute", trains, f"{before}\n    {trains} / 8\n    {loss} = mean")


@exhibit("pytorch/torchtitan/issues/2252", 2026, _STAGED)
def _copies_made_apart() -> Plant:
    """A model with tied weights trained an embedding and a head of its own.

    Each copy of the tied weight gets initial values of its own when it is allocated.
    """
    return built(
        _STAGES, lambda module: module.stage_id and module.canonical_parameters()["wte.weight"].data.normal_(std=0.02)
    )


@exhibit("pytorch/torchtitan/pull/3908", 2026, _RESUMED)
def _data_from_the_beginning() -> Plant:
    """Resumed runs trained on the first data again, or on those of another epoch (also 3023 and 3008).

    The data begin at the first window again, whatever the checkpoint's step.

    Without the order that 3023 repeated in every epoch, which is longer than a training of this suite.
    """
    right, wrong = "range(first_step, config.total_steps)", "range(config.total_steps - first_step)"
    return edited("dsgpt.training.trainer", "training_batches", right, wrong)


@exhibit("pytorch/pytorch/issues/170862", 2025, _SHARDS)
def _norm_of_own_shards() -> Plant:
    """With FSDP2 each rank clipped by the norm of its own shards, and reported it.

    The squares of the shards are not summed over ranks.
    """
    whole = "self._sum_over_ranks(base.square_sum(gradients).to(self._device)).sqrt().float()"
    return edited(_FSDP, "_global_norm", whole, "base.global_norm(gradients)")


@exhibit("huggingface/accelerate/pull/3465", 2025, _SHARDS)
def _clipped_by_own_shards() -> Plant:
    """Gradient clipping under FSDP2 called the function of another version of FSDP.

    The reported norm is that of all ranks, but each rank clips by the norm of its shards.

    The pull request has only the branch that chose the wrong function.
    """
    given = "(parameters, self._clipping"
    return edited(_STEP, "_clip_and_step", f"clip_grads_with_norm_{given}, norm)", f"clip_grad_norm_{given})")


@exhibit("huggingface/accelerate/issues/963", 2023, _DATA)
def _schedule_per_micro_batch() -> Plant:
    """With accumulation the learning rate fell as many times too fast as there were micro batches.

    The schedule advances in every micro batch, not in every step.
    """
    return _faster(lambda step: 3 * step - 2)


@exhibit("huggingface/accelerate/pull/2694", 2024, _DATA)
def _own_shuffles() -> Plant:
    """Ranks read some samples several times and others never.

    Each rank shuffles with a random stream of its own, and then takes its share.
    """
    wrong = "share.of(np.random.default_rng(share.data_rank).permutation(batch))"
    return edited("dsgpt.training.trainer", "training_windows", "share.of(batch)", wrong)


@exhibit("huggingface/accelerate/issues/3877", 2025, Cell(strategy="zero2", ranks=2))
def _last_micro_batch_alone() -> Plant:
    """With ZeRO-2 the training loss was the higher the more micro batches a step had.

    The gradients of each micro batch replace those of the ones before it, as if each ended a step.

    The mechanism is that of allenai/open-instruct 1498, which has the same symptom; the thread names none.
    """
    engine = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
    return edited(engine, "independent_gradient_partition_epilogue", "add_(new_avg_grad)", "copy_(new_avg_grad)")


@exhibit("verl-project/verl/issues/7493", 2026, _DATA)
def _groups_of_one_rank() -> Plant:
    """With fsdp_size=1 on several GPUs every rank trained a model of its own.

    Gradients are reduced in groups of one rank.

    Under DDP; verl used FSDP.
    """
    alone = "alone: Future[Tensor] = Future()\n    alone.set_result(bucket.buffer())\n    return alone"
    return edited(_DDP, "_average", "return allreduce_hook(self._ddp.process_group, bucket)", alone)


@exhibit("karpathy/build-nanogpt/pull/30", 2024, _DATA)
def _synchronised_too_late() -> Plant:
    """With accumulation the loss of GPT-2 fell much more slowly: ranks did not exchange gradients.

    DDP is told to reduce before the last backward pass, but only after its forward pass.
    """

    def forward_alone(strategy: Any) -> None:
        def loss(*batch: Any) -> Any:
            with strategy._ddp.no_sync():
                return strategy._ddp(*batch)

        strategy._training_loss = loss

    return built(_DDP, forward_alone)


@exhibit("karpathy/nanoGPT/commit/553f949f46e04a946e5ff2da6e4bb70a221ea1fc", 2023, _ALONE)
def _summed_not_averaged() -> Plant:
    """Clipping acted on gradients that were too large by the number of micro batches.

    Gradients of the micro batches are added up, not averaged. The reported loss is the mean.
    """
    return edited(_STEP, "train_step", "loss * self._scale.factor", "loss * self._accumulation * self._scale.factor")


@exhibit("huggingface/transformers/pull/35438", 2024, Cell(strategy="zero2-offload", ranks=2))
def _divided_by_own_targets() -> Plant:
    """With accumulation loss and gradients had the wrong scale (also 34191 and 34242).

    Each micro batch is divided by its own number of targets, not by that of the step.

    Under offload, and the reported loss is right.
    """
    return built(_ZERO, lambda strategy: setattr(strategy, "_loss_factor", strategy._accumulation))


@exhibit("huggingface/transformers/pull/24088", 2023, _DATA)
def _schedule_per_rank() -> Plant:
    """The learning rate fell as many times too fast as there were processes.

    The schedule advances once per rank in every step.
    """
    return _faster(lambda step: 2 * step - 1)


@exhibit("mehta-lab/VisCy/pull/408", 2026, _DATA)
def _share_of_the_first_rank() -> Plant:
    """All GPUs trained on the same batches, and every epoch on the same part of the data.

    The sampler is not told the rank: each takes the first one's share.

    The epoch, which it did not count either, is longer than a training of this suite.
    """
    return edited("dsgpt.data.order:RankShare", "of", "shares[self.data_rank]", "shares[0]")


@exhibit("TensorAuto/OpenTau/issues/181", 2026, Cell(strategy="ddp", ranks=2, precision="bf16"))
def _no_master_weights() -> Plant:
    """Trainings in bf16 under DDP learned less than the same under DeepSpeed.

    There are no fp32 weights: each update is rounded to bf16.
    """
    copy, low, masters = "torch._foreach_copy_(list({}.values()), list({}.values()))", "self._low", "self.parameters"
    copied = copy.format(low, masters)
    return edited(f"{_TORCH}:MasterWeights", "publish", copied, f"{copied}\n        {copy.format(masters, low)}")


_UNREAD = "The thread was not found in the archive that was searched."
_RING = "Under context parallelism, gradients of attention's queries, keys and values were off by up to 120%."
_PART = "the parts of the thread that could be read."
for _thread, _year, _effect, _why in (
    ("NVIDIA/Megatron-LM/issues/1464", 2025, _RING, f"It was in Transformer Engine, and its cause is not in {_PART}"),
    ("NVIDIA/Megatron-LM/issues/7452#2", 2026, "One of a list of silent bugs.", f"It is not in {_PART}"),
    ("pytorch/pytorch/issues/187732", 2026, _UNREAD, "So its mechanism is unknown here."),
    ("huggingface/transformers/issues/25849", 2023, _UNREAD, "So its mechanism is unknown here."),
):
    _one = Exhibit(thread=_thread, year=_year, effect=_effect, mechanism=_effect, absent=_why)
    EXHIBITS[_one.name] = _one
