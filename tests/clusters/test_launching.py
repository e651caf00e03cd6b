"""What starts a training on several machines: the files of ``launch``, and the command that a plan writes for each."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_ranks import run_script
from planner_records import RECORD
from small_run import REPOSITORY, TOKENS, command_line, random_ids, within, write_data, write_recipe, write_tokens
from training_runs import finished, read_lines

from dsgpt.checkpoints.manifest import read_manifest
from dsgpt.common.errors import EXIT_STOPPED, EXIT_USER_ERROR
from dsgpt.machine.topology import free_port

LAUNCH = REPOSITORY / "launch"
BESIDE = Path(sys.executable).parent


SIXTEEN = "--model_size small --gpu a100-80gb --gpus 16 --micro_batch_size_per_gpu 8"
DATA = "--train_data_path train.bin --val_data_path val.bin --vocab_size 257 --max_position_embeddings 16"
TWO = f"--gpu a100-80gb --gpus 2 --gpus_per_machine 1 --precision fp32 --global_batch_size 8 {DATA}"
TWO += " --num_layers 1 --num_heads 1"
"""Two machines of one GPU each, and the data of the tests."""


def planned(folder: Path, *words: str, of: str = SIXTEEN) -> tuple[Path, str]:
    """The folder of a recommendation, by default for 16 GPUs, and the last line of its command."""
    flags = [*of.split(), "--tokens", "1e9", "--recommend", *words]
    finished(run_script(REPOSITORY / "src" / "plan.py", flags, cwd=folder))
    return folder / "plan", (folder / "plan" / "train.sh").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("launcher", "starts"),
    [
        ("deepspeed", "exec launch/run_hostfile.sh --run_type "),
        ("torchrun", "exec env DEVICES=8 launch/torchrun.sh --run_type "),
        ("slurm", "exec sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm/train.sbatch --run_type "),
    ],
)
def test_a_plan_writes_the_command_of_the_launcher(tmp_path, launcher, starts):
    folder, line = planned(tmp_path, "--launcher", launcher)
    assert line.startswith(starts)
    assert not (folder / "train.yaml").exists()


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "kubernetes"])
def test_the_command_of_a_plan_for_two_machines_does_a_dry_run(tmp_path, launcher):
    """On one of them, which needs no GPU for it."""
    for name in ("src", "launch", "ds_configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    folder, _ = planned(write_data(tmp_path), "--launcher", launcher, of=TWO)
    (tmp_path / "hosts").write_text("10.0.0.1 slots=1\n10.0.0.2 slots=1\n")
    variables = {"NODES": "1:2", "NODE_RANK": "0", "PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    command = ["sh", "plan/train.sh"]
    if launcher == "kubernetes":  # the container's, with the variables that Kubeflow gives
        trainer = documents(folder / "train.yaml")[1]["spec"]["trainer"]
        command, variables = [*trainer["command"], *trainer["args"]], {"PET_NPROC_PER_NODE": "1", "PET_NNODES": "1:1"}
        variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port()), "PET_NODE_RANK": "0"}
    environment = os.environ | variables | {"PATH": f"{BESIDE}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, "--dry_run"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dry run: everything checked, nothing started" in done.stdout


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def checked(document: dict[str, Any]) -> None:
    """Kubeflow's types have every field; kubernetes-validate has Kubernetes' own kinds."""
    import kubernetes_validate  # takes a second, as the next
    from kubeflow_trainer_api import models

    kinds = {"TrainJob": models.TrainerV1alpha1TrainJob, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}
    if document["kind"] in kinds:
        assert kinds[document["kind"]].from_dict(document).to_dict() == document
    else:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["runtime.yaml", "train.yaml"])
def test_the_files_for_kubernetes_are_valid(name):
    for document in documents(LAUNCH / "kubernetes" / name):
        checked(document)


def test_a_job_has_its_recipe_and_plan_where_its_flags_name_them(tmp_path):
    folder, line = planned(tmp_path, "--launcher", "kubernetes")
    assert line.startswith("exec kubectl create -f plan/train.yaml")
    plan, job = documents(folder / "train.yaml")
    for document in (plan, job):
        checked(document)
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["resourcesPerNode"]) == (2, {"limits": {"nvidia.com/gpu": 8}})
    assert "--deepspeed_config=plan/recipe.json" in trainer["args"]
    assert plan["data"]["recipe.json"] == (folder / "recipe.json").read_text()
    pod = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    (volume,), (container,) = pod["spec"]["template"]["spec"]["volumes"], pod["spec"]["template"]["spec"]["containers"]
    assert volume["configMap"]["name"] == plan["metadata"]["name"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dsgpt/plan"}]


def test_a_job_without_gpus_asks_for_cpus(tmp_path):
    (tmp_path / "calibration.json").write_text(json.dumps(RECORD))
    folder, _ = planned(tmp_path, "--launcher", "kubernetes", of="--model_size tiny --machine calibration.json")
    assert documents(folder / "train.yaml")[1]["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"cpu": 2}}


def test_scripts_and_image_have_no_known_mistakes():
    scripts = [*LAUNCH.rglob("*.sh"), LAUNCH / "slurm" / "train.sbatch"]
    assert len(scripts) == 5
    for command in (["shellcheck", *scripts], ["hadolint", LAUNCH / "Dockerfile"]):
        finished(subprocess.run([BESIDE / command[0], *command[1:]], capture_output=True, text=True, check=False))


APART = """
import json, os, sys
from dsgpt.machine.launcher import exit_rank
from dsgpt.training import command, run
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
run.SEEN_SEC = command.PATIENCE_SEC = 0.1
exit_rank(command.train([*sys.argv[2:], *json.loads(sys.argv[1])[int(os.environ["RANK"])]]))
"""
"""``src/gpt2.py`` of a rank that is alone on its machine, with flags of its own."""


def train_apart(folder: Path, *flags: list[str], code: int = EXIT_USER_ERROR) -> str:
    """What two ranks on machines of their own say in a run that ends with ``code``; each has flags of its own."""
    write_recipe(write_data(folder) / "recipe.json")
    (folder / "apart.py").write_text(APART)
    words = [json.dumps(flags), *command_line(folder, run_type="ddp", checkpoint_path=None)]
    done = run_script(folder / "apart.py", words, ranks=2, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_each_of_two_machines_saves_its_share_and_its_trace(tmp_path, way):
    flags = ["--run_type", way, "--checkpoint_path", "run", "--profile", "1", "--max_train_steps", "8"]
    train_apart(tmp_path, flags, flags, code=0)
    assert read_manifest(tmp_path / "run" / "step-00000008").step == 8
    assert len(list((tmp_path / "run" / "profile").iterdir())) == 2


def test_machines_that_do_not_share_the_run_folder_are_refused_before_the_first_step(tmp_path):
    """Each of the two has a folder of its own under the same path, which differs here by its link."""
    said = train_apart(tmp_path, *(["--checkpoint_path", f"of-{rank}"] for rank in range(2)))
    assert f"{socket.gethostname()} does not see what rank 0 writes there" in said
    assert not (tmp_path / "of-0" / "step-00000002").exists()


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ("--deepspeed_config other/recipe.json", "the recipe's optimizer is "),
        pytest.param("--seed 7", "--seed is '7', not '", marks=pytest.mark.long),
        ("--train_data_path other/train.bin", "sha256 of train is "),
        pytest.param("--train_data_path bare/train.bin", "sha256 of train is ", marks=pytest.mark.long),
    ],
)
def test_machines_that_were_not_given_the_same_are_refused_before_the_run_folder_is_made(tmp_path, flags, first):
    """Other data are of equal length; without a sidecar they are read."""
    write_recipe(tmp_path / "other" / "recipe.json", optimizer={"type": "AdamW", "params": {"lr": 0.5}})
    for folder in ("other", "bare"):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_tokens(tmp_path / folder / "train.bin", random_ids(TOKENS, seed=2))
    (tmp_path / "bare" / "train.json").unlink()
    said = train_apart(tmp_path, [], flags.split())
    host = socket.gethostname()
    assert f"error: {host} does not train what {host} does: {first}" in said
    assert said.rstrip().endswith("start all machines with the same code, flags, recipe and data")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_script_of_deepspeeds_launcher_makes_the_ranks_save(here, number):
    """The launcher itself dies of it, and its ranks with it."""
    (here / "hosts").write_text("127.0.0.1 slots=2\n")
    flags = {"run_type": "optimized", "max_train_steps": 4000, "save_every": 0, "max_val_steps": 1}
    variables = {"HOSTFILE": str(here / "hosts"), "NODE_RANK": "0", "PORT": str(free_port())}
    environment = os.environ | variables | {"DS_ACCELERATOR": "cpu", "PATH": f"{BESIDE}:{os.environ['PATH']}"}
    command, run = [LAUNCH / "run_hostfile.sh", *command_line(here, **flags)], here / "run"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as script:
        within(lambda: (run / "metrics.jsonl").exists() and len(read_lines(run)) > 3, seconds=120)
        script.send_signal(number)
        assert script.wait(timeout=60) == EXIT_STOPPED
    assert (run / f"step-{read_lines(run)[-1]['step']:08d}" / "manifest.json").exists()
