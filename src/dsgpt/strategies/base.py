"""The contract between the training loop and the strategies, and the choice of the strategy of a run.

A strategy executes one optimizer step per call. Separate
methods for forward, backward and step are not possible, because DeepSpeed's pipeline engine forbids them.
"""

import importlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsgpt.checkpoints.training_state import Counters, Shards, StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch
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


class Strategy(Protocol):
    """A way to execute the recipe. Methods are collective unless they say otherwise: every rank calls them in order."""

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

    @abstractmethod
    def counters(self) -> Counters:
        """The rest of the state besides the tensors of ``shards``; no communication."""

    @abstractmethod
    def load_state(self, reader: StateReader) -> None:
        """Continue from the state of a checkpoint, which any strategy on any number of ranks may have written.

        Tensors are read one at a time, and of each only what this rank keeps. Settings such as betas and learning rate
        stay the recipe's. Call it before the first step.
        """

    def close(self) -> None:
        """Remove the files that this rank swapped to, if any. Not collective: it may be called after an error."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on ``device``; does not wait for the copy."""
    return Batch(*(part.to(device, non_blocking=True) for part in batch))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor in the state of ``optimizer``: moments and counters."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


# Builds the strategy of a run; the only module that knows all of them.


def build_strategy(config: RunConfig, device: torch.device) -> Strategy:
    """The strategy of ``config``, its model initialised.

    Only its own module is imported, because DeepSpeed takes seconds.
    """
    sizes = config.topology.sizes
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
