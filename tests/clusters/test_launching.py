"""What starts a training on several machines: the files of ``launch``, and the command that a plan writes for each."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from forked_ranks import run_script
from kubeflow_trainer_api import models
from small_run import REPOSITORY, command_line, write_data, write_recipe

from dsgpt.common.errors import EXIT_USER_ERROR

LAUNCH = REPOSITORY / "launch"
BESIDE = Path(sys.executable).parent


def planned(folder: Path, *words: str) -> tuple[Path, str]:
    """The folder of a recommendation for 16 GPUs, and the last line of its command."""
    flags = ["--model_size", "small", "--gpu", "a100-80gb", "--gpus", "16", "--tokens", "1e9", "--recommend", *words]
    done = run_script(REPOSITORY / "src" / "plan.py", flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "plan", (folder / "plan" / "train.sh").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("launcher", "starts"),
    [
        ("deepspeed", "exec launch/run_hostfile.sh --run_type "),
        ("torchrun", "exec env NODES=2 DEVICES=8 launch/torchrun.sh --run_type "),
        ("slurm", "exec sbatch --nodes=2 --gpus-per-node=8 launch/slurm/train.sbatch --run_type "),
    ],
)
def test_a_plan_writes_the_command_of_the_launcher(tmp_path, launcher, starts):
    folder, line = planned(tmp_path, "--launcher", launcher)
    assert line.startswith(starts)
    assert not (folder / "train.yaml").exists()


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def checked(document: dict[str, Any]) -> None:
    """Kubeflow's types have every field; kubernetes-validate has Kubernetes' own kinds."""
    kinds = {"TrainJob": models.TrainerV1alpha1TrainJob, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}
    if document["kind"] in kinds:
        read = kinds[document["kind"]].from_dict(document)
        assert read.to_dict() == document
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


def test_scripts_and_image_have_no_known_mistakes():
    scripts = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm" / "train.sbatch"]
    for command in (["shellcheck", *scripts], ["hadolint", LAUNCH / "Dockerfile"]):
        done = subprocess.run([BESIDE / command[0], *command[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


APART = """
import os, sys
from dsgpt.machine.launcher import exit_rank
from dsgpt.training import command, run
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
run.SEEN_SEC = command.PATIENCE_SEC = 0.1
exit_rank(command.train([*sys.argv[1:], "--checkpoint_path", f"of-{os.environ['RANK']}"]))
"""
"""``src/gpt2.py`` of a rank that is alone on its machine."""


def test_machines_that_do_not_share_the_run_folder_are_refused_before_the_first_step(tmp_path):
    """Each of the two has a folder of its own under the same path, which differs here by its link."""
    write_recipe(write_data(tmp_path) / "recipe.json")
    (tmp_path / "apart.py").write_text(APART)
    words = command_line(tmp_path, run_type="ddp", checkpoint_path=None)
    done = run_script(tmp_path / "apart.py", words, ranks=2, cwd=tmp_path)
    assert done.returncode == EXIT_USER_ERROR
    assert f"{socket.gethostname()} does not see what rank 0 writes there" in done.stderr
    assert not (tmp_path / "of-0" / "step-00000002").exists()
