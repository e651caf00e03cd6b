"""The fault campaign, and its core."""

import json
import signal
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY
from suite_commands import REFERENCE

from dsgpt.benchmarks import faults
from dsgpt.benchmarks import faults_kinds as kinds
from dsgpt.benchmarks import faults_kinds as suite
from dsgpt.benchmarks.faults_runs import Missed, Runs, resumed_from
from dsgpt.benchmarks.frame import run_suite
from dsgpt.config.options import SAVE_MODES

# `python src/benchmark.py faults`: what is planned, the command, its record and its page.


RECORD = REPOSITORY / REFERENCE / "faults.json"


def test_kills_are_the_same_for_a_seed_and_cover_all_combinations():
    kills = faults.seeded_kills(faults.KILLS, seed=faults.SEED)
    assert kills == faults.seeded_kills(faults.KILLS, seed=faults.SEED)
    assert kills != faults.seeded_kills(faults.KILLS, seed=faults.SEED + 1)
    assert len({kill.name for kill in kills}) == faults.KILLS == 40
    assert Counter(kill.run for kill in kills) == dict.fromkeys(faults.RUNS, 8)
    assert Counter(kill.moment for kill in kills) == dict.fromkeys(faults.KILL_MOMENTS, 20)
    for run in set(faults.RUNS) - {"baseline"}:
        own = [kill for kill in kills if kill.run == run]
        assert {(kill.victim, kill.moment) for kill in own} == set(product(faults.VICTIMS, faults.KILL_MOMENTS))
        assert {(kill.moment, kill.save_mode) for kill in own} == set(product(faults.KILL_MOMENTS, SAVE_MODES))
    assert all(0 < kill.step < faults.STEPS - 1 for kill in kills)
    assert all(kill.step % faults.SAVE_EVERY == 0 for kill in kills if kill.moment == "saving")


def test_the_committed_record_holds_the_whole_campaign():
    record = json.loads(RECORD.read_text())
    assert Counter(fault["kind"] for fault in record["faults"]) == Counter(
        fault.kind for fault in kinds.all_faults(kills=faults.KILLS, seed=faults.SEED)
    )
    assert {fault["status"] for fault in record["faults"]} == {"passed"}


def failing(_runs):
    raise Missed("it ended before step 9")


def test_a_fault_that_cannot_be_caused_counts_as_failed(tmp_path, monkeypatch, capsys):
    good = kinds.Fault(kind="kill", name="good", attempt=lambda _: faults.Outcome(kind="kill", name="good"))
    bad = kinds.Fault(kind="damage", name="bad", attempt=failing)
    assert [outcome.status for outcome in kinds.try_faults(None, [good, bad])] == ["passed", "failed"]
    monkeypatch.setattr(suite, "core_faults", lambda: [good, bad])
    options = faults.FaultOptions(core=True, output=tmp_path / "out" / "faults.json")
    assert run_suite(faults.Faults, options, repository=REPOSITORY) == 1
    assert "[ 2/2] bad: FAILED" in capsys.readouterr().out
    assert json.loads(options.output.read_text())["faults"][1]["wrong"] == "it ended before step 9"
    assert "* bad: **NO**: it ended before step 9" in options.output.with_suffix(".md").read_text()


def test_the_page_lists_faults_that_were_not_run():
    record = json.loads(RECORD.read_text())
    fault = next(fault for fault in record["faults"] if fault["kind"] == "disk")
    fault |= {"status": "not run", "not_run": "this user may not mount", "measured": {}, "said": []}
    assert f"* {fault['name']}: not run: this user may not mount" in faults.faults_page(record, source="here")


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("resuming from run/step-00000008 (ddp on 2 ranks) as ddp on 2 ranks", 8),
        ("run holds a finished run; nothing to do", 24),
        ("run holds no checkpoint yet: starting from the first step", 0),
    ],
)
def test_the_step_from_which_a_run_continued(line, step):
    """A short run may end before its ranks notice that their launcher is gone: then nothing is lost."""
    assert resumed_from(f"batch       12 sequences\n{line}\n", taken=24) == step


@pytest.mark.parametrize(
    ("to", "code", "status", "finished"),
    [
        ("the launcher", -signal.SIGUSR1, "completed", True),
        ("the launcher", -signal.SIGUSR1, "interrupted", False),
        ("the launcher", 0, "completed", False),  # it passed the signal on, and the run ignored it
        ("rank 1", -signal.SIGUSR1, "completed", False),
    ],
)
def test_a_run_may_end_before_it_notices_that_its_launcher_is_gone(to, code, status, finished):
    assert (
        kinds.finished_unaware(kinds.SentSignal(run="ddp", signal=signal.SIGUSR1, to=to), code=code, status=status)
        is finished
    )


# Kills, signals and a restarted worker, under real launchers: the campaign's core.


class ForkedRuns(Runs):
    """Launches what is disturbed. The undisturbed and the resumed runs, which are compared with it, are forked."""

    def train(self, run: str, run_dir: Path, *more: str) -> tuple[int, str]:
        ranks = faults.RUNS[run].ranks
        words = [*self.words(run, run_dir, {}), *more]
        script = REPOSITORY / "src" / "gpt2.py"
        done = run_script(script, words, ranks=ranks if ranks > 1 else None, cwd=run_dir.parent)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The campaign's runs. An undisturbed run is trained when a test first needs it."""
    return ForkedRuns(tmp_path_factory.mktemp("faults"), repository=REPOSITORY)


@pytest.mark.parametrize("fault", kinds.core_faults(), ids=lambda fault: fault.name)
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
        log.write_text(
            "\n".join([*lines[:place], lines[place].replace(f'"{key}": ', f'"{key}": 1'), *lines[place + 1 :], ""])
        )
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
