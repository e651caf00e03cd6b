"""``python src/benchmark.py parity``: the command, its record and its page."""

import json
from dataclasses import fields

import pytest
from small_run import REPOSITORY
from suite_commands import REFERENCE, assert_refused, benchmark

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.benchmarks.harness.command import EXIT_FAILED
from dsgpt.benchmarks.harness.sources import without_sources
from dsgpt.benchmarks.parity import suite
from dsgpt.benchmarks.parity.bounds import BF16, FP32, Bounds
from dsgpt.benchmarks.parity.command import ParityOptions, run_parity
from dsgpt.benchmarks.parity.page import parity_page

RECORD = (REFERENCE / "parity.json").as_posix()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["parity", "--only", "zero7"],
            "error: --only zero7: is no strategy (did you mean zero3?); known are baseline, ",
        ),
        (["parity", "--ranks", "3"], "error: --ranks 3: no cell has so many ranks; give 1, 2, 4 or 8"),
        (
            ["parity", "--only", "tensor2-zero1", "--ranks", "1"],
            "error: --ranks 1: no cell of tensor2-zero1 has so many ranks; give 2 or 4",
        ),
        (["parity", "--ranks", "two"], "error: --ranks must be a whole number of at least 1, not two"),
        (["parity", "--table-from", "nowhere.json"], "error: --table-from nowhere.json: cannot be read as a record"),
        (["parity", "--oly", "ddp"], "error: --oly is not a known flag (did you mean --only?)"),
        (["parety"], "error: argument what: invalid choice: 'parety'"),
    ],
)
def test_mistakes(arguments, line, tmp_path):
    assert_refused(*arguments, line=line, cwd=tmp_path)


def test_a_run_leaves_its_record_and_the_page_made_of_it(tmp_path):
    done = benchmark("parity", "--core", "--only", "baseline", "--output", "out/record.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python starts 1 rank for 3 trainings" in done.stdout
    assert "[  1/3] baseline, 1 rank, accumulation 1, adamw, fp32: passed" in done.stdout
    assert "| baseline | 1 | 3 of 3 |" in done.stdout
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert [cell["status"] for cell in record["cells"]] == ["passed"] * 3
    assert all(cell["measured"]["loss"]["difference"] >= 0 for cell in record["cells"])
    assert record["env"]["torch_version"]
    assert record["launches"][0]["seconds"] > 0
    page = (tmp_path / "out" / "record.md").read_text()
    assert without_sources(page) == parity_page(record, source="out/record.json")
    assert "This page was made from these sources." in page
    assert "## What a step costs a rank" in page
    again = benchmark("parity", "--table-from", "out/record.json", "--page", "again.md", cwd=tmp_path)
    assert again.returncode == 0
    assert (tmp_path / "again.md").read_text() == page


def test_a_failure_is_the_exit_code_and_says_where(tmp_path, monkeypatch, capsys):
    """With bounds of nothing even the baseline fails, which adds up its micro batches in another order."""
    none = Bounds(loss=0, validation=0, norm=0, gradient=0, update=0, weights=0)
    monkeypatch.setattr(suite, "BOUNDS", {"cpu": {FP32: none, BF16: none}})
    options = ParityOptions(
        ranks=(),
        only=("baseline",),
        core=True,
        output=tmp_path / "record.json",
        page=tmp_path / "record.md",
        keep=tmp_path / "kept",
        device="cpu",
    )
    assert run_parity(options, repository=REPOSITORY) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "not as it should be: baseline, 1 rank, accumulation 3, sgd, fp32" in said
    assert "accumulation 3, sgd, fp32: FAILED" in said
    assert "loss at step " in said
    page = (tmp_path / "record.md").read_text()
    assert "## Failures" in page
    assert "* baseline, 1 rank, accumulation 3, sgd, fp32: loss at step " in page
    assert (tmp_path / "kept" / "baseline_1-rank_accumulation-3_sgd_fp32" / "recipe.json").exists()


def test_the_committed_page_is_what_the_committed_record_gives():
    record = json.loads((REPOSITORY / RECORD).read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs" / "parity.md").read_text(encoding="utf-8")
    assert without_sources(page) == parity_page(record, source=RECORD)


def test_the_committed_record_is_whole_and_everything_in_it_is_as_it_should_be():
    from dsgpt.benchmarks.parity.matrix import whole_matrix
    from dsgpt.benchmarks.parity.planted import BUGS
    from dsgpt.benchmarks.parity.record import SCHEMA_VERSION

    record = json.loads((REPOSITORY / RECORD).read_text(encoding="utf-8"))
    cells = record["cells"]
    assert all(cell["as_expected"] for cell in cells)
    recorded = {Cell(**{field.name: cell[field.name] for field in fields(Cell)}) for cell in cells}
    wanted = {*whole_matrix(), *(bug.cell(name) for name, bug in BUGS.items())}
    if record["schema_version"] == SCHEMA_VERSION:
        assert recorded == wanted
    else:
        assert recorded < wanted  # of an earlier suite, which had less to show
