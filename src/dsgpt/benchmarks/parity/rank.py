"""One cell in one rank: the way of ``src/gpt2.py`` from flags to steps, watched."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsgpt.benchmarks.harness.measurement import (
    CHANGED,
    FIRST_CHANGE,
    WEIGHT,
    Measurement,
    WatchedBatches,
    validated_after,
)
from dsgpt.benchmarks.parity.first_gradient import SgdGradients, full_gradient
from dsgpt.benchmarks.parity.planted import plant
from dsgpt.benchmarks.parity.reference import train_reference
from dsgpt.benchmarks.parity.split import Split
from dsgpt.benchmarks.parity.traffic import compared
from dsgpt.benchmarks.parity.used_rates import UsedRates
from dsgpt.config.flags import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.runtime.device import bring_up
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.process_group import HostGroup, barrier, joined
from dsgpt.runtime.topology import read_topology
from dsgpt.strategies.base import StepResult, Strategy
from dsgpt.strategies.build import build_strategy
from dsgpt.telemetry.console import Console
from dsgpt.telemetry.step_traffic import CostMeter
from dsgpt.training.loop import training_batches, validation_loss
from dsgpt.training.stopping import Stopping


def run_cell(flags: list[str], folder: Path, *, bug: str = "", reference: Mapping[str, Any] | None = None) -> None:
    """Train what ``flags`` say, and leave this rank's measurements in ``folder``.

    Args:
        flags: of ``src/gpt2.py``.
        folder: exists.
        bug: what to plant in the strategy; see ``dsgpt.benchmarks.parity.planted``.
        reference: train in plain PyTorch instead of the strategy; the fields of a ``Split``.

    Raises:
        UserError: the product refuses the combination.
    """
    options, problems = parse_arguments(flags)
    config = resolve(options, topology=read_topology(), problems=problems)
    device = bring_up(config.device, local_rank=config.topology.local_rank, threads=config.threads_per_device)
    if reference is not None:
        train_reference(config, device, Split(**reference)).write(folder, rank=0)
        return
    with contextlib.nullcontext() if config.run_type == "baseline" else joined(config.topology, device):
        torch.manual_seed(config.options.seed)
        with plant(bug):
            _train(config, device).write(folder, rank=config.topology.rank)
        barrier()


def _train(config: RunConfig, device: torch.device) -> Measurement:
    with contextlib.closing(build_strategy(config, device)) as strategy:
        measurement = _measure(config, strategy)
        barrier()
    return measurement


def _measure(config: RunConfig, strategy: Strategy) -> Measurement:
    measurement = Measurement(data_rank=config.topology.data_rank, strategy=config.strategy_name)
    batches = WatchedBatches(training_batches(config, first_step=0))
    costs = CostMeter(
        lambda: strategy.state_tensors()._asdict(),
        last_step=config.total_steps,
        report=lambda cost: measurement.cost(compared(cost, config)),
    )
    stopping = Stopping(Interruption(speaks=False), HostGroup())  # which nobody asks for
    for step in range(1, config.total_steps + 1):
        with costs.watch(step), UsedRates() as used, SgdGradients() if step == 1 else contextlib.nullcontext() as noted:
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
            noted.forget()
        if step == FIRST_CHANGE:
            _take_weights(config, strategy, measurement, after=CHANGED)
        if step in validated_after(config.total_steps):
            _validate(config, strategy, stopping, measurement, after_step=step)
    for name, value in strategy.replicated_weights():
        measurement.replica(name, value)
    _take_weights(config, strategy, measurement, after=WEIGHT)
    return measurement


def _take_weights(config: RunConfig, strategy: Strategy, measurement: Measurement, *, after: str) -> None:
    """Note every weight; every rank walks through the state, because that is collective."""
    for name, state in strategy.iter_state():
        if config.topology.is_main:
            measurement.weight(name, state.weight, after=after)


def _validate(
    config: RunConfig, strategy: Strategy, stopping: Stopping, measurement: Measurement, *, after_step: int
) -> None:
    """Validate as the training loop does, which is collective."""
    loss, targets = validation_loss(config, strategy, Console(speaks=False), stopping) or (math.nan, 0)
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
