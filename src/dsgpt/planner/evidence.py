"""How near predictions came to measured steps of setups like one: its 80% range, and a sentence beside a plan.

The residuals of the rows that others measured are kept with the constants that were fitted to them. Those of the rows
nearest to a setup say how far off its prediction may be. docs/exam.md shows how often the range holds, also for rows
of a source that no constant was fitted to.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import Any

from dsgpt.planner.hardware import gpus
from dsgpt.planner.rates import Machine, fitted
from dsgpt.planner.rows import code_of, measured_rows, read_row, strategy_of_row
from dsgpt.planner.setup import Setup

INSIDE = 0.8
"""Share of measured steps that a range is to contain."""
_LEAST = 0.03
"""Least half width of a range, as a logarithm: what a run differs from its repetition."""
REACH = 0.2
"""Distance at which the weight of a row has fallen to 1/e. Nearer rows say how wide a range is."""
_NEAREST = 8
"""Rows whose mean distance says how near the measured ones are."""
_LIKE = 0.6
"""Largest distance of a row that is like a setup."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What decides whether two setups are alike."""

    words: tuple[tuple[str, str], str, bool, str, bool]
    """Kernels and attention; family of the GPU; whether ranks split the model; FSDP, ZeRO-3 or neither; whether there
    are several machines."""
    sizes: tuple[int, int, int, int]
    """Width, tokens of a micro batch, GPUs, tensor ranks."""

    def distance(self, other: "Traits") -> float:
        """0 for alike: 1 for other kernels or attention, 0.7 for another GPU, a part for each doubling of a size."""
        unequal = zip((1.0, 0.7, 0.5, 0.3, 0.3), self.words, other.words, strict=True)
        doublings = zip((0.25, 0.12, 0.08, 0.15), self.sizes, other.sizes, strict=True)
        far = sum(weight for weight, one, two in unequal if one != two)
        return far + sum(weight * abs(math.log2(one / two)) for weight, one, two in doublings)


def traits_of(setup: Setup, machine: Machine) -> Traits:
    """The traits of ``setup`` on ``machine``."""
    family, run_type = gpus()[machine.name].family, setup.run_type
    stage = setup.recipe.zero_stage if run_type == "optimized" else 0
    parallel, tokens = setup.sizes, setup.micro_batch_size * setup.seq_length
    split, far = parallel.tensor * parallel.pipeline > 1, setup.world_size > machine.devices
    return Traits(
        words=((setup.kernels, setup.attention), family, split, _sharding(run_type, stage), far),
        sizes=(setup.model.n_embd, tokens, setup.world_size, parallel.tensor),
    )


def _of_row(raw: Mapping[str, Any]) -> Traits:
    """The same from a row: the setups of all would take seconds."""
    row, far = read_row(raw), raw["gpus"] > raw["gpus_per_node"]
    family, split = gpus()[row.hardware].family, row.tp * row.pp > 1
    return Traits(
        words=(code_of(row), family, split, _sharding(*strategy_of_row(row)), far),
        sizes=(row.n_embd, row.micro_batch * row.seq_len, row.gpus, row.tp),
    )


def _sharding(run_type: str, stage: int) -> str:
    return "zero3" if stage == 3 else "fsdp" if run_type == "fsdp" else ""


@dataclass(frozen=True, kw_only=True)
class Witness:
    """A measured row, and how its prediction differs."""

    id: str
    source: str
    traits: Traits
    ratio: float
    """Predicted seconds divided by measured ones."""
    left_out: float
    """The same with constants that were fitted without the rows of its source."""


def witnesses_of(residuals: Mapping[str, tuple[float, float]]) -> tuple[Witness, ...]:
    """The rows of ``residuals``, which has both ratios of each."""
    return tuple(
        Witness(id=row["id"], source=row["source"], traits=_of_row(row), ratio=pair[0], left_out=pair[1])
        for row in measured_rows()
        if (pair := residuals.get(row["id"]))
    )


@cache
def witnesses() -> tuple[Witness, ...]:
    """The rows that the constants were fitted to."""
    return witnesses_of(fitted().residuals)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What measured rows say about a prediction."""

    low: float
    """Least measured time to expect, in units of the predicted one."""
    high: float
    near: bool
    """Whether rows like it were measured."""
    errors: tuple[float, ...]
    """Shares by which the predictions of the rows like it are off."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the range in units of the predicted time, and what the rows like it say."""
        return {"low": self.low, "high": self.high, "near": self.near, "rows": len(self.errors), "words": self.words}

    @property
    def words(self) -> str:
        """A sentence for people."""
        if not self.near:
            return "no measured row is near this setup"
        rows = f"{len(self.errors)} measured row{'s' * (len(self.errors) > 1)} like this one"
        return f"for {rows}: median error {median(self.errors):.0%}, worst {max(self.errors):.0%}"


def evidence_for(
    traits: Traits, among: Iterable[Witness] | None = None, *, growth: float | None = None, inside: float = INSIDE
) -> Evidence:
    """The 80% range of a setup with these traits, from the residuals of the rows nearest to it.

    A row weighs exp(-d / reach) at distance d. The range is between the weighted 10th and 90th percentiles, around the
    prediction. It grows with the distance of the nearest rows beyond this reach: what was not measured is known less
    well.

    Args:
        traits: of the setup.
        among: the rows; None for all.
        growth: by which the range grows, as a logarithm for each unit of distance; None for what was fitted.
        inside: share of steps that another range is to contain.
    """
    rows = sorted((traits.distance(each.traits), each.ratio) for each in (witnesses() if among is None else among))
    far = fmean(distance for distance, _ in rows[:_NEAREST])
    errors = tuple(abs(ratio - 1) for distance, ratio in rows if distance <= _LIKE)
    weighted = sorted((-math.log(ratio), math.exp(-(distance - rows[0][0]) / REACH)) for distance, ratio in rows)
    wider = (fitted().growth if growth is None else growth) * max(0.0, far - REACH)
    low, high = (_percentile(weighted, share) for share in ((1 - inside) / 2, (1 + inside) / 2))
    return Evidence(
        low=math.exp(min(low, -_LEAST) - wider),
        high=math.exp(max(high, _LEAST) + wider),
        near=far <= _LIKE,
        errors=errors,
    )


def _percentile(weighted: list[tuple[float, float]], share: float) -> float:
    """The value below which ``share`` of the weights are; values ascend."""
    goal, passed = share * sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        passed += weight
        if passed >= goal:
            return value
    return weighted[-1][0]
