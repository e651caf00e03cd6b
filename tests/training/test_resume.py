"""A resume continues exactly from what was saved, or refuses."""

import json
import shutil
import signal
import subprocess
import time

import pytest
from messages import without_torch
from training_runs import (
    ADAMW,
    SCRIPT,
    SHAPE,
    data_flags,
    finished,
    read_lines,
    read_record,
    roll_back,
    train,
    write_recipe,
)

from dsgpt.machine.launcher import launcher_command

# 12 steps over epochs of fewer: the interruption at step 5 falls inside an epoch.
STEPS = ("--max_train_steps", "12", "--save_every", "5", "--max_val_steps", "2", "--steps_per_print", "3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """A baseline run with dropout that kept all of its checkpoints, and its recipe."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_recipe(folder / "recipe.json")
    run = folder / "run"
    finished(train(run, corpus, recipe, *STEPS, "--dropout", "0.1", "--keep_checkpoints", "9"))
    return run, recipe


def losses(run):
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in read_lines(run)]


def test_baseline_resumes_bit_for_bit(undisturbed, corpus, tmp_path):
    run, recipe = undisturbed
    copy = roll_back(run, tmp_path / "copy", 5)
    done = train(copy, corpus, recipe, *STEPS, "--dropout", "0.1", "--resume")
    finished(done)
    assert "resuming from" in done.stdout
    assert losses(copy) == losses(run)
    old, new = read_record(run), read_record(copy)
    assert new["resumed_from"] == "step-00000005"
    assert old["resumed_from"] is None
    for one, two in zip(old["epochs"], new["epochs"], strict=True):
        for key in ("steps", "train_loss_avg_global", "val_loss_avg_global", "tokens_processed_global"):
            assert two[key] == one[key]
    assert new["summary"]["optimizer_steps"] == 12
    assert new["summary"]["best_val_loss"] == old["summary"]["best_val_loss"]


def test_a_killed_run_is_continued(undisturbed, corpus, tmp_path):
    """A real kill -9 at some instant after the first save."""
    run, recipe = undisturbed
    killed = tmp_path / "killed"
    command = [*launcher_command("python", 1), SCRIPT, "--run_type", "baseline", *data_flags(corpus)]
    command += [*SHAPE, "--seq_length", "32"]
    command += ["--device", "cpu", "--deepspeed_config", str(recipe), "--checkpoint_path", str(killed)]
    command += [*STEPS, "--dropout", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (killed / "latest").exists():
        assert process.poll() is None, "the run ended before its first save"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (killed / "RUN_COMPLETE.txt").exists():
        pytest.fail("the run was too fast to be killed; give it more steps")
    finished(train(killed, corpus, recipe, *STEPS, "--dropout", "0.1", "--resume"))
    assert losses(killed) == losses(run)


def test_resume_without_a_run_starts_fresh(corpus, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    run = tmp_path / "new"
    run.mkdir()
    # what a run that was killed before its first step leaves: its configuration, and no lines yet
    (run / "config.json").write_text(json.dumps({"options": {}, "training_config": {}}), encoding="utf-8")
    (run / "metrics.jsonl").touch()
    done = train(run, corpus, recipe, "--max_train_steps", "2", "--resume")
    finished(done)
    assert "no checkpoint yet; starting fresh" in done.stdout
    assert len(losses(run)) == 2


def test_resume_of_a_finished_run_does_nothing(undisturbed, corpus):
    run, recipe = undisturbed
    before = (run / "training_metrics.json").read_bytes()
    done = train(run, corpus, recipe, *STEPS, "--dropout", "0.1", "--resume")
    finished(done)
    assert "finished run; nothing to do" in done.stdout
    assert (run / "training_metrics.json").read_bytes() == before


def test_an_existing_run_is_not_changed_without_a_flag(undisturbed, corpus):
    run, recipe = undisturbed
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    done = train(run, corpus, recipe, *STEPS)
    assert done.returncode == 2
    assert without_torch(done.stderr).count("\n") == 1
    assert "--overwrite" in done.stderr
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_overwrite_removes_the_run_and_nothing_else(undisturbed, corpus, tmp_path):
    run, recipe = undisturbed
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "notes.txt").write_text("mine", encoding="utf-8")
    finished(train(copy, corpus, recipe, "--max_train_steps", "2", "--overwrite"))
    assert len(losses(copy)) == 2
    assert [path.name for path in copy.glob("step-*")] == ["step-00000002"]
    assert (copy / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_another_training_is_not_resumed(undisturbed, corpus, tmp_path):
    run, _ = undisturbed
    copy = roll_back(run, tmp_path / "copy", 5)
    other = {"type": "AdamW", "params": {**ADAMW["params"], "lr": 0.001}}
    recipe = write_recipe(tmp_path / "other.json", optimizer=other)
    done = train(copy, corpus, recipe, *STEPS, "--dropout", "0.1", "--seed", "7", "--resume")
    assert done.returncode == 2
    assert "--resume: optimizer is" in done.stderr
    assert "--resume: seed is 7" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_checkpoint_is_named(undisturbed, corpus, tmp_path):
    run, recipe = undisturbed
    copy = roll_back(run, tmp_path / "copy", 5)
    victim = copy / "step-00000005" / "optimizer.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = train(copy, corpus, recipe, *STEPS, "--dropout", "0.1", "--resume")
    assert done.returncode == 2
    assert "optimizer.safetensors" in done.stderr
    assert "damaged" in done.stderr


def test_the_manifest_lists_every_file(undisturbed):
    run, _ = undisturbed
    for checkpoint in run.glob("step-*"):
        manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
        files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
        assert set(manifest["files"]) == files - {"manifest.json"}
        assert len({(checkpoint / name).stat().st_mode for name in files}) == 1
    assert (run / "latest").read_text(encoding="utf-8").strip() == "step-00000012"
    assert not list(run.glob(".partial-*"))


def test_only_the_newest_checkpoints_are_kept(corpus, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    run = tmp_path / "run"
    finished(train(run, corpus, recipe, "--max_train_steps", "6", "--save_every", "2", "--keep_checkpoints", "2"))
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000004", "step-00000006"]
