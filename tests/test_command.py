"""The command ``dsgpt``: in a checkout, under launchers, completed by a shell, and installed from a wheel."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import REPOSITORY, write_inputs

from dsgpt.__main__ import COMMANDS

SCRIPTS = {path.relative_to(REPOSITORY).as_posix() for folder in ("src", "charts", "data_prep")
           for path in (REPOSITORY / folder).glob("*.py")}  # fmt: skip


def dsgpt(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsgpt", *map(str, words)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "COLUMNS": "120"} | variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_every_script_has_a_command(tmp_path):
    assert {target.split()[0] for target, _ in COMMANDS.values()} >= SCRIPTS
    lines = dsgpt(cwd=tmp_path).stdout.splitlines()
    assert [line[2:17].strip() for line in lines[4 : 4 + len(COMMANDS)]] == list(COMMANDS)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "dsgpt 0."),
        (["trian"], 2, "error: trian: is not a command of dsgpt (did you mean train?)"),
        (["data"], 2, "; there is data prepare, data small, data download, data verify"),
        (["train"], 2, "error: --run_type is missing"),
        (["bench", "saving", "--help"], 0, "usage: dsgpt bench "),
        (["records", "--check", "--only", "nothing"], 2, "error: --only"),
        (["data", "verify", "nothing.bin"], 2, "error: nothing.bin: cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_and_what_they_answer(words, code, said, tmp_path):
    done = dsgpt(*words, cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("dsgpt da", {"data", "dashboard"}),
        ("dsgpt data ver", {"verify"}),
        ("dsgpt train --max_t", {"--max_train_steps"}),
        ("dsgpt data prepare --num", set()),
        ("dsgpt data small --num", {"--num_documents"}),
        ("dsgpt bench sav", {"saving"}),
    ],
)
def test_a_shell_completes(typed, offered, tmp_path):
    """By argcomplete's protocol: the line in variables, the answer on descriptor 8."""
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\v", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    line = f"exec 8>{answer} 9>/dev/null; exec {sys.executable} -m dsgpt"
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=os.environ | asked, check=True)
    assert {word.strip() for word in answer.read_text().split("\v") if word} == offered


def test_token_files_are_verified(tmp_path):
    folder = write_inputs(tmp_path)
    train, val = folder / "train.bin", folder / "val.bin"
    done = dsgpt("data", "verify", train, val, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    ids = bytearray(train.read_bytes())
    ids[0] ^= 1
    train.write_bytes(ids)
    sidecar = json.loads(val.with_suffix(".json").read_text()) | {"vocab_size": 2}
    val.with_suffix(".json").write_text(json.dumps(sidecar))
    done = dsgpt("data", "verify", train, val, cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: {train}: .*sha256.*\nerror: {val}: its largest id is .*\n", done.stderr), done.stderr


def test_a_wheel_works_outside_the_checkout(tmp_path):
    """Scripts and recipes come along; DeepSpeed's launcher starts the command as a module."""
    copy, wheels, installed, work = (tmp_path / name for name in ("copy", "wheels", "installed", "work"))
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=REPOSITORY, text=True).split("\0"):
        if name and not name.startswith(("checkpoint/", "docs/", "tests/")) and (REPOSITORY / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", wheels, copy], check=True)
    subprocess.run(
        [*pip, "install", "--no-compile", "--no-deps", "--target", installed, *wheels.glob("*.whl")], check=True
    )
    folder = write_inputs(work)
    alone = {"PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", "import dsgpt; print(dsgpt.__file__)"],
        cwd=work, env=os.environ | alone, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(installed))
    planned = dsgpt("plan", "--model_size", "tiny", "--gpus", 2, "--gpu", "t4", "--tokens", "1e6",
                    "--deepspeed_config", "ds_configs/zero2.json", cwd=work, **alone)  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    flags = ["--train_data_path", folder / "train.bin", "--val_data_path", folder / "val.bin", "--seq_length", 8,
             "--num_layers", 1, "--num_heads", 1, "--embedding_size", 8, "--max_train_steps", 1, "--no_inference",
             "--global_batch_size", 2, "--micro_batch_size_per_gpu", 1, "--device", "cpu"]  # fmt: skip
    deepspeed = [Path(sys.executable).parent / "deepspeed", "--quiet", "--num_gpus", "2", "--module", "dsgpt", "train"]
    recipe = ["--deepspeed_config", "ds_configs/zero1.json"]
    trained = subprocess.run(
        [str(word) for word in (*deepspeed, "--run_type", "optimized", *recipe, *flags, "--checkpoint_path", "run")],
        cwd=work, env=os.environ | alone | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (work / "run" / "RUN_COMPLETE.txt").exists(), trained.stdout + trained.stderr
