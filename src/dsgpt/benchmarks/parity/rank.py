"""One rank of one cell: what ``src/gpt2.py`` does from flags to steps, measured."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsgpt.benchmarks.parity.computation import Split
from dsgpt.benchmarks.parity.measurement import (
    CHANGED,
    FIRST_CHANGE,
    WEIGHT,
    Measurement,
    WatchedBatches,
    validated_after,
)
from dsgpt.benchmarks.parity.optimizer_hooks import SgdGradients, UsedRates, full_gradient
from dsgpt.benchmarks.parity.planted import plant
from dsgpt.benchmarks.parity.reference import train_reference
from dsgpt.config.flags import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.model.linear_cross_entropy import CHUNKS
from dsgpt.planning.communication import most_sent_bytes
from dsgpt.planning.model_state import largest_model_state
from dsgpt.runtime.device import bring_up
from dsgpt.runtime.process_group import barrier, joined
from dsgpt.runtime.topology import read_topology
from dsgpt.strategies.base import StepResult, Strategy
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.step_traffic import MODEL_STATE, TrafficMeter
from dsgpt.training.batches import training_batches
from dsgpt.training.run_description import setup_of
from dsgpt.training.trainer import validation_loss

SENT = "sent"
"""A category besides those of ``MODEL_STATE``: the bytes that the busiest rank sends in a step."""


def train_cell(flags: list[str], folder: Path, *, bug: str) -> None:
    """Train as ``flags`` say, and write this rank's measurements into ``folder``.

    Args:
        flags: of ``src/gpt2.py``.
        folder: an existing folder.
        bug: to plant in the strategy, a key of ``planted.BUGS``; empty for none.

    Raises:
        UserError: the product refuses the combination.
    """
    config, device = _resolved(flags)
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        torch.manual_seed(config.options.seed)
        with plant(bug):
            _train(config, device).write(folder, rank=config.topology.rank)
        barrier()


def train_reference_cell(flags: list[str], folder: Path, *, split: Mapping[str, Any]) -> None:
    """Train the same in plain PyTorch instead of a strategy; ``split`` holds the fields of a ``Split``.

    Raises:
        UserError: the product refuses the combination.
    """
    config, device = _resolved(flags)
    train_reference(config, device, Split(**split)).write(folder, rank=0)


LOGITS_AT_ONCE = 12_000
"""Of the loss: 40 tokens with the suite's vocabulary of 300, so that every micro batch has several chunks, as in large
models."""


def _resolved(flags: list[str]) -> tuple[RunConfig, torch.device]:
    CHUNKS.update(dict.fromkeys(CHUNKS, LOGITS_AT_ONCE))
    options, problems = parse_arguments(flags)
    config = resolve(options, topology=read_topology(), problems=problems)
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    return config, device


def _train(config: RunConfig, device: torch.device) -> Measurement:
    with contextlib.closing(build_strategy(config, device)) as strategy:
        measurement = _measure(config, strategy)
        barrier()
    return measurement


def _measure(config: RunConfig, strategy: Strategy) -> Measurement:
    """Train from the first to the last step; every rank calls it, because parts of it are collective."""
    measurement = Measurement(data_rank=config.topology.data_rank, strategy=config.strategy_name)
    batches = WatchedBatches(training_batches(config, first_step=0))
    meter = TrafficMeter(
        lambda: strategy.state_tensors()._asdict(),
        last_step=config.total_steps,
        report=lambda cost: measurement.bytes_per_rank(compared_bytes(cost, config)),
    )
    sgd = SgdGradients()
    for step in range(1, config.total_steps + 1):
        with meter.watch(step), UsedRates() as used, sgd if step == 1 else contextlib.nullcontext():
            result = strategy.train_step(batches, step)
        measurement.step(
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            lr=result.lr,
            used=sorted(used.seen),
            skipped=bool(result.skipped),
            samples=batches.take(),
        )
        if step == 1:
            _take_gradient(config, strategy, result, measurement)
            sgd.forget()
        if step == FIRST_CHANGE:
            _take_weights(config, strategy, measurement, after=CHANGED)
        if step in validated_after(config.total_steps):
            _validate(config, strategy, measurement, after_step=step)
    for name, value in strategy.replicated_weights():
        measurement.replica(name, value)
    _take_weights(config, strategy, measurement, after=WEIGHT)
    return measurement


def compared_bytes(measured: dict[str, Any], config: RunConfig) -> dict[str, dict[str, int | None]]:
    """Bytes of model state and of traffic in a step, measured and by ``dsgpt.planning``, of the rank that has most.

    Args:
        measured: the ``cost`` block of a run's record.
        config: the run.
    """
    setup = setup_of(config)
    state, traffic = measured["model_state_bytes_per_rank"], measured["communication_per_step"]
    predicted = largest_model_state(setup)
    found = {name: {"measured": state[name], "formula": getattr(predicted, name)} for name in MODEL_STATE}
    sent = None if traffic is None else traffic["ring_bytes_per_rank"]
    return found | {SENT: {"measured": sent, "formula": most_sent_bytes(setup)}}


def _take_weights(config: RunConfig, strategy: Strategy, measurement: Measurement, *, after: str) -> None:
    """Note every weight on the main rank; every rank walks through the state, because that is collective."""
    for name, state in strategy.iter_state():
        if config.topology.is_main:
            measurement.weight(name, state.weight, after=after)


def _validate(config: RunConfig, strategy: Strategy, measurement: Measurement, *, after_step: int) -> None:
    """Validate as the training loop does, which is collective."""
    loss, targets = validation_loss(config, strategy) or (math.nan, 0)
    measurement.validation(after_step=after_step, loss=loss, targets=targets)


def _take_gradient(config: RunConfig, strategy: Strategy, result: StepResult, measurement: Measurement) -> None:
    """Note the first step's gradient; collective, as ``_take_weights``."""
    recipe = config.recipe
    beta1 = recipe.optimizer.betas[0] if recipe.optimizer.type == "AdamW" else 0.0  # see ``SgdGradients``
    for name, state in strategy.iter_state():
        if config.topology.is_main and state.exp_avg is not None:
            gradient = full_gradient(
                state.exp_avg.float(),
                beta1=beta1,
                grad_norm=float(result.grad_norm),
                clipping=recipe.gradient_clipping,
            )
            measurement.gradient(name, gradient)
