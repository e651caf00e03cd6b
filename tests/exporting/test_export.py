"""``src/convert.py`` exports the weights of real runs for other tools, or refuses with the reason."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from convert_script import SCRIPT, config_of, converted, damage, refusal
from messages import without_paths
from published import largest_difference, our_model, publish
from safetensors.torch import load_file
from small_run import command_line, write_inputs
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dsgpt.inference.commands import GenerateRequest as Request
from dsgpt.inference.sample import Writer
from dsgpt.training.command import train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline of three steps, each kept, on data with a tokenizer; tests only read it."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    assert train(command_line(folder, save_every=1, keep_checkpoints=9, max_train_steps=3, eval_every=1)) == 0
    return folder / "run"


def test_a_run_becomes_a_model_of_transformers(run_dir, tmp_path):
    out = tmp_path / "new" / "hf"
    said = converted("--from", run_dir, "--to", "hf", out)
    assert "step-00000003 (baseline, step 3)" in said
    checkpoint = run_dir / "step-00000003"
    config = config_of(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert largest_difference(our_model(load_file(checkpoint / "model.safetensors"), config), theirs) < 1e-5
    assert theirs.dtype == torch.float32
    assert theirs.get_input_embeddings().weight.shape[0] == config.vocab_size != config.padded_vocab_size
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer.encode("def é 日")) == "def é 日"
    assert tokenizer.model_max_length == config.block_size
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == GenerationConfig.from_pretrained(out).eos_token_id
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert out.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bit_exports(run_dir, tmp_path, name, dtype):
    converted("--from", run_dir, "--to", "hf", "--dtype", name, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.dtype == dtype
    whole = load_file(run_dir / "step-00000003" / "model.safetensors")
    assert torch.equal(theirs.transformer.h[1].mlp.c_fc.weight, whole["blocks.1.mlp.fc.weight"].t().to(dtype))


def test_portable_weights_are_the_checkpoints_and_generate_text(run_dir, tmp_path):
    converted("--from", run_dir / "step-00000002", "--to", "portable", tmp_path / "portable")
    checkpoint = run_dir / "step-00000002"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "portable"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (checkpoint / "model.json").read_bytes() == (tmp_path / "portable" / "model.json").read_bytes()
    manifest = json.loads((tmp_path / "portable" / "manifest.json").read_text())
    assert (manifest["portable"], manifest["step"], manifest["strategy"]) == ("weights", 2, "baseline")
    texts = [
        list(Writer(Request(checkpoint=folder, max_new_tokens=8, device="cpu")).texts(["ab"]))
        for folder in (checkpoint, tmp_path / "portable")
    ]
    assert texts[0] == texts[1]


def test_export_and_import_is_the_identity(run_dir, tmp_path):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    converted("--from", run_dir, "--to", "hf", one)
    converted("--from", one, "--to", "portable", two)
    converted("--from", two, "--to", "hf", three)
    assert {path.name for path in one.iterdir()} == {path.name for path in three.iterdir()}
    for path in one.iterdir():
        assert path.read_bytes() == (three / path.name).read_bytes(), path.name
    back = load_file(two / "model.safetensors")
    for name, value in load_file(run_dir / "step-00000003" / "model.safetensors").items():
        assert torch.equal(back[name], value), name


def test_the_best_checkpoint(run_dir, tmp_path, snapshot):
    losses = {
        checkpoint.name: json.loads((checkpoint / "manifest.json").read_text())["val_loss"]
        for checkpoint in run_dir.glob("step-*")
    }
    best = min(losses, key=losses.get)
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    worse = next(name for name in losses if name != best)
    said = converted("--from", copy, "--to", "hf", "--which", "best", tmp_path / "a")
    assert best in said
    (copy / "best").write_text(f"{worse}\n")
    assert worse in converted("--from", copy, "--to", "hf", "--which", "best", tmp_path / "b")
    (copy / "best").write_text("step-00000099\n")
    missing = refusal("--from", copy, "--to", "hf", "--which", "best", tmp_path / "c")
    (copy / "best").unlink()
    unknown = refusal("--from", copy, "--to", "hf", "--which", "best", tmp_path / "c")
    single = refusal("--from", copy / "step-00000001", "--to", "hf", "--which", "best", tmp_path / "c")
    assert [without_paths(line, copy) for line in (*missing, *unknown, *single)] == snapshot


def test_a_run_without_a_tokenizer(run_dir, tmp_path, snapshot):
    copy = tmp_path / "step-00000003"
    shutil.copytree(run_dir / "step-00000003", copy)
    shutil.rmtree(copy / "tokenizer")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"] = {name: facts for name, facts in manifest["files"].items() if "tokenizer" not in name}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    *_, last = converted("--from", copy, "--to", "hf", tmp_path / "hf").splitlines()
    assert last == snapshot
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.eos_token_id is None


def test_it_needs_neither_transformers_nor_deepspeed(run_dir, tmp_path):
    command = [sys.executable, "-X", "importtime", str(SCRIPT), "--from", run_dir, "--to", "hf", tmp_path / "hf"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for package in ("transformers", "huggingface_hub", "deepspeed"):
        assert f" {package}\n" not in done.stderr


def test_mistakes_are_reported_together(run_dir, tmp_path, snapshot):
    lines = refusal("--to", "hg", "--dtype", "int8", "--which", "worst", "--checkpoint", "x", "--quantize")
    assert lines == snapshot
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    lines = refusal("--from", tmp_path, "--to", "hf", tmp_path / "full")
    assert [without_paths(line, tmp_path) for line in lines] == snapshot
    assert (tmp_path / "full" / "file").exists()


def test_places_where_nothing_can_be_written(run_dir, tmp_path, snapshot):
    file = tmp_path / "file"
    file.write_text("x")
    (tmp_path / "link").symlink_to(tmp_path)
    for place in (file, file / "below", tmp_path / "link"):
        (line,) = refusal("--from", run_dir, "--to", "hf", place)
        assert without_paths(line, tmp_path) == snapshot
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_an_empty_folder_is_used(run_dir, tmp_path):
    converted("--from", run_dir, "--to", "portable", tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_a_failed_write_leaves_nothing(run_dir, tmp_path):
    """A limit of the system on the size of a file stands for a full disk: writing fails in the middle."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    command = [sys.executable, SCRIPT, "--from", run_dir, "--to", "hf", tmp_path / "hf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/hf: could not be written (File too large)\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "tokenizer/tokenizer.json"])
def test_damage_is_found(run_dir, tmp_path, name):
    copy = tmp_path / "step-00000003"
    shutil.copytree(run_dir / "step-00000003", copy)
    damage(copy / name)
    (line,) = refusal("--from", copy, "--to", "hf", tmp_path / "hf")
    assert line.startswith(f"{copy}/{name}: is damaged")
    assert not (tmp_path / "hf").exists()


def test_what_only_a_resume_needs_may_be_missing(run_dir, tmp_path):
    copy = tmp_path / "step-00000003"
    shutil.copytree(run_dir / "step-00000003", copy)
    (copy / "optimizer.safetensors").unlink()
    converted("--from", copy, "--to", "hf", tmp_path / "hf")


def test_values_that_a_dtype_cannot_hold(tmp_path, snapshot):
    model = publish(tmp_path / "hf", vocab_size=60)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path / "hf")
    assert "to" in converted("--from", tmp_path / "hf", "--to", "hf", "--dtype", "bf16", tmp_path / "bf16")
    assert refusal("--from", tmp_path / "hf", "--to", "hf", "--dtype", "fp16", tmp_path / "fp16") == snapshot
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "bf16"}
