"""Predicts the time of a whole training: its steps, validations, checkpoints and start."""

import math
from dataclasses import dataclass

from dsgpt.planning.parameters import model_parameters, total
from dsgpt.planning.rates import Machine
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.step_time import StepTime

START_SEC = 60.0
"""Assumed seconds until the first step: launcher, imports, process group, compiled operations."""


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a training is."""

    tokens: float
    """Of the whole training."""
    eval_every: int = 0
    """Steps between validations; there is one at the end in any case."""
    val_tokens: float = 0.0
    """Of a validation; 0 leaves validations out."""
    save_every: int = 0
    """Steps between checkpoints; there is one at the end in any case."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a training by what they are, at the likely rates; and all of them at the fastest and the slowest."""

    steps: int
    """Optimizer steps."""
    parts: dict[str, float]
    """``steps``, ``validation``, ``checkpoints`` and ``start``."""
    least: float
    most: float

    @property
    def seconds(self) -> float:
        """The likely time."""
        return sum(self.parts.values())


def run_time(setup: Setup, machine: Machine, step: StepTime, length: Length) -> RunTime:
    """The time of a training whose steps take ``step``."""
    global_batch = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel_size
    steps = max(1, math.floor(length.tokens / (global_batch * setup.seq_length)))
    validations = _times(steps, length.eval_every) if length.val_tokens else 0
    saves = _times(steps, length.save_every)
    validation = validations * _validation_micro_batches(setup, length) * step.validation_micro_batch
    written = checkpoint_bytes(setup)
    parts = {
        "steps": steps * step.seconds,
        "validation": validation,
        "checkpoints": saves * written / machine.rates.disk,
        "start": START_SEC,
    }

    def bounded(step_seconds: float, disk: float) -> float:
        return steps * step_seconds + validation * step_seconds / step.seconds + saves * written / disk + START_SEC

    return RunTime(
        steps=steps,
        parts={name: seconds for name, seconds in parts.items() if seconds},
        least=bounded(step.least, machine.fastest.disk),
        most=bounded(step.most, machine.slowest.disk),
    )


def _times(steps: int, every: int) -> int:
    """How often something happens that is done every so many steps, and after the last one in any case."""
    return math.ceil(steps / every) if every else 1


def checkpoint_bytes(setup: Setup) -> int:
    """Bytes of a checkpoint: the weights and the optimizer's moments in fp32, written by one process."""
    return FULL * (1 + setup.moments) * total(model_parameters(setup.model))


def _validation_micro_batches(setup: Setup, length: Length) -> float:
    """Micro batches that a rank validates on, the bubble of a pipeline included."""
    own = length.val_tokens / (setup.data_parallel_size * setup.micro_batch_size * setup.seq_length)
    return own + setup.sizes.pipeline - 1
