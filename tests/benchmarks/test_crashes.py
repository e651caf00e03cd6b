"""States of the disk after a power cut: the model of a disk, traced runs, and the bugs that must show."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks import crashes
from dsgpt.benchmarks.crashes_disk import STRACE, State, Trace, below, read_trace, read_tree, states
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.records import REFERENCE
from dsgpt.common.files import sha256_of

pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")


def traced(folder: Path, code: str) -> Trace:
    """What Python does in ``folder``, whose path is ``root``, with the statements ``code``."""
    file, before = folder.with_suffix(".strace"), read_tree(folder)
    words = ["-c", f"from pathlib import Path; root = Path({str(folder)!r}); {code}"]
    subprocess.run([*STRACE, str(file), sys.executable, *words], check=True)
    return read_trace(file, root=folder, before=before)


def all_states(folder: Path, code: str) -> list[State]:
    """The states that ``code`` may leave."""
    trace = traced(folder, code)
    return [state for seed in range(9) for state in states(trace, seed=seed, most=1000)]


NEW = b"x" * 5000


def test_the_committed_record_holds_every_scenario_and_every_planted_bug_was_noticed():
    record = json.loads((REPOSITORY / REFERENCE / "crashes.json").read_text())
    assert [one["scenario"] for one in record["scenarios"]] == list(crashes.SCENARIOS)
    assert all(bool(one["wrong"]) == (one["scenario"] in crashes.PLANTS) for one in record["scenarios"])
    own = [one["states"] for one in record["scenarios"] if one["scenario"] not in crashes.PLANTS]
    assert sum(own) >= 2000
    assert len(record["commands"]) >= 100
    assert not any(one["wrong"] for one in record["commands"])


def test_what_no_fsync_covered_may_be_missing_in_part(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(b"old")
    write = f"(root / 'new').write_bytes({NEW!r}); (root / 'new').rename(root / 'file')"
    found = {state.tree["file"] for state in all_states(root, write) if "file" in state.tree}
    assert {b"old", b"", bytes(5000), NEW} < found
    assert NEW[:4096] + bytes(904) in found or bytes(4096) + NEW[4096:] in found


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(b"old")
    found = all_states(root, f"import dsgpt.common.files as f; f.write_atomic(root / 'file', {NEW!r})")
    assert {state.tree["file"] for state in found} == {b"old", NEW}
    assert {state.tree["file"] for state in found if state.moment == math.inf} == {NEW}


def test_a_checkpoint_that_retention_removes_is_whole_or_absent(tmp_path):
    """Without the fsync between its renaming and its removal it may keep its name and lack a file."""
    name, root = "step-00000008", tmp_path / "root"
    (root / name).mkdir(parents=True)
    for file in ("manifest.json", "model.safetensors"):
        (root / name / file).write_bytes(file.encode())
    whole = read_tree(root / name)
    found = all_states(root, f"from dsgpt.checkpoints.store import discard; discard(root / {name!r})")
    assert [below(state.tree, name) for state in found if name in state.tree] == [whole] * 9
    assert any(not state.tree for state in found)


def test_a_checkpoint_that_comes_from_a_second_copy_is_whole_or_absent(tmp_path):
    """Without the fsync of what came, it may be empty under its name."""
    name, root, copy = "step-00000008", tmp_path / "root", tmp_path / "copy"
    root.mkdir()
    (copy / name).mkdir(parents=True)
    (copy / name / "weights").write_bytes(NEW)
    facts = {"weights": {"size": len(NEW), "sha256": sha256_of(copy / name / "weights")}}
    (copy / name / "manifest.json").write_text(json.dumps({"files": facts}))
    fetch = f"import dsgpt.checkpoints.second_copy as s; s.fetch_newer({str(copy)!r}, root, damage=lambda name: '')"
    found = all_states(root, fetch)
    whole = read_tree(copy / name)
    assert [below(state.tree, name) for state in found if name in state.tree] == [whole] * 9


def test_a_call_that_the_model_lacks_is_refused(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(b"old")
    with pytest.raises(ValueError, match="the model of a disk lacks"):
        traced(root, "(root / 'other').hardlink_to(root / 'file')")


def run(tmp_path: Path, name: str, *, most: int, commands: int) -> dict[str, Any]:
    """The record of one scenario; the suite must call it right, and a planted bug noticed."""
    options = crashes.CrashOptions(
        only=(name,), states=most, commands=commands, seed=1, output=tmp_path / "out" / "crashes.json"
    )
    assert run_suite(crashes.Crashes, options, repository=REPOSITORY) == 0
    record: dict[str, Any] = json.loads(options.output.read_text())
    return record


def test_a_save_survives_a_power_cut(tmp_path):
    """A run folder whose own name is not durable shows here: an announced checkpoint is lost with it."""
    record = run(tmp_path, "save", most=2, commands=0)
    assert record["scenarios"][0]["states"] > 50


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in crashes.SCENARIOS if name != "save"])
def test_other_scenarios_survive_and_planted_bugs_are_noticed(tmp_path, name):
    record = run(tmp_path, name, most=2, commands=name not in crashes.PLANTS)
    assert record["scenarios"][0]["states"] > 20
