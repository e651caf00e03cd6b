"""The resume suite, its core, and the suite of saves."""

import io
import json
import time

import pytest
from forked_ranks import launches_fork, run_script
from small_run import REPOSITORY
from training_runs import read_lines, roll_back

from dsgpt.benchmarks import resume as command
from dsgpt.benchmarks import saving as saving_command
from dsgpt.benchmarks.cells import STEPS, by, flags, write_recipe
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.launch import training_words
from dsgpt.benchmarks.records import REFERENCE
from dsgpt.benchmarks.resume import BASELINE, BOUND, Resume, ResumeOptions, cells, core_pairs, core_rewritten
from dsgpt.benchmarks.saving import BLOCK, MB_PER_SEC, SAVES, Saving, SavingOptions, SlowFile, write_together
from dsgpt.checkpoints.pieces import MOMENTS
from dsgpt.training.command import train

# `python src/benchmark.py resume` and `saving`: the commands, their records and their pages.


def test_the_committed_record_is_of_the_seeded_pairs_and_all_passed():
    record = json.loads((REPOSITORY / REFERENCE / "resume.json").read_text())
    pairs = command.seeded_pairs()
    assert {pair["name"] for pair in record["pairs"]} == {pair.name for pair in pairs}
    assert len(record["pairs"]) == len(pairs) == 30
    strategies = {cell.strategy for cell in cells()}
    assert {pair.source.strategy for pair in pairs} == {pair.target.strategy for pair in pairs} == strategies
    assert {end["status"] for end in [*record["pairs"], *record["rewritten"]]} == {"passed"}


def test_resume_writes_its_record_and_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "core_rewritten", lambda: [BASELINE])
    monkeypatch.setattr(command, "core_pairs", list)
    record = tmp_path / "out" / "resume.json"
    with launches_fork():
        assert run_suite(Resume, ResumeOptions(core=True, output=record), repository=REPOSITORY) == 0
    assert "[1/1] baseline on 1 rank, fp32, writes what it read: passed" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["rewritten"][0]["measured"]["optimizer.safetensors"] is True
    assert found["reference"]["last_loss"] < found["reference"]["first_loss"]
    assert "| baseline | yes |" in record.with_suffix(".md").read_text()


@pytest.mark.long
def test_saving_writes_its_record_and_page(tmp_path, monkeypatch):
    def forked_train(values, **_):
        assert run_script(REPOSITORY / "src" / "gpt2.py", training_words(values)).returncode == 0
        return json.loads((values["checkpoint_path"] / "training_metrics.json").read_text())

    monkeypatch.setattr(saving_command, "train", forked_train)
    small = {"model_size": "demo", "vocab_size": 300, "seq_length": 16}
    small |= {"save_every": 2, "max_train_steps": 2 * SAVES + 1}
    monkeypatch.setattr(saving_command, "WORK", saving_command.WORK | small)
    monkeypatch.setattr(saving_command, "WRITERS", (2,))
    options = SavingOptions(rounds=1, output=tmp_path / "saving.json")
    with launches_fork():
        code = run_suite(Saving, options, repository=REPOSITORY)
    assert code in {0, 1}  # the ratio of so small a model means nothing
    found = json.loads(options.output.read_text())
    assert [(run["mode"], len(run["saves"])) for run in found["runs"]] == [("sync", SAVES), ("async", SAVES)]
    assert found["writers"].keys() == {"2"}
    for run in found["runs"]:
        for save in run["saves"]:
            assert (save["save_stall_sec"] == save["save_total_sec"]) == (run["mode"] == "sync")
    assert f"waits **{found['ratio']:.0%}** of the time" in options.output.with_suffix(".md").read_text()


# Any strategy resumes the run of any other: each writes what it read, and pairs of strategies share a run.


FEW, SAVED = 8, 4
"""Enough to notice state that is lost: the tests below lose some. The record has 20 steps."""


EVERY_TIME = ("ddp", "fsdp", "zero1", "zero3", "tensor2-zero1", "pipeline2-zero1")
"""Strategies that ``make test`` rewrites; ``make test-slow`` does all."""


def rewritten(cell):
    quick = cell.strategy in EVERY_TIME and cell.ranks == 2 and cell.precision == "fp32"
    return pytest.param(cell, marks=[] if quick else [pytest.mark.long], id=f"{by(cell)}, {cell.precision}")


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """How the selected cells and pairs of the core ended, by name: one run for all tests."""
    chosen = [item.callspec.params for item in request.session.items if "results" in getattr(item, "fixturenames", ())]
    suite = Resume(ResumeOptions(), REPOSITORY)
    suite.folder, suite.steps = tmp_path_factory.mktemp("resume"), FEW
    suite._cells, suite._pairs = ([each[name] for each in chosen if name in each] for name in ("cell", "pair"))
    with launches_fork():
        suite.begin()
        return {result["name"]: result for result in suite.results()}


@pytest.mark.parametrize("cell", [rewritten(cell) for cell in core_rewritten()])
def test_writes_what_it_read(results, cell):
    result = results[f"{by(cell)}, {cell.precision}, writes what it read"]
    assert result["status"] == "passed", result["message"]
    files = {"model.safetensors", "optimizer.safetensors", "training_state.json"}
    assert set(result["measured"]) == files | {"weights that a rank computes with", "validation loss"}


@pytest.mark.parametrize("pair", core_pairs(), ids=lambda pair: pair.name)
def test_resumes_as_if_undisturbed(results, pair):
    result = results[pair.name]
    assert result["status"] == "passed", result["message"]


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("loss", 6e-6, "loss is off by 6.0e-06"),
        ("validation loss", 0.4, "validation loss is off by 4.0e-01"),
        ("validation loss", float("nan"), "validation loss is off by nan"),
        ("validated", [15, 20], "it validated after steps [15, 20]"),  # but not with the weights that it loaded
        ("steps", list(range(1, 20)), "its steps are "),
    ],
)
def test_why_a_pair_fails(fact, value, said):
    pair = core_pairs()[0]
    before, after = by(pair.source), by(pair.target)
    measured = {
        "changes": [{"step": STEPS // 2, "name": "executed by", "before": before, "after": after}],
        "line": f"resuming from step-{STEPS // 2:08d} ({before}) as {after}",
        "steps": list(range(1, STEPS + 1)),
        "validated": [10, 15, 20],
        "loss": 1e-6,
        "validation loss": 1e-6,
    }
    assert command.wrong_in(pair, measured, STEPS) == ""
    assert command.wrong_in(pair, measured | {fact: value}, STEPS).startswith(said)


def trained(run, folder, corpus, *more):
    """The baseline of the suite, in ``run``; its losses."""
    recipe = write_recipe(folder / "recipe.json", BASELINE, recipes=REPOSITORY / "ds_configs")
    words = flags(BASELINE, recipe=recipe, corpus=corpus, run_dir=run, device="cpu", steps=FEW)
    words += ["--save_every", str(SAVED), "--keep_checkpoints", "9", "--max_val_steps", "1"]
    assert train([*words, *more]) == 0
    return {line["step"]: line["loss"] for line in read_lines(run)}


def test_moments_that_a_strategy_loses_are_noticed(tmp_path, corpus):
    """The bound is far below what a checkpoint without moments does to the loss."""
    straight = trained(tmp_path / "run", tmp_path, corpus)
    copy = roll_back(tmp_path / "run", tmp_path / "copy", SAVED)
    checkpoint = copy / f"step-{SAVED:08d}"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / MOMENTS).unlink()
    del manifest["files"][MOMENTS]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    resumed = trained(copy, tmp_path, corpus, "--resume")
    assert max(abs(resumed[step] - straight[step]) for step in range(SAVED + 1, FEW + 1)) > 400 * BOUND


# Saves by number of writers.


def test_all_files_of_a_process_share_its_bandwidth():
    files = [SlowFile(io.BytesIO()) for _ in range(2)]
    data = bytes(range(256)) * (BLOCK // 256) + b"end"
    began = time.perf_counter()
    for file in (*files, files[0]):
        file.write(data)
    assert time.perf_counter() - began >= 2 * len(data) / (MB_PER_SEC * 1e6)  # the last block goes at once
    assert [file.detach().getvalue() for file in files] == [data * 2, data]


@pytest.mark.long
def test_two_processes_write_a_state_in_half_of_the_time(tmp_path):
    alone, together = (write_together(tmp_path / str(writers), writers, preset="tiny") for writers in (1, 2))
    size = 3 * 4 * 13_405_248
    assert size / (MB_PER_SEC * 1e6) < alone
    assert together < 0.7 * alone
    written = sum(path.stat().st_size for path in (tmp_path / "2").glob("*.safetensors"))
    assert size < written < 1.01 * size
