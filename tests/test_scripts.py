"""How scripts end: if the output has no reader, is full or closed, and if a path is not valid UTF-8."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from forked_ranks import NO_READER, run_script
from small_run import REPOSITORY, SCRIPTS, command_line, write_inputs

from dsgpt.__main__ import COMMANDS
from dsgpt.common.command_line import exit_code_of
from dsgpt.common.errors import UserError
from dsgpt.config.options import Options, parse_arguments, path_or_address

LATIN = os.fsdecode(b"caf\xe9")
"""A name from an old disk or archive: not UTF-8."""
SHOWN = r"caf\xe9"


def start(script: str | Path, *words: object, cwd: Path, **outputs: str):
    """Run a script whose output refuses what it cannot encode, as most outputs do."""
    path = script if script == DSGPT else REPOSITORY / script
    return run_script(path, words, cwd=cwd, environment=os.environ | {"COLUMNS": "120"}, **outputs)


FULL_DISK = "error: standard output: No space left on device: the output is incomplete\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_output_that_is_closed_or_full_ends_a_script(script, tmp_path):
    closed = start(script, "--help", cwd=tmp_path, stdout=NO_READER)
    full = start(script, "--help", cwd=tmp_path, stdout="/dev/full")
    expected = [(0, ""), (0, "")] if script == "src/gpt2.py" else [(141, ""), (2, FULL_DISK)]
    assert [(done.returncode, done.stderr) for done in (closed, full)] == expected


def test_python_adds_no_message_when_it_exits(tmp_path):
    """A forked script ends without the interpreter's own exit."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    words = [sys.executable, REPOSITORY / "src" / "plan.py", "--help"]
    for output, code, message in (("| true; exit ${PIPESTATUS[0]}", 141, ""), (">/dev/full", 2, FULL_DISK)):
        line = ["bash", "-c", f'"$@" {output}', "-", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, message)


def test_generate_ends_when_its_output_is_closed(run_dir, tmp_path):
    """Also in the middle of its work: a million samples are asked for."""
    words = ["--checkpoint", run_dir, "--prompt", "a", "--max_new_tokens", 2, "--num_samples", 10**6]
    done = start("src/generate.py", *words, cwd=tmp_path, stdout=NO_READER)
    assert (done.returncode, done.stderr) == (141, "")


SIGNALLED = """
import os, runpy, time
from dsgpt.inference import model_files

def signalled(*_args, **_named):
    os.kill(os.getpid(), {number})
    time.sleep(60)

model_files.write_safetensors = signalled
runpy.run_path("{path}", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "words", "kept", "number"),
    [
        ("src/serve.py", ["--checkpoint"], "", signal.SIGTERM),
        ("src/convert.py", ["--to", "hf", "out/model", "--from"], "; nothing was written", signal.SIGHUP),
    ],
)
def test_a_signal_leaves_no_partial_folder(run_dir, tmp_path, monkeypatch, script, words, kept, number):
    """It arrives while the weights are written."""
    for folder in ("out", "temporary"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    signalled = tmp_path / "signalled.py"
    signalled.write_text(SIGNALLED.format(path=REPOSITORY / script, number=int(number)))
    done = start(signalled, *words, run_dir, cwd=tmp_path)
    assert done.stderr.endswith(f"error: ended by {number.name}{kept}\n")
    assert done.returncode == 128 + number
    assert [*(tmp_path / "out").iterdir(), *(tmp_path / "temporary").iterdir()] == []


def test_charts_of_a_run_under_any_name_are_written(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / LATIN)
    words = ["--run", f"a={LATIN}", "--output-dir", f"{LATIN}/charts", "--only", "training_time"]
    done = start("charts/generate_charts.py", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr, f"{SHOWN}/charts" in done.stdout) == (0, "", True)
    assert (tmp_path / LATIN / "charts" / "comparison.md").exists()


@pytest.mark.parametrize("sink", [NO_READER, "/dev/full", "closed"])
def test_training_continues_and_its_log_is_complete(run_dir, tmp_path, sink):
    """Standard error has the same target: writing to it must not fail either."""
    words = [*command_line(run_dir.parent, checkpoint_path=tmp_path / "run", steps_per_print=1)]
    if sink == "closed":  # a new process: the first files that Python opens would get these numbers
        line = ["bash", "-c", 'exec "$@" >&- 2>&-', "-", sys.executable, REPOSITORY / "src" / "gpt2.py", *words]
        done = subprocess.run(line, check=False, cwd=tmp_path)
    else:
        done = start("src/gpt2.py", *words, cwd=tmp_path, stdout=sink, stderr=sink)
    assert done.returncode == 0
    log = (tmp_path / "run" / "train.log").read_text(encoding="utf-8")
    assert log.startswith("strategy ") and "step      2/2  loss " in log
    assert (tmp_path / "run" / "RUN_COMPLETE.txt").exists()


def test_every_path_of_training_must_be_utf8():
    paths = [
        f"--{each.name}"
        for each in fields(Options)
        if each.metadata["argparse"].get("type") in (Path, path_or_address) or each.name == "checkpoint_path"
    ]
    assert {*paths} >= {"--train_data_path", "--val_data_path", "--checkpoint_path", "--deepspeed_config"}
    _, problems = parse_arguments([word for flag in paths for word in (flag, f"{LATIN}/x")])
    with pytest.raises(UserError) as caught:
        problems.raise_if_any()
    named = [line.split(": is not valid UTF-8")[0] for line in caught.value.problems]
    assert named == [f"{flag} {SHOWN}/x" for flag in paths]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("src/gpt2.py", ["--init_from", LATIN]),
        ("src/generate.py", ["--checkpoint", LATIN]),
        ("src/convert.py", ["--to", "hf", "--from", LATIN, "out"]),
        ("src/convert.py", ["--to", "hf", "--from", "run", LATIN]),
        ("src/benchmark.py", ["parity", "--keep", LATIN]),
        ("data_prep/preprocess.py", ["--output_dir", LATIN]),
        ("data_prep/preprocess.py", ["--tokenizer", LATIN]),
        ("data_prep/download_data.py", ["--output_dir", LATIN]),
    ],
)
def test_a_path_that_libraries_cannot_open_is_refused(script, flags, tmp_path):
    (tmp_path / LATIN).mkdir()
    done = start(script, *flags, cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and all(line.startswith("error: ") for line in lines), done.stderr
    (line,) = [line for line in lines if "UTF-8" in line]
    reason = "the libraries that read tokenizers and weights cannot open such a path: rename it"
    assert f" {SHOWN}: is not valid UTF-8, and {reason}" in line
    assert [path.name for path in tmp_path.iterdir()] == [LATIN]


def test_text_under_any_name_is_prepared_although_the_output_is_closed(run_dir, tmp_path):
    """A folder, a single file and JSON lines; a second call finds the result; every JSON file is valid Unicode."""
    (texts := tmp_path / LATIN).mkdir()
    (texts / f"{LATIN}.txt").write_text("under another name\n" * 9)
    (texts / f"{LATIN}.jsonl").write_text(f"{json.dumps({'text': 'a line ' * 9})}\n" * 9)
    files, tokenizer = [texts, texts / f"{LATIN}.txt"], run_dir.parent / "tokenizer"
    words = ["--input", *files, "--tokenizer", tokenizer, "--output_dir", "out"]
    first = start("data_prep/preprocess.py", *words, cwd=tmp_path, stdout=NO_READER)
    assert (first.returncode, first.stderr) == (141, "")
    second = start("data_prep/preprocess.py", *words, cwd=tmp_path)
    assert (second.returncode, second.stderr, second.stdout[:17]) == (0, "", "already prepared:")
    for path in (tmp_path / "out").glob("*.json"):
        json.dumps(json.loads(path.read_bytes()), ensure_ascii=False).encode()
    assert json.loads((tmp_path / "out" / "train.json").read_bytes())["source"] == f"{SHOWN}, {SHOWN}.txt"


def failing(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def test_mistakes_of_the_user_are_lines_and_other_errors_are_raised(capsys):
    for error, code, output in (
        (UserError("one", "two"), 2, "error: one\nerror: two\n"),
        (KeyboardInterrupt(), 130, "error: interrupted; nothing was written\n"),
        (OSError(28, "No space left", "a/b"), 2, "error: a/b: No space left; nothing was written\n"),
    ):
        assert exit_code_of(failing(error), kept="nothing was written") == code
        assert capsys.readouterr() == ("", output)
    for other in (ConnectionResetError(104, "reset"), BrokenPipeError(32, "of another pipe"), KeyError("x")):
        with pytest.raises(type(other)):
            exit_code_of(failing(other))


# The command ``dsgpt``: in a checkout, completed by a shell, and under a launcher from an installed wheel.

DSGPT = "dsgpt.__main__"


def test_every_script_has_a_command(tmp_path):
    assert {target.split()[0] for target, _ in COMMANDS.values()} >= set(SCRIPTS)
    lines = start(DSGPT, cwd=tmp_path).stdout.splitlines()
    assert [line[2:17].strip() for line in lines[4 : 4 + len(COMMANDS)]] == list(COMMANDS)
    for words, answer in (("--version", "dsgpt 0."), ("bench saving --help", "usage: dsgpt bench ")):
        assert start(DSGPT, *words.split(), cwd=tmp_path).stdout.startswith(answer)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("dsgpt da", {"data", "dashboard"}),
        ("dsgpt data ver", {"verify"}),
        ("dsgpt train --max_t", {"--max_train_steps"}),
        ("dsgpt data small --num", {"--num_documents"}),
    ],
)
def test_a_shell_completes(typed, offered, tmp_path):
    """By argcomplete's protocol: the line in variables, the answer on descriptor 8."""
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\v", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    line = f"exec 8>{answer} 9>/dev/null; exec {sys.executable} -m dsgpt"
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=os.environ | asked, check=True)
    assert {word.strip() for word in answer.read_text().split("\v") if word} == offered


CARRIED = re.compile(r"(src|charts)/\w+\.py|(data_prep|ds_configs|launch|charts/\.streamlit)/.*")
"""What a wheel has besides the package; a source distribution also has ``OF_SOURCES``."""
OF_SOURCES = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "requirements.txt", "setup.py"}


@pytest.mark.long
def test_a_wheel_of_a_source_distribution_works_outside_the_checkout(tmp_path):
    """Scripts and recipes come along; DeepSpeed's launcher, named by its path, starts the command as a module.

    On PATH are neither a compiler nor anything of the environment, which need not be activated.
    """
    copy, wheels, installed, work, tools = (
        tmp_path / name for name in ("copy", "wheels", "installed", "work", "tools")
    )
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=REPOSITORY, text=True).split("\0")
    tracked = {name for name in listed if name and (REPOSITORY / name).exists()}
    for name in tracked:
        if not name.startswith(("checkpoint/", "docs/", "tests/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (sources,) = wheels.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        assert {name.partition("/")[2] for name in archive.getnames()} >= OF_SOURCES
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", wheels, sources], check=True)
    subprocess.run(
        [*pip, "install", "--no-compile", "--no-deps", "--target", installed, *wheels.glob("*.whl")], check=True
    )
    checkout = installed / "dsgpt" / "checkout"
    carried = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    assert carried == {name for name in tracked if CARRIED.fullmatch(name)}
    package = {f"src/{path.relative_to(installed).as_posix()}" for path in (installed / "dsgpt").rglob("*")}
    assert {name for name in tracked if name.startswith("src/dsgpt/")} <= package  # with the texts of pages and styles
    folder = write_inputs(work)
    alone = {"PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import dsgpt; print(dsgpt.__file__)"]
    assert subprocess.check_output(where, cwd=work, env=os.environ | alone, text=True).startswith(str(installed))
    flags = ["--train_data_path", folder / "train.bin", "--val_data_path", folder / "val.bin", "--seq_length", 8,
             "--num_layers", 1, "--num_heads", 1, "--embedding_size", 8, "--max_train_steps", 1, "--no_inference",
             "--global_batch_size", 2, "--micro_batch_size_per_gpu", 1, "--device", "cpu"]  # fmt: skip
    deepspeed = [Path(sys.executable).parent / "deepspeed", "--quiet", "--num_gpus", "2", "--module", "dsgpt", "train"]
    recipe = ["--deepspeed_config", "ds_configs/zero1.json"]
    tools.mkdir()
    for name in ("sh", "bash", "env", "uname", "grep", "awk", "cat"):
        (tools / name).symlink_to(shutil.which(name))
    kept = {key: value for key, value in os.environ.items() if key in {"HOME", "TMPDIR", "LANG"}}
    trained = subprocess.run(
        [str(word) for word in (*deepspeed, "--run_type", "optimized", *recipe, *flags, "--checkpoint_path", "run")],
        cwd=work, env=kept | alone | {"PATH": str(tools)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (work / "run" / "RUN_COMPLETE.txt").exists(), trained.stdout + trained.stderr
    plan = "plan --recommend --launcher deepspeed --gpu a100-80gb --gpus 16 --tokens 1e9 --train_data_path train.bin"
    words = [sys.executable, "-m", "dsgpt", *plan.split(), "--val_data_path", "val.bin"]
    subprocess.run(words, cwd=work, env=os.environ | alone, check=True)
    started = subprocess.run(["sh", "plan/train.sh"], cwd=work, capture_output=True, text=True, check=False)
    assert started.stderr.startswith("error: hosts: there is no such hostfile"), started.stderr
