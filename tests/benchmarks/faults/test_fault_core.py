"""Kills, signals and a restarted worker, under real launchers: the campaign's core.

``make faults`` is the whole campaign; its record is ``docs/faults.md``.
"""

from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY

from dsgpt.benchmarks.faults import RUNS
from dsgpt.benchmarks.faults_kinds import BEFORE, DAMAGES, NEWEST, core_faults, try_damage, try_faults
from dsgpt.benchmarks.faults_runs import Runs


class ForkedRuns(Runs):
    """Launches what is disturbed. The undisturbed and the resumed runs, which are compared with it, are forked."""

    def train(self, run: str, run_dir: Path, *more: str) -> tuple[int, str]:
        ranks = RUNS[run].ranks
        words = [*self.words(run, run_dir, {}), *more]
        script = REPOSITORY / "src" / "gpt2.py"
        done = run_script(script, words, ranks=ranks if ranks > 1 else None, cwd=run_dir.parent)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The campaign's runs. An undisturbed run is trained when a test first needs it."""
    return ForkedRuns(tmp_path_factory.mktemp("faults"), repository=REPOSITORY)


@pytest.mark.parametrize("fault", core_faults(), ids=lambda fault: fault.name)
def test_the_run_recovers(runs, fault):
    (outcome,) = try_faults(runs, [fault])
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
    plan = next(damage for damage in DAMAGES if damage.resumed_from == BEFORE)
    harmless = type(plan)(name="harmless", harm=lambda checkpoint: None, resumed_from=BEFORE, words=plan.words)
    monkeypatch.setattr("dsgpt.benchmarks.faults_kinds.DAMAGED_RUN", "baseline")
    wrong = try_damage(runs, harmless).wrong
    assert f"it resumed from step {NEWEST}" in wrong
    assert f"it did not print: {plan.words}" in wrong
