"""The contract between the training loop and the strategies, their choice, and the parts that every strategy shares.

A strategy executes one optimizer step per call. Separate methods for forward, backward and step are not possible,
because DeepSpeed's pipeline engine forbids them. Strategies share initial weights, the optimizer and its state, the
learning rate and the loss scale.

The learning rate is a pure function of the optimizer step, value for value what DeepSpeed's own schedulers give:
DeepSpeed 0.19.8, ``deepspeed/runtime/lr_schedules.py``: WarmupLR, WarmupDecayLR, WarmupCosineLR. A scheduler there
counts from -1 and is stepped after the optimizer, so steps 1 and 2 of a run both use the start of the warm-up. Under
WarmupCosineLR, step 1 uses a learning rate of 0 instead.
"""

import contextlib
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dsgpt.checkpoints.pieces import Box
from dsgpt.checkpoints.training_state import Counters, LossScaleState, Shards, StateReader
from dsgpt.common.errors import NonFiniteError
from dsgpt.config.recipe_blocks import LossScaling, OptimizerRecipe, SchedulerRecipe
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch
from dsgpt.model.config import STATE_NAMES, decays
from dsgpt.model.gpt2 import GPT2, Block, initial_value
from dsgpt.telemetry.meter import StepResult


class StateTensors(NamedTuple):
    """The tensors that hold this rank's model state now, by purpose.

    To sum their sizes, count each storage once, with its whole size, in the first field that has it. So a field may
    list views of a flat buffer instead of the buffer, and padding counts. A DTensor is listed by its local tensor.
    Tensors that are None or not allocated are left out.
    """

    parameters: list[Tensor]
    """Weights that the forward pass uses, as they are kept between steps."""
    gradients: list[Tensor]
    """Gradients while the optimizer steps: those that it steps on, and others that have not been freed."""
    optimizer: list[Tensor]
    """Moments and counters; see ``optimizer_tensors``."""
    master: list[Tensor]
    """fp32 weights in addition to ``parameters``; none where the optimizer changes the parameters themselves."""
    buffers: list[Tensor]
    """Memory kept between steps only to move gradients or weights between ranks or devices: buckets, staging."""


class Watch(Protocol):
    """Sees what a rank computes by itself, before any rank exchanges it."""

    def loss(self, loss: Tensor, targets: Tensor, reduction: str, *, training: bool) -> None:
        """Called with the ``"mean"`` or ``"sum"`` of the losses of ``targets``, before a backward pass.

        ``training`` is the mode of the model.
        """

    def gradient(self, name: str, boxes: list[Box], gradient: Tensor) -> None:
        """Called with the gradient of one backward pass, by canonical name; it has the elements of ``boxes``."""


class Strategy(ABC):
    """A way to execute the recipe. Methods are collective unless they say otherwise: every rank calls them in order."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        recipe = config.recipe
        self._device = device
        self._accumulation = config.batch.gradient_accumulation_steps
        self._schedule = build_schedule(recipe.scheduler, base_lr=recipe.optimizer.lr, total_steps=config.total_steps)
        self._scale = LossScale(recipe.loss_scaling if config.precision == "fp16" else None)
        self._optimizer_steps = 0

    @abstractmethod
    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """Take one optimizer step on the next ``gradient_accumulation_steps`` micro batches of this rank.

        Args:
            batches: this rank's micro batches.
            step: the number of this optimizer step; the first of a run is 1.
        """

    @abstractmethod
    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """Sum of losses (nats) and number of targets over one validation step of all ranks; both 0-dim float64."""

    @abstractmethod
    def shards(self) -> Shards:
        """The part of the state that this rank writes, under canonical names (the baseline's); no communication.

        The parts of all ranks contain every element once.
        """

    @abstractmethod
    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight that this rank holds whole and computes with, under its canonical name; no communication.

        All ranks that yield a name must hold the same value, bit for bit.
        """

    @abstractmethod
    def state_tensors(self) -> StateTensors:
        """The tensors that hold this rank's model state now; no communication.

        Called after a step, and, to see the gradients, when ``step`` of the torch optimizer begins.
        """

    def counters(self) -> Counters:
        """The rest of the state besides the tensors of ``shards``; no communication."""
        return Counters(optimizer_steps=self._optimizer_steps, loss_scale=self._scale.state())

    @abstractmethod
    def load_state(self, reader: StateReader) -> None:
        """Continue from the state of a checkpoint, which any strategy on any number of ranks may have written.

        Tensors are read one at a time, and of each only what this rank keeps. Settings such as betas and learning rate
        stay the recipe's. Call it before the first step. A subclass first calls this, which sets the counters.
        """
        self._optimizer_steps = reader.counters.optimizer_steps
        self._scale.restore(reader.counters.loss_scale)

    @abstractmethod
    def watch(self, watch: Watch, undo: contextlib.ExitStack) -> None:
        """Let ``watch`` see every loss and gradient that this rank computes, until ``undo`` is closed.

        Not collective. With ``--compile`` its hooks would break the graph.
        """

    def close(self) -> None:  # noqa: B027 - most have no files
        """Remove the files that this rank swapped to, if any. Not collective: it may be called after an error."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on ``device``; does not wait for the copy."""
    return Batch(*(part.to(device, non_blocking=True) for part in batch))


def watch_losses(model: nn.Module, watch: Watch) -> RemovableHandle:
    """A hook with which ``watch`` sees every loss of ``model``, a ``GPT2``."""

    def note(module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any], loss: Tensor) -> Tensor:
        watch.loss(loss, given[1], named.get("reduction", "mean"), training=module.training)
        return loss.clone()  # hooks of an engine on what it gets then come before that of ``watch``

    return model.register_forward_hook(note, with_kwargs=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor in the state of ``optimizer``: moments and counters."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


# Builds the strategy of a run.


def build_strategy(config: RunConfig, device: torch.device) -> Strategy:
    """The strategy of ``config``, its model initialised.

    Only its own module is imported, because DeepSpeed takes seconds.
    """
    sizes = config.topology.sizes
    if config.run_type == "optimized":  # before a module of DeepSpeed's is imported, and with it its accelerator
        importlib.import_module("dsgpt.strategies.deepspeed.setup").import_deepspeed(device)
    if config.run_type != "optimized":
        module, name = "pytorch", {"baseline": "Baseline", "ddp": "Ddp", "fsdp": "Fsdp"}[config.run_type]
    elif sizes.pipeline > 1:
        module, name = "deepspeed.pipeline", "PipelineParallel"
    elif sizes.tensor > 1:
        module, name = "deepspeed.zero", "TensorParallel"
    else:
        module, name = "deepspeed.zero", "SequenceParallel" if sizes.sequence > 1 else "Zero"
    strategy: Strategy = getattr(importlib.import_module(f"dsgpt.strategies.{module}"), name)(config, device)
    return strategy


# The initial value of every parameter, drawn from seed and name, or published.

InitialValues = Callable[[str, torch.Size], Tensor]
"""(canonical name, whole shape) to the whole initial value, fp32 on the CPU; the same on every rank."""


def initial_values(config: RunConfig) -> InitialValues:
    """The function from which the strategies of this run get initial weights, whole, before they split them.

    Raises:
        UserError: the source that ``--init_from`` names is gone.
    """
    if config.init_from is not None:
        return config.init_from.weights(config.model)
    return partial(initial_value, config=config.model, seed=config.options.seed)


def model_of(config: RunConfig) -> GPT2:
    """The model of this run, without values, where PyTorch makes parameters at the moment."""
    how = {"activation_checkpointing": config.activation_checkpointing, "pad_logits": config.options.pad_logits}
    model = GPT2(config.model, **how)
    model.end_of_text = config.end_of_text
    return model


def whole_model(config: RunConfig) -> GPT2:
    """The whole model in host memory, in fp32, with its initial weights."""
    model, values = model_of(config), initial_values(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name, parameter.shape))
    return model


def compile_blocks(model: nn.Module, method: str = "forward") -> None:
    """Compile a method of each transformer block, in place, and nothing around it.

    All blocks share one compiled graph. What a strategy does between blocks (reduce a bucket, gather the next weights)
    still happens there, and not before or after one graph of the whole model. Each size gets its own graph: one for any
    size would be slower.
    """
    for block in model.modules():
        if isinstance(block, Block):
            setattr(block, method, torch.compile(getattr(block, method), dynamic=False))


# The optimizer of a recipe, its state, and the gradient norm.

BLOCK = 512
"""Elements of a gradient whose squares are summed in fp32."""


def parameter_groups(parameters: Mapping[str, nn.Parameter], recipe: OptimizerRecipe) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, in the order of ``parameters`` (canonical name to parameter)."""
    return [
        {"params": [value for name, value in parameters.items() if decays(name) is decayed], "weight_decay": decay}
        for decayed, decay in ((True, recipe.weight_decay), (False, 0.0))
    ]


def build_optimizer(
    groups: Iterable[dict[str, Any]], recipe: OptimizerRecipe, *, fused: bool = True
) -> torch.optim.Optimizer:
    """``torch.optim``'s AdamW or SGD over ``groups``; the loop sets the learning rate before every step.

    Args:
        groups: as ``parameter_groups`` makes them.
        recipe: its settings.
        fused: update in one pass over the memory of a parameter and its state, on GPUs and CPUs alike. How an element
            is rounded then depends on its place in the tensor.
    """
    if recipe.type == "SGD":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=fused)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of the next steps; ``optimizer`` is torch's, or DeepSpeed's wrapper of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Members of ``STATE_NAMES`` that ``optimizer`` keeps from its first step on."""
    if "betas" in optimizer.defaults:
        return STATE_NAMES[:2]
    return STATE_NAMES[2:] if optimizer.defaults.get("momentum") else ()


def begin_state(optimizer: torch.optim.Optimizer, parameter: Tensor, *, steps: int) -> dict[str, Tensor]:
    """Make the state of ``parameter`` after ``steps`` steps, with zeros for moments, which the caller fills.

    torch and DeepSpeed's CPU Adam make the state only in their first step. torch counts the steps in a tensor, on
    the parameter's device if the optimizer is fused, and DeepSpeed in a Python number.

    Returns:
        The moments by name, each of the shape and on the device of ``parameter``.
    """
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in state_names(optimizer)}
    state: dict[str, Any] = dict(moments)
    if "betas" in optimizer.defaults:
        of_torch, device = type(optimizer).__module__.startswith("torch."), torch.device("cpu")
        if optimizer.defaults.get("fused"):
            device = parameter.device
        state["step"] = torch.tensor(float(steps), device=device) if of_torch else steps
    optimizer.state[parameter] = state
    return moments


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all ``gradients`` together, 0-dim fp32."""
    return square_sum(gradients).sqrt().float()


def square_sum(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all elements of ``gradients``, 0-dim fp64, on their device."""
    norms = [block_norms(gradient) for gradient in gradients]
    return torch.cat(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def block_norms(gradient: Tensor) -> Tensor:
    """The 2-norm of each block of ``BLOCK`` elements, (blocks,), computed in fp32 and returned in fp64.

    One fp32 sum of squares over an embedding of millions of small values is off by up to 1e-4 relative. fp64 for every
    element is exact, but takes thirty times longer on a CPU.
    """
    flat = gradient.detach().reshape(-1).float()
    whole = flat.numel() // BLOCK * BLOCK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])[None]  # 0 if nothing is left
    return torch.cat([norms, rest]).double()


# The learning rate of a step.

Schedule = Callable[[int], float]
"""Maps the optimizer step (the first is 1) to its learning rate."""


def build_schedule(recipe: SchedulerRecipe | None, *, base_lr: float, total_steps: int) -> Schedule:
    """The schedule that ``recipe`` asks for; a constant ``base_lr`` without one.

    Args:
        recipe: the JSON's ``scheduler`` block; an omitted ``total_num_steps`` becomes ``total_steps``.
        base_lr: the optimizer's ``lr``.
        total_steps: optimizer steps of the whole run.
    """
    if recipe is None:
        return lambda _: base_lr
    ratio = partial(_ratio, recipe=recipe, total=recipe.total_num_steps or total_steps)
    if recipe.type == "WarmupCosineLR":
        return lambda step: base_lr * ratio(step - 2) if step > 1 else 0.0
    low, high = recipe.warmup_min_lr, recipe.warmup_max_lr
    if high is None:
        high = base_lr if recipe.type == "WarmupLR" else 0.001
    return lambda step: low + (high - low) * ratio(step - 2) if step > 1 else low


def _ratio(i: int, recipe: SchedulerRecipe, total: int) -> float:
    """Position of the rate between its two ends at DeepSpeed's counter ``i``, which starts at 0; from 0 to 1.

    Under WarmupCosineLR, the rate divided by the optimizer's.
    """
    steps = max(2, recipe.warmup_num_steps)
    cosine = recipe.type == "WarmupCosineLR"
    if i < steps:
        linear = recipe.warmup_type == "linear"
        warm = i / steps if linear else 1.0 / math.log(steps) * math.log(i + 1)  # as DeepSpeed rounds it
        return recipe.warmup_min_ratio + warm * (1 - recipe.warmup_min_ratio) if cosine else warm
    if recipe.type == "WarmupLR":
        return 1.0
    if not cosine:
        return max(0.0, (total - i) / max(1.0, total - steps))
    progress = min(1.0, (i - steps + 1) / max(1, total - steps))
    lowest = recipe.cos_min_ratio
    return max(0.0, lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2)


# Loss scaling for fp16, with the same rules under every strategy, so that all of them scale by the same factor.

MOST_SKIPS = 100
"""Overflows in a row after which training stops at a fixed scale, which cannot adapt."""


class LossScale:
    """The factor on the loss: 1 in other precisions, fixed or dynamic in fp16.

    The rules are DeepSpeed 0.19.8's (``deepspeed/runtime/fp16/loss_scaler.py``), because the keys of the JSON's
    ``fp16`` block are DeepSpeed's; torch's ``GradScaler`` has no hysteresis. DeepSpeed's scaler is not used: its
    effective scale grows with the number of ranks, and its optimizers change the scale between scaling and unscaling
    one gradient.

    Near overflow two strategies may still skip different steps, because some sum micro batches or ranks in fp16 and
    others in fp32.
    """

    def __init__(self, scaling: LossScaling | None) -> None:
        """Begin at the scale of ``scaling``, the JSON's ``fp16`` block; None for a precision that needs no scaling."""
        self.enabled = scaling is not None
        self._scaling = scaling or LossScaling(loss_scale=1.0)
        self._dynamic, self._skips = self._scaling.loss_scale == 0, 0
        factor = 2.0**self._scaling.initial_scale_power if self._dynamic else self._scaling.loss_scale
        self._now = LossScaleState(factor=factor, step=0, last_overflow=-1, patience=self._scaling.hysteresis)

    @property
    def factor(self) -> float:
        """The factor of the next step."""
        return self._now.factor

    def update(self, *, overflow: bool) -> None:
        """Lower the factor after overflows of a step's gradients, and raise it after a window without any.

        Raises:
            NonFiniteError: they overflow at the smallest factor allowed, or ``MOST_SKIPS`` times at a fixed one.
        """
        self._skips = self._skips + 1 if overflow else 0
        if not self._dynamic:
            if self._skips >= MOST_SKIPS:
                what = f"overflowed in {MOST_SKIPS} steps in a row at the fixed loss scale {self.factor:g}"
                cure = "training stopped; lower loss_scale, or leave it out for a dynamic one"
                raise NonFiniteError(f"fp16 gradients {what}: {cure}")
            return
        scaling, now = self._scaling, self._now
        if overflow:
            now = replace(now, last_overflow=now.step)
            if now.patience > 1:
                now = replace(now, patience=now.patience - 1)
            elif now.factor == scaling.min_loss_scale:
                cure = "training stopped; lower the learning rate, or take bf16 or fp32"
                raise NonFiniteError(f"fp16 gradients overflow at the smallest loss scale, {self.factor:g}: {cure}")
            else:
                now = replace(now, factor=max(now.factor / 2, scaling.min_loss_scale))
        else:
            steps_without = now.step - now.last_overflow - 1
            grows = steps_without > 0 and steps_without % scaling.loss_scale_window == 0
            if grows or scaling.consecutive_hysteresis:
                now = replace(now, patience=scaling.hysteresis)
            if grows:
                now = replace(now, factor=now.factor * 2)
        self._now = replace(now, step=now.step + 1)

    def state(self) -> LossScaleState | None:
        """State for a checkpoint; None in a precision that needs no scaling."""
        return self._now if self.enabled else None

    def restore(self, state: LossScaleState | None) -> None:
        """Continue from a checkpoint's ``state``; a fixed factor stays the recipe's."""
        if state is not None and self._dynamic:
            self._now = state
