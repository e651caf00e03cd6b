"""``python src/benchmark.py resume`` and ``saving``: the commands, their records and their pages."""

import json

import pytest
from small_run import REPOSITORY
from suite_commands import REFERENCE, benchmark, refusal

from dsgpt.benchmarks import resume as command
from dsgpt.benchmarks import saving as saving_command
from dsgpt.benchmarks.resume import ResumeOptions, run_resume
from dsgpt.benchmarks.resume_rank import BASELINE
from dsgpt.benchmarks.saving import SAVES, SavingOptions, run_saving
from dsgpt.record.provenance import without_sources


@pytest.mark.parametrize(
    "arguments", ["resume --pairs many", "resume --table-from nowhere.json", "saving --rounds 0", "saving --pairs 3"]
)
def test_mistakes(arguments, tmp_path, snapshot):
    assert refusal(*arguments.split(), cwd=tmp_path) == snapshot


def test_a_suite_must_be_named(tmp_path):
    assert refusal(cwd=tmp_path) == "error: the following arguments are required: what; see --help"


@pytest.mark.parametrize("name", ["resume", "saving"])
def test_the_committed_page_is_made_from_the_committed_record(name, tmp_path):
    record, page = REFERENCE / f"{name}.json", tmp_path / "page.md"
    assert benchmark(name, "--table-from", record, "--page", page).returncode == 0
    assert without_sources(page.read_text()) == without_sources((REPOSITORY / "docs" / f"{name}.md").read_text())


def test_the_committed_record_holds_30_pairs_and_all_passed():
    record = json.loads((REPOSITORY / REFERENCE / "resume.json").read_text())
    assert len(record["pairs"]) == 30
    assert {pair["status"] for pair in record["pairs"]} == {"passed"}
    assert {one["status"] for one in record["rewritten"]} == {"passed"}


def test_resume_writes_its_record_and_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "core_rewritten", lambda: [BASELINE])
    monkeypatch.setattr(command, "core_pairs", list)
    record, page = tmp_path / "out" / "resume.json", tmp_path / "out" / "resume.md"
    options = ResumeOptions(pairs=30, seed=4, core=True, output=record, page=page, keep=None)
    assert run_resume(options, repository=REPOSITORY) == 0
    assert "[  1/1] baseline on 1 rank, fp32, writes what it read: passed" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["rewritten"][0]["measured"]["optimizer.safetensors"] is True
    assert found["reference"]["last_loss"] < found["reference"]["first_loss"]
    assert "| baseline | yes |" in page.read_text()


def test_saving_writes_its_record_and_page(tmp_path, monkeypatch):
    small = {
        "model_size": "demo",
        "vocab_size": 300,
        "seq_length": 16,
        "save_every": 2,
        "max_train_steps": 2 * SAVES + 1,
    }
    monkeypatch.setattr(saving_command, "WORK", saving_command.WORK | small)
    record, page = tmp_path / "saving.json", tmp_path / "saving.md"
    options = SavingOptions(rounds=1, device="cpu", output=record, page=page, keep=None)
    assert run_saving(options, repository=REPOSITORY) in {0, 1}  # the ratio is not meaningful for so small a model
    found = json.loads(record.read_text())
    assert [(run["mode"], len(run["saves"])) for run in found["runs"]] == [("sync", SAVES), ("async", SAVES)]
    for run in found["runs"]:
        for save in run["saves"]:
            assert (save["save_stall_sec"] == save["save_total_sec"]) == (run["mode"] == "sync")
    assert f"waits **{found['ratio']:.0%}** of the time" in page.read_text()
