"""Pipeline parallelism, with ZeRO stage 0 or 1 and tensor parallelism inside blocks.

GPT-2 as the sequence of layers that DeepSpeed's ``PipelineModule`` assigns to stages. A rank builds the layers of its
own stage and no others. This module imports DeepSpeed: import it after ``setup.import_deepspeed`` has chosen the
device.

Pipeline parallelism x ZeRO stage 0 or 1 over data ranks x tensor parallelism inside blocks. Written for DeepSpeed
0.19.8. DeepSpeed assigns the layers to stages, runs the schedule, moves activations and gradients between stages and
reduces gradients. This module replaces the steps of the schedule that DeepSpeed gets wrong.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.machine.device import named_range, sum_over_ranks
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import Block, parameter_shapes
from dsgpt.model.linear_cross_entropy import VocabularyPart, cross_entropy_of_part, logits_of
from dsgpt.strategies.base import StateTensors, Watch, compile_blocks, initial_values, square_sum, to_device
from dsgpt.strategies.deepspeed.engine import DeepSpeedStrategy
from dsgpt.strategies.deepspeed.setup import engine_config
from dsgpt.strategies.deepspeed.state import is_split, take_part, tensors_of
from dsgpt.strategies.deepspeed.tensor_layers import VocabularyEmbedding, split_block, vocabulary_part

_TIED = "wte"
"""Key of the embedding that the first and the last layer share, and its canonical name."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps logits (B, T, V) and targets (B, T) to a 0-dim loss."""


class PositionEmbedding(nn.Embedding):
    """Adds the learned positions to the embedded tokens."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        positions = torch.arange(x.shape[1], device=x.device)  # (T,)
        embedded: Tensor = self.dropout(x + super().forward(positions))
        return embedded


class StageBlock(Block):
    """A transformer block of one stage, split over tensor peers if there are any.

    Args:
        config: the model's shape.
        recompute: whether its activations are computed again in the backward pass instead of kept.
        tensor_group: returns the tensor peers, or None if there are none; called when the block is built.
    """

    def __init__(
        self, config: GPT2Config, *, recompute: bool, tensor_group: Callable[[], dist.ProcessGroup | None]
    ) -> None:
        super().__init__(config)
        self._recompute = recompute
        self.compute = super().forward
        """The block without recomputation, which a compiler would not look into."""
        if (group := tensor_group()) is not None:
            split_block(self, group)

    def forward(self, x: Tensor, documents: None = None) -> Tensor:  # type: ignore[override]  # stages see no ids
        """(B, T, C) to (B, T, C)."""
        assert documents is None
        if self._recompute and self.training:
            recomputed: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return recomputed
        return self.compute(x)


def _logits(vocab_size: int, padded: bool, stage: "StageModule", embedding: nn.Embedding, x: Tensor) -> Tensor:
    """The language-modelling head, whose weight is the embedding's: (B, T, C) to (B, T, V), as ``logits_of``.

    All logits of this rank's part exist here: DeepSpeed calls the loss outside of its module, and looks at gradients of
    weights that are used there before they are complete, so ``linear_cross_entropy`` cannot be used.
    """
    weight = embedding.weight if stage.use is None else stage.use(embedding.weight)
    if (vocabulary := stage.vocabulary) is not None:
        x, vocab_size = vocabulary.share(x), vocabulary.own(vocab_size)
    return logits_of(x, weight, vocab_size=vocab_size, padded=padded)


class StageModule(PipelineModule):  # type: ignore[misc]  # DeepSpeed ships no types
    """This rank's stage of the model, at its initial values.

    Args:
        config: the run.
        loss: of a micro batch, called on the last stage.
        give: gets what this rank gives to tensor peers for embedding and loss.
    """

    vocabulary: VocabularyPart | None = None
    """This rank's rows of the embedding; None if it has all."""
    use: Callable[[Tensor], Tensor] | None = None
    """Makes of the embedding what the head multiplies by; None for itself."""

    def __init__(self, config: RunConfig, loss: Loss, give: Callable[[Tensor], None]) -> None:
        model, sizes, data = config.model, config.topology.sizes, config.topology.data_parallel_size
        head = partial(_logits, model.vocab_size, config.options.pad_logits)
        embedding = partial(TiedLayerSpec, _TIED, nn.Embedding, model.padded_vocab_size, model.n_embd)
        if sizes.tensor > 1:
            embedding = partial(TiedLayerSpec, _TIED, VocabularyEmbedding, model, group=self._tensor_group, give=give)
        recompute, group_of = config.activation_checkpointing, self._tensor_group
        layers = [
            embedding(),
            LayerSpec(PositionEmbedding, model),
            *(LayerSpec(StageBlock, model, recompute=recompute, tensor_group=group_of) for _ in range(model.n_layer)),
            LayerSpec(nn.LayerNorm, model.n_embd),
            embedding(forward_fn=partial(head, self)),
        ]
        # Lays the ranks out as ``Topology`` says: by stage, then data, then tensor.
        ranks = PipeModelDataParallelTopology(num_pp=sizes.pipeline, num_mp=sizes.tensor, num_dp=data)
        super().__init__(layers=layers, topology=ranks, loss_fn=loss, partition_method=config.recipe.pipeline.partition)
        if (group := self._tensor_group()) is not None:
            self.vocabulary = vocabulary_part(model, group, give)
        self._names = [_TIED, "wpe", *(f"blocks.{layer}" for layer in range(model.n_layer)), "ln_f", _TIED]
        shapes, values = parameter_shapes(model), initial_values(config)
        rank, size = self._grid.get_slice_parallel_rank(), self._grid.get_slice_parallel_world_size()
        with torch.no_grad():
            for name, parameter in self.canonical_parameters().items():
                parameter.copy_(take_part(name, values(name, shapes[name]), rank=rank, size=size))

    def _tensor_group(self) -> dist.ProcessGroup | None:
        return self._grid.get_slice_parallel_group() if self._grid.get_slice_parallel_world_size() > 1 else None

    def _count_layer_params(self) -> list[int]:
        """Number of parameters of every layer, for the partition. DeepSpeed would allocate each layer to count them."""
        with torch.device("meta"):
            counts: list[int] = super()._count_layer_params()
        return counts

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """Broadcast the tied weights like DeepSpeed, but without autograd, which would warn in every backward pass."""
        super()._synchronize_tied_weights()

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, or its parts of them, under their canonical names."""
        parameters = {}
        for name, parameter in self.named_parameters():
            # DeepSpeed's names begin with ``tied_modules.KEY`` or with the number of the layer in the whole model.
            first, rest = name.split(".", 1)
            parameters[rest if first == "tied_modules" else f"{self._names[int(first)]}.{rest}"] = parameter
        return parameters

    def owner(self, name: str) -> int:
        """The first stage that holds the parameter of this canonical name."""
        layer = next(i for i, prefix in enumerate(self._names) if name.startswith(f"{prefix}."))
        stage: int = self.stage_owner(layer)
        return stage


class PipelineParallel(DeepSpeedStrategy):
    """One DeepSpeed pipeline engine per rank, which holds one stage, or its part of one."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        super().__init__(config, device)

        self._clipping = config.recipe.gradient_clipping
        self._own_norm: Tensor | None = None
        self._watch: Watch | None = None
        with contextlib.redirect_stdout(io.StringIO()):  # memory in use and layouts, printed without a logger
            self._module = StageModule(config, self._loss, self._exchanges.give)
            self._parameters = self._module.canonical_parameters()
            self._start(self._module, config, ds_config=engine_config(config))
        if self._exact is not None:
            self._module.use = self._exact.shared_use()
        if config.options.compile:
            compile_blocks(self._module, "compute")
        self._mend_schedule()
        # What this stage receives from the one before it, and what it gives to the one behind it.
        if not self._engine.is_first_stage():
            self._module.register_forward_pre_hook(lambda _, received: self._exchanges.receive(*received))
        if not self._engine.is_last_stage():  # which notes its loss in ``_execute``
            self._module.register_forward_hook(lambda _module, _received, given: self._exchanges.give(given))
        if config.topology.sizes.tensor > 1:
            self._watch_row_parallel(self._module)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of a micro batch, fp32: the mean in training; the sum in validation, where some targets do not count."""
        reduction = "mean" if self._module.training else "sum"
        if (vocabulary := self._module.vocabulary) is not None:
            loss = cross_entropy_of_part(
                logits.flatten(0, 1), targets.flatten(), reduction=reduction, vocabulary=vocabulary
            )
        else:
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)
        if self._watch is not None:
            self._watch.loss(loss, targets, reduction, training=self._module.training)
        return loss if self._exact is None or reduction == "sum" else self._exact.loss(loss)

    def watch(self, watch: Watch, undo: contextlib.ExitStack) -> None:
        """See ``Strategy``."""
        super().watch(watch, undo)
        self._watch = watch
        undo.callback(setattr, self, "_watch", None)

    def _mend_schedule(self) -> None:
        """Replace the steps of DeepSpeed's schedule that compute something wrong."""
        from deepspeed.runtime.pipe import schedule  # noqa: PLC0415

        instructions: dict[type, Callable[..., None]] = {**self._engine._INSTRUCTION_MAP}
        if self._stage == 0:
            instructions[schedule.OptimizerStep] = self._clip_and_step
        if self._scale.enabled:
            instructions[schedule.ReduceTiedGrads] = self._sum_tied_gradients
        if self._stage == 0 or self._engine.using_bf16_optimizer:
            # A sum over data ranks is rounded by places in a bucket, which differ from stage to stage. After it, the
            # sum over stages makes the tied embedding's gradients equal; before it, the copies would drift apart.
            tied, own = schedule.ReduceTiedGrads, schedule.ReduceGrads
            instructions[tied], instructions[own] = instructions[own], instructions[tied]
        steps = schedule.ForwardPass, schedule.BackwardPass, schedule.OptimizerStep
        for name, kind in zip(("forward", "backward", "optimizer"), steps, strict=True):
            instructions[kind] = _in_range(name, instructions[kind])
        self._engine._INSTRUCTION_MAP = instructions

    def _clip_and_step(self, engine: Any, **arguments: dict[str, Any] | None) -> None:
        """Clip by the norm of all stages, and let DeepSpeed step; its own clipping is switched off.

        ``clip_fp32_gradients`` treats the stages as tensor peers that hold the same parameters. So it clips by the norm
        of the first stage alone. It does not return a norm.
        """
        self._own_norm = self._global_norm()
        if self._clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._clipping, self._own_norm)
        engine._exec_optimizer_step(**arguments)

    def _global_norm(self) -> Tensor:
        """The gradient norm of the whole model: every parameter counts on one stage and one tensor peer.

        ``ds_pipe_replicated`` marks the tied embedding on all stages but the first that has it.
        """
        own = [
            parameter.grad
            for name, parameter in self._parameters.items()
            if (is_split(name) or self._topology.tensor_rank == 0) and not parameter.ds_pipe_replicated  # type: ignore[attr-defined]  # DeepSpeed's
        ]
        if self._exact is not None:
            parts = [gradient for gradient in own if gradient is not None]
            return self._exact.norm(parts, group=self._engine.grid.get_model_parallel_group(), split=True)
        squares = square_sum(gradient for gradient in own if gradient is not None).to(self._device)
        dist.all_reduce(squares, group=self._engine.grid.get_model_parallel_group())
        return squares.sqrt().float()

    def _sum_tied_gradients(self, _engine: Any) -> None:
        """Sum the fp32 gradients of the tied embedding over its stages, in fp16.

        DeepSpeed's ``_exec_reduce_tied_grads`` looks for them in ``grad``, but stage 1 has moved them to
        ``grad_accum``. So each stage would step on its own part, and the copies would drift apart.
        """
        for weight, group in self._module.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad_accum, group=group)

    def _execute(self, batches: Iterator[Batch], *, own_factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """See ``DeepSpeedStrategy``; ``own_factor`` is 1, because fp16 is refused at stage 0."""
        loss = self._engine.train_batch(iter(self._draw(batches)))
        self._engine.timers("train_batch").reset()  # else it keeps two events per step for a report that is off
        if self._engine.is_last_stage():
            self._exchanges.give(self._engine.dp_group_loss)
        return loss, self._engine.dp_group_loss, self._gradient_norm(self._own_norm) / own_factor

    def _draw(self, batches: Iterator[Batch]) -> list[Batch]:
        """The micro batches of one step. Stages between the first and the last draw them too, but use none."""
        return [to_device(next(batches), self._device) for _ in range(self._accumulation)]

    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        drawn = self._draw(batches)
        losses = self._engine.eval_batch(iter(drawn), reduce_output=None, bcast_loss=False)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # losses, targets
        if self._engine.is_last_stage() and self._topology.tensor_rank == 0:
            sums[0] = torch.stack(losses).double().sum()
            sums[1] = sum((batch.targets != IGNORED_TARGET).sum() for batch in drawn)
        loss_sum, tokens = sum_over_ranks(sums)
        return loss_sum, tokens

    def _owns(self, name: str) -> bool:
        return self._module.owner(name) == self._topology.stage

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``; the engine keeps what it receives, and the last stage's logits until they are replaced."""
        state = super().state_tensors()
        return state._replace(
            buffers=[*state.buffers, *tensors_of(self._engine, "pipe_buffers", "pipe_recv_buf", "grad_layer")]
        )


def _in_range(name: str, instruction: Callable[..., None]) -> Callable[..., None]:
    """A step of the schedule that profilers show under ``name``."""

    def call(engine: Any, **arguments: Any) -> None:
        with named_range(name):
            instruction(engine, **arguments)

    return call
