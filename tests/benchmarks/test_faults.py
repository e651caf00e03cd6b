"""The fault campaign, and its core."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
from forked_ranks import launches_fork, run_script
from small_run import REPOSITORY

from dsgpt.benchmarks import faults
from dsgpt.benchmarks import faults_kinds as kinds
from dsgpt.benchmarks.faults_runs import Missed, Resumed, Runs
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.records import REFERENCE
from dsgpt.config.options import SAVE_MODES

# `python src/benchmark.py faults`: what is planned, the command, its record and its page.


RECORD = REPOSITORY / REFERENCE / "faults.json"


def test_the_committed_record_holds_the_whole_campaign_with_the_seeded_kills():
    record = json.loads(RECORD.read_text())
    planned = kinds.all_faults(kills=faults.KILLS, seed=faults.SEED)
    expected = [(one.kind, one.name) for one in planned]
    assert [(fault["kind"], fault["name"]) for fault in record["faults"]] == expected
    assert {fault["status"] for fault in record["faults"]} == {"passed"}
    kills = faults.seeded_kills(faults.KILLS, seed=faults.SEED)
    assert {(kill.run, kill.victim, kill.moment) for kill in kills} >= set(
        product(set(faults.RUNS) - {"baseline"}, faults.VICTIMS, faults.KILL_MOMENTS)
    )
    assert {(kill.moment, kill.save_mode) for kill in kills} == set(product(faults.KILL_MOMENTS, SAVE_MODES))


@pytest.mark.parametrize(
    ("partial", "mode", "output", "step"),
    [
        (8, "sync", "", 8), (4, "async", "", 4), (0, "async", "", 8), (0, "sync", "", 0),
        (0, "async", "step      8/24  saved in 0.4 s", 0), (0, "async", "step      4/24  saved in 0.4 s", 8),
    ],
)  # fmt: skip
def test_a_save_that_was_announced_must_not_be_lost(partial, mode, output, step):
    resumed = Resumed(output="", resumed_from=4, taken=9, wrong="")
    assert kinds.save_cut_off(partial, mode, resumed, output) == step
    assert kinds.save_cut_off(0, mode, replace(resumed, resumed_from=8), "") == 0


def test_a_fault_that_cannot_be_caused_counts_as_failed(tmp_path, monkeypatch, capsys):
    """One that this machine cannot run does not, but the page lists it."""
    good = kinds.Fault(kind="kill", name="good", attempt=lambda _: faults.Outcome())
    bad = kinds.Fault(kind="damage", name="bad", attempt=Mock(side_effect=Missed("it ended before step 9")))
    left_out = kinds.Fault(kind="disk", name="disk", attempt=lambda _: faults.Outcome(not_run="it may not mount"))
    monkeypatch.setattr(kinds, "core_faults", lambda: [good, bad, left_out])
    options = faults.FaultOptions(core=True, output=tmp_path / "out" / "faults.json")
    assert run_suite(faults.Faults, options, repository=REPOSITORY) == 1
    assert "[2/3] bad: FAILED" in capsys.readouterr().out
    statuses = [one["status"] for one in json.loads(options.output.read_text())["faults"]]
    assert statuses == ["passed", "failed", "not run"]
    page = options.output.with_suffix(".md").read_text()
    assert "* bad: **NO**: it ended before step 9" in page
    assert "* disk: not run: it may not mount" in page


# Kills, signals and a restarted worker, under real launchers: the campaign's core.


class ForkedRuns(Runs):
    """Launches what is disturbed. The undisturbed and the resumed runs, which are compared with it, are forked."""

    def train(self, run: str, run_dir: Path, *more: str, prefix: Sequence[str] = ()) -> tuple[int, str]:
        if prefix:
            return super().train(run, run_dir, *more, prefix=prefix)
        ranks = faults.RUNS[run].ranks
        words = [*self.words(run, run_dir, {}), *more]
        script = REPOSITORY / "src" / "gpt2.py"
        done = run_script(script, words, ranks=ranks if ranks > 1 else None, cwd=run_dir.parent)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The campaign's runs. An undisturbed run is trained when a test first needs it."""
    with launches_fork():
        return ForkedRuns(tmp_path_factory.mktemp("faults"), repository=REPOSITORY)


QUICK = ("zero1: all in the save",)
"""A kill under a launcher. The others are left to ``make test-slow``: two whole launches each. A signal meets a job of
Slurm in ``tests/clusters/test_slurm.py``."""


def marks(fault):
    return [] if fault.name.startswith(QUICK) else [pytest.mark.long]


OF_THE_MACHINE = [
    *(fault for fault in kinds.machine_faults() if fault.kind == "machine" and not fault.name.startswith("zero1")),
    *(fault for fault in kinds.machine_faults() if "`model-00001" in fault.name or "`manifest" in fault.name),
]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=marks(fault), id=fault.name) for fault in (*kinds.core_faults(), *OF_THE_MACHINE)],
)
def test_the_run_recovers(runs, fault):
    (outcome,) = kinds.try_faults(runs, [fault])
    assert outcome.status == "passed", outcome.wrong
    assert outcome.measured


def test_a_run_with_other_figures_is_noticed(runs):
    """A change of any compared figure is noticed, and so is a step that is missing or logged twice."""
    run_dir = runs.copied("baseline", "spoiled")
    log = run_dir / "metrics.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines()
    for key in ("loss", "grad_norm", "lr", "val_loss"):
        place = next(number for number, line in enumerate(lines) if f'"{key}": ' in line)
        other = lines[place].replace(f'"{key}": ', f'"{key}": 1')
        log.write_text("\n".join([*lines[:place], other, *lines[place + 1 :], ""]))
        assert f"{key} of step" in runs.difference("baseline", run_dir)
    log.write_text("\n".join([*lines[:5], *lines[6:], ""]))
    assert "it has other steps" in runs.difference("baseline", run_dir)
    log.write_text("\n".join([*lines, lines[5], ""]))
    assert "of step" in runs.difference("baseline", run_dir)
    log.write_text("\n".join([*lines, ""]))
    assert runs.difference("baseline", run_dir) == ""


def test_damage_that_resume_does_not_find_fails(runs, monkeypatch):
    """A campaign that could not fail would prove nothing."""
    plan = next(damage for damage in kinds.DAMAGES if damage.resumed_from == kinds.BEFORE)
    harmless = type(plan)(what="harmless", harm=lambda checkpoint: None, resumed_from=kinds.BEFORE, words=plan.words)
    monkeypatch.setattr("dsgpt.benchmarks.faults_kinds.DAMAGED_RUN", "baseline")
    wrong = kinds.try_damage(runs, harmless).wrong
    assert f"it resumed from step {kinds.NEWEST}" in wrong
    assert f"it did not print: {plan.words}" in wrong
