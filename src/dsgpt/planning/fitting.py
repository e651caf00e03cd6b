"""Fits the rates of a machine to measured steps: a factor of computation for each precision, one of communication.

A roofline from rates that were measured one by one leaves out what happens between them: allocation, caches, Python.
The factors say how much longer a step takes. They are few, so that they hold for setups that were never measured.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsgpt.planning.rates import Machine, Rates
from dsgpt.planning.setup import Setup
from dsgpt.planning.step_time import predict_step

_LEAST_SHARE = 0.05
"""Of a step: cells that communicate less say nothing about communication."""
_BOUNDS = (0.2, 5.0)
"""Of factors: beyond them the machine is not the one that was calibrated."""
_LEAST_SPREAD = 0.05
_NEARLY = 0.8
"""Of the largest share: steps whose share of the fitted part is smaller do not count."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A setup whose step was measured, and the machine as it is with that many devices at work."""

    setup: Setup
    machine: Machine
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Factors:
    """How many times as long as its rates say a machine takes."""

    compute: Mapping[str, float]
    """By precision."""
    communication: float
    spread: float
    """The largest share by which a fitted prediction misses a measured step."""
    steps: int
    """Measured ones that were fitted."""

    def applied(self, machine: Machine) -> Machine:
        """``machine`` with these factors; its range becomes the spread of the fit."""
        rates = self._scaled(machine.rates)
        wide = 1 + max(_LEAST_SPREAD, self.spread)
        return replace(
            machine,
            rates=rates,
            slowest=rates.scaled(compute=wide, communication=wide),
            fastest=rates.scaled(compute=1 / wide, communication=1 / wide),
            assumed=False,
            basis=(
                f"{machine.basis.partition(';')[0]}; fitted to measured steps ({self.steps}), which it misses by "
                f"{self.spread:.0%} at most"
            ),
        )

    def _scaled(self, rates: Rates) -> Rates:
        for precision, factor in self.compute.items():
            rates = rates.in_precision(precision, slower=factor)
        return rates.scaled(compute=1, communication=self.communication)


def fit(steps: Sequence[MeasuredStep]) -> Factors:
    """The factors with which predictions are nearest to ``steps``, of which there is at least one."""
    compute = {
        precision: _median([_computing(step) for step in steps if step.setup.precision == precision])
        for precision in sorted({step.setup.precision for step in steps})
    }
    waited = [found for step in steps if (found := _communicating(step, compute)) is not None]
    factors = Factors(compute=compute, communication=_median(waited) if waited else 1.0, spread=0.0, steps=len(steps))
    return replace(factors, spread=max(_missed(step, factors) for step in steps))


def _computing(step: MeasuredStep) -> tuple[float, float]:
    """Measured per predicted seconds of a step, and the share of it that computes: such steps say most."""
    predicted = predict_step(step.setup, step.machine)
    sent = predicted.parts.get("communication", 0.0)
    return max(0.0, step.seconds - sent) / (predicted.seconds - sent), 1 - sent / predicted.seconds


def _communicating(step: MeasuredStep, compute: Mapping[str, float]) -> tuple[float, float] | None:
    """Measured per predicted seconds of communication; None if there is little."""
    predicted = predict_step(step.setup, step.machine)
    sent = predicted.parts.get("communication", 0.0)
    if sent < _LEAST_SHARE * predicted.seconds:
        return None
    rest = compute[step.setup.precision] * (predicted.seconds - sent)
    return (step.seconds - rest) / sent, sent / predicted.seconds


def _median(ratios: Sequence[tuple[float, float]]) -> float:
    """The median of those that say most, within bounds."""
    best = max(weight for _, weight in ratios)
    middle = statistics.median(ratio for ratio, weight in ratios if weight >= _NEARLY * best)
    return min(_BOUNDS[1], max(_BOUNDS[0], middle))


def _missed(step: MeasuredStep, factors: Factors) -> float:
    return abs(predict_step(step.setup, factors.applied(step.machine)).seconds / step.seconds - 1)
