"""What a sweep trains and in which order, and which suites are refused before anything runs."""

from collections import Counter

import pytest
from messages import without_paths
from small_run import REPOSITORY, random_ids, write_tokens
from suite_commands import refusal
from sweep_files import cell, options, write_description

from dsgpt.benchmarks.sweep import run_sweep
from dsgpt.benchmarks.sweep_cells import (
    BATCH,
    SUITES,
    Cell,
    built_in,
    planned_work,
    read_description,
    require_equal_work,
)
from dsgpt.benchmarks.sweep_turns import ordered_turns
from dsgpt.common.errors import UserError

CELLS = [Cell(name=name, devices=1, launcher="python", flags=()) for name in "abcdef"]


@pytest.mark.parametrize(
    "arguments",
    [
        "run",
        "run --suite scalling --devices 1,x --repeats 0 --limit 0 --model_size huge --price -1 --pairs 3",
        "run --suite scaling --devices 3",
        "run --suite nowhere.json",
        "run --table-from nowhere.json",
        "compare",
        "compare a b",
        "compare a b --allow-unequal",
    ],
)
def test_mistakes(arguments, tmp_path, snapshot):
    assert refusal(*arguments.split(), cwd=tmp_path) == snapshot


def test_all_mistakes_of_a_description_are_reported_together(tmp_path, snapshot):
    wrong = [
        {"name": "a", "devices": 0, "flags": ["--run_typ", "x", "--seed", "many"], "flag": []},
        cell("b", "--resume", run_type="ddp", launcher="mpi"),
        cell("c d", run_type="ddp"),
        cell("c-d", devices=2, launcher="torchrun"),
        cell("e", devices=2),
        cell("f\x1b[2J", run_type="ddp", launcher=["torchrun"]),
        {"flags": 3},
    ]
    comparisons = [{"baseline": "q", "kind": "strong"}, {"baseline": "c d", "cells": ["c"]}]
    file = write_description(tmp_path, wrong, schema_version=1, comparisons=comparisons)
    with pytest.raises(UserError) as refused:
        read_description(file, devices=None)
    assert without_paths("\n".join(refused.value.problems), tmp_path) == snapshot


def test_a_description_on_some_devices_keeps_its_baseline(tmp_path):
    file = write_description(tmp_path, [cell("one"), cell("two", run_type="ddp", devices=2)])
    assert [one.name for one in read_description(file, devices=(1,)).cells] == ["one"]
    with pytest.raises(UserError, match=r"--devices 2: leaves out the baseline 'one'"):
        read_description(file, devices=(2,))


def test_every_repeat_has_all_cells_in_an_order_of_its_own():
    turns = ordered_turns(CELLS, repeats=4, seed=3)
    orders = [[turn.cell.name for turn in turns if turn.repeat == repeat] for repeat in (1, 2, 3, 4)]
    assert [turn.repeat for turn in turns] == sorted(turn.repeat for turn in turns)
    assert [turn.place for turn in turns] == list(range(1, 25))
    assert all(Counter(order) == Counter("abcdef") for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_the_seed_alone_draws_the_order_and_more_repeats_continue_it():
    turns = ordered_turns(CELLS, repeats=3, seed=3)
    assert ordered_turns(CELLS, repeats=5, seed=3)[: len(turns)] == turns
    assert ordered_turns(CELLS, repeats=3, seed=4) != turns


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Flags of data for the largest batch of a suite on 8 devices."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("train", "val")):
        write_tokens(folder / f"{name}.bin", random_ids(16 * BATCH * 8 + 1, seed=number))
    words = [word for name in ("train", "val") for word in (f"--{name}_data_path", str(folder / f"{name}.bin"))]
    return [*words, "--model_size", "demo", "--seq_length", "16", "--max_train_steps", "4", "--device", "cpu"]


def works_of(suite, data, tmp_path):
    return {
        one.name: planned_work(
            one, [*data, *one.flags, "--checkpoint_path", str(tmp_path / "run")], repository=REPOSITORY
        )
        for one in suite.cells
    }


@pytest.mark.parametrize("name", SUITES)
def test_the_built_in_suites_compare_equal_work(name, data, tmp_path):
    suite = built_in(name, devices=(1, 2, 8))
    assert len({one.folder for one in suite.cells}) == len(suite.cells)
    works = works_of(suite, data, tmp_path)
    assert [name for name, work in works.items() if work is None] == []
    require_equal_work(suite, works)
    compared = {name for plan in suite.comparisons for name in (plan.baseline, *plan.cells)}
    assert compared == works.keys()


def test_weak_scaling_keeps_the_batch_of_a_device_and_is_not_called_the_same_training(data, tmp_path):
    suite = built_in("scaling", devices=(1, 2, 4))
    strong, weak = suite.comparisons
    works = works_of(suite, data, tmp_path)
    assert {works[name]["global batch"] for name in strong.cells} == {BATCH}
    assert {works[name]["global batch"] / suite.cell(name).devices for name in weak.cells} == {BATCH}
    assert (strong.kind, weak.kind) == ("same training", "weak scaling")


def test_a_cell_with_another_batch_is_refused_before_anything_runs(tmp_path, snapshot):
    cells = [cell("one"), cell("larger", "--global_batch_size", "16"), cell("longer", "--max_train_steps", "7")]
    weak = {"name": "weak", "kind": "weak scaling", "baseline": "one", "cells": ["larger"]}
    same = {"name": "strong", "baseline": "one"}
    file = write_description(tmp_path, cells, comparisons=[same, weak])
    with pytest.raises(UserError) as refused:
        run_sweep(options(tmp_path, file), repository=REPOSITORY)
    assert "\n".join(refused.value.problems) == snapshot
    assert not (tmp_path / "out").exists()
