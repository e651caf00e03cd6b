"""Checkpoints of every strategy, and the swap space of NVMe offload."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import without_paths
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

from dsgpt.common.errors import EXIT_NOT_SAVED, UserError
from dsgpt.machine.topology import Topology
from dsgpt.strategies.deepspeed import setup as swap_space
from dsgpt.strategies.deepspeed.setup import SwapSpace
from dsgpt.training.command import train

# Resumed runs are equal bit for bit, follow a new recipe if one is given, and stop on a full disk.


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


# Offload to nvme leaves no file on the drive, and changes no file of another run.


MAIN = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed")
HOLD = """
import sys
from pathlib import Path
from dsgpt.strategies.deepspeed.setup import _make

_make(Path(sys.argv[1]))
Path(sys.argv[1], "moments").write_bytes(b"...")
print("made", flush=True)
sys.stdin.read()
"""


def space(base: Path, topology: Topology = MAIN, **paths: Path) -> tuple[SwapSpace, dict[str, Any]]:
    """The swap space of a new run with both offloads under ``base``, and the paths that DeepSpeed gets."""
    names = ("offload_optimizer", "offload_param")
    config = {"zero_optimization": {name: {"nvme_path": str(paths.get(name, base))} for name in names}}
    recipe: Any = SimpleNamespace(nvme_blocks=names)
    return SwapSpace(config, recipe, topology), {name: config["zero_optimization"][name]["nvme_path"] for name in names}


def open_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_run_has_its_folder_and_removes_it(tmp_path):
    one, its_paths = space(tmp_path)
    two, other_paths = space(tmp_path)
    assert len(set(its_paths.values())) == 1
    assert its_paths["offload_param"] != other_paths["offload_param"]
    for path in (its_paths["offload_param"], other_paths["offload_param"]):
        assert Path(path).parent == tmp_path
        (Path(path) / "moments").write_bytes(b"...")
    one.close()
    one.close()
    assert [str(path) for path in tmp_path.iterdir()] == [other_paths["offload_param"]]
    assert (Path(other_paths["offload_param"]) / "moments").exists()
    two.close()
    assert list(tmp_path.iterdir()) == []


def test_each_offload_may_use_another_drive(tmp_path):
    swap, paths = space(tmp_path / "one", offload_param=tmp_path / "two")
    assert {Path(path).parent for path in paths.values()} == {tmp_path / "one", tmp_path / "two"}
    swap.close()
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[], []]


def test_other_ranks_of_a_machine_make_nothing(tmp_path):
    swap, _ = space(tmp_path, replace(MAIN, rank=1, local_rank=1))
    assert list(tmp_path.iterdir()) == []
    swap.close()


def test_ranks_of_other_machines_have_other_folders(tmp_path, monkeypatch):
    """The machines may share the drive, and agree on one name for the run."""
    monkeypatch.setattr(swap_space, "from_main", lambda value: "agreed")
    names = [space(tmp_path, replace(MAIN, rank=rank, local_rank=rank % 2))[1]["offload_param"] for rank in range(4)]
    assert names[0] == names[1] != names[2] == names[3]


def test_the_next_run_removes_what_a_killed_run_left(tmp_path):
    """A real process holds the folder, and is then killed."""
    left = tmp_path / f"{swap_space._own_prefix()}12345678-0"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "made\n"
    swap, _ = space(tmp_path)
    swap.close()
    assert (left / "moments").exists()
    holder.kill()
    holder.communicate()
    swap, _ = space(tmp_path)
    assert not left.exists()
    swap.close()


def test_files_of_others_stay(tmp_path):
    """A file, a link to another folder, and what another host left or still uses: its locks may be invisible here."""
    mine, theirs = f"{swap_space._own_prefix()}mine", "nvme-swap-another-host.12345678-0"
    (tmp_path / mine).write_text("a file")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").touch()
    (tmp_path / f"{mine}-link").symlink_to(tmp_path / "data")
    (tmp_path / theirs).mkdir()
    handles = open_handles()
    swap, _ = space(tmp_path)
    swap.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", theirs, mine, f"{mine}-link"]
    assert (tmp_path / "data" / "kept").exists()
    assert open_handles() == handles


def test_a_leftover_that_cannot_be_removed_does_not_matter(tmp_path, monkeypatch):
    """Another user's, or one that another run removes at the same time."""
    left = tmp_path / f"{swap_space._own_prefix()}12345678-0"
    (left / "below").mkdir(parents=True)

    def denied(path: str, *given: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", denied)
        handles = open_handles()
        swap, _ = space(tmp_path)
        assert open_handles() == handles + 1
    swap.close()
    assert left.exists()


def test_an_error_without_a_file_name_names_the_folder(tmp_path, monkeypatch, snapshot):
    def no_locks(handle: int, kind: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    handles = open_handles()
    with pytest.raises(UserError) as caught:
        space(tmp_path)
    assert without_paths("\n".join(caught.value.problems), tmp_path) == snapshot
    assert list(tmp_path.iterdir()) == []
    assert open_handles() == handles


def test_a_path_that_cannot_be_used_gives_one_error_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        space(tmp_path, offload_param=tmp_path / "file" / "below")
    (line,) = caught.value.problems
    assert line.startswith(f"nvme_path {tmp_path / 'file'}")
    assert line.endswith("cannot be used (Not a directory): name another folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_never_seen_without_its_lock(tmp_path, monkeypatch):
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        handle = os.open(self, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    swap, _ = space(tmp_path)
    swap.close()
