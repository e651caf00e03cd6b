"""``python src/benchmark.py recipes``: what it trains, how it chooses, its page, and the recipe that is shipped."""

import json

import pytest
from small_run import REPOSITORY
from suite_commands import refusal

from dsgpt.benchmarks import recipes as command
from dsgpt.benchmarks.recipes import (
    SEARCHES,
    SEED,
    SHIPPED_BEFORE,
    RecipesOptions,
    Search,
    Trial,
    other_seeds,
    run_recipes,
)


@pytest.mark.parametrize("arguments", ["--size huge", "--core", "--table-from no.json"])
def test_mistakes(arguments, tmp_path, snapshot):
    assert refusal("recipes", *arguments.split(), cwd=tmp_path) == snapshot


@pytest.mark.parametrize("size", SEARCHES)
def test_every_training_sees_the_same_tokens(size):
    search = SEARCHES[size]
    for trial in [SHIPPED_BEFORE, *search.grid()]:
        assert search.steps(trial) * trial.batch * search.length == search.tokens


def test_the_choice_is_made_on_one_seed_and_shown_on_others():
    best = Trial(batch=8, lr=1e-3)
    changed = SEARCHES["demo"].changes_of(best)
    assert {trial.seed for trial in changed} == {SEED}
    assert len(set(changed) - {best}) == 5
    assert SEED not in {trial.seed for trial in other_seeds(best)}
    assert {trial.lr for trial in other_seeds(best)} == {1e-3}


def test_a_rate_at_the_edge_is_not_chosen_and_the_best_change_is_repeated(tmp_path, monkeypatch, capsys):
    """With trainings that only pretend: the loss is made up from the settings."""
    trained = []

    def pretend(_self, search, trial):
        trained.append(trial)
        unstable = trial.lr > 4e-3 or (trial.lr == 4e-3 and trial.seed != SEED)
        loss = 9.0 if unstable else abs(trial.lr - 4e-3) * 100 + abs(trial.beta2 - 0.99)
        return {"size": search.size, **trial.as_dict(), "steps": 1, "val_loss": loss}

    search = Search(size="demo", length=128, tokens=1024, batches=(8,), rates=(1e-3, 2e-3, 4e-3, 8e-3))
    monkeypatch.setattr(command, "SEARCHES", {"demo": search})
    monkeypatch.setattr(command, "prepare_demo", lambda _repository, folder: folder)
    monkeypatch.setattr(command._RecipesCommand, "_train", pretend)
    record, page = tmp_path / "recipes.json", tmp_path / "recipes.md"
    options = RecipesOptions(output=record, page=page, keep=None, size=(), device="cpu")
    assert run_recipes(options, repository=REPOSITORY) == 0
    best = Trial(batch=8, lr=2e-3, beta2=0.99)
    assert set(trained[5:10]) == set(search.changes_of(Trial(batch=8, lr=2e-3)))  # side by side, in whatever order
    assert set(trained[10:13]) == set(other_seeds(best))
    assert set(trained[13:]) == set(other_seeds(SHIPPED_BEFORE))
    stages = [trial["stage"] for trial in json.loads(record.read_text())["trials"]]
    assert stages == 5 * ["grid"] + 5 * ["change"] + 3 * ["seed"] + 3 * ["before"]
    assert "| 8 | 0.002 | 0.05 | 0.99 | 0.1 | 0.1 | 1 | **0.2000** |" in page.read_text()
    assert "demo: validation loss 0.2000 with batch 8, lr 0.002" in capsys.readouterr().out
