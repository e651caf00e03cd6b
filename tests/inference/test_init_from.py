"""Published weights to start from, and tokenizers in exports."""

import json
import os
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_script
from harmful_tokenizers import bring_code, seal
from published import RunsCode, converted, hub, largest_difference, our_model, publish, published, refusal
from safetensors.torch import load_file, save_file
from small_run import REPOSITORY, VOCABULARY, command_line, without_paths, write_inputs, write_tokenizer
from training_runs import finished, read_record
from transformers import GPT2Model

from dsgpt.common.errors import UserError
from dsgpt.formats.hugging_face import PretrainedWeights
from dsgpt.machine.topology import free_port
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.training.command import train

# `--init_from`: published weights are loaded exactly, or refused with the reason.


CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=VOCABULARY)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    weights = PretrainedWeights(folder, CONFIG)
    return {name: weights(name, shape) for name, shape in parameter_shapes(CONFIG).items()}


def refused(folder: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        loaded(folder)
    return [line.replace(str(folder), "HF") for line in caught.value.problems]


@pytest.fixture(scope="module")
def model_and_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model as ``save_pretrained`` leaves it; tests only read it."""
    folder = tmp_path_factory.mktemp("published") / "hf"
    return publish(folder, vocab_size=VOCABULARY), folder


def test_the_published_function_is_computed(model_and_folder):
    model, folder = model_and_folder
    assert largest_difference(our_model(loaded(folder), CONFIG), model) < 1e-5


def test_every_way_to_store_the_same(model_and_folder, tmp_path):
    model, folder = model_and_folder
    expected = loaded(folder)
    weights = model.state_dict()
    assert "lm_head.weight" in weights
    bare = {name.removeprefix("transformer."): value for name, value in weights.items() if name != "lm_head.weight"}
    mask = {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    ways = {name: tmp_path / name for name in ("parts", "bare", "zip", "legacy", "openai")}
    for way in ways.values():
        way.mkdir()
    model.save_pretrained(ways["parts"], max_shard_size="20kB")
    assert len(list(ways["parts"].glob("model-*.safetensors"))) > 1
    GPT2Model.from_pretrained(folder).save_pretrained(ways["bare"])
    torch.save(weights, ways["zip"] / "pytorch_model.bin")
    torch.save(bare | mask, ways["legacy"] / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    save_file({name: value.contiguous() for name, value in (bare | mask).items()}, ways["openai"] / "model.safetensors")
    for name, way in ways.items():
        found = loaded(way)
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
    hashes = {name: PretrainedWeights(way, CONFIG).sha256() for name, way in ways.items()}
    assert len(set(hashes.values())) == len(hashes)
    published(vocab_size=VOCABULARY).to(torch.bfloat16).save_pretrained(tmp_path / "low")
    found = loaded(tmp_path / "low")  # read as it is
    assert all(torch.equal(found[name], expected[name].bfloat16().float()) for name in expected)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    for name, new in (("zip", True), ("legacy", False)):
        folder = tmp_path / name
        folder.mkdir()
        file = folder / "pytorch_model.bin"
        torch.save({"wte.weight": RunsCode(tmp_path / "ran")}, file, _use_new_zipfile_serialization=new)
        (line,) = refused(folder)
        assert line.startswith("HF/pytorch_model.bin: holds more than tensors, and loading it could run code")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "pytorch_model.bin").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    assert refused(bare)
    assert not (tmp_path / "ran").exists()
    assert torch.load(tmp_path / "zip" / "pytorch_model.bin", weights_only=False)  # it would have
    assert (tmp_path / "ran").exists()


def test_other_weights_are_refused(model_and_folder, tmp_path, snapshot):
    _, folder = model_and_folder
    weights = {name: value.contiguous() for name, value in load_file(folder / "model.safetensors").items()}

    name = "transformer.h.1.mlp.c_fc.bias"
    for case, changed in {
        "missing": {key: value for key, value in weights.items() if key != name},
        "unknown": weights | {"score.weight": torch.ones(2)},
        "shape": weights | {name: torch.ones(7)},
        "type": weights | {name: torch.ones(128, dtype=torch.int8)},
        "untied head": weights | {"lm_head.weight": torch.ones(VOCABULARY, 32)},
        "with and without the prefix": weights | {"wpe.weight": torch.ones(64, 32)},
    }.items():
        save_file(changed, tmp_path / "model.safetensors")
        assert [line.removeprefix("HF/model.safetensors: ") for line in refused(tmp_path)] == snapshot(name=case)
    (tmp_path / "model.safetensors").unlink()
    for part in ("one.safetensors", "two.safetensors"):
        save_file(weights, tmp_path / part)
    index = {"weight_map": {"wte.weight": "one.safetensors", "wpe.weight": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(tmp_path) == snapshot(name="in two parts")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../model.safetensors"}}')
    assert refused(tmp_path) == snapshot(name="outside")


# Around a run.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Data in the vocabulary of a small tokenizer, a recipe, and a model published with that tokenizer."""
    write_inputs(tmp_path)
    write_tokenizer(tmp_path / "hf")
    publish(tmp_path / "hf", vocab_size=VOCABULARY)
    return tmp_path


NO_SHAPE = {"num_layers": None, "num_heads": None, "embedding_size": None, "max_position_embeddings": None}


def flags(folder: Path, **changes: Any) -> list[str]:
    return command_line(folder, **NO_SHAPE | {"init_from": folder / "hf", "seq_length": 16} | changes)


def mistakes(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    capsys.readouterr()
    assert train(flags(folder, dry_run=True, **changes)) == 2
    return [line.removeprefix("error: ").replace(str(folder), "HERE") for line in capsys.readouterr().err.splitlines()]


def test_training_starts_from_published_weights_and_resumes_without_them(folder, capsys, snapshot):
    assert train(flags(folder, max_train_steps=2, save_every=1, num_layers=2)) == 0  # as the shape says
    # The schedule's first steps have learning rate 0: the weights are still the published ones.
    saved = load_file(folder / "run" / "step-00000001" / "model.safetensors")
    expected = loaded(folder / "hf")
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    source = read_record(folder / "run")["training_config"]["init_from"]
    assert source == {"source": f"{folder}/hf", "sha256": PretrainedWeights(folder / "hf", CONFIG).sha256()}
    assert read_record(folder / "run")["training_config"]["model_size"] == "hf"
    longer = {"max_train_steps": 4, "resume": True, "allow_changed": "recipe"}
    without = mistakes(folder, capsys, **longer, init_from=None, num_layers=2, num_heads=2, embedding_size=32,
                       max_position_embeddings=64)  # fmt: skip
    assert any(line.startswith("--resume: initial weights is None but") for line in without)
    (folder / "hf").rename(folder / "elsewhere")
    assert train(flags(folder, **longer)) == 0
    assert read_record(folder / "run")["training_config"]["init_from"] == source
    assert read_record(folder / "run")["summary"]["optimizer_steps"] == 4
    assert mistakes(folder, capsys, checkpoint_path=folder / "other") == snapshot


def test_another_vocabulary_is_refused_and_a_missing_one_is_reported(folder, capsys, snapshot):
    tokenizer = json.loads((folder / "hf" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert mistakes(folder, capsys) == snapshot
    (folder / "hf" / "tokenizer.json").unlink()
    assert train(flags(folder, max_train_steps=1)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--init_from: ")]
    assert without_paths(line, folder) == snapshot
    publish(folder / "hf", vocab_size=60)
    assert mistakes(folder, capsys, checkpoint_path=folder / "other") == snapshot


# `--init_from` a name on the hub: fetched once, used from the cache after that, and refused in one line.


def train_from_hub(folder: Path, endpoint: str, name: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
    words = flags(folder, init_from=name, max_train_steps=1, overwrite=True, **more)
    return run_script(REPOSITORY / "src" / "gpt2.py", words, environment=environment, cwd=folder)


def test_a_name_is_fetched_once(folder):
    published(vocab_size=VOCABULARY).save_pretrained(folder / "parts", max_shard_size="20kB")
    with hub({"gpt2": folder / "hf", "somebody/parts": folder / "parts"}) as (endpoint, asked):
        finished(train_from_hub(folder, endpoint, "gpt2"))
        fetched = [line.rpartition("/")[2] for line in asked if line.startswith("GET") and "/resolve/" in line]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*fetched} and len({*fetched}) == len(fetched)
        finished(train_from_hub(folder, endpoint, "somebody/parts", dry_run=True))
        done = train_from_hub(folder, endpoint, "nobody/nothing", dry_run=True)
        line = "error: --init_from nobody/nothing: is neither a folder here nor a readable model on the hub\n"
        assert (done.returncode, done.stderr) == (2, line)
    done = train_from_hub(folder, endpoint, "gpt2")  # the hub is gone, the cache is not
    finished(done)
    assert "start       from the weights of gpt2" in done.stdout


def test_no_network_is_one_line(folder):
    endpoint = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    done = train_from_hub(folder, endpoint, "gpt2")
    assert time.monotonic() - started < 60, "a library retried"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --init_from gpt2: no network, {endpoint} does not answer (")
    assert done.stderr.count("\n") == 1


# An exported folder contains no code, no request for code, and no contents of links.


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["hf", "portable", "deepspeed"])
def test_only_known_files_are_exported_and_no_code(checkpoint, tmp_path, form):
    for name in ("helper.py", "notes.txt"):
        (checkpoint / "tokenizer" / name).write_text("")
    seal(checkpoint)
    converted("--from", checkpoint, "--to", form, tmp_path / "known")
    found = {Path(name).name for name in names(tmp_path / "known")}
    assert {"tokenizer.json", "tokenizer_config.json"} <= found and not {"helper.py", "notes.txt"} & found
    bring_code(checkpoint / "tokenizer", marker=tmp_path / "ran")
    seal(checkpoint)
    said = converted("--from", checkpoint, "--to", form, tmp_path / "out")
    assert f"tokenizer   left out: {checkpoint}/tokenizer: its tokenizer_config.json asks for its own code" in said
    assert not [name for name in names(tmp_path / "out") if name.endswith(".py") or "tokenizer" in name]
    assert not (tmp_path / "ran").exists()


def test_a_file_that_the_manifest_does_not_name_is_refused(checkpoint, tmp_path):
    (checkpoint / "tokenizer" / "added_tokens.json").write_text("{}")
    (line,) = refusal("--from", checkpoint, "--to", "hf", tmp_path / "out")
    assert line.startswith(f"{checkpoint}/tokenizer/added_tokens.json: is not in manifest.json")


@pytest.mark.parametrize("harm", ["code", "link"])
def test_the_harmful_tokenizer_of_a_published_folder_is_left_out(tmp_path, harm):
    write_tokenizer(folder := tmp_path / "published")
    publish(folder, vocab_size=VOCABULARY)
    if harm == "code":
        bring_code(folder, marker=tmp_path / "ran")
    else:
        (folder / "tokenizer.json").rename(tmp_path / "moved")
        (folder / "tokenizer.json").symlink_to(tmp_path / "moved")
    assert f"tokenizer   left out: {folder}: its " in converted("--from", folder, "--to", "portable", tmp_path / "out")
    assert names(tmp_path / "out") == {"manifest.json", "model.json", "model.safetensors"}
