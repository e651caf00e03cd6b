"""``python src/benchmark.py decoding``: what it measures, its figures, its page."""

import json
from dataclasses import replace

import pytest
import torch
from small_run import command_line, write_inputs
from stand_in_nanogpt import STAND_IN
from suite_commands import benchmark, refusal

from dsgpt.benchmarks import decoding_contenders as measure
from dsgpt.benchmarks.decoding import HUGGING_FACE, NANOGPT, OURS, decoding_page, missed, peers_of, rows, verdict
from dsgpt.benchmarks.decoding_contenders import bytes_read, draw_model, measure_row, open_contender, span
from dsgpt.common.errors import UserError
from dsgpt.model.config import PRESETS
from dsgpt.training.command import train

CPU = torch.device("cpu")
SMALL = replace(rows("demo")[0], prompt_tokens=5, new_tokens=4)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "model.py").write_text(STAND_IN, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        *("--rounds 0", "--peer nanogpt", "--peer llama=.", "--peer nanogpt=.", "--only nothing"),
        *("--model_size huge", "--checkpoint run"),
    ],
)
def test_mistakes(arguments, tmp_path, snapshot):
    assert refusal("decoding", *arguments.split(), cwd=tmp_path) == snapshot


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_contender_takes_its_turns(checkout, monkeypatch, batch_size):
    """Ours and transformers generate the same ids from the same weights."""
    monkeypatch.setattr(measure, "READS", 1)
    work = replace(SMALL, batch_size=batch_size)
    found = measure_row(work, rounds=2, device=CPU, checkout=checkout)
    kinds = [OURS, HUGGING_FACE, *([NANOGPT] if batch_size == 1 else [])]
    assert list(found["seconds"]) == kinds == peers_of(work, nanogpt=True)
    assert list(found["ratios"]) == kinds[1:]
    assert all(len(figures["values"]) == 2 for figures in (*found["seconds"].values(), found["share"]))
    assert found["same_ids"]
    ours, theirs = found["seconds"][OURS]["values"], found["seconds"][HUGGING_FACE]["values"]
    expected = [each / own for each, own in zip(theirs, ours, strict=True)]
    assert found["ratios"][HUGGING_FACE]["values"] == pytest.approx(expected)
    assert found["share"]["median"] == pytest.approx(
        span([f / t for f, t in zip(found["floor_sec"]["values"], found["token_sec"]["values"], strict=True)])["median"]
    )


def test_the_bytes_of_a_token_are_those_of_its_weights():
    """All parameters but the positions: 4 bytes each in fp32."""
    config = PRESETS["demo"]
    size = 4 * (config.parameter_count() - config.block_size * config.n_embd)
    assert bytes_read(draw_model(SMALL, CPU)) == size
    half = draw_model(replace(SMALL, precision="bf16"), CPU)
    assert bytes_read(half) == size // 2
    layers, width = config.n_layer, config.n_embd
    matrices = config.vocab_size * width + layers * 12 * width**2
    scales = config.vocab_size + layers * 9 * width
    assert bytes_read(half, quantize="int8") == size // 2 - matrices + 2 * scales


def test_a_peer_with_another_model_is_refused(checkout):
    (checkout / "model.py").write_text(STAND_IN.replace("block_size + 2", "block_size + 3"), encoding="utf-8")
    with pytest.raises(UserError, match=r"^nanogpt has .* parameters instead of .*: is it another version"):
        open_contender(NANOGPT, SMALL, draw_model(SMALL, CPU), checkout=checkout)


def result(**changes):
    return {
        "title": "it",
        "work": SMALL.as_dict() | {"precision": changes.pop("precision", "fp32")},
        "ratios": {HUGGING_FACE: span([1.2, 1.4, 1.3])},
        "share": span([0.7]),
        "same_ids": True,
        "ratio_goal": 1.3,
        "share_goal": 0.7,
    } | changes


@pytest.mark.parametrize(
    ("changes", "misses"),
    [
        ({}, 0),
        ({"ratios": {HUGGING_FACE: span([1.2, 1.4, 1.29])}}, 1),
        ({"share": span([0.69])}, 1),
        ({"same_ids": False}, 1),
        ({"same_ids": False, "precision": "bf16"}, 0),
        ({"same_ids": False, "share": span([0.1])}, 2),
        ({"ratio_goal": None, "share_goal": None, "share": span([0.1])}, 0),
    ],
)
def test_goals(changes, misses):
    """In bf16 the order of rounding decides between near ids, so they may differ."""
    assert len(missed(result(**changes))) == misses
    assert verdict(result(**changes)).endswith(", NOT REACHED") == (misses > 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Data, and a run of two steps on it."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    assert train(command_line(folder, save_every=1)) == 0
    return folder


def test_a_small_part_of_the_command(run, tmp_path):
    record, page = tmp_path / "decoding.json", tmp_path / "decoding.md"
    words = ["--model_size", "demo", "--only", "fp32-1", "--rounds", 1, "--output", record, "--page", page]
    done = benchmark("decoding", *words, "--checkpoint", run / "run", "--data", run / "val.bin")
    values = json.loads(record.read_text())
    losses = {name: each["loss"] for name, each in values["losses"]["weights"].items()}
    measured = json.loads((run / "run" / "training_metrics.json").read_text())["epochs"][-1]["val_loss_avg_global"]
    assert losses["fp32"] == pytest.approx(measured, rel=1e-6)
    assert len(set(losses.values())) == 3
    assert max(losses.values()) - min(losses.values()) < 0.01
    assert f"| int8 | {losses['int8']:.5f} |" in page.read_text()
    assert [each["key"] for each in values["results"]] == ["fp32-1"], done.stderr
    assert "| demo, fp32, batch 1 |" in page.read_text()
    assert done.returncode == bool(missed(values["results"][0]))
    assert "fp32, batch 1: " in done.stdout
    assert decoding_page(values, source="x").startswith("# How fast a model generates")
