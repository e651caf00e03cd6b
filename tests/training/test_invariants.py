"""``--check_invariants`` says nothing of a sound run, and names step, rank and parameter of a planted bug."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, SEQUENCE, command_line, random_ids, write_recipe, write_tokens
from training_runs import checkpoints, errors, read_lines

from dsgpt.benchmarks import museum
from dsgpt.benchmarks.cells import STRATEGIES, Cell
from dsgpt.benchmarks.cells import write_recipe as write_cell
from dsgpt.benchmarks.parity_rank import BUGS
from dsgpt.benchmarks.resume import Pair
from dsgpt.checkpoints.training_state import StateReader
from dsgpt.common.errors import EXIT_DONE, EXIT_WRONG
from dsgpt.config.recipe import merged
from dsgpt.data.loader import Batch, WindowDataset
from dsgpt.data.order import RankShare
from dsgpt.machine.probe import compiler, libaio_problem
from dsgpt.model import gpt2
from dsgpt.strategies import base
from dsgpt.strategies.pytorch import MasterWeights, TorchStrategy
from dsgpt.training.command import train as train_here

CHECKED = {"max_train_steps": 5, "check_invariants": 1, "eval_every": 2, "save_every": 2, "no_inference": True}
EVAL_STEP = TorchStrategy.eval_step
Bug = contextlib.AbstractContextManager[Any]


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Bug:
    """A context in which what the attribute ``name`` of ``owner`` returns goes through ``change``."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *given, **named: change(original(*given, **named)))


def in_training_mode(strategy: TorchStrategy, batches: Any) -> Any:
    with mock.patch.object(strategy.model, "eval", strategy.model.train):
        return EVAL_STEP(strategy, batches)


def first_of(windows: np.ndarray) -> np.ndarray:
    return np.repeat(windows[:, :1], windows.shape[1], axis=1)


def without_a_bias(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [groups[0], groups[1] | {"params": groups[1]["params"][1:]}]


def half(_strategy: Any, gradients: Any) -> Any:
    return base.global_norm([*gradients][::2])


PLANTED: dict[str, tuple[Callable[[], Bug], str]] = {
    "step 1, rank 0: read 8 samples that are not of this step, or have other targets": (
        lambda: changed(WindowDataset, "__getitems__", lambda batch: Batch(batch.inputs, batch.inputs)),
        "fp32",
    ),
    "step 1: the ranks together did not read each sample of the step once": (
        lambda: changed(RankShare, "of", first_of),
        "fp32",
    ),
    "step 1, rank 0, wte.weight: starts with a deviation of 0.0248, not 0.02": (
        lambda: mock.patch.object(gpt2, "WEIGHT_STD", 0.025),
        "fp32",
    ),
    "step 1, rank 0, blocks.0.ln_1.weight: the update is not AdamW's with rate 0 in its step 1": (
        lambda: changed(base, "parameter_groups", without_a_bias),
        "fp32",
    ),
    "step 1: the norm is reported as 0.": (lambda: mock.patch.object(TorchStrategy, "_global_norm", half), "fp32"),
    "step 3, rank 0, wte.weight: the weight of the model is not its fp32 master, rounded": (
        lambda: mock.patch.object(MasterWeights, "publish", lambda _weights: None),
        "bf16",
    ),
    "step 2: the validation computed in training mode": (
        lambda: mock.patch.object(TorchStrategy, "eval_step", in_training_mode),
        "fp32",
    ),
}


@pytest.mark.parametrize("message", PLANTED)
def test_a_planted_bug_stops_the_run_before_it_is_saved(here, message, capsys):
    plant, precision = PLANTED[message]
    with plant():
        assert train_here(command_line(here, **CHECKED, precision=precision)) == EXIT_WRONG
    (line,) = errors(capsys)
    assert line.startswith(f"error: {message}")
    assert all(step < int(message[5]) for step in checkpoints(here / "run"))


def test_an_update_that_weights_absorb_is_no_zero_gradient(here):
    """SGD without momentum tells its gradient by the weights alone, and at a small rate these of 1 do not change."""
    rates = {"warmup_max_lr": 1e-5, "warmup_num_steps": 4}
    recipe = {"optimizer": {"type": "SGD", "params": {"lr": 1e-5}}, "scheduler": {"type": "WarmupLR", "params": rates}}
    write_recipe(here / "recipe.json", **recipe)
    assert train_here(command_line(here, **CHECKED)) == EXIT_DONE


def test_lost_moments_are_seen_at_a_resume(here, capsys):
    words = command_line(here, **CHECKED)
    assert train_here(words) == EXIT_DONE
    (here / "run" / "RUN_COMPLETE.txt").unlink()
    with mock.patch.object(StateReader, "has_moments", property(lambda _: False)):
        assert train_here([*words, "--resume", "--max_train_steps", "6", "--allow_changed", "recipe"]) == EXIT_WRONG
    what = "the state at the start is not that of step-00000005"
    assert errors(capsys)[0].startswith(f"error: step 6, rank 0, wte.weight: {what}")


def on_ranks(
    folder: Path, cell: Cell, bug: str = "", *flags: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[int, str]:
    """Train ``cell``, its recipe changed, with ``bug`` planted; returns the exit code and the output."""
    write_tokens(folder / "train.bin", random_ids(12 * 6 * SEQUENCE + 1))
    write_tokens(folder / "val.bin", random_ids(13 * SEQUENCE + 1, seed=1))
    write_cell(folder / "recipe.json", cell, recipes=REPOSITORY / "ds_configs")
    recipe = merged(json.loads((folder / "recipe.json").read_text()), changes) | {"train_batch_size": 12}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    words = command_line(folder, **CHECKED, run_type=STRATEGIES[cell.strategy].run_type, precision=cell.precision)
    words += ["--grad_accum_steps", str(cell.accumulation), "--max_position_embeddings", "20"]
    words += ["--seq_length", str(SEQUENCE), *flags]
    done = run_script(Path(__file__).with_name("planted_run.py"), [bug, *words], ranks=cell.ranks, cwd=folder)
    return done.returncode, done.stdout + done.stderr


EVERY = bool(os.environ.get("EVERY_BUG"))
"""Whether all runs below are tested, as docs/training.md says, or those that differ in what is checked and where."""
FIRST = {
    "sum-over-ranks": "error: step 1, wte.weight: the gradient that the optimizer used is 2 times",
    "positions-not-shifted": "error: step 1, wpe.weight: position 8 has no gradient",
}
UNSEEN = "micro-batches-summed-in-bf16"
"""ZeRO-0 in bf16 rounds its sums once in any case; the bug rounds them three times, which no bound can tell from it."""
INSIDE = ("deepspeed-8154", "deepspeed-8224", "deepspeed-5664", "torchtitan-3206", "torchtitan-4245")
"""Exhibits of the museum that change the model's own forward or backward pass, which only a reference tells."""
ELSEWHERE = {"deepspeed-7718": "the run is refused", "torchtitan-4167": "is planted in the parity suite's validation"}
museum.load()
BUGS_TESTED = {
    *("dropped-last-micro-batch", "skipped-tied-gradient-sum", "clipping-norm-of-one-stage"),
    *("rounded-before-the-reduction", "scaled-after-the-norm", "biases-decay"),
}
EXHIBITS_TESTED = {
    "deepspeed-7580": "step 4, rank 1, wte.weight: differs from its replica on rank 0",
    "deepspeed-551": "step 3: the norm is reported as",
    "megatron-lm-844": "step 1, wte.weight: the gradient that the optimizer used is",
    "torchtitan-2206": "step 2: the validation reports",
    "torchtitan-3908": "step 5, rank 0: read 6 samples that are not of this step",
    "accelerate-963": "step 2, rank 0, wte.weight: the update is not AdamW's with rate 0",
}
SHOWN = [name for name, exhibit in museum.EXHIBITS.items() if exhibit.where and name not in ELSEWHERE]


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, marks=() if bug in FIRST else pytest.mark.long)
        for bug in BUGS
        if bug != UNSEEN and (EVERY or bug in BUGS_TESTED or bug in FIRST)
    ],
)
def test_bugs_of_the_parity_suite_are_found(tmp_path, bug):
    code, output = on_ranks(tmp_path, BUGS[bug].cell, bug)
    assert code == EXIT_WRONG, output
    assert FIRST.get(bug, "error: step ") in output


@pytest.mark.long
def test_all_ranks_stop_where_one_has_no_norm(tmp_path):
    """One that leaves the exchange out would let the others read what it sends next."""
    code, output = on_ranks(tmp_path, Cell(strategy="ddp", ranks=2), "nan-on-rank-1")
    assert code == EXIT_WRONG, output
    assert "error: step 1, rank 1: reports loss, norm, rate and skipped as" in output


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SHOWN if name not in INSIDE and (EVERY or name in EXHIBITS_TESTED)])
def test_exhibits_of_the_museum_are_found(tmp_path, name):
    exhibit = museum.EXHIBITS[name]
    cell, flags = exhibit.where, ("--embedding_size", "34")
    if isinstance(cell, Pair):
        assert on_ranks(tmp_path, cell.source, "", *flags)[0] == EXIT_DONE
        (tmp_path / "run" / "RUN_COMPLETE.txt").unlink()
        shutil.rmtree(tmp_path / "run" / "step-00000005")
        cell, flags = cell.target, (*flags, "--resume")
    code, output = on_ranks(tmp_path, cell, name, *flags, changes=exhibit.changes)
    assert code == EXIT_WRONG, output
    assert f"error: {EXHIBITS_TESTED.get(name, 'step ')}" in output


def test_the_page_counts_what_is_found():
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    bugs, exhibits = (f"{len(names) - unseen} of {len(names)}" for names, unseen in ((BUGS, 1), (SHOWN, len(INSIDE))))
    assert f"{bugs} bugs" in page
    assert f"{exhibits} exhibits" in page


SOUND = [
    *("zero1", "fsdp", "ddp", "zero0", "zero3-offload", "tensor2-zero1", "pipeline2-zero1", "sequence2-zero3"),
    "zero1-momentum",
]
if EVERY:
    SOUND += ["zero2", "zero3", "zero2-offload", "pipeline2-zero0", "sequence2-zero1", "pipeline2-tensor2-zero1"]
    SOUND += [] if not (command := compiler()) or libaio_problem(command) else ["zero3-nvme"]


@pytest.mark.parametrize("strategy", [SOUND[0], *(pytest.param(name, marks=pytest.mark.long) for name in SOUND[1:])])
def test_nothing_is_found_in_a_sound_run(tmp_path, strategy):
    tested, flags = STRATEGIES[strategy], ("--dropout", "0.1", "--activation_checkpointing")
    for precision in ("fp32",) if strategy == SOUND[0] or tested.fp32_only else ("fp32", "bf16"):
        cell = Cell(strategy=strategy, ranks=max(2, *tested.ranks[:1]), precision=precision, optimizer=tested.optimizer)
        code, output = on_ranks(tmp_path, cell, "", *flags, "--overwrite")
        assert code == EXIT_DONE, output
    if strategy == "ddp":  # of which the record has no exchange of the checks
        measured = json.loads((tmp_path / "run" / "training_metrics.json").read_text())["cost"]
        assert {one["op"] for one in measured["communication_per_step"]["by_op"]} == {"all_reduce"}
    assert all(line["warm_up"] for line in read_lines(tmp_path / "run"))  # a checked step has no speed
