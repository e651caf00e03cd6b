"""Checkpoints of commit ccaa26a, from before the code moved: they are resumed and exported as that commit did.

``PYTHONPATH=tests .venv/bin/python tests/goldens/test_old_checkpoints.py WORKTREE`` made the folder, with the code of
that commit in WORKTREE.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, VOCABULARY, command_line, write_tokenizer, write_tokens
from training_runs import finished, read_lines

FOLDER = Path(__file__).with_name("old_checkpoints")
CONTINUED, EXPORTED = FOLDER / "continued.json", FOLDER / "exported.json"
SAVED, LAST = 4, 8
"""Steps of the runs, and of the resumed runs."""
WAYS = {"zero1": ("optimized", 2), "zero3": ("optimized", 2), "baseline": ("baseline", None), "fsdp": ("fsdp", 2)}
"""Run type and ranks."""
RESUMED = [("zero1", "zero1"), ("zero1", "zero3"), ("zero1", "fsdp"), ("zero3", "zero3"), ("zero3", "baseline")]
BOUND = 1e-6
"""Relative, on losses. A moment of Adam that is lost at a resume changes them by 1%, one step that is not counted by
0.1%, other instruction sets by 2e-7."""

Start = Callable[[str, list[str], int | None, Path], None]
"""Runs a script, by its path in the repository, with arguments, on a number of ranks, in a folder."""


def train(start: Start, folder: Path, run: str, way: str, **changes: object) -> Path:
    run_type, ranks = WAYS[way]
    recipe = "zero3.json" if way == "zero3" else "zero1.json"
    flags = {"run_type": run_type, "deepspeed_config": recipe, "checkpoint_path": run, "embedding_size": 8}
    flags |= {"grad_accum_steps": 2, "no_inference": True} | changes
    start("src/gpt2.py", command_line(Path(), **flags), ranks, folder)
    return folder / run


def losses_after_resume(start: Start, folder: Path, run: str, way: str) -> list[float]:
    train(start, folder, run, way, max_train_steps=LAST, resume=True, allow_changed="recipe")
    return [line["loss"] for line in read_lines(folder / run) if line["step"] > SAVED]


def hashes_of_export(start: Start, folder: Path, run: str) -> dict[str, str]:
    start("src/convert.py", ["--from", run, "--to", "hf", "exported"], None, folder)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "exported").iterdir()}


def forked(script: str, words: list[str], ranks: int | None, folder: Path) -> None:
    finished(run_script(REPOSITORY / script, words, ranks=ranks, cwd=folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the committed folder: a resume writes into it."""
    return shutil.copytree(FOLDER, tmp_path / "old")


@pytest.mark.parametrize(("run", "way"), RESUMED)
def test_resumed(folder, run, way):
    golden = json.loads(CONTINUED.read_text(encoding="utf-8"))[f"{run} as {way}"]
    assert len(golden) == LAST - SAVED
    assert losses_after_resume(forked, folder, run, way) == pytest.approx(golden, rel=BOUND)


@pytest.mark.parametrize("run", ["zero1", "zero3"])
def test_exported(folder, run):
    assert hashes_of_export(forked, folder, run) == json.loads(EXPORTED.read_text(encoding="utf-8"))[run]


def make(worktree: Path) -> None:
    def start(script: str, words: list[str], ranks: int | None, folder: Path) -> None:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks else []
        variables = os.environ | {"PYTHONPATH": str(worktree / "src"), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, script, *words]  # by this path, which the records repeat
        (folder / "src").symlink_to(worktree / "src")
        subprocess.run(command, cwd=folder, env=variables, check=True)
        (folder / "src").unlink()

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    ids = np.frombuffer((REPOSITORY / "LICENSE").read_bytes(), np.uint8)
    tokenizer = write_tokenizer(FOLDER / "tokenizer")
    for name, part in (("train.bin", ids[:641]), ("val.bin", ids[641:802])):
        write_tokens(FOLDER / name, part, tokenizer=tokenizer, vocab_size=VOCABULARY, source="LICENSE")
    for name in ("zero1", "zero3"):
        recipe = json.loads((worktree / "ds_configs" / f"{name}.json").read_text(encoding="utf-8"))
        recipe["train_batch_size"] = 8
        recipe["optimizer"]["params"]["lr"] = 0.01
        recipe["scheduler"]["params"] |= {"warmup_num_steps": 2, "total_num_steps": LAST}
        recipe["zero_optimization"] |= {"reduce_bucket_size": 2_000}
        if name == "zero3":
            recipe["zero_optimization"] |= {"stage3_param_persistence_threshold": 50}
        (FOLDER / f"{name}.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
        train(start, FOLDER, name, name, max_train_steps=SAVED)
    continued, exported = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for run, way in RESUMED:
            copy = shutil.copytree(FOLDER, Path(temporary) / f"{run}-{way}")
            continued[f"{run} as {way}"] = losses_after_resume(start, copy, run, way)
        for run in ("zero1", "zero3"):
            exported[run] = hashes_of_export(start, shutil.copytree(FOLDER, Path(temporary) / run), run)
    for path, found in ((CONTINUED, continued), (EXPORTED, exported)):
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
