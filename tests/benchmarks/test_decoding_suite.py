"""``python src/benchmark.py decoding``: its contenders, its figures, its page."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from small_run import REPOSITORY
from stand_in_nanogpt import STAND_IN

from dsgpt.benchmarks import contenders, decoding
from dsgpt.benchmarks.contenders import Continued, bytes_read, draw_model, draw_prompts, open_generator
from dsgpt.benchmarks.decoding import HUGGING_FACE, OURS, Decoding, DecodingOptions, missed, rows, verdict
from dsgpt.benchmarks.frame import NANOGPT, run_suite, span
from dsgpt.inference.decoder import Decoder
from dsgpt.model.config import PRESETS

CPU = torch.device("cpu")
SMALL = replace(rows("demo")[0], prompt_tokens=5, new_tokens=4)
ROUNDED = replace(SMALL, precision="bf16", quantize="int8")


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


@pytest.mark.parametrize(
    ("changes", "misses"),
    [
        ({}, 0),
        ({"ratios": {HUGGING_FACE: span([1.2, 1.4, 1.29])}}, 1),
        ({"same_ids": False, "precision": "bf16"}, 0),
        ({"same_ids": False, "share": span([0.9, 0.69, 0.1])}, 2),
        ({"ratio_goal": None, "share_goal": None, "share": span([0.1])}, 0),
    ],
)
def test_goals(changes, misses):
    """In bf16 the order of rounding decides between near ids, so they may differ."""
    work = asdict(SMALL) | {"precision": changes.pop("precision", "fp32")}
    result = {"title": "it", "work": work, "same_ids": True, "ratio_goal": 1.3, "share_goal": 0.7}
    result |= {"ratios": {HUGGING_FACE: span([1.2, 1.4, 1.3])}, "share": span([0.7])} | changes
    assert len(missed(result)) == misses
    assert verdict(result).endswith(", NOT REACHED") == (misses > 0)
    assert Decoding(DecodingOptions(output=Path("o")), REPOSITORY).failures({"results": [result]}) == missed(result)


def test_a_small_part_of_the_suite(run_dir, tmp_path, monkeypatch, capsys):
    """Run in this process, which has imported transformers already."""
    monkeypatch.setattr(decoding, "rows", lambda _, compiled: [SMALL, ROUNDED])
    monkeypatch.setattr(contenders, "READS", 1)
    files = {"output": tmp_path / "decoding.json", "checkpoint": run_dir, "data": run_dir.parent / "val.bin"}
    chosen = DecodingOptions(model_size="demo", only=("fp32-1",), rounds=1, **files)
    code = run_suite(Decoding, chosen, repository=REPOSITORY)
    values, page = json.loads(chosen.output.read_text()), chosen.output.with_suffix(".md").read_text()
    losses = {name: each["loss"] for name, each in values["losses"]["weights"].items()}
    measured = json.loads((run_dir / "training_metrics.json").read_text())["epochs"][-1]["val_loss_avg_global"]
    assert losses["fp32"] == pytest.approx(measured, rel=1e-6)
    assert len(set(losses.values())) == 3
    assert max(losses.values()) - min(losses.values()) < 0.01
    assert f"| int8 | {losses['int8']:.5f} |" in page
    assert [each["key"] for each in values["results"]] == ["fp32-1"]
    assert "| demo, fp32, batch 1 |" in page and page.startswith("# How fast a model generates")
    assert code == bool(missed(values["results"][0]))
    assert "fp32, batch 1: " in capsys.readouterr().out


SECONDS = {OURS: (90.0, 1.0, 2.0, 4.0), HUGGING_FACE: (90.0, 3.0, 4.0, 4.0), NANOGPT: (90.0, 10.0, 10.0, 10.0)}
"""Of every turn, the warm-up first."""
FLOORS = (0.006, 0.005, 0.008, 0.009, 0.010, 0.030)
"""Of two readings in each round."""


@pytest.fixture
def scripted(monkeypatch) -> tuple[list[str], set[int]]:
    """The turns that were taken, and the bytes of each reading; a token of ours takes a hundredth of its turn."""
    turns, sizes, floors = list[str](), set[int](), iter(FLOORS)

    def opened(kind, work, model, *, checkout):
        def generate(prompts: torch.Tensor) -> Continued:
            seconds = SECONDS[kind][turns.count(kind)]
            turns.append(kind)
            ids = [[7, 8]] if kind == OURS or checkout == Path("same") else [[7, 9]]
            return Continued(ids=ids, seconds=seconds, token_sec=seconds / 100 if kind == OURS else None)

        return generate

    def timed(read: partial[torch.Tensor], device: str) -> float:
        sizes.add(read.args[0].nbytes)
        return next(floors)

    monkeypatch.setattr(contenders, "open_generator", opened)
    monkeypatch.setattr(contenders, "_timed", timed)
    monkeypatch.setattr(contenders, "READS", 2)
    return turns, sizes


@pytest.mark.parametrize(("work", "checkout"), [(SMALL, "same"), (ROUNDED, "other")])
def test_a_row_has_the_figures_of_its_turns_without_the_warm_up(scripted, work, checkout):
    turns, sizes = scripted
    measured = contenders.measure_decoding(work, rounds=3, device=CPU, checkout=Path(checkout))
    assert measured["same_ids"] == (checkout == "same")
    rounds = [(OURS, HUGGING_FACE, NANOGPT), (HUGGING_FACE, NANOGPT, OURS), (NANOGPT, OURS, HUGGING_FACE)]
    assert turns == [OURS, HUGGING_FACE, NANOGPT, *(kind for order in rounds for kind in order)]
    expected = {kind: span(seconds[1:]) for kind, seconds in SECONDS.items()}
    assert measured["seconds"] == expected
    assert measured["ratios"] == {HUGGING_FACE: span([3.0, 2.0, 1.0]), NANOGPT: span([10.0, 5.0, 2.5])}
    assert measured["token_sec"] == span([0.01, 0.02, 0.04])
    assert measured["floor_sec"] == span([0.005, 0.008, 0.010])
    assert measured["share"] == span([0.5, 0.4, 0.25])
    assert measured["bytes_per_token"] == bytes_read(draw_model(work, CPU), quantize=work.quantize)
    assert [size / measured["bytes_per_token"] for size in sizes] == [pytest.approx(1, rel=0.01)]
    assert (measured["ratio_goal"], measured["share_goal"]) == ((1.3, 0.7) if work == SMALL else (None, None))


def test_every_contender_gets_the_same_work_and_the_precision_of_the_row(monkeypatch, tmp_path):
    from transformers import GPT2LMHeadModel

    asked, generate = {}, GPT2LMHeadModel.generate

    def decoder(model, **options):
        asked[OURS] = options
        return Decoder(model, **options)

    def generated(peer, prompts, **options):
        asked[HUGGING_FACE] = (peer.dtype, peer.training)
        return generate(peer, prompts, **options)

    monkeypatch.setattr(contenders, "Decoder", decoder)
    monkeypatch.setattr(GPT2LMHeadModel, "generate", generated)
    checked = "assert (top_k, self.wte.weight.dtype, self.training) == (1, torch.bfloat16, False)"
    (tmp_path / "model.py").write_text(STAND_IN.replace("assert top_k == 1", checked), encoding="utf-8")
    for work in (replace(SMALL, batch_size=3), replace(ROUNDED, batch_size=3)):  # the same ids from the same weights
        model, prompts = draw_model(work, CPU), draw_prompts(work, CPU)
        kinds = (OURS, HUGGING_FACE, *([NANOGPT] if work.precision == "bf16" else []))
        ids = {kind: open_generator(kind, work, model, checkout=tmp_path)(prompts).ids for kind in kinds}
        assert all([len(row) for row in each] == [work.new_tokens] * 3 for each in ids.values())
        assert work.quantize == "int8" or ids[OURS] == ids[HUGGING_FACE]
    ours = {"batch_size": 3, "quantize": "int8", "compiled": False}
    assert asked == {OURS: ours, HUGGING_FACE: (torch.bfloat16, False)}


def test_our_seconds_have_the_prompts_and_those_of_a_token_do_not(monkeypatch):
    """The prompts take 5 s with the first token, and each other token 1 s."""
    now = [100.0]

    def scripted(decoder, prompts, *, new_tokens):
        for number in range(new_tokens):
            now[0] += 1.0 if number else 5.0
            yield [10 * row + number for row in range(len(prompts))]

    monkeypatch.setattr(contenders, "generate_batch", scripted)
    monkeypatch.setattr(contenders.time, "perf_counter", lambda: now[0])
    found = open_generator(OURS, SMALL, draw_model(SMALL, CPU), checkout=None)(torch.zeros((2, 5), dtype=torch.long))
    monkeypatch.undo()
    assert (found.seconds, found.token_sec) == (8.0, 1.0)
    assert found.ids == [[0, 1, 2, 3], [10, 11, 12, 13]]
