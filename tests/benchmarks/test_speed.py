"""The suite of speed, and the time to a loss."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import REPOSITORY, random_ids, write_tokens
from stand_in_nanogpt import STAND_IN

from dsgpt.benchmarks import speed
from dsgpt.benchmarks import speed as command
from dsgpt.benchmarks.contenders import open_loop, synchronisations, train_nanogpt
from dsgpt.benchmarks.frame import NANOGPT, run_suite, span
from dsgpt.common.errors import UserError

# `python src/benchmark.py speed`: what it measures, its figures, its page.


SMALL = speed.Shape(name="2 x 32", n_layer=2, n_head=2, n_embd=32, vocab_size=257, length=16)
WORK = speed.StepSetup(shape=SMALL, batch=2, precision="fp32", threads=1)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nanogpt")
    (folder / "model.py").write_text(STAND_IN, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "257.bin", random_ids(500))


def test_every_contender_of_a_row_takes_its_turns(checkout, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SHORTEST_TURN_SEC", 0)
    entries = tuple(speed.Entry(name=kind, kind=kind) for kind in (speed.OURS, speed.ENGINE, *speed.PEERS))
    row = speed.Row(title="row", work=WORK, entries=entries, target=1.0)
    found = speed.measure_row(row, rounds=2, tokens=tokens, folder=tmp_path, peers={NANOGPT: checkout})
    assert [entry["name"] for entry in found["entries"]] == [speed.OURS, speed.ENGINE, NANOGPT, speed.HUGGING_FACE]
    for entry in found["entries"]:
        assert len(entry["tokens_per_sec"]["values"]) == 2
        assert 4 < entry["loss"] < 7.5  # ids below 257 at random: ln 257 is 5.5
        assert entry["peak_bytes"] > 1e8
    first, *others = (entry["tokens_per_sec"] for entry in found["entries"])
    best = max(others, key=lambda speeds: speeds["median"])
    assert found["ratio"]["values"] == pytest.approx(
        [ours / theirs for ours, theirs in zip(first["values"], best["values"], strict=True)]
    )


def test_weak_scaling_compares_tokens_of_a_rank(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SHORTEST_TURN_SEC", 0)
    row = next(row for row in speed.rows("cpu", threads=2, peers=()) if row.key == "weak-scaling-1-to-2-cores-tiny-ddp")
    found = speed.measure_row(replace(row, work=WORK), rounds=1, tokens=tokens, folder=tmp_path, peers={})
    (two,), (one,), (apart,) = (entry["tokens_per_sec"]["values"] for entry in found["entries"])
    assert found["ratio"]["median"] == pytest.approx(two / one / 2)
    assert found["limit"]["median"] == pytest.approx(apart / one / 2)
    losses = [entry["loss"] for entry in found["entries"]]
    assert losses[1] == losses[2] != losses[0]  # ranks that are apart train what one rank alone trains


def test_a_contender_that_fails_is_named(tokens, tmp_path):
    empty = tmp_path / "checkout"
    empty.mkdir()
    (empty / "model.py").write_text("raise RuntimeError('another version')\n", encoding="utf-8")
    row = speed.Row(title="a row", work=WORK, entries=(speed.Entry(name=NANOGPT, kind=NANOGPT),), target=1)
    with pytest.raises(UserError, match=r"(?s)nanogpt, a row: ended: .*another version"):
        speed.measure_row(row, rounds=1, tokens=tokens, folder=tmp_path / "work", peers={NANOGPT: empty})


@pytest.mark.parametrize(("peers", "other"), [({NANOGPT: Path()}, NANOGPT), ({}, speed.HUGGING_FACE)])
def test_memory_is_compared_with_nanogpt_if_it_takes_part(tmp_path, monkeypatch, peers, other):
    """With teams that only say what they needed."""
    peaks = {speed.OURS: 30, NANOGPT: 60, speed.HUGGING_FACE: 40}

    def start(_row, entry, _held, **_):
        return SimpleNamespace(take=lambda steps: {"peak_bytes": steps * peaks[entry.kind]})

    monkeypatch.setattr(command, "_start", start)
    compared = speed.measure_memory(WORK, steps=2, tokens=tmp_path, folder=tmp_path, peers=peers)
    assert (compared["other"], compared["share"]) == (other, 30 / peaks[other])
    assert compared["peak_bytes"] == {
        kind: 2 * peaks[kind] for kind in (speed.OURS, *speed.PEERS) if kind != NANOGPT or peers
    }


def test_a_peer_with_another_model_is_refused(tokens, tmp_path):
    (tmp_path / "model.py").write_text(STAND_IN.replace("block_size + 2", "block_size + 3"), encoding="utf-8")
    with pytest.raises(UserError, match=r"^nanogpt has a model of 68,512 parameters instead of 68,480: "):
        open_loop(NANOGPT, WORK, tokens=tokens, peer=tmp_path)


def test_every_wait_for_the_gpu_is_counted(monkeypatch):
    """With the warnings of PyTorch's debug mode, but without a GPU."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with synchronisations("cuda") as waits:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (at x.cpp:1)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(waits) == 2
    assert modes == ["warn", "default"]
    with synchronisations("cpu") as waits:
        pass
    assert not waits
    assert len(modes) == 2


def test_rows_without_a_peer_are_left_out():
    without = speed.rows("cpu", threads=2, peers=(speed.HUGGING_FACE,))
    assert [row.key for row in without[:2]] == ["small-t-256-b-4-fp32", "small-t-256-b-4-bf16"]
    titles = {row.title for row in without}
    assert not any("compiled" in title for title in titles)
    with_peer = speed.rows("cpu", threads=2, peers=speed.PEERS)
    assert titles < {row.title for row in with_peer}
    assert len({row.key for row in with_peer}) == len(with_peer)
    assert not [row for row in speed.rows("cpu", threads=1, peers=speed.PEERS) if "scaling" in row.title]
    assert {row.work.device for row in speed.rows("cuda", threads=2, peers=speed.PEERS)} == {"cuda"}


def test_flops_are_those_of_the_palm_paper():
    small = speed.published("small", length=1024)
    without_positions = 124_439_808 - 1024 * 768
    assert small.config(1024).flops_per_token(1024) == 6 * without_positions + 12 * 12 * 768 * 1024


def waiting(kind, times):
    return {"kind": kind, "synchronisations": times}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"ratio": span([1.0, 1.3, 1.2]), "target": 1.2, "entries": [waiting(speed.OURS, None)]}, True),
        ({"ratio": span([1.0, 1.3, 1.2]), "target": 1.21, "entries": [waiting(speed.OURS, 0)]}, False),
        ({"ratio": span([1.3]), "target": 1.2, "entries": [waiting(speed.OURS, 1)]}, False),
        ({"ratio": span([1.3]), "target": 1.2, "entries": [waiting(speed.ENGINE, 1)]}, True),
        ({"seconds": span([0.4]), "target": 0.3}, False),
        ({"share": 0.7, "target": 0.7}, True),
        ({"share": span([0.02]), "target": 0.01}, False),
        ({"products_sec": 1.0}, None),
    ],
)
def test_targets(result, expected):
    assert speed.reached(result) is expected
    if expected is False:
        assert speed.verdict({"title": "it", "best_other": "theirs", **result}).endswith(", NOT REACHED")


def test_a_row_that_fails_loses_no_other_and_rows_without_a_checkout_are_named(tmp_path, monkeypatch, capsys):
    """In record, page and console: else a record without nanoGPT reads as if nothing more was to be compared."""

    def fail(*_):
        raise UserError("no memory left")

    monkeypatch.setattr(speed.Speed, "_row", fail)
    record, page, key = tmp_path / "speed.json", tmp_path / "speed.md", "4-x-256-t-256-b-8-bf16"
    options = speed.SpeedOptions(output=record, page=page, rounds=1, only=(key, "help", "time-to-loss"))
    assert run_suite(speed.Speed, options, repository=REPOSITORY) == 1
    values, out = json.loads(record.read_text()), capsys.readouterr().out
    failed, measured = values["results"]
    assert failed == {"key": key, "title": key, "failed": "no memory left"}
    assert (measured["key"], len(measured["seconds"]["values"])) == ("help", 1)
    assert "| src/gpt2.py --help |" in page.read_text() and "src/gpt2.py --help: " in out
    assert f"| {key} | no memory left | **no** |" in page.read_text()
    assert f"{key}: FAILED: no memory left" in out
    title = "4 x 256, T=256, B=8, bf16"
    assert values["missing"] == {NANOGPT: [title, f"{title}, compiled", command.TIME_TO_LOSS]}
    line = f"nanogpt (`--peer nanogpt=FOLDER`) it is missing in: {title}; {title}, compiled; {command.TIME_TO_LOSS}."
    assert line in page.read_text() and line in out


# The time until a training reaches a loss.


CURVE = [(10.0, 6.0), (20.0, 5.0), (30.0, 4.0)]


@pytest.mark.parametrize(("loss", "seconds"), [(5.0, 20.0), (4.5, 25.0), (4.0, 30.0), (6.5, 10.0), (3.9, None)])
def test_the_loss_is_reached_on_a_line_between_two_validations(loss, seconds):
    found = speed.seconds_to(CURVE, loss)
    assert found is None if seconds is None else found == pytest.approx(seconds)


def test_the_share_is_that_of_the_same_round():
    first, second = [(25.0, 7.0), (50.0, 4.5)], [(50.0, 5.0)]
    assert speed.time_to_loss({speed.OURS: [CURVE, CURVE], NANOGPT: [first, second]})["share"] == span(
        [25 / 50, 20 / 50]
    )
    assert speed.time_to_loss({speed.OURS: [CURVE, CURVE], NANOGPT: [first, [(50.0, 3.0)]]})["share"] is None


def test_rates_are_those_of_nanogpts_schedule():
    rates = [speed.NANOGPT_DEFAULTS.rate(step, steps=500) for step in (0, 100, 300, 500)]
    assert rates == pytest.approx([1e-3 / 101, 1e-3, 1e-4 + 0.5 * 9e-4, 1e-4])


def test_a_peer_learns(corpus, checkout):
    """The stand-in predicts each id from the one before, which a table can learn."""
    work = speed.StepSetup(
        shape=speed.published("demo", length=128, vocab_size=300), batch=12, precision="fp32", threads=1
    )
    fast = speed.Defaults(batch=12, lr=0.1, beta2=0.99, weight_decay=0.0, warm_up_steps=0)
    files = {"tokens": corpus.train, "val": corpus.val, "peer": checkout}
    curve = train_nanogpt(work, fast, steps=6, validate_every=1, windows=3, **files)
    seconds, losses = zip(*curve, strict=True)
    assert len(curve) == 6
    assert sorted(seconds) == list(seconds)
    assert losses[-1] < losses[0] - 0.1
