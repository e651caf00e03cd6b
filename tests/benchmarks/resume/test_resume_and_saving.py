"""``python src/benchmark.py resume`` and ``saving``: the commands, their records and their pages."""

import json

import pytest
from small_run import REPOSITORY
from suite_commands import REFERENCE, assert_refused, benchmark

from dsgpt.benchmarks.harness.sources import without_sources
from dsgpt.benchmarks.resume import command
from dsgpt.benchmarks.resume.command import ResumeOptions, run_resume
from dsgpt.benchmarks.resume.suite import BASELINE
from dsgpt.benchmarks.saving import command as saving_command
from dsgpt.benchmarks.saving.command import SAVES, SavingOptions, run_saving


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["resume", "--pairs", "many"], "error: --pairs must be a whole number of at least 0, not many"),
        (["resume", "--table-from", "nowhere.json"], "error: --table-from nowhere.json: cannot be read as a record"),
        (["saving", "--rounds", "0"], "error: --rounds must be a whole number of at least 1, not 0"),
        (["saving", "--pairs", "3"], "error: --pairs is not a known flag"),
        ([], "error: the following arguments are required: what"),
    ],
)
def test_mistakes(arguments, line, tmp_path):
    assert_refused(*arguments, line=line, cwd=tmp_path)


@pytest.mark.parametrize("name", ["resume", "saving"])
def test_the_page_is_of_the_committed_record(name, tmp_path):
    record, page = REFERENCE / f"{name}.json", tmp_path / "page.md"
    assert benchmark(name, "--table-from", record, "--page", page).returncode == 0
    assert without_sources(page.read_text()) == without_sources((REPOSITORY / "docs" / f"{name}.md").read_text())


def test_the_committed_record_holds_what_was_promised():
    record = json.loads((REPOSITORY / REFERENCE / "resume.json").read_text())
    assert len(record["pairs"]) == 30
    assert {pair["status"] for pair in record["pairs"]} == {"passed"}
    assert {one["status"] for one in record["rewritten"]} == {"passed"}


def test_resume_leaves_its_record_and_page(tmp_path, monkeypatch, capsys):
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


def test_saving_leaves_its_record_and_page(tmp_path, monkeypatch):
    small = {"model_size": "demo", "vocab_size": 300, "seq_length": 16}
    monkeypatch.setattr(saving_command, "WORK", saving_command.WORK | small)
    record, page = tmp_path / "saving.json", tmp_path / "saving.md"
    options = SavingOptions(rounds=1, device="cpu", output=record, page=page, keep=None)
    assert run_saving(options, repository=REPOSITORY) in {0, 1}  # how fast so small a model is saved, nobody promises
    found = json.loads(record.read_text())
    assert [(run["mode"], len(run["saves"])) for run in found["runs"]] == [("sync", SAVES), ("async", SAVES)]
    for run in found["runs"]:
        for save in run["saves"]:
            assert (save["save_stall_sec"] == save["save_total_sec"]) == (run["mode"] == "sync")
    assert f"waits **{found['ratio']:.0%}** of the time" in page.read_text()
