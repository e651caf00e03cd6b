"""Compares a training with its reference: every fact, at every step, for every parameter, against its bound."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgpt.benchmarks.parity.bounds import RATE, Bounds
from dsgpt.benchmarks.parity.measurement import CHANGED, GRADIENT, WEIGHT, read_tensors

Facts = dict[str, Any]
"""A part of a rank's file, as ``Measurement`` writes it."""
Difference = tuple[float, str, Any, Any]
"""Size, where, expected and actual value."""


@dataclass(kw_only=True)
class Comparison:
    """The result of comparing one cell."""

    measured: dict[str, Facts] = field(default_factory=dict)
    """By fact: its largest difference and where that was."""
    failures: list[Facts] = field(default_factory=list)
    """Facts out of bounds, each with the first place where it is, and both values."""

    def note(
        self,
        fact: str,
        found: list[Difference],
        bound: float | Callable[[str], float],
    ) -> None:
        """Compare one fact's differences with its bound; a difference that is not a number fails.

        Args:
            fact: its name.
            found: its differences, in the order of their places.
            bound: one number, or a function from a place to a number.
        """
        if not found:
            return
        largest = max(found, key=lambda entry: entry[0])
        self.measured.setdefault(fact, {}).update(difference=largest[0], where=largest[1])
        for difference, where, expected, actual in found:
            allowed = bound(where) if callable(bound) else bound
            if not difference <= allowed:
                self._fail(fact, where, expected, actual, difference=difference, bound=allowed)
                return

    def _fail(self, fact: str, where: str, expected: Any, actual: Any, **more: float) -> None:
        self.failures.append({"fact": fact, "where": where, "expected": expected, "actual": actual, **more})

    def require(self, fact: str, where: str, expected: Any, actual: Any) -> None:
        """Compare two values that must be equal; the first difference of a fact is kept."""
        known = self.measured.setdefault(fact, {})
        if expected != actual and known.get("equal", True):
            known["equal"] = False
            self._fail(fact, where, expected, actual)
        else:
            known.setdefault("equal", True)


def compare(
    ranks: list[Facts],
    folder: Path,
    *,
    reference: Facts,
    reference_folder: Path,
    bounds: Bounds,
    replicas: str,
) -> Comparison:
    """Compare the measurements of all ranks of a cell with those of the reference.

    Args:
        ranks: every rank's file.
        folder: where rank 0 wrote its tensors.
        reference: the reference's file.
        reference_folder: where its tensors are.
        bounds: how far they may be apart.
        replicas: ``all``, ``some`` or ``none``: how much of the model every rank must hold whole.
    """
    comparison = Comparison()
    ours, theirs = ranks[0]["steps"], reference["steps"]
    comparison.require("steps", "in all", len(theirs), len(ours))
    pairs = list(zip(theirs, ours, strict=False))
    for step, (one, two) in enumerate(pairs, start=1):
        comparison.require("skipped", f"step {step}", one["skipped"], two["skipped"])
    _check_rates(comparison, ranks, theirs)
    comparison.note("loss", _numbers(pairs, "loss", relative=False), bounds.loss)
    comparison.note("gradient norm", _numbers(pairs, "grad_norm", relative=True), bounds.norm)
    _check_validation(comparison, ranks, reference["validations"], bounds)
    _check_samples(comparison, ranks, theirs)
    _check_ranks_agree(comparison, ranks)
    for fact, kind, bound in (
        ("first gradient", GRADIENT, bounds.for_gradient),
        ("first update", CHANGED, bounds.for_update),
        ("weights", WEIGHT, bounds.weights),
    ):
        expected, actual = read_tensors(reference_folder, kind), read_tensors(folder, kind)
        comparison.require(fact, "names", sorted(expected), sorted(actual))
        if kind != GRADIENT:
            expected, actual = _seen(expected), _seen(actual)
        comparison.note(fact, list(_tensors(expected, actual)), bound)
    _check_replicas(comparison, ranks, replicas, names=set(expected))
    return comparison


def _check_rates(comparison: Comparison, ranks: list[Facts], reference: list[Facts]) -> None:
    """The rate that a strategy reports, and those that every rank's optimizer stepped with, in all parameter groups."""
    found = []
    for index, expected in enumerate(reference):
        for number, rank in enumerate(ranks):
            if index >= len(rank["steps"]):
                continue
            step = rank["steps"][index]
            if not (step["used"] or step["skipped"]):
                comparison.require("learning rate", f"step {index + 1}, used by rank {number}", "one", "none")
            for lr in [step["lr"], *step["used"]]:
                found.append((abs(lr - expected["lr"]), f"step {index + 1}, rank {number}", expected["lr"], lr))
    comparison.note("learning rate", found, RATE)


def _check_validation(comparison: Comparison, ranks: list[Facts], reference: list[Facts], bounds: Bounds) -> None:
    """Every rank's mean loss over all targets of the validation file, and their number."""
    found = []
    for number, rank in enumerate(ranks):
        comparison.require("validations", f"of rank {number}", len(reference), len(rank["validations"]))
        for expected, actual in zip(reference, rank["validations"], strict=False):
            where = f"step {expected['after_step']}, rank {number}"
            comparison.require("validation targets", where, expected["targets"], actual["targets"])
            difference = float("inf") if actual["loss"] is None else abs(actual["loss"] - expected["loss"])
            found.append((difference, where, expected["loss"], actual["loss"]))
    comparison.note("validation loss", found, bounds.validation)


def _numbers(pairs: list[tuple[Facts, Facts]], key: str, *, relative: bool) -> list[tuple[float, str, Any, Any]]:
    found = []
    for step, (one, two) in enumerate(pairs, start=1):
        expected, actual = one[key], two[key]
        if actual is None:  # it was not finite
            found.append((float("inf"), f"step {step}", expected, actual))
            continue
        difference = abs(actual - expected) / (abs(expected) if relative else 1.0)
        found.append((difference, f"step {step}", expected, actual))
    return found


def _tensors(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> Iterator[tuple[float, str, float, float]]:
    """Relative L2 distance per parameter, and both norms."""
    for name, one in expected.items():
        two = actual.get(name)
        if two is None:
            continue  # the comparison of names reports it
        size, other = (float(torch.linalg.vector_norm(value.double())) for value in (one, two))
        if two.shape != one.shape:
            yield float("inf"), f"{name}, shape {tuple(two.shape)} instead of {tuple(one.shape)}", size, other
            continue
        distance = float(torch.linalg.vector_norm(two.double() - one.double()))
        yield (distance / size if size else distance), name, size, other


def _seen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part of every weight that affects the loss: all but the keys' biases, the middle third of ``(3C,)``.

    Softmax ignores what all keys share, so the gradient of these biases is only rounding error. Adam takes full steps
    along it, so these biases end at arbitrary values in every precision.
    """
    return {name: _without_keys(value) if name.endswith("attn.qkv.bias") else value for name, value in weights.items()}


def _without_keys(bias: Tensor) -> Tensor:
    queries, _, values = bias.tensor_split(3)
    return torch.cat([queries, values])


def _check_samples(comparison: Comparison, ranks: list[Facts], reference: list[Facts]) -> None:
    """Together the data ranks read each of the reference's samples once; peers of one data rank read the same."""
    shares: dict[int, list[tuple[int, Facts]]] = {}
    for number, rank in enumerate(ranks):
        shares.setdefault(rank["data_rank"], []).append((number, rank))
    for index, step in enumerate(reference):
        together: Counter[str] = Counter()
        for data_rank, peers in shares.items():
            taken = [(number, rank["steps"][index]["samples"]) for number, rank in peers if len(rank["steps"]) > index]
            taken = [(number, samples) for number, samples in taken if samples]  # middle stages of a pipeline read none
            for number, samples in taken[1:]:
                where = f"step {index + 1}, rank {number} beside rank {taken[0][0]} of data rank {data_rank}"
                comparison.require("samples", where, taken[0][1], samples)
            together.update(taken[0][1] if taken else [])
        comparison.require("samples", f"step {index + 1}", step["samples"], sorted(together.elements()))


def _check_ranks_agree(comparison: Comparison, ranks: list[Facts]) -> None:
    """Every rank reports the same loss, norm, learning rate and skipped steps."""
    for number, rank in enumerate(ranks[1:], start=1):
        for index, (one, two) in enumerate(zip(ranks[0]["steps"], rank["steps"], strict=False), start=1):
            for key in ("loss", "grad_norm", "lr", "skipped"):
                comparison.require("reports of all ranks", f"step {index}, {key} of rank {number}", one[key], two[key])


def _check_replicas(comparison: Comparison, ranks: list[Facts], replicas: str, *, names: set[str]) -> None:
    """Ranks that hold a weight whole hold the same bits, and every rank holds as many as its strategy says."""
    holders: dict[str, tuple[int, list[Any]]] = {}
    shared = 0
    for number, rank in enumerate(ranks):
        for name, value in rank["replicas"].items():
            if name not in holders:
                holders[name] = (number, value)
                continue
            first, expected = holders[name]
            shared += 1
            where = f"{name} of rank {number} beside rank {first}"
            comparison.require("replicated weights", where, expected, value)
        if replicas == "all":
            held = len(names & rank["replicas"].keys())
            comparison.require("replicated weights", f"number held by rank {number}", len(names), held)
    if replicas == "some" and len(ranks) > 1:
        comparison.require("replicated weights", "any held by two ranks", True, shared > 0)
