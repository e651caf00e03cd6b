"""``benchmark.py oracles`` and ``benchmark.py band``: programs of others, and curves of reference runs."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import REPOSITORY
from training_runs import read_record

from dsgpt.benchmarks import oracles
from dsgpt.benchmarks.band import WINDOW, band_of, first_outside, verdict
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.launch import training_words
from dsgpt.benchmarks.oracles import EXACT, NANOGPT, OURS, TRAINER, TRANSFORMERS, Oracles, OraclesOptions
from dsgpt.common.errors import UserError
from dsgpt.data.sources import TRANSFORMERS_NAME
from dsgpt.record.runs import read_run
from dsgpt.training.command import train

# Others train the same; of `make test` the plain loops, in this process.


class InThisProcess(contextlib.AbstractContextManager["InThisProcess"]):
    def __init__(self, _: str, job: dict[str, Any], folder: Path, **__: Any) -> None:
        folder.mkdir()
        self._job = job

    def read(self) -> dict[str, Any]:
        return {"curve": oracles.peer_training(self._job)}

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def here(monkeypatch, corpus):
    """The suite on the corpus of the tests, with this program's trainings and those of others in this process."""

    def own(values: dict[str, object], **_: Any) -> None:
        assert train(training_words(values)) == 0

    monkeypatch.setattr(oracles, "train", own)
    monkeypatch.setattr(oracles, "LineWorker", InThisProcess)
    monkeypatch.setattr(oracles.cells, "prepare_corpus", lambda *_: corpus)


def results(folder: Path, **flags: Any) -> tuple[int, dict[str, dict[str, Any]], str]:
    record = folder / "oracles.json"
    code = run_suite(Oracles, OraclesOptions(output=record, **flags), repository=REPOSITORY)
    programs = json.loads(record.read_text())["programs"]
    return code, {one["name"]: one for one in programs}, record.with_suffix(".md").read_text()


def test_transformers_trains_the_same(here, tmp_path, monkeypatch):
    """Also to the page; what is not installed or not given is not run, and another decay of one program is found."""
    found_here = oracles.importlib.util.find_spec
    monkeypatch.setattr(
        oracles.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "accelerate" else found_here(name, *more),
    )
    code, found, page = results(tmp_path, steps=4)
    assert (code, [name for name, one in found.items() if one["status"] == "passed"]) == (
        0,
        [EXACT, OURS, TRANSFORMERS],
    )
    assert found[NANOGPT]["message"] == "without --peer nanogpt=FOLDER"
    assert f"| {OURS} |" in page and "accelerate" in page
    plain = oracles._plain_loop

    def other(model: Any, batches: Any, recipe: dict[str, Any], name: str) -> Any:
        decay = {"weight_decay": 0.2} if name == TRANSFORMERS else {}
        return plain(model, batches, recipe | {"optimizer": {"params": recipe["optimizer"]["params"] | decay}}, name)

    monkeypatch.setattr(oracles, "_plain_loop", other)
    code, found, _ = results(tmp_path, steps=4)
    assert (code, [name for name, one in found.items() if one["status"] == "failed"]) == (1, [TRANSFORMERS])


@pytest.mark.long
def test_trainer_and_deepspeed_train_the_same(tmp_path):
    """In processes of their own, as the command runs them."""
    code, found, _ = results(tmp_path, steps=4)
    assert (code, found[TRAINER]["status"]) == (0, "passed"), found


# Bands.


def curves(seeds: int, *, steps: int = 60) -> np.ndarray:
    noise = np.random.default_rng(0).normal(scale=0.1, size=(seeds, steps))
    return 9 * np.exp(-np.arange(steps) / 20) + noise


def test_another_seed_is_normal_and_a_bend_is_found_where_it_begins():
    *reference, other = curves(6)
    band = band_of(reference)
    assert first_outside(other, band) is first_outside(other[:7], band) is None
    bent = other + np.where(np.arange(60) >= 30, 1.0, 0.0)
    assert 31 <= first_outside(bent, band) <= 31 + WINDOW
    broken = other.copy()
    broken[40:] = np.nan
    assert first_outside(broken, band) == 41
    broken[42:] = other[42:]  # fewer than count
    assert first_outside(broken, band) is None


def test_a_run_is_judged_with_what_differs_or_refused_in_a_line(run_dir, tmp_path):
    record = read_record(run_dir)
    run = read_run(run_dir, name="run")
    losses = [run.train_curve.at_steps()[step] for step in (1, 2)]
    work = dict(run.work) | {"learning rate": 0.5, "seed": "7", "tokens": 9.0, "validation windows": 3.0}

    def bands(by: float, **changes: Any) -> Path:
        band = {"low": [loss + by - 0.1 for loss in losses] * 3, "high": [loss + by + 0.1 for loss in losses] * 3}
        size = {"source": record["data"]["train_source"], "work": work, "band": band} | changes
        (path := tmp_path / "band.json").write_text(json.dumps({"sizes": {"demo": size}}))
        return path

    lines, normal, *_ = verdict(run_dir, bands(0.0))
    rate = "learning rate: 0.001; the reference has 0.5"
    assert (normal, lines) == (True, ["normal: the loss of steps 1 to 2 is inside the band of demo", rate])
    refused = {TRANSFORMERS_NAME: {"source": "another"}, "no reference": {"work": work | {"model n_embd": 8.0}}}
    for why, changes in refused.items():
        with pytest.raises(UserError, match=why):
            verdict(run_dir, bands(0.0, **changes))
