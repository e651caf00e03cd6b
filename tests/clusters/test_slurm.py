"""``launch/slurm/train.sbatch`` under a real Slurm: it trains, saves when asked, is requeued and resumes."""

import json
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, command_line, within, write_data, write_recipe
from training_runs import read_lines

STEPS = 80
SLOW = {"num_layers": 6, "num_heads": 4, "embedding_size": 192, "threads_per_device": 1}
"""A step of some 30 ms, so that there is time to send a signal."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_data(tmp_path_factory.mktemp("jobs"))
    write_recipe(folder / "recipe.json")
    return folder


def words(folder: Path, run: str) -> list[str]:
    flags = {"run_type": "ddp", "max_train_steps": STEPS, "save_every": 20, "checkpoint_path": folder / run}
    return command_line(folder, **SLOW, **flags, no_inference=True, max_val_steps=1)


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run) if "loss" in line}


def wait_for_step(run: Path, step: int) -> None:
    within(lambda: (run / "metrics.jsonl").exists() and max(losses(run), default=0) >= step, seconds=120)


@pytest.fixture(scope="module")
def undisturbed(here: Path) -> dict[int, float]:
    done = run_script(REPOSITORY / "src" / "gpt2.py", words(here, "undisturbed"), ranks=2, cwd=here)
    assert done.returncode == 0, done.stderr
    return losses(here / "undisturbed")


def test_a_signalled_job_saves_is_requeued_and_resumes(slurm, here, undisturbed):
    job = slurm.submit(*words(here, "signalled"))
    wait_for_step(here / "signalled", 5)
    slurm("scancel", "--signal=USR1", job)
    slurm.wait_for(job, "COMPLETED")
    log = (slurm.folder / f"{job}-4294967294.log").read_text()
    assert f"job {job}: saved; requeued" in log
    assert f"job {job}, start 1: 2 nodes (n[1-2]) x 1 ranks" in log
    assert "resuming from" in log
    assert losses(here / "signalled") == undisturbed
    record = json.loads((here / "signalled" / "training_metrics.json").read_text())
    assert record["hardware"]["launcher"] == "slurm"
    assert [*(here / "signalled").glob(".seen-by-all-*")] == []


@pytest.mark.long
def test_a_job_whose_node_goes_down_resumes_when_it_is_back(slurm, here, undisturbed):
    job = slurm.submit(*words(here, "down"))
    wait_for_step(here / "down", 5)
    slurm("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    slurm.wait_for(job, "PENDING")
    slurm("scontrol", "update", "nodename=n2", "state=resume")
    slurm.wait_for(job, "COMPLETED")
    assert losses(here / "down") == undisturbed


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_task_of_an_array_has_the_flags_of_its_line(slurm, here, trains):
    runs = [here / f"{'trained' if trains else 'of'}-{task}" for task in range(2)]
    (here / "sweep.txt").write_text("".join(f"--checkpoint_path {run}\n" for run in runs))
    words, variables = command_line(here, checkpoint_path=None, run_type="ddp"), {"SWEEP": str(here / "sweep.txt")}
    flags = [] if trains else ["--dry_run"]
    job = slurm.submit(*words, *flags, options=("--array=0-1",), variables=variables)
    slurm.wait_for(job, "COMPLETED")
    for task, run in enumerate(runs):
        log = (slurm.folder / f"{job}-{task}.log").read_text()
        assert f"run folder  {run}\n" in log
        assert ("dry run: everything checked, nothing started" in log) is not trains
        assert (run / "RUN_COMPLETE.txt").exists() == run.exists() == trains
