"""What a resume may change, and what only with ``--allow_changed``."""

import json

import pytest
from messages import without_paths
from run_folders import errors, record, resume
from small_run import RECIPE, TOKENS, random_ids, write_recipe, write_tokens

from dsgpt.checkpoints.manifest import Change, read_run_state
from dsgpt.record.equal_work import judge
from dsgpt.record.runs import read_run
from dsgpt.training.run_description import CHANGEABLE, CHANGES_KEY


@pytest.fixture
def faster(tmp_path):
    """The recipe with three times the learning rate and other betas."""
    params = RECIPE["optimizer"]["params"] | {"lr": 0.003, "betas": [0.8, 0.9]}
    return write_recipe(tmp_path / "faster.json", optimizer={"type": "AdamW", "params": params})


def losses(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def compared(finished_run, run_dir):
    """How the charts judge the finished run and one that was resumed."""
    return judge([read_run(finished_run / "run", name="whole"), read_run(run_dir, name="resumed")])


def test_the_split_of_the_batch_may_change(stopped, finished_run):
    assert resume(stopped, finished_run, micro_batch_size_per_gpu=2) == 0
    expected, found = losses(finished_run / "run"), losses(stopped)
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - expected[step]) <= 2e-4 for step in expected)
    assert record(stopped)[CHANGES_KEY] == []
    assert compared(finished_run, stopped).line() == "same work: yes"


def test_a_changed_recipe_is_refused_and_the_error_names_the_flag(stopped, finished_run, faster, capsys, snapshot):
    assert resume(stopped, finished_run, deepspeed_config=faster) == 2
    (line,) = errors(capsys)
    assert without_paths(line, stopped) == snapshot


def test_an_allowed_change_of_the_recipe_takes_effect_and_is_recorded(stopped, finished_run, faster, capsys):
    assert resume(stopped, finished_run, deepspeed_config=faster, allow_changed="data,recipe") == 0
    assert "--allow_changed: optimizer was {'lr': 0.001, " in capsys.readouterr().out
    (change,) = record(stopped)[CHANGES_KEY]
    assert (change["step"], change["name"]) == (9, "optimizer")
    assert (change["before"]["lr"], change["after"]["lr"]) == (0.001, 0.003)
    assert change["after"]["betas"] == [0.8, 0.9]
    rates = [json.loads(line).get("lr") for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    before, after = (next(rate for rate in order if rate is not None) for order in (rates[::-1], rates[1:]))
    assert before != after
    state = read_run_state(stopped / "step-00000012")
    assert state.changes == [Change(**change)]
    facts = {difference.fact for difference in compared(finished_run, stopped).differences}
    assert "changed at resume optimizer after step 9" in facts


def test_a_change_stays_in_the_record_after_another_resume(stopped, finished_run, faster):
    changed = {"deepspeed_config": faster, "allow_changed": "recipe"}
    assert resume(stopped, finished_run, **changed) == 0
    (stopped / "RUN_COMPLETE.txt").unlink()
    (change,) = record(stopped)[CHANGES_KEY]
    assert resume(stopped, finished_run, deepspeed_config=faster) == 0
    assert record(stopped)[CHANGES_KEY] == [change]


def test_other_data_needs_allow_changed_data(stopped, finished_run, tmp_path, capsys):
    other = write_tokens(tmp_path / "other.bin", random_ids(TOKENS, seed=9))
    assert resume(stopped, finished_run, train_data_path=other, allow_changed="recipe") == 2
    assert "add --allow_changed data" in errors(capsys)[0]
    assert resume(stopped, finished_run, train_data_path=other, allow_changed="data") == 0
    assert [change["name"] for change in record(stopped)[CHANGES_KEY]] == ["train data"]


def test_a_change_that_was_reverted_counts(stopped, finished_run, tmp_path):
    """The record then has the recipe of a run that was never changed, but the weights were trained with both."""
    params = RECIPE["optimizer"]["params"] | {"betas": [0.8, 0.9]}
    other = write_recipe(tmp_path / "other.json", optimizer={"type": "AdamW", "params": params})
    changed = {"max_train_steps": 12, "allow_changed": "recipe"}
    assert resume(stopped, finished_run, deepspeed_config=other, **changed) == 0
    assert resume(stopped, finished_run, max_train_steps=13, allow_changed="recipe") == 0
    verdict = compared(finished_run, stopped)
    assert verdict.mark == "NOT EQUAL WORK"  # one step more
    assert {difference.fact for difference in verdict.differences} >= {
        "changed at resume optimizer after step 9",
        "changed at resume optimizer after step 12",
    }


def test_data_of_another_length_keeps_the_sums(stopped, finished_run, tmp_path):
    """Epochs of 5 steps before, of 7 afterwards: every step belongs to one record of an epoch."""
    other = write_tokens(tmp_path / "other.bin", random_ids(7 * 8 * 16 + 1, seed=9))
    assert resume(stopped, finished_run, train_data_path=other, allow_changed="data") == 0
    found = record(stopped)
    assert sum(epoch["steps"] for epoch in found["epochs"]) == found["summary"]["optimizer_steps"] == 12


def test_a_finished_run_may_be_made_longer(copied_run, finished_run, capsys):
    assert resume(copied_run, finished_run, max_train_steps=15) == 2
    assert "total steps is 15 but the finished run" in errors(capsys)[0]
    assert resume(copied_run, finished_run, max_train_steps=15, allow_changed="recipe") == 0
    assert record(copied_run)["summary"]["optimizer_steps"] == 15
    assert sorted(losses(copied_run)) == list(range(1, 16))
    assert record(copied_run)["status"] == "completed"


def test_a_run_cannot_end_before_its_checkpoint(stopped, finished_run, capsys, snapshot):
    assert resume(stopped, finished_run, max_train_steps=7, allow_changed="recipe") == 2
    assert without_paths(errors(capsys)[0], stopped) == snapshot


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seed": 7}, "seed"),
        ({"seq_length": 8, "global_batch_size": 16}, "sequence length"),
        ({"global_batch_size": 4}, "global batch"),
        ({"dropout": 0.1}, "model"),
        ({"precision": "bf16"}, "precision"),
    ],
)
def test_some_things_never_change(stopped, finished_run, capsys, changes, name):
    assert resume(stopped, finished_run, allow_changed="data,recipe", **changes) == 2
    assert any(line.startswith(f"error: --resume: {name} is ") for line in errors(capsys))
    assert not any(name in names for names in CHANGEABLE.values())


def test_adams_implementation_may_change(stopped, finished_run, tmp_path):
    """A machine without a compiler uses PyTorch's Adam instead of DeepSpeed's CPU Adam."""
    params = RECIPE["optimizer"]["params"] | {"torch_adam": True}
    recipe = write_recipe(tmp_path / "torch.json", optimizer={"type": "AdamW", "params": params})
    assert resume(stopped, finished_run, deepspeed_config=recipe) == 0
