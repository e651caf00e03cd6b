"""Whether runs did the same work, and whether they ran on the same machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsgpt.common.text import grouped, instruction_words
from dsgpt.config.options import LATER_FACTS, RESUME_FACTS, TRAINING_FACTS, WORK_FACTS
from dsgpt.record.runs import Run
from dsgpt.record.work import HARDWARE, INSTRUCTIONS, Worked, differences

# Whether runs did the same work and reached the same losses: what differs, what is unknown, and the verdict.

MODEL_FACTS = frozenset(fact for fact in WORK_FACTS if fact.startswith("model "))

LOSS_TOLERANCE = {"fp32": 0.02}
"""Largest difference at which fp32 losses count as equal, nats per token: rounding differences grow over many steps."""
LOSS_TOLERANCE_OTHERWISE = 0.05
"""Tolerance in 16-bit precisions, or if the precision is unknown."""


@dataclass(frozen=True)
class Difference:
    """A fact that differs: one value per run, in the order of the runs; None if a run did not record it."""

    fact: str
    values: tuple[Any, ...]

    def text(self, names: Sequence[str]) -> str:
        """The difference as ``global batch 32 vs 128``; with more than two runs, each further value names its runs."""
        labels = [show(value) for value in self.values]
        if len(set(labels)) < len({repr(value) for value in self.values}):
            labels = [repr(value) for value in self.values]
        groups = grouped(zip(labels, names, strict=True))
        if len(names) == 2:
            return f"{self.fact} {' vs '.join(groups)}"
        first, *others = groups
        return f"{self.fact} {first} vs " + ", ".join(f"{value} ({', '.join(groups[value])})" for value in others)


@dataclass(frozen=True)
class Verdict:
    """Whether runs did the same work."""

    names: tuple[str, ...]
    differences: tuple[Difference, ...]
    unknown: dict[str, tuple[str, ...]]
    """Facts that a run did not record and that are not known to differ, by run."""
    facts: int
    """Number of facts compared."""
    bits: bool | None = None
    """Whether all ended with the same weights, to the bit; None if not all trained with ``--exact``."""

    @property
    def answer(self) -> str:
        """yes, no or unknown. A known difference makes it no, whatever else is unknown; a single run is unknown."""
        if self.differences:
            return "no"
        return "unknown" if self.unknown or len(self.names) < 2 else "yes"

    @property
    def mark(self) -> str:
        """The label of a figure that compares these runs; empty for equal work."""
        if self.answer == "yes" or len(self.names) < 2:
            return ""
        if self.answer == "unknown":
            return "WORK NOT VERIFIED"
        same_amount = all(difference.fact.startswith(TRAINING_FACTS) for difference in self.differences)
        return "NOT THE SAME TRAINING" if same_amount else "NOT EQUAL WORK"

    def differences_text(self) -> str:
        """Differences in words, work before recipe; empty if none is known."""
        return "; ".join(difference.text(self.names) for difference in self.differences)

    def unknown_text(self) -> str:
        """Facts that were not recorded, by run, in words; empty if there are none."""
        lines = []
        for name, facts in self.unknown.items():
            whole_model = set(facts) >= MODEL_FACTS
            words = ["model" if whole_model and fact in MODEL_FACTS else fact for fact in facts]
            what = "its work" if len(facts) == self.facts else ", ".join(dict.fromkeys(words))
            lines.append(f"{name} did not record {what}")
        return "; ".join(lines)

    def line(self) -> str:
        """The verdict on one line, beginning with "same work: yes", "same work: no" or "same work: unknown"."""
        reasons = [self.differences_text(), self.unknown_text()]
        if len(self.names) < 2:
            reasons = ["one run, nothing to compare it with"]
        reason = "; ".join(text for text in reasons if text)
        bits = "" if self.answer != "yes" or self.bits is None else ", to the bit" if self.bits else ", not to the bit"
        return f"same work: {self.answer}{bits}" + (f" ({reason})" if reason else "")


def compared_facts(runs: Sequence[Worked]) -> list[str]:
    """The facts by which these runs are compared: all but those of ``LATER_FACTS`` that no run recorded.

    If a run was resumed, ``RESUME_FACTS`` are compared even if no run recorded them: a missing fact may have changed.
    """
    later = LATER_FACTS - RESUME_FACTS if any(run.resumed for run in runs) else LATER_FACTS
    return [fact for fact in runs[0].work if fact not in later or any(run.work[fact] is not None for run in runs)]


def judge(runs: Sequence[Worked]) -> Verdict:
    """Compare every fact over all ``runs``; a value that was not recorded is unknown."""
    differences: list[Difference] = []
    unknown: dict[str, list[str]] = {}
    facts = compared_facts(runs)
    for fact in facts:
        values = [run.work[fact] for run in runs]
        differing = list(_differences(fact, values))
        recorded = [value for value in values if value is not None]
        disagree = any(value != recorded[0] for value in recorded)
        differences += differing
        for run, value in zip(runs, values, strict=True):
            if not differing and (value is None or (disagree and _holds_null(value))):
                unknown.setdefault(run.name, []).append(fact)
    return Verdict(
        names=tuple(run.name for run in runs),
        differences=tuple(differences),
        unknown={name: tuple(missing) for name, missing in unknown.items()},
        facts=len(facts),
        bits=None if None in (weights := {run.weights for run in runs}) else len(weights) == 1,
    )


def show(value: Any, *, whole: bool = False) -> str:
    """The value of a fact as text; a long text is cut at the end unless ``whole``."""
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:g}"
    if isinstance(value, dict):
        shown = {key: "not given" if item is None else show(item, whole=whole) for key, item in value.items()}
        text = ", ".join(f"{key} {item}" for key, item in shown.items()) or "none"
        return text if whole or len(text) <= 120 else f"{text[:119]}…"
    text = str(value)
    return text if whole or len(text) <= 40 else f"{text[:10]}…"


def work_stamps(verdict: Verdict) -> list[str]:
    """The warning on every picture that compares runs, unless their work was the same."""
    return [f"{verdict.mark}: {verdict.differences_text() or verdict.unknown_text()}"] if verdict.mark else []


def inference_stamps(runs: Sequence[Run]) -> list[str]:
    """The warning that latencies are for different numbers of tokens."""
    return [
        f"NOT EQUAL INFERENCE: {difference.text([run.name for run in runs])}"
        for fact in ("new tokens", "prompt tokens")
        for difference in _differences(fact, [getattr(run, fact.replace(" ", "_")) for run in runs])
    ]


def equal_loss_line(baseline: Run, other: Run) -> str:
    """One line beginning with "equal loss: " and yes, no or unknown, with the largest differences found.

    Judged over every optimizer step and evaluation that both runs recorded, so one bad step is enough for a "no".
    """
    verdict = judge([baseline, other])
    tolerance = LOSS_TOLERANCE.get(baseline.work["precision"], LOSS_TOLERANCE_OTHERWISE)
    gaps: dict[str, tuple[float, float]] = {}
    for kind, (ours, theirs) in {
        "training": (baseline.train_curve.at_steps(), other.train_curve.at_steps()),
        "validation": (baseline.val_curve.at_steps(), other.val_curve.at_steps()),
    }.items():
        if common := ours.keys() & theirs.keys():  # of equally large ones that of the first step
            gap, earlier = max((abs(ours[step] - theirs[step]), -step) for step in common)
            gaps[kind] = gap, -earlier
    largest = [f"{gap:.2g} in {kind} loss at step {step:,.0f}" for kind, (gap, step) in gaps.items()]
    pair = f"{other.name} against {baseline.name}"
    if not largest:
        return f"equal loss: unknown ({pair}: no optimizer step at which both runs recorded a loss)"
    measured = "largest difference per step " + ", ".join(largest)
    if verdict.answer == "no":
        return f"equal loss: unknown ({pair}: not the same training, so not judged; {measured})"
    answer = "yes" if max(gap for gap, _ in gaps.values()) <= tolerance else "no"
    doubt = "" if verdict.answer == "yes" else "; whether the work was the same is unknown"
    return f"equal loss: {answer} ({pair}: {measured}; tolerance {tolerance:g} nats per token{doubt})"


def _holds_null(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and any(map(_holds_null, value.values())))


def _differences(fact: str, values: Sequence[Any]) -> Iterator[Difference]:
    """The leaves of ``values`` that differ between the runs that recorded them."""
    recorded = [value for value in values if value is not None]
    if all(value == recorded[0] for value in recorded):
        return
    if not all(isinstance(value, dict) for value in recorded):
        yield Difference(fact, tuple(values))
        return
    for key in sorted({key for value in recorded for key in value}):
        leaves = [None if value is None else value.get(key, "absent") for value in values]
        yield from _differences(f"{fact} {key}", leaves)


# The ends, machines and setups of runs, and warnings if figures of different ones are compared.


def stamps(runs: Sequence[Run]) -> list[str]:
    """Warnings about runs that did not reach their end, records of later versions, other machines and setups."""
    partial = [f"{run.name} is {run.status}" for run in runs if run.status not in {None, "completed"}]
    lines = ["PARTIAL RUN: " + ", ".join(partial)] if partial else []
    lines += [f"LATER SCHEMA: {run.name} {run.later_schema}" for run in runs if run.later_schema]
    if len(_all(runs, HARDWARE)) > 1 or len(_all(runs, INSTRUCTIONS)) > 1:
        machines = [(run.name, run.machine or "not recorded", instruction_words(run.instruction_sets)) for run in runs]
        used = [f"{name}: {machine} ({sets})" for name, machine, sets in machines]
        lines.append("DIFFERENT HARDWARE: " + "; ".join(used))
    for run in runs:
        if changed := differences(run.segments, noted=False):
            lines.append(f"SEGMENTS DIFFER: {run.name}: " + "; ".join(changed))
        if (last := [each.last_step for each in run.segments if not each.setup]) and last[0]:
            lines.append(f"NOT RECORDED: how {run.name} executed its steps 1 to {last[0]:,}")
    busy = [f"A BUSY MACHINE: {run.name}: {each.busy}" for run in runs for each in run.segments if each.busy]
    return [*lines, *dict.fromkeys(busy)]


def _all(runs: Sequence[Run], what: str) -> list[str]:
    """Hardware, or instruction sets, that were recorded, each once."""
    return list(dict.fromkeys(value for run in runs for each in run.segments if (value := each.setup.get(what))))


def machine_line(runs: Sequence[Run]) -> str:
    """The machine in one line, with the devices of each run and the runs that did not record the machine."""
    machines, sets = _all(runs, HARDWARE), _all(runs, INSTRUCTIONS)
    unrecorded = [run.name for run in runs if run.machine is None]
    if not machines:
        return "machine: not recorded"
    machine = "several machines or devices"
    if len(machines) == 1 and len(sets) < 2:
        machine = f"machine: {machines[0]} ({instruction_words(', '.join(sets))})"
    if unrecorded:
        machine += f" (not recorded by {', '.join(unrecorded)})"
    users = grouped((run.devices, run.name) for run in runs if run.devices)
    devices = "; ".join(f"{share}: {', '.join(names)}" for share, names in users.items())
    return f"{machine}. {devices}." if devices else f"{machine}."
