"""Checkpoints of commit ccaa26a, from before the code moved: they are resumed and exported as that commit did.

Commit fe720baf has in this file the function that made the folder.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, command_line
from training_runs import SCRIPT, finished, read_lines, read_record

FOLDER = Path(__file__).with_name("old_checkpoints")
SAVED, LAST = 4, 8
"""Steps of the runs, and of the resumed runs."""
WAYS = {"zero1": ("optimized", 2), "zero3": ("optimized", 2), "baseline": ("baseline", None), "fsdp": ("fsdp", 2)}
"""Run type and ranks."""
RESUMED = [("zero1", "zero1"), ("zero1", "zero3"), ("zero1", "fsdp"), ("zero3", "zero3"), ("zero3", "baseline")]
BOUND = 1e-6
"""Relative, on losses. A moment of Adam that is lost at a resume changes them by 1%, one step that is not counted by
0.1%, other instruction sets by 2e-7."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the committed folder: a resume writes into it."""
    return shutil.copytree(FOLDER, tmp_path / "old")


@pytest.mark.parametrize(("run", "way"), RESUMED)
def test_resumed(folder, run, way):
    golden = json.loads((FOLDER / "continued.json").read_text(encoding="utf-8"))[f"{run} as {way}"]
    assert len(golden) == LAST - SAVED
    run_type, ranks = WAYS[way]
    recipe = "zero3.json" if way == "zero3" else "zero1.json"
    flags = {"run_type": run_type, "deepspeed_config": recipe, "checkpoint_path": run, "embedding_size": 8}
    flags |= {"grad_accum_steps": 2, "no_inference": True, "max_train_steps": LAST}
    words = command_line(Path(), **flags, resume=True, allow_changed="recipe")
    finished(run_script(SCRIPT, words, ranks=ranks, cwd=folder))
    losses = [line["loss"] for line in read_lines(folder / run) if line["step"] > SAVED]
    assert losses == pytest.approx(golden, rel=BOUND)
    assert [segment["pad_logits"] for segment in read_record(folder / run)["segments"]] == [False, False]


@pytest.mark.parametrize("run", ["zero1", "zero3"])
def test_exported(folder, run):
    finished(run_script(REPOSITORY / "src/convert.py", ["--from", run, "--to", "hf", "exported"], cwd=folder))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "exported").iterdir()}
    assert found == json.loads((FOLDER / "exported.json").read_text(encoding="utf-8"))[run]
