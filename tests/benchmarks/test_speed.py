"""``python src/benchmark.py speed``: what it measures, its figures, its page."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from small_run import REPOSITORY, random_ids, write_tokens
from stand_in_nanogpt import STAND_IN

from dsgpt.benchmarks import contenders, speed
from dsgpt.benchmarks.contenders import PeerLoop, nanogpt_rate, synchronisations, train_nanogpt
from dsgpt.benchmarks.frame import NANOGPT, run_suite, span
from dsgpt.benchmarks.stand_in_gpu import stand_in_gpu
from dsgpt.common.errors import UserError

SMALL = speed.Shape(name="2 x 32", n_layer=2, n_head=2, n_embd=32, vocab_size=257, length=16)
WORK = speed.StepSetup(shape=SMALL, batch=2, precision="fp32", threads=1)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nanogpt")
    (folder / "model.py").write_text(STAND_IN, encoding="utf-8")
    return folder


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """The suite in a folder that has the tokens of ``WORK``, without peers."""
    write_tokens(tmp_path / "tokens" / "257.bin", random_ids(500))
    suite = speed.Speed(speed.SpeedOptions(output=Path("o"), rounds=1), REPOSITORY)
    suite.folder, suite._peers, suite._threads = tmp_path, {}, 1
    monkeypatch.setattr(speed, "SHORTEST_TURN_SEC", 0)
    return suite


@pytest.mark.long
@pytest.mark.parametrize("kind", [speed.DDP, speed.ENGINE])
def test_weak_scaling_compares_tokens_of_a_rank(suite, kind):
    rows = speed.rows("cpu", threads=2, peers=())
    (row,) = [row for row in rows if row.title.startswith("weak scaling") and row.entries[0].kind == kind]
    found = suite._row(replace(row, work=WORK))
    (two,), (one,), (apart,) = (entry["tokens_per_sec"]["values"] for entry in found["entries"])
    assert found["ratio"]["median"] == pytest.approx(two / one / 2)
    assert found["limit"]["median"] == pytest.approx(apart / one / 2)
    losses = [entry["loss"] for entry in found["entries"]]
    assert losses[1] == losses[2] != losses[0]  # ranks that are apart train what one rank alone trains
    assert all(4 < loss < 7.5 for loss in losses)
    assert all(entry["peak_bytes"] > 1e8 for entry in found["entries"])


def test_the_ratio_is_to_the_best_other_of_the_same_round_and_of_peers_with_kept_memory_apart():
    row = speed.rows("cpu", threads=2, peers=speed.PEERS)[0]
    ours, nanogpt, hugging_face, *kept = (entry.name for entry in row.entries)
    speeds = {ours: [8.0, 6.0, 9.0], nanogpt: [4.0, 4.0, 1.0], hugging_face: [2.0, 3.0, 5.0]}
    found = speed._compared(row, speeds | {name: [8.0, 4.0, 3.0] for name in kept})
    assert (found["best_other"], found["ratio"]) == (nanogpt, span([2.0, 1.5, 9.0]))
    assert found["ratio_with_memory_kept"] == span([1.0, 1.5, 3.0])
    scaling = speed.rows("cpu", threads=2, peers=())[-1]
    assert [entry.name for entry in scaling.entries] == ["2 ranks", "1 rank", "2 apart"]
    found = speed._compared(scaling, {"2 ranks": [3.0], "1 rank": [2.0], "2 apart": [3.6]})
    assert (found["ratio"], found["limit"]) == (span([0.75]), span([0.9]))


@pytest.mark.long
def test_a_contender_takes_steps_and_one_that_fails_is_named(suite, tmp_path):
    (tmp_path / "model.py").write_text("raise RuntimeError('another version')\n", encoding="utf-8")
    suite._peers = {NANOGPT: tmp_path}
    entries = ((speed.Entry(name=kind, kind=kind),) for kind in (speed.OURS, NANOGPT))
    ours, peer = (speed.Row(title="a row", work=WORK, entries=each, target=1) for each in entries)
    (entry,) = suite._row(ours)["entries"]
    assert 4 < entry["loss"] < 7.5  # ids below 257 at random: ln 257 is 5.5
    assert entry["peak_bytes"] > 1e8 and entry["tokens_per_sec"]["median"] > 0
    with pytest.raises(UserError, match=r"(?s)nanogpt, a row: ended: .*another version"):
        suite._row(peer)


@pytest.mark.parametrize(("peers", "other"), [({NANOGPT: Path()}, NANOGPT), ({}, speed.HUGGING_FACE)])
def test_memory_is_compared_with_nanogpt_if_it_takes_part(suite, monkeypatch, peers, other):
    """With contenders that only say what they needed."""
    peaks = {speed.OURS: 30, NANOGPT: 60, speed.HUGGING_FACE: 40}
    taken = lambda _, entry, *more: lambda steps: {"peak_bytes": steps * peaks[entry.kind]}  # noqa: E731
    monkeypatch.setattr(suite, "_start", taken)
    suite._peers = peers
    compared = suite._memory()
    assert (compared["other"], compared["share"]) == (other, 30 / peaks[other])
    assert compared["peak_bytes"] == {kind: 2 * peaks[kind] for kind in peaks if kind != NANOGPT or peers}


def test_peers_take_steps_and_one_with_another_model_is_refused(suite, checkout, tmp_path):
    files = {"tokens": tmp_path / "tokens" / "257.bin", "peer": checkout}
    assert all(4 < float(PeerLoop(kind, WORK, **files).step()) < 7.5 for kind in speed.PEERS)
    (tmp_path / "model.py").write_text(STAND_IN.replace("block_size + 2", "block_size + 3"), encoding="utf-8")
    with pytest.raises(UserError, match=r"^nanogpt has a model of 68,512 parameters instead of 68,480: "):
        PeerLoop(NANOGPT, WORK, **files | {"peer": tmp_path})


def test_every_wait_for_the_gpu_is_counted():
    """But for those that CUDA's debug mode does not report."""
    with stand_in_gpu(), synchronisations("cuda") as waits:
        for _ in range(2):
            torch.ones(1, device="cuda").item()
        torch.cuda.synchronize()
    assert len(waits) == 2


def test_waits_that_are_not_reported_are_not_taken_for_none(monkeypatch):
    with stand_in_gpu():
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
        with pytest.raises(RuntimeError, match="reports no wait"), synchronisations("cuda"):
            pass
        monkeypatch.undo()


def test_rows_without_a_peer_are_left_out():
    without = speed.rows("cpu", threads=2, peers=(speed.HUGGING_FACE,))
    assert not any("compiled" in row.title for row in without)
    with_peer = speed.rows("cpu", threads=2, peers=speed.PEERS)
    assert {row.key for row in without} < {row.key for row in with_peer}
    assert len({row.key for row in with_peer}) == len(with_peer)
    assert not [row for row in speed.rows("cpu", threads=1, peers=speed.PEERS) if "scaling" in row.title]
    assert {row.work.device for row in speed.rows("cuda", threads=2, peers=speed.PEERS)} == {"cuda"}


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
        ({"products_sec": 1.0}, None),
    ],
)
def test_targets(result, expected):
    assert speed.reached(result) is expected
    if expected is False:
        assert speed.verdict({"title": "it", "best_other": "theirs", **result}).endswith(", NOT REACHED")


def test_a_row_that_fails_loses_no_other_and_rows_without_a_checkout_are_named(tmp_path, monkeypatch, capsys):
    """In record, page and console: else a record without nanoGPT reads as if nothing more was to be compared."""
    monkeypatch.setattr(speed.Speed, "_row", Mock(side_effect=UserError("no memory left")))
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
    assert values["missing"] == {NANOGPT: [title, f"{title}, compiled", speed.TIME_TO_LOSS]}
    line = f"nanogpt (`--peer nanogpt=FOLDER`) it is missing in: {title}; {title}, compiled; {speed.TIME_TO_LOSS}."
    assert line in page.read_text() and line in out


# The time until a training reaches a loss.


CURVE = [(10.0, 6.0), (20.0, 5.0), (30.0, 4.0)]


@pytest.mark.parametrize(("loss", "seconds"), [(5.0, 20.0), (4.5, 25.0), (6.5, 10.0), (3.9, None)])
def test_the_loss_is_reached_on_a_line_between_two_validations(loss, seconds):
    assert speed.seconds_to(CURVE, loss) == seconds


def test_the_share_is_our_time_to_the_loss_of_nanogpts_end(suite, corpus, monkeypatch):
    monkeypatch.setattr(suite, "_own_curve", lambda: CURVE)
    monkeypatch.setattr(speed.Speed, "_corpus", corpus)
    monkeypatch.setattr(speed, "SEARCHED_WINDOWS", 1)
    for end, share in ((4.5, 25 / 50), (3.0, None)):
        monkeypatch.setattr(suite, "_nanogpt_curve", lambda end=end: [(25.0, 7.0), (50.0, end)])
        found = suite._time_to_loss()
        assert found["share"] == (share and span([share]))
        assert found["losses"] == {speed.OURS: [4.0], NANOGPT: [end]}


def test_nanogpt_learns_at_the_rates_of_its_schedule(corpus, checkout, monkeypatch):
    """The stand-in predicts each id from the one before, which a table can learn."""
    rates = [nanogpt_rate(step, steps=500) for step in (0, 100, 300, 500)]
    assert rates == pytest.approx([1e-3 / 101, 1e-3, 1e-4 + 0.5 * 9e-4, 1e-4])
    monkeypatch.setattr(contenders, "NANOGPT_DEFAULTS", speed.NANOGPT_DEFAULTS | {"lr": 0.1, "warm_up_steps": 0})
    shape = speed.Shape.published("demo", length=128, vocab_size=300)
    work = speed.StepSetup(shape=shape, batch=12, precision="fp32", threads=1)
    files = {"tokens": corpus.train, "val": corpus.val, "peer": checkout}
    seconds, losses = zip(*train_nanogpt(work, steps=6, validate_every=2, windows=3, **files), strict=True)
    assert (len(seconds), sorted(seconds)) == (3, list(seconds))
    assert losses[-1] < losses[0] - 0.1
