"""``launch/slurm/train.sbatch`` under a real Slurm: it trains, saves when asked, is requeued and resumes."""

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest
from forked_ranks import run_script
from planner_records import RECORD
from small_run import REPOSITORY, command_line, within, write_data, write_recipe
from training_runs import finished, read_lines

STEPS = 80
PLAN = (
    "--recommend --launcher slurm --machine calibration.json --train_data_path train.bin --val_data_path val.bin "
    "--tokens 1e6 --global_batch_size 8 --num_layers 1 --num_heads 1 --embedding_size 8 --max_position_embeddings 16 "
    "--vocab_size 257"
)
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
    finished(run_script(REPOSITORY / "src" / "gpt2.py", words(here, "undisturbed"), ranks=2, cwd=here))
    return losses(here / "undisturbed")


def printed(slurm, job: str, node: int | None = None) -> str:
    """What the script of a job printed so far, or the ranks of a node; the long number is that of no array."""
    path = slurm.folder / f"{job}-4294967294{'' if node is None else f'-{node}'}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.long
def test_a_signalled_job_saves_is_requeued_and_resumes(slurm, here, undisturbed):
    """In a container, for which a script stands that has the words of Apptainer."""
    container = here / "apptainer"
    container.write_text('#!/bin/sh\necho "in $2: $RANK"\nshift 2\nexec "$@"\n')
    container.chmod(0o755)
    job = slurm.submit(*words(here, "signalled"), variables={"CONTAINER": f"{container} exec dsgpt.sif"})
    wait_for_step(here / "signalled", 5)
    slurm("scancel", "--signal=USR1", job)
    slurm.wait_for(job, "COMPLETED")
    assert f"job {job}: saved; requeued" in printed(slurm, job)
    assert f"job {job}, start 1: 2 nodes (n[1-2]) x 1 ranks" in printed(slurm, job)
    assert "resuming from" in printed(slurm, job, 0)
    assert [f"{node}: in dsgpt.sif: {node}" in printed(slurm, job, node) for node in range(2)] == [True, True]
    assert "trains from step-" in (here / "signalled" / "train-1.log").read_text()
    assert losses(here / "signalled") == undisturbed
    assert json.loads((here / "signalled" / "training_metrics.json").read_text())["hardware"]["launcher"] == "slurm"
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


@pytest.mark.long
def test_a_job_that_lost_a_rank_is_requeued(slurm, here, undisturbed):
    job = slurm.submit(*words(here, "lost"))
    wait_for_step(here / "lost", 25)
    (rank,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if str(here / "lost") in (process.info["cmdline"] or ()) and process.environ().get("SLURM_PROCID") == "1"
    )
    rank.kill()
    slurm.wait_for(job, "COMPLETED", seconds=300)
    assert f"job {job}: lost a rank; requeued" in printed(slurm, job)
    assert losses(here / "lost") == undisturbed


@pytest.mark.long
def test_a_job_that_reaches_a_limit_of_its_own_is_not_requeued(slurm, here):
    job = slurm.submit(*words(here, "limited"), "--max_train_steps", "100000", "--max_hours", "0.01")
    slurm.wait_for(job, "FAILED")
    assert f"job {job}: saved at a limit of its own; not requeued" in printed(slurm, job)
    assert "stopped by --max_hours 0.01 after step" in printed(slurm, job, 0)
    assert [*REPOSITORY.glob(".dsgpt-limit-*")] == []


@pytest.mark.long
def test_a_job_whose_time_ends_saves_is_requeued_and_resumes(slurm, here):
    """Slurm looks at times every half minute, and one minute is the shortest limit."""
    job = slurm.submit(*words(here, "timed"), "--max_train_steps", "100000", options=("--time=1", "--signal=USR1@30"))
    within(lambda: f"job {job}: saved; requeued" in printed(slurm, job), seconds=180)
    within(lambda: "resuming from" in printed(slurm, job, 0), seconds=120)
    slurm("scancel", "--full", job)


@pytest.mark.long
def test_the_command_of_a_plan_does_a_dry_run(slurm, tmp_path):
    for name in ("src", "launch", "ds_configs", ".venv"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (write_data(tmp_path) / "calibration.json").write_text(json.dumps(RECORD))
    assert run_script(REPOSITORY / "src" / "plan.py", PLAN.split(), cwd=tmp_path).returncode == 0
    variables = {"SBATCH_OUTPUT": str(slurm.folder / "%j-4294967294.log"), "MASTER_ADDR": "127.0.0.1"}
    job = slurm("sh", "plan/train.sh", "--dry_run", cwd=tmp_path, **variables).split()[-1]
    slurm.wait_for(job, "COMPLETED")
    assert "dry run: everything checked, nothing started" in printed(slurm, job, 0)


def test_a_job_that_would_use_one_of_its_gpus_is_refused(here):
    script = REPOSITORY / "launch" / "slurm" / "train.sbatch"
    environment = {"PATH": os.environ["PATH"], "SLURM_GPUS_ON_NODE": "8"}
    done = subprocess.run(["bash", script], cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: a node has 8 GPUs and would train on one: add --ntasks-per-node=8 to sbatch\n"


@pytest.mark.long
def test_each_task_of_an_array_has_the_flags_of_its_line(slurm, here):
    """The folders' names have a space; the third task has no line."""
    runs = [here / f"of {task}" for task in range(2)]
    (here / "sweep.txt").write_text("".join(f'--checkpoint_path "{run}"\n' for run in runs))
    words, variables = command_line(here, checkpoint_path=None, run_type="ddp"), {"SWEEP": str(here / "sweep.txt")}
    job = slurm.submit(*words, options=("--array=0-2",), variables=variables)
    within(lambda: slurm.states(job) == {"COMPLETED", "FAILED"}, seconds=120)
    for run in runs:
        assert (run / "RUN_COMPLETE.txt").exists()
    refused = (slurm.folder / f"{job}-2.log").read_text()
    assert f"error: {here / 'sweep.txt'} has no flags in line 3, for task 2" in refused
