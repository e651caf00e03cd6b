"""Fits the rates of a machine to measured steps: a factor of computation for each precision, one of communication.

A roofline from rates that were measured one by one leaves out what happens between them: allocation, caches, Python.
The factors say how much longer a step takes. They are few, so that they hold for setups that were never measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsgpt.planner.rates import Machine, Rates
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import predict_step

_LEAST_SHARE = 0.05
"""Of a step: a step says nothing about what takes less of it."""
_BOUNDS = (0.2, 5.0)
"""Of factors: beyond them the machine is not the one that was calibrated."""
_LEAST_SPREAD = 0.05
_ROUNDS = 30
_FARTHEST = 0.5
"""Change of a factor's logarithm in a round."""
_SENT = "communication"


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
    """The largest share by which a measured step is missed by the factors of all others: what to expect of a setup that
    was not measured."""
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
                f"{machine.basis.partition(';')[0]}; fitted to measured steps ({self.steps}) in "
                f"{' and '.join(sorted(self.compute))}, each of which a fit to the others misses by {self.spread:.0%} "
                "at most"
            ),
        )

    def _scaled(self, rates: Rates) -> Rates:
        for precision, factor in self.compute.items():
            rates = rates.in_precision(precision, slower=factor)
        return rates.scaled(compute=1, communication=self.communication)


def fit(steps: Sequence[MeasuredStep]) -> Factors:
    """The factors with which predictions are nearest to ``steps``, of which there is at least one.

    A prediction is a sum of terms that grow with one factor each. Gauss-Newton steps on the logarithms of the factors
    minimize the sum of squares of log(predicted / measured).
    """
    names = [*sorted({step.setup.precision for step in steps}), _SENT]
    terms = [_terms(step, names) for step in steps]
    spread = 0.0
    for left_out, (step, term) in enumerate(zip(steps, terms, strict=True)):
        others = [each for index, each in enumerate(zip(steps, terms, strict=True)) if index != left_out]
        spread = max(spread, abs(_sum(term, _nearest(names, others)) / step.seconds - 1))
    found = _nearest(names, list(zip(steps, terms, strict=True)))
    return replace(_factors(found), spread=spread, steps=len(steps))


def _nearest(names: Sequence[str], steps: Sequence[tuple[MeasuredStep, Mapping[str, float]]]) -> dict[str, float]:
    """The factors that fit ``steps``, each with its terms; 1 for what takes no step long enough."""
    free = [name for name in names if any(term[name] >= _LEAST_SHARE * step.seconds for step, term in steps)]
    found = dict.fromkeys(names, 1.0)
    for _ in range(_ROUNDS if free else 0):
        found |= _nearer(found, free, steps)
    return found


def _nearer(
    found: Mapping[str, float], free: Sequence[str], steps: Sequence[tuple[MeasuredStep, Mapping[str, float]]]
) -> dict[str, float]:
    """The free factors after another Gauss-Newton step."""
    import numpy as np  # noqa: PLC0415 - only fits need it

    predicted = np.array([_sum(term, found) for _, term in steps])
    off = np.log(predicted / np.array([step.seconds for step, _ in steps]))
    slopes = np.array([[term[name] * found[name] for name in free] for _, term in steps]) / predicted[:, None]
    change, *_ = np.linalg.lstsq(slopes, -off, rcond=None)
    within = np.clip(change, -_FARTHEST, _FARTHEST)
    return {
        name: min(_BOUNDS[1], max(_BOUNDS[0], found[name] * math.exp(by)))
        for name, by in zip(free, within.tolist(), strict=True)
    }


def _factors(found: Mapping[str, float]) -> Factors:
    compute = {name: factor for name, factor in found.items() if name != _SENT}
    return Factors(compute=compute, communication=found[_SENT], spread=0.0, steps=0)


def _terms(step: MeasuredStep, names: Sequence[str]) -> dict[str, float]:
    """The seconds of ``step`` that grow with each factor; under the empty name those that grow with none."""
    ones = dict.fromkeys(names, 1.0)
    once = _predicted(step, _factors(ones))
    terms = {name: _predicted(step, _factors(ones | {name: 2.0})) - once for name in names}
    return terms | {"": once - sum(terms.values())}


def _sum(terms: Mapping[str, float], found: Mapping[str, float]) -> float:
    return sum(found.get(name, 1.0) * seconds for name, seconds in terms.items())


def _predicted(step: MeasuredStep, factors: Factors) -> float:
    return predict_step(step.setup, factors.applied(step.machine)).seconds
