"""``python src/benchmark.py parity``: the command, its record and its page."""

import json
from dataclasses import fields

import pytest
from small_run import REPOSITORY
from suite_commands import REFERENCE, benchmark, refusal

from dsgpt.benchmarks import parity_suite as suite
from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.frame import EXIT_FAILED
from dsgpt.benchmarks.parity import ParityOptions, run_parity
from dsgpt.benchmarks.parity_bounds import BF16, FP32, Bounds
from dsgpt.benchmarks.parity_page import parity_page
from dsgpt.record.provenance import PARAGRAPH, without_sources

RECORD = (REFERENCE / "parity.json").as_posix()


@pytest.mark.parametrize(
    "arguments",
    [
        "--ranks 3",
        "--only tensor2-zero1 --ranks 1",
        "--ranks two",
        "--table-from nowhere.json",
        "--oly ddp",
    ],
)
def test_mistakes(arguments, tmp_path, snapshot):
    assert refusal("parity", *arguments.split(), cwd=tmp_path) == snapshot


def test_an_unknown_strategy_and_an_unknown_suite(tmp_path, snapshot):
    """The rest of each message is not compared: it lists all strategies, or depends on the version of argparse."""
    assert refusal("parity", "--only", "zero7", cwd=tmp_path).partition(", ")[0] == snapshot
    assert refusal("parety", cwd=tmp_path).startswith("error: argument what: invalid choice: 'parety'")


def test_a_run_writes_its_record_and_the_page_made_from_it(tmp_path):
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
    assert f"\n\n{PARAGRAPH}" in page
    assert "## Bytes per rank" in page
    again = benchmark("parity", "--table-from", "out/record.json", "--page", "again.md", cwd=tmp_path)
    assert again.returncode == 0
    assert (tmp_path / "again.md").read_text() == page


def test_a_failure_gives_the_exit_code_and_names_the_place(tmp_path, monkeypatch, capsys):
    """With bounds of 0 even the baseline fails, because it adds up its micro batches in another order."""
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
    assert "unexpected result: baseline, 1 rank, accumulation 3, sgd, fp32" in said
    assert "accumulation 3, sgd, fp32: FAILED" in said
    assert "loss at step " in said
    page = (tmp_path / "record.md").read_text()
    assert "## Failures" in page
    assert "* baseline, 1 rank, accumulation 3, sgd, fp32: loss at step " in page
    assert (tmp_path / "kept" / "baseline_1-rank_accumulation-3_sgd_fp32" / "recipe.json").exists()


def test_the_committed_page_is_made_from_the_committed_record():
    record = json.loads((REPOSITORY / RECORD).read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs" / "parity.md").read_text(encoding="utf-8")
    assert without_sources(page) == parity_page(record, source=RECORD)


def test_the_committed_record_is_complete_and_has_no_unexpected_result():
    from dsgpt.benchmarks.parity import whole_matrix
    from dsgpt.benchmarks.parity_rank import BUGS
    from dsgpt.benchmarks.parity_suite import SCHEMA_VERSION

    record = json.loads((REPOSITORY / RECORD).read_text(encoding="utf-8"))
    cells = record["cells"]
    assert all(cell["as_expected"] for cell in cells)
    recorded = {Cell(**{field.name: cell[field.name] for field in fields(Cell)}) for cell in cells}
    wanted = {*whole_matrix(), *(bug.cell(name) for name, bug in BUGS.items())}
    if record["schema_version"] == SCHEMA_VERSION:
        assert recorded == wanted
    else:
        assert recorded < wanted  # made by an earlier suite, which had fewer cells
