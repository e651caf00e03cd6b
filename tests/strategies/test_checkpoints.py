"""Resumed runs are equal bit for bit, follow a new recipe if one is given, and stop on a full disk."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strategy_cells import (
    CELLS,
    CHANGED_STRATEGIES,
    FULL_DISK,
    RESUMED,
    SAVED_BESIDE,
    SPLIT_STATE,
    SUMMED_BY_MANY,
    THREE_D,
    Asked,
    recipe_of,
)
from training_runs import read_lines, roll_back

from dsgpt.common.errors import EXIT_NOT_SAVED
from dsgpt.training.command import train

LAST = Path("step-00000004") / "model.safetensors"


def steps(run: Path) -> list[tuple[int, float, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in read_lines(run)]


@pytest.mark.parametrize(
    "cell",
    [
        *(Asked(2, f"resumed {name}") for name in (*RESUMED, *SAVED_BESIDE)),
        Asked(4, f"resumed {SUMMED_BY_MANY}"),
        Asked(8, f"resumed {THREE_D}"),
    ],
    ids=str,
)
def test_a_killed_run_with_dropout_resumes_bit_for_bit(seen, cell):
    end = seen(cell)
    assert [facts["exit"] for facts in end.ranks] == [0] * cell.ranks
    straight = end.run.with_name("run")
    assert len(steps(straight)) == 4
    assert steps(end.run) == steps(straight)
    assert json.loads((end.run / "training_metrics.json").read_text())["resumed_from"] == "step-00000002"
    assert (end.run / LAST).read_bytes() == (straight / LAST).read_bytes()
    assert not list(end.run.glob("nvme-swap-*"))


@pytest.mark.parametrize("cell", [Asked(2, f"checkpoint {name}") for name in SPLIT_STATE], ids=str)
def test_no_rank_ever_holds_the_whole_state_of_training(seen, cell):
    """It writes and reads parameter by parameter. While it reads, it also holds the new moments of its part."""
    for facts in seen(cell).ranks:
        whole, largest = facts["whole"], facts["largest"]
        assert facts["moments"]
        assert largest <= facts["most_while_saved"] <= 6 * largest < whole
        assert largest <= facts["most_while_loaded"] <= 2 * whole / cell.ranks + 6 * largest < 2 * whole


@pytest.fixture(scope="module")
def baselines(tmp_path_factory, corpus) -> dict[str, Path]:
    """The same runs in plain PyTorch: with the first recipe alone, and with the changed one from step 2 on."""
    folder = tmp_path_factory.mktemp("baseline")
    runs = {}
    for name in ("before the change zero1", "changed zero1"):
        cell = CELLS[2][name]
        recipe_of(cell, 1, folder / f"{name}.json")
        run = folder / ("killed" if cell.after else "run")
        assert train(["--run_type", "baseline", *cell.words(corpus, folder / f"{name}.json", run)]) == 0
        if not cell.after:
            roll_back(run, folder / "killed", 2)
        runs[name.split()[0]] = run
    return runs


@pytest.mark.parametrize("cell", [Asked(2, f"changed {name}") for name in CHANGED_STRATEGIES], ids=str)
def test_a_resumed_run_uses_the_new_recipes_settings(seen, baselines, cell):
    """Betas, weight decay and clipping of the new recipe act under every strategy, as under plain PyTorch."""
    end = seen(cell)
    assert [facts["exit"] for facts in end.ranks] == [0, 0]
    expected, other = (load_file(baselines[name] / LAST) for name in ("changed", "before"))
    for name, value in load_file(end.run / LAST).items():
        off = torch.linalg.vector_norm(value - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert off <= 1e-3, name
    for one, two in zip(steps(baselines["changed"]), steps(end.run), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert torch.linalg.vector_norm(other["wte.weight"] - expected["wte.weight"]) > 0.05 * torch.linalg.vector_norm(
        expected["wte.weight"]
    )


FULL = [*((f"full disk of main {name}", 0) for name in FULL_DISK), (f"full disk of last {FULL_DISK[0]}", 1)]


@pytest.mark.parametrize(("cell", "who"), [(Asked(2, name), who) for name, who in FULL], ids=str)
def test_a_disk_that_is_full_for_one_rank_ends_all_ranks(seen, cell, who):
    """Neither rank waits for the other, both print the reason, and no file of the attempt is left."""
    end = seen(cell)
    assert [facts["exit"] for facts in end.ranks] == [EXIT_NOT_SAVED] * 2
    for rank in range(2):
        (line,) = [line for line in end.log(rank).splitlines() if line.startswith("error: ")]
        assert f"not saved: rank {who}: " in line
        assert "File too large" in line
    assert not list(end.run.glob("*step-*"))
    assert not list(end.run.glob("nvme-swap-*"))
