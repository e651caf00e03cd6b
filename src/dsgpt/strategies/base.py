"""The seam between the training loop and a way to execute it: one optimizer step.

Forward, backward and step apart cannot be the seam, because DeepSpeed's pipeline engine forbids them.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsgpt.checkpointing.training_state import Counters, ParamState, StateReader
from dsgpt.data.loader import Batch


class StepResult(NamedTuple):
    """One optimizer step, seen from any rank; tensors stay on the device so that nothing waits for them."""

    loss: Tensor
    """0-dim fp32: mean cross-entropy over the global batch, nats per token."""
    grad_norm: Tensor
    """0-dim fp32: 2-norm of the whole model's gradient, before clipping."""
    lr: float
    """The learning rate that this step used."""
    skipped: Tensor
    """0-dim bool: fp16 gradients overflowed, and the weights were left alone."""


class StateTensors(NamedTuple):
    """The tensors that hold this rank's model state at this moment, by what they are for.

    A storage is counted once, where it comes first, as large as it is: views of a flat buffer may be listed instead of
    the buffer, and padding counts. A DTensor is listed by its local tensor. What is None or not allocated is left out.
    """

    parameters: list[Tensor]
    """What the forward pass computes with, as it is kept between steps."""
    gradients: list[Tensor]
    """While the optimizer steps: what it steps on, and other gradients that have not been freed."""
    optimizer: list[Tensor]
    """Moments and counters; see ``optimizer_tensors``."""
    master: list[Tensor]
    """fp32 weights beside ``parameters``; none where the optimizer changes the parameters themselves."""
    buffers: list[Tensor]
    """What is kept from step to step only to move gradients or weights between ranks or devices: buckets, staging."""


class Strategy(Protocol):
    """A way to execute the recipe. Methods are collective: every rank calls them, in the same order."""

    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """Take one optimizer step on the next ``gradient_accumulation_steps`` micro batches of this rank.

        Args:
            batches: this rank's micro batches.
            step: the number of this optimizer step; the first of a run is 1.
        """
        ...

    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """Sum of losses (nats) and number of targets over one validation step of all ranks, 0-dim float64."""
        ...

    def iter_state(self) -> Iterator[tuple[str, ParamState]]:
        """Every parameter under its canonical name (the baseline's), one at a time, valid until the next one."""
        ...

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight that this rank holds whole and computes with, under its canonical name; no communication.

        Ranks that hold the same name must hold the same value at all times.
        """
        ...

    def state_tensors(self) -> StateTensors:
        """The tensors that hold this rank's model state now; no communication.

        Called after a step, and for the gradients when ``step`` of the torch optimizer begins.
        """
        ...

    def counters(self) -> Counters:
        """What belongs to the state besides the tensors of ``iter_state``; no communication."""
        ...

    def load_state(self, reader: StateReader) -> None:
        """Take up the state of a checkpoint, whichever strategy on however many ranks wrote it.

        Whole tensors are read one at a time, and each rank keeps its part. Settings, as betas and learning rate, stay
        the recipe's. Call it before the first step.
        """
        ...

    def close(self) -> None:
        """Remove what this rank put outside of its memory. Not collective: an error may have come before."""
        ...


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on ``device``; does not wait for the copy."""
    return Batch(*(part.to(device, non_blocking=True) for part in batch))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor in the state of ``optimizer``: moments and counters."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
