"""``src/generate.py`` generates text from a real run, or refuses with the reason."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_script
from small_run import (
    REPOSITORY,
    TOKENS,
    command_line,
    random_ids,
    write_data,
    write_inputs,
    write_recipe,
    write_tokenizer,
    write_tokens,
)

from dsgpt.common.errors import UserError
from dsgpt.inference.sample import sample
from dsgpt.main import train

SCRIPT = REPOSITORY / "src" / "generate.py"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on data with a tokenizer, two checkpoints kept; tests only read it."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    assert train(command_line(folder, save_every=1)) == 0
    return folder / "run"


def texts(path: Path, **changes: Any) -> list[str]:
    flags = {
        "which": "latest",
        "prompt": "def ma",
        "samples": 1,
        "new_tokens": 8,
        "temperature": 0.8,
        "top_k": 50,
        "seed": 1,
        "device_kind": "cpu",
    }
    return list(sample(path, **flags | changes))


def refusal(path: Path, **changes: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        texts(path, **changes)
    assert not any("\n" in line for line in caught.value.problems)
    return [line.replace(f"{path}", "RUN") for line in caught.value.problems]


def generate(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_script(SCRIPT, words, cwd=cwd)


def test_the_command_continues_the_prompt(run_dir, tmp_path):
    done = generate("--checkpoint", run_dir, "--prompt", "def ma", "--num_samples", 2, "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, rest = done.stdout.split("-" * 80 + "\n")
    assert first.startswith("def ma")
    assert second.startswith("def ma")
    assert first != second
    assert rest == ""


def test_the_seed_decides_the_text(run_dir):
    assert texts(run_dir, samples=2) == texts(run_dir, samples=2)
    assert texts(run_dir, seed=1) != texts(run_dir, seed=2)
    assert texts(run_dir, seed=1, temperature=0) == texts(run_dir, seed=2, temperature=0)


def test_an_empty_prompt_starts_a_document(run_dir):
    (text,) = texts(run_dir, prompt="", temperature=0)
    assert text != ""


def test_no_more_is_generated_than_fits(run_dir):
    (text,) = texts(run_dir, prompt="x" * 10, new_tokens=1000, temperature=0)
    assert len(text.encode()) >= 10


def test_a_checkpoint_may_be_named_itself(run_dir):
    newest, older = sorted(run_dir.glob("step-*"), reverse=True)
    assert (newest.name, older.name) == ("step-00000002", "step-00000001")
    assert texts(newest) == texts(run_dir)
    assert texts(older)


def test_a_prompt_longer_than_the_context(run_dir, snapshot):
    assert refusal(run_dir, prompt="x" * 16) == snapshot


def test_a_prompt_that_is_not_text(run_dir):
    """What Python makes of bytes on the command line that are not UTF-8."""
    assert refusal(run_dir, prompt="def \udcff") == ["--prompt is not valid UTF-8 text"]
    assert texts(run_dir, prompt="é 日")


def test_a_prompt_outside_the_models_vocabulary(tmp_path, snapshot):
    folder = write_data(tmp_path)
    write_recipe(folder / "recipe.json")
    tokenizer = write_tokenizer(folder / "tokenizer")
    for name in ("train.bin", "val.bin"):
        write_tokens(folder / name, random_ids(TOKENS, below=60), tokenizer=tokenizer)
    assert train(command_line(folder, vocab_size=60)) == 0
    assert refusal(folder / "run", prompt="~") == snapshot
    assert refusal(folder / "run", prompt="") == snapshot


def test_a_tokenizer_without_an_end_of_text(run_dir, tmp_path, snapshot):
    copy = tmp_path / "step-00000001"
    shutil.copytree(run_dir / "step-00000001", copy)
    settings = copy / "tokenizer" / "tokenizer_config.json"
    settings.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    manifest = json.loads((copy / "manifest.json").read_text())
    data = settings.read_bytes()
    facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"]["tokenizer/tokenizer_config.json"] = facts
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(copy, prompt="") == snapshot
    assert texts(copy, prompt="def")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"samples": 0}, "--num_samples must be at least 1, not 0"),
        ({"new_tokens": -1}, "--max_new_tokens must be at least 1, not -1"),
        ({"top_k": 0}, "--top_k must be at least 1, not 0"),
        ({"temperature": -1.0}, "--temperature must be a number of at least 0, not -1.0"),
        ({"temperature": float("nan")}, "--temperature must be a number of at least 0, not nan"),
        ({"temperature": float("inf")}, "--temperature must be a number of at least 0, not inf"),
        ({"seed": -1}, "--seed must be a whole number from 0 to 2^63 - 1, not -1"),
        ({"seed": 2**64}, f"--seed must be a whole number from 0 to 2^63 - 1, not {2**64}"),
    ],
)
def test_numbers_out_of_range(run_dir, changes, line):
    assert refusal(run_dir, **changes) == [line]


def test_mistakes_are_reported_together(run_dir):
    assert len(refusal(run_dir, samples=0, top_k=0, temperature=-1.0, seed=-1)) == 4


def test_a_tiny_temperature_is_the_likeliest_text(run_dir):
    assert texts(run_dir, temperature=1e-30) == texts(run_dir, temperature=0)


def test_no_checkpoint_there(tmp_path):
    line = "--checkpoint RUN: holds no checkpoint; name a run folder such as checkpoint/demo-zero1"
    assert refusal(tmp_path) == [line]
    assert refusal(tmp_path / "nothing") == [line]
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == [line]


def test_no_tokenizer(run_dir, tmp_path, snapshot):
    copy = tmp_path / "step-00000001"
    shutil.copytree(run_dir / "step-00000001", copy)
    shutil.rmtree(copy / "tokenizer")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"] = {name: facts for name, facts in manifest["files"].items() if not name.startswith("tokenizer/")}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(copy) == snapshot


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_a_damaged_file_is_named(run_dir, tmp_path, snapshot, name):
    copy = tmp_path / "step-00000001"
    shutil.copytree(run_dir / "step-00000001", copy)
    data = bytearray((copy / name).read_bytes())
    data[-3] ^= 1
    (copy / name).write_bytes(data)
    assert refusal(copy) == snapshot


def test_an_unreadable_manifest_is_refused(run_dir, tmp_path):
    copy = tmp_path / "step-00000001"
    shutil.copytree(run_dir / "step-00000001", copy)
    for text in ("{", "[]", "{}", '{"files": 5}'):
        (copy / "manifest.json").write_text(text)
        (line,) = refusal(copy)
        assert line.startswith("RUN/manifest.json: is not a readable manifest (")


def test_errors_of_the_command(run_dir, tmp_path):
    done = generate("--checkpoint", tmp_path / "none", "--prompt", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: --checkpoint {tmp_path}/none: holds no checkpoint; name a run folder such as checkpoint/demo-zero1\n"
    )
    done = generate("--prompt", "x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: the following arguments are required: --checkpoint; see --help"
    done = generate("--checkpoint", run_dir, "--temperature", "warm", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: --temperature must be a number of at least 0, not warm"


def test_mistakes_on_the_command_line_are_reported_together(run_dir, tmp_path, snapshot):
    words = "--num_samples 0 --top_k x --temperature nan --seed -1 --device tpu --which newest --promt def"
    done = generate("--checkpoint", run_dir, *words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == snapshot
