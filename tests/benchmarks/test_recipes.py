"""The search for recipes, and those that it found."""

import json
from dataclasses import asdict

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks import recipes
from dsgpt.benchmarks.frame import run_suite

# `python src/benchmark.py recipes`: what it trains, how it chooses, its page, and the recipe that is shipped.


def test_every_training_sees_the_same_tokens():
    for search in recipes.SEARCHES.values():
        for trial in [recipes.SHIPPED_BEFORE, *search.grid()]:
            assert search.steps(trial) * trial.batch * search.length == search.tokens


def test_a_rate_at_the_edge_is_not_chosen_and_the_best_change_is_repeated(tmp_path, monkeypatch, capsys):
    """With trainings that only pretend: the loss is made up from the settings."""
    trained = []

    def pretend(_self, search, trial):
        trained.append(trial)
        unstable = trial.lr > 4e-3 or (trial.lr == 4e-3 and trial.seed != recipes.SEED)
        loss = 9.0 if unstable else abs(trial.lr - 4e-3) * 100 + abs(trial.beta2 - 0.99)
        return {"size": search.size, **asdict(trial), "steps": 1, "val_loss": loss}

    search = recipes.Search(size="demo", length=128, tokens=1024, batches=(8,), rates=(1e-3, 2e-3, 4e-3, 8e-3))
    monkeypatch.setattr(recipes, "SEARCHES", {"demo": search})
    monkeypatch.setattr(recipes, "prepare_demo", lambda _repository, folder: folder)
    monkeypatch.setattr(recipes.Recipes, "_train", pretend)
    record, page = tmp_path / "recipes.json", tmp_path / "recipes.md"
    options = recipes.RecipesOptions(output=record, page=page, keep=None, size=(), device="cpu")
    assert run_suite(recipes.Recipes, options, repository=REPOSITORY) == 0
    best = recipes.Trial(batch=8, lr=2e-3, beta2=0.99)
    changes = search.changes_of(recipes.Trial(batch=8, lr=2e-3))
    assert set(trained[5:10]) == set(changes)  # side by side, in whatever order
    assert set(trained[10:13]) == set(recipes.other_seeds(best))
    assert set(trained[13:]) == set(recipes.other_seeds(recipes.SHIPPED_BEFORE))
    stages = [trial["stage"] for trial in json.loads(record.read_text())["trials"]]
    assert stages == 5 * ["grid"] + 5 * ["change"] + 3 * ["seed"] + 3 * ["before"]
    assert "| 8 | 0.002 | 0.05 | 0.99 | 0.1 | 0.1 | 1 | **0.2000** |" in page.read_text()
    assert "demo: validation loss 0.2000 with batch 8, lr 0.002" in capsys.readouterr().out


# The recipes of small models are those that the committed search chose.


@pytest.mark.parametrize("size", recipes.SEARCHES)
def test_the_shipped_recipe_is_the_one_that_was_chosen(size):
    """The demo has another text since, on which the rate that was chosen for it is too high: it takes half."""
    record = json.loads((REPOSITORY / "checkpoint/reference/cpu-2-cores/recipes.json").read_text(encoding="utf-8"))
    trial = next(trial for trial in record["trials"] if trial["size"] == size and trial["stage"] == "seed")
    chosen = recipes._settings(trial).recipe(steps=trial["steps"])
    shipped = json.loads((REPOSITORY / "ds_configs" / "sizes" / f"{size}.json").read_text(encoding="utf-8"))
    assert shipped.pop("zero_optimization")["stage"] == 1
    chosen["optimizer"]["params"]["lr"] *= 0.5 if size == "demo" else 1
    assert shipped == chosen
