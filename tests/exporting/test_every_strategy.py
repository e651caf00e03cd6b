"""Weights into and out of strategies that split them, and what their checkpoints may not do."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from convert_script import config_of, converted
from forked_ranks import run_script
from published import RunsCode, largest_difference, our_model, publish
from safetensors.torch import load_file
from training_runs import SCRIPT, data_flags, finished, write_recipe
from transformers import AutoModelForCausalLM

from dsgpt.benchmarks.cells import Corpus
from dsgpt.formats.hugging_face import PretrainedWeights
from dsgpt.model.gpt2 import parameter_shapes

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
LAYOUTS = (*STAGES, "fsdp")
LAST = "step-00000003"


def start(folder: Path, corpus: Corpus, layout: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Train published weights on over two ranks, three steps, every one saved."""
    recipe = write_recipe(folder / f"{layout}.json", stage=STAGES.get(layout, 1))
    run_type = "optimized" if layout in STAGES else layout
    words = ["--run_type", run_type, *data_flags(corpus), "--init_from", str(folder / "hf"), "--seq_length", "32"]
    words += ["--device", "cpu", "--deepspeed_config", str(recipe), "--checkpoint_path", str(folder / layout)]
    words += ["--max_train_steps", "3", "--save_every", "1", "--keep_checkpoints", "9", "--max_val_steps", "1", *more]
    return run_script(SCRIPT, words, ranks=2, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """One run of every layout, from the model in ``hf``."""
    folder = tmp_path_factory.mktemp("layouts")
    vocabulary = json.loads((corpus.train.parent / "train.json").read_text())["vocab_size"]
    publish(folder / "hf", vocab_size=vocabulary)
    for layout in LAYOUTS:
        finished(start(folder, corpus, layout))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_starts_from_the_published_weights(folder, layout):
    """The schedule's first steps have learning rate 0: after one, the weights are still those of the source."""
    config = config_of(folder / layout / LAST)
    source = PretrainedWeights(folder / "hf", config)
    saved = load_file(folder / layout / "step-00000001" / "model.safetensors")
    for name, shape in parameter_shapes(config).items():
        assert torch.equal(saved[name], source(name, shape)), name
    last = load_file(folder / layout / LAST / "model.safetensors")
    assert not torch.equal(last["wte.weight"], saved["wte.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_is_exported(folder, layout, tmp_path):
    converted("--from", folder / layout, "--to", "hf", tmp_path / "hf")
    checkpoint = folder / layout / LAST
    ours = our_model(load_file(checkpoint / "model.safetensors"), config_of(checkpoint))
    assert largest_difference(ours, AutoModelForCausalLM.from_pretrained(tmp_path / "hf")) < 1e-5


def test_a_forged_checkpoint_runs_no_code(folder, corpus, tmp_path):
    """Every hash of the manifest is right, as a forger would see to; a tensor file that is a pickle is none."""
    shutil.copytree(folder / "zero1", tmp_path / "zero1")
    shutil.copytree(folder / "hf", tmp_path / "hf")
    checkpoint = tmp_path / "zero1" / LAST
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for path in checkpoint.glob("*.safetensors"):
        torch.save({"more": RunsCode(tmp_path / "ran")}, path)
        data = path.read_bytes()
        manifest["files"][path.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "zero1" / "RUN_COMPLETE.txt").unlink()
    done = start(tmp_path, corpus, "zero1", "--resume")
    finished(done)
    assert "--resume: step-00000003 is refused: " in done.stdout
    assert "is not a readable safetensors file" in done.stdout
    assert not (tmp_path / "ran").exists()
