"""Evaluation: the command, and perplexity."""

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from published import called, drawn
from safetensors.torch import load_file, save_file
from small_run import END_OF_TEXT, SEQUENCE, command_line, write_inputs, write_tokens

from dsgpt.common.files import sha256_of
from dsgpt.formats.tokenizer_files import open_tokenizer
from dsgpt.inference.commands import evaluate as command
from dsgpt.inference.evaluate import predict, read_text, windows_of
from dsgpt.inference.model_files import export, load
from dsgpt.machine.console import Console
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2
from dsgpt.training.command import train

# `src/evaluate.py` measures what a run's own validation measured, and refuses what it cannot.


def evaluate(*words: object) -> tuple[int, str, str]:
    return called(command, *words, "--device", "cpu")


def figures(tmp_path: Path, *words: object) -> dict:
    code, _, err = evaluate(*words, "--output", tmp_path / "record.json")
    assert code == 0, err
    return json.loads((tmp_path / "record.json").read_text())


def test_as_many_and_as_long_windows_as_the_training_validated_on_have_its_loss(tmp_path):
    """The model could read more, but its later positions never learned anything."""
    folder = write_inputs(tmp_path)
    longer = {"seq_length": SEQUENCE, "max_position_embeddings": 2 * SEQUENCE, "max_val_steps": 1}
    assert train(command_line(folder, save_every=2, **longer)) == 0
    asked = "--checkpoint", folder / "run", "--data", folder / "val.bin"
    found = figures(tmp_path, *asked, "--windows", 8)
    own = json.loads((folder / "run" / "training_metrics.json").read_text())["epochs"][-1]["val_loss_avg_global"]
    assert (found["tokens"], found["windows"], found["seq_length"]) == (8 * SEQUENCE, 8, SEQUENCE)
    assert found["loss"] == pytest.approx(own, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(own))
    for other in ([], ["--seq_length", 2 * SEQUENCE, "--windows", 4]):
        assert abs(figures(tmp_path, *asked, *other)["loss"] - own) > 1e-5
    assert evaluate(*asked)[1].splitlines()[-2] == (
        f"validation      {own:.4f} by the training itself, in fp32, on the first 8 windows of 16: the same with "
        "--windows 8"
    )


def test_a_model_of_masked_documents_is_evaluated_with_masks(tmp_path):
    """As its training validated it; a text is one document."""
    folder = write_inputs(tmp_path)
    write_tokens(folder / "val.bin", np.where(np.arange(161) % 5, np.arange(161), END_OF_TEXT))
    assert train(command_line(folder, save_every=2, mask_documents=True)) == 0
    asked = "--checkpoint", folder / "run", "--data", folder / "val.bin"
    found, own = figures(tmp_path, *asked), json.loads((folder / "run" / "training_metrics.json").read_text())
    assert found["mask_documents"]
    assert found["loss"] == pytest.approx(own["epochs"][-1]["val_loss_avg_global"], rel=1e-6)


def test_data_of_another_tokenizer_is_refused(run_dir, tmp_path):
    """A tokenizer whose file differs is another one only if an id means something else."""
    ours = shutil.copytree(run_dir.parent / "tokenizer", tmp_path / "tokenizer") / "tokenizer.json"
    values = json.loads(ours.read_text())
    vocabulary = values["model"]["vocab"]
    for known, said in ((vocabulary, None), (vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}, "is 'a'")):
        ours.write_text(json.dumps(values | {"model": values["model"] | {"vocab": known}}))
        facts = {"name": "tokenizer", "sha256": sha256_of(ours)}
        data = write_tokens(tmp_path / "val.bin", np.arange(40), tokenizer=facts)
        code, out, err = evaluate("--checkpoint", run_dir, "--data", data)
        assert (code, err.count("\n"), "not compared" in out) == ((2, 1, False) if said else (0, 0, False))
        assert said is None or said in err
    shutil.rmtree(tmp_path / "tokenizer")
    code, _, err = evaluate("--checkpoint", run_dir, "--data", data)
    assert (code, "is not beside it" in err) == (2, True)
    assert "not compared" in evaluate("--checkpoint", run_dir, "--data", run_dir.parent / "val.bin")[1]


def test_bits_per_byte_count_the_bytes_of_the_text(run_dir, tmp_path):
    """As a text, and as ids with ends of documents, which are predicted but are no bytes."""
    text = "naïve 日本\n" * 9
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    found = figures(tmp_path, "--checkpoint", run_dir, "--text", tmp_path / "text.txt", "--stride", 4)
    size = len(text.encode())
    assert (found["tokens"], found["bytes"], found["stride"]) == (size, size, 4)
    assert found["windows"] == 1 + math.ceil((size - SEQUENCE) / 4)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    tokenizer = open_tokenizer(run_dir.parent / "tokenizer", what="it")
    ids = [END_OF_TEXT, *tokenizer.encode(text), END_OF_TEXT, *tokenizer.encode("abc"), END_OF_TEXT]
    write_tokens(tmp_path / "ids.bin", np.array(ids))
    found = figures(tmp_path, "--checkpoint", run_dir, "--data", tmp_path / "ids.bin")
    assert (found["tokens"], found["bytes"]) == (size + 5, size + 3)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * (size + 5) / (size + 3) / math.log(2))

    write_tokens(tmp_path / "ids.bin", np.array(tokenizer.encode("abcd")))
    found = figures(tmp_path, "--checkpoint", run_dir, "--data", tmp_path / "ids.bin")
    assert (found["tokens"], found["bytes"]) == (3, 3)  # nothing predicts the first token
    (tmp_path / "text.txt").write_text("a<|endoftext|>b")  # the name of a special token is text, as in training
    letters = [token for letter in "a<|endoftext|>b" for token in tokenizer.encode(letter)]
    assert read_text(tmp_path / "text.txt", tokenizer).ids.tolist() == [END_OF_TEXT, *letters]
    tokenizer.eos_token = None
    alone = read_text(tmp_path / "text.txt", tokenizer)
    assert (alone.ids.tolist(), alone.bytes) == (letters, 14)


def test_the_checkpoint_and_the_precision_are_those_that_were_asked_for(run_dir, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    (run / "best").write_text("step-00000001")
    data = ["--data", run_dir.parent / "val.bin"]
    exact = figures(tmp_path, "--checkpoint", run, *data)["loss"]
    rounded = figures(tmp_path, "--checkpoint", run, "--precision", "bf16", *data)["loss"]
    assert rounded == pytest.approx(exact, rel=1e-2)
    assert rounded != exact
    quantized = figures(tmp_path, "--checkpoint", run, "--precision", "bf16", "--quantize", "int8", *data)["loss"]
    assert quantized == pytest.approx(rounded, rel=1e-2)
    assert quantized not in (exact, rounded)
    (run / "step-00000002" / "model.safetensors").unlink()
    assert evaluate("--checkpoint", run, "--which", "best", *data)[0] == 0
    assert evaluate("--checkpoint", run, *data)[0] == 2


def test_folders_of_hugging_face_give_the_same_figures_and_weights_that_are_not_finite_none(run_dir, tmp_path):
    export(run_dir, tmp_path / "hf", form="hf", dtype="fp32", which="latest", console=Console(speaks=False))
    asked = "--data", run_dir.parent / "val.bin", "--seq_length", 8
    of_run = figures(tmp_path, "--checkpoint", run_dir, *asked)
    assert figures(tmp_path, "--checkpoint", tmp_path / "hf", *asked)["loss"] == of_run["loss"]
    assert of_run["windows"] == 20
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    for value, why in ((math.nan, "ln_f.weight holds"), (3e38, "though")):  # the weights, or what is computed with them
        bad = {f"transformer.ln_f.{name}": torch.full((16,), value) for name in ("weight", "bias")}
        save_file(weights | bad, tmp_path / "hf" / "model.safetensors")
        code, _, err = evaluate("--checkpoint", tmp_path / "hf", "--data", run_dir.parent / "val.bin")
        assert (code, err.count("\n"), why in err) == (2, 1, True)
    save_file(weights | {"transformer.ln_f.weight": torch.full((16,), 1e6)}, tmp_path / "hf" / "model.safetensors")
    code, out, _ = evaluate("--checkpoint", tmp_path / "hf", "--data", run_dir.parent / "val.bin")
    assert (code, "perplexity      infinite\n" in out) == (0, True)
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    for file in (tmp_path / "hf").glob("*token*"):
        file.unlink()
    code, out, _ = evaluate("--checkpoint", tmp_path / "hf", "--data", run_dir.parent / "val.bin")
    assert (code, "bits per byte   unknown: the model has no tokenizer" in out) == (0, True)


def test_without_the_harness_its_tasks_are_refused(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = evaluate("--checkpoint", run_dir, "--tasks", "piqa")
    assert code == 2
    assert err.endswith("install it with .venv/bin/python -m pip install -e '.[eval]'\n")


TASK = """\
task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["a", "b"]
doc_to_target: answer
metric_list:
  - metric: acc
"""


def test_the_harness_evaluates_the_exported_model(run_dir, tmp_path, monkeypatch):
    """A task of 6 questions in a local file: the harness chooses the answer that our own logits find likelier."""
    harness = pytest.importorskip("lm_eval.tasks")
    questions = ["one ", "two ", "red ", "x = ", "def ", "yes "]
    loaded = load(run_dir, which="latest", device=torch.device("cpu"), precision="fp32")
    likelier = []
    for question in questions:
        ids = torch.tensor([loaded.tokenizer.encode(question.rstrip() + " ")])
        logits = loaded.model(ids)[0, -1]
        a, b = (int(loaded.tokenizer.encode(word)[0]) for word in "ab")
        likelier.append(int(logits[b] > logits[a]))
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "tiny.jsonl"
    right = [*likelier[:4], *(1 - answer for answer in likelier[4:])]  # four of six
    lines = [{"question": question, "answer": answer} for question, answer in zip(questions, right, strict=True)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tasks" / "tiny.yaml").write_text(TASK.format(file=data))
    # Its own thousands of tasks take six seconds to list, each time.
    monkeypatch.setattr(harness, "TaskManager", partial(harness.TaskManager, include_defaults=False))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--checkpoint", run_dir, "--tasks", "tiny", "--include_path", tmp_path / "tasks"]
    assert figures(tmp_path, *words)["tasks"]["tiny"]["acc"] == pytest.approx(4 / 6)
    code, _, err = evaluate(*words[:3], "absent")
    assert code == 2
    assert err.endswith("error: --tasks: there is no task absent; .venv/bin/python -m lm_eval ls tasks lists them\n")


# Windows predict every token once, and perplexity is what transformers computes.


CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=40)


@pytest.fixture(scope="module")
def model() -> GPT2:
    return drawn(GPT2(CONFIG))  # whose predictions depend on what comes before


IDS = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(2))


@torch.inference_mode()
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (8, 1)])
def test_every_token_is_predicted_once_from_what_its_window_has_before_it(model, length, stride, batch_size):
    """Compared with one pass for each token."""
    nats, end = 0.0, 0
    for target in range(1, len(IDS)):
        if target > end:  # the next window
            end = min(len(IDS) - 1, end + (stride if end else length))
        before = IDS[max(0, end - length) : target]
        nats -= float(model(before[None])[0, -1].log_softmax(dim=0)[IDS[target]])
    windows, done = windows_of(59, length=length, stride=stride), []
    found = predict(model, IDS, windows=windows, batch_size=batch_size, progress=done.append)
    assert (found, sum(done)) == (pytest.approx(nats, rel=1e-5), len(windows))
    assert sum(counted for _, _, counted in windows) == 59
