"""Sweeps: how they are planned and compared, and the committed ones."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from small_run import REPOSITORY, command_line, random_ids, write_inputs, write_tokens
from test_running_sweeps import WORK, cell, made_up, options, planned, write_description

from dsgpt.benchmarks import sweep_cells
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.records import REFERENCE
from dsgpt.benchmarks.sweep import SweepSuite, cell_of, ordered_turns
from dsgpt.benchmarks.sweep_page import block_length, compare, speed_difference
from dsgpt.common.errors import UserError
from dsgpt.record.suites import State, read_sweep
from dsgpt.training.command import train

# What a sweep trains and in which order, and which suites are refused before anything runs.


CELLS = [planned(name) for name in "abcdef"]


def test_a_description_on_some_devices_keeps_its_baseline(tmp_path):
    file = write_description(tmp_path, [cell("one"), cell("two", run_type="ddp", devices=2)])
    assert [one.name for one in sweep_cells.read_description(file, devices=(1,)).cells] == ["one"]
    with pytest.raises(UserError, match=r"--devices 2: leaves out the baseline 'one'"):
        sweep_cells.read_description(file, devices=(2,))


def test_a_flag_of_a_cell_may_have_a_value_with_an_equals_sign():
    flags = ["--train_data_path=a=1/t.bin", "--deepspeed_config", "a=1/x.json", "--seed=1", "--seed", "2"]
    found = [sweep_cells.value_of(flags, f"--{name}") for name in ("train_data_path", "deepspeed_config", "seed", "x")]
    assert found == ["a=1/t.bin", "a=1/x.json", "2", None]


def test_every_repeat_has_all_cells_in_an_order_that_the_seed_alone_draws_and_more_repeats_continue_it():
    turns = ordered_turns(CELLS, repeats=4, seed=3)
    orders = [[turn.cell.name for turn in turns if turn.repeat == repeat] for repeat in (1, 2, 3, 4)]
    assert [turn.repeat for turn in turns] == sorted(turn.repeat for turn in turns)
    assert [turn.place for turn in turns] == list(range(1, 25))
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert ordered_turns(CELLS, repeats=5, seed=3)[: len(turns)] == turns
    assert ordered_turns(CELLS, repeats=4, seed=4) != turns


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Flags of data for the largest batch of a suite on 8 devices."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("train", "val")):
        write_tokens(folder / f"{name}.bin", random_ids(16 * sweep_cells.BATCH * 8 + 1, seed=number))
    words = [word for name in ("train", "val") for word in (f"--{name}_data_path", str(folder / f"{name}.bin"))]
    return [*words, "--model_size", "demo", "--seq_length", "16", "--max_train_steps", "4", "--device", "cpu"]


@pytest.mark.parametrize("name", sweep_cells.SUITES)
def test_the_built_in_suites_compare_equal_work(name, data, tmp_path):
    suite = sweep_cells.built_in(name, devices=(1, 2, 8))
    assert len({one.folder for one in suite.cells}) == len(suite.cells)
    words, works = [*data, "--checkpoint_path", str(tmp_path / "run")], {}
    for one in suite.cells:
        works[one.name] = sweep_cells.planned_work(one, [*words, *one.flags], repository=REPOSITORY)
    assert [name for name, work in works.items() if work is None] == []
    sweep_cells.require_equal_work(suite, works)
    assert {one for plan in suite.comparisons for one in (plan.baseline, *plan.cells)} == works.keys()
    if name == "scaling":  # weak scaling keeps the batch of a device, and is not called the same training
        strong, weak = suite.comparisons
        assert {works[one]["global batch"] for one in strong.cells} == {sweep_cells.BATCH}
        assert {works[one]["global batch"] / suite.cell(one).devices for one in weak.cells} == {sweep_cells.BATCH}
        assert (strong.kind, weak.kind) == ("same training", "weak scaling")


def test_a_cell_with_another_batch_is_refused_before_anything_runs(tmp_path, snapshot):
    cells = [cell("one"), cell("larger", "--global_batch_size", "16"), cell("longer", "--max_train_steps", "7")]
    weak = {"name": "weak", "kind": "weak scaling", "baseline": "one", "cells": ["larger"]}
    same = {"name": "strong", "baseline": "one"}
    file = write_description(tmp_path, cells, comparisons=[same, weak])
    with pytest.raises(UserError) as refused:
        run_suite(SweepSuite, options(tmp_path, file), repository=REPOSITORY)
    assert "\n".join(refused.value.problems) == snapshot
    assert not (tmp_path / "out").exists()


# `python src/benchmark.py compare`: the interval on made-up numbers with known answers, and the exit codes.


def test_the_interval_of_three_pairs_is_that_of_students_t_test():
    """By hand; B was slower in every repeat, which of two equal programs happens once in eight comparisons."""
    found = speed_difference([100, 100, 100], [90, 99, 95])
    logs = [math.log(ratio) for ratio in (0.9, 0.99, 0.95)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)
    expected = [math.expm1(mean + off) for off in (0, -half, half)]
    assert [found.change, found.low, found.high] == pytest.approx(expected)
    assert found.verdict == "no difference"


def test_the_interval_of_many_pairs_is_that_of_the_normal_distribution():
    random = np.random.default_rng(0)
    logs = random.normal(0.05, 0.2, size=400)
    found = speed_difference([1.0] * 400, np.exp(logs).tolist())
    mean, half = logs.mean(), 1.96 * logs.std() / 20
    assert math.log1p(found.low) == pytest.approx(mean - half, abs=0.002)
    assert math.log1p(found.high) == pytest.approx(mean + half, abs=0.002)


@pytest.mark.parametrize(("pairs", "most"), [(3, 20), (12, 30)])
def test_equal_programs_are_rarely_called_different(pairs, most):
    """Of 200 comparisons of equal programs 10 are expected, of 12 pairs by the percentile interval 16.

    The percentile interval of two pairs calls half of them different, of three pairs a quarter, of five 15%.
    """
    random = np.random.default_rng(1)
    wrong = 0
    for seed in range(200):
        a, b = np.exp(random.normal(0, 0.1, size=(2, pairs))).tolist()
        wrong += speed_difference(a, b, seed=seed).verdict != "no difference"
    assert 3 <= wrong <= most


def test_blocks_widen_the_interval_of_steps_that_depend_on_their_neighbours():
    random = np.random.default_rng(2)
    slow = np.repeat(random.normal(0, 0.1, size=30), 10)  # load that lasts ten steps
    a, b = [1.0] * 300, np.exp(slow).tolist()
    alone, in_blocks = speed_difference(a, b), speed_difference(a, b, block=10)
    assert in_blocks.high - in_blocks.low > 2 * (alone.high - alone.low)
    in_turn = speed_difference([1.0] * 100, [1.1, 1 / 1.1] * 50, block=2)  # neighbours cancel
    assert (in_turn.low, in_turn.high) == pytest.approx((0, 0))
    assert [block_length(steps) for steps in (1, 27, 1000)] == [1, 3, 10]


FAILED = {"state": State.FAILED, "message": "exit code 1: KeyError"}


def write_sweep(file: Path, speeds: dict[str, list[float | None]], *, cpu: str = "a CPU", **more) -> Path:
    """A record of cells with these speeds by repeat; None is a turn that failed."""
    cells = []
    for name, values in speeds.items():
        facts = [{"speed": speed, **(FAILED if speed is None else {}), **more} for speed in values]
        turns = [made_up(name, repeat, **each) for repeat, each in enumerate(facts, start=1)]
        cells.append(asdict(cell_of(planned(name), turns, price=None)))
    record = json.loads((REPOSITORY / REFERENCE / "sweep-scaling.json").read_text(encoding="utf-8"))
    hardware = {"gpu_name": None, "cpu_name": cpu, "cpu_count": 2}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record | {"hardware": hardware, "cells": cells, "comparisons": []}))
    return file


def works(speed: float) -> list[float | None]:
    return [speed * share for share in (1.0, 0.5, 0.8, 0.7)]


@pytest.fixture
def a(tmp_path):
    return write_sweep(tmp_path / "a" / "sweep.json", {"one": works(1000), "two": works(2000)})


def test_sweeps_are_compared_cell_by_cell_and_one_slower_cell_gives_the_exit_code(a, tmp_path, capsys, snapshot):
    same = write_sweep(tmp_path / "same" / "sweep.json", {"two": works(2000), "one": works(1100), "new": works(9)})
    slower = write_sweep(tmp_path / "b" / "sweep.json", {"one": works(1100), "two": works(1800)})
    code = compare(str(a.parent), str(same.parent), allow_unequal=False)
    assert (code, capsys.readouterr().out) == (0, snapshot(name="not slower"))
    code = compare(str(a), str(slower), allow_unequal=False)
    assert (code, capsys.readouterr().out) == (1, snapshot(name="slower"))


def test_cells_are_named_behind_the_path_and_repeats_that_failed_in_one_are_left_out(a, tmp_path, capsys):
    assert compare(f"{a}#two", f"{a}#one", allow_unequal=False) == 1
    half = "B is 50.0% slower than A, 95% interval -50.0% to -50.0% of its speed, 4 repeats"
    assert capsys.readouterr().out == f"A = two, B = one: {half}\n"
    b = write_sweep(tmp_path / "b.json", {"one": [900, None, 720, 630]})
    assert compare(f"{a}#one", f"{b}#one", allow_unequal=False) == 1
    b = write_sweep(tmp_path / "b.json", {"one": [900, None, None, None]})
    with pytest.raises(UserError, match=r"1 repeats have a speed in both, and a comparison needs 2: run more --rep"):
        compare(f"{a}#one", f"{b}#one", allow_unequal=False)


def test_other_work_is_said_first_and_must_be_allowed(a, tmp_path, capsys):
    larger = {"work": WORK | {"global batch": 16.0}}
    b = write_sweep(tmp_path / "b.json", {"one": works(1000), "two": works(2000)}, cpu="another", **larger)
    with pytest.raises(UserError) as refused:
        compare(str(a), str(b), allow_unequal=False)
    assert [line.split(":")[0] for line in refused.value.problems] == ["one", "two"]
    assert all("give --allow_unequal" in line for line in refused.value.problems)
    assert compare(f"{a}#one", f"{b}#one", allow_unequal=True) == 0
    unknown = write_sweep(tmp_path / "unknown.json", {"one": works(1000)}, work=None)
    with pytest.raises(UserError, match=r"same work: unknown \(B did not record its work\)"):
        compare(f"{a}#one", f"{unknown}#one", allow_unequal=False)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("one: NOT EQUAL WORK: same work: no (global batch 8 vs 16)")
    cores = "2 cores (instruction sets: not recorded)"
    assert second == f"one: other machines: A ran on a CPU, {cores}, B on another, {cores}"
    assert third.startswith("one: A and B: no difference, 95% interval ")


def test_what_cannot_be_paired_is_refused(a, tmp_path):
    other = write_sweep(tmp_path / "other.json", {"three": works(1)})
    unknown = r"has no cell 'on' \(did you mean one\?\)"
    for one, two, why in ((f"{a}#on", f"{a}#one", unknown), (a, other, r"have no cell of the same name")):
        with pytest.raises(UserError, match=why):
            compare(str(one), str(two), allow_unequal=False)


def test_runs_are_paired_by_step_after_the_warm_up(tmp_path, capsys):
    write_inputs(tmp_path)
    assert train([*command_line(tmp_path, max_train_steps=40), "--no_inference"]) == 0
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "loss" in line:
            line["tokens_per_sec"] *= 50 if line["warm_up"] else 0.9
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    (other / "training_metrics.json").write_text((run / "training_metrics.json").read_text())
    capsys.readouterr()
    assert compare(str(run), str(other), allow_unequal=False) == 1
    counted = sum("loss" in line and not line["warm_up"] for line in lines[:-1])
    slower = f"B is 10.0% slower than A, 95% interval -10.0% to -10.0% of its speed, {counted} steps\n"
    assert slower in capsys.readouterr().out
    record = json.loads((run / "training_metrics.json").read_text())
    record["training_config"]["seed"] = 7
    (other / "training_metrics.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"same work: no \(seed 1337 vs 7\): give --allow_unequal"):
        compare(str(run), str(other), allow_unequal=False)


# The committed sweeps: every comparison in them is of equal work.


@pytest.mark.parametrize("name", ["sweep-scaling", "sweep-strategies"])
def test_every_cell_was_trained_and_compared(name):
    sweep = read_sweep(REPOSITORY / REFERENCE / f"{name}.json")
    assert all(len(cell.done()) == sweep.repeats == 3 for cell in sweep.cells)
    assert sweep.comparisons and all(one.comparable for plan in sweep.comparisons for one in plan.cells)
