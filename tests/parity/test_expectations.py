"""What counts as success: a refusal where one is known, and nowhere else."""

import pytest
from small_run import REPOSITORY

from dsgpt.parity.launch import Assignment
from dsgpt.parity.matrix import Cell, core, refusal_expected, whole_matrix
from dsgpt.parity.page import parity_page
from dsgpt.parity.record import suite_record
from dsgpt.parity.suite import Result, Suite, work_of

TRAINED, REFUSED = Cell(strategy="zero1", ranks=2), Cell(strategy="tensor2-zero3", ranks=2)


@pytest.mark.parametrize(
    ("cell", "device", "expected"),
    [
        (TRAINED, "cpu", False),
        (REFUSED, "cpu", True),
        (Cell(strategy="sequence2-zero3", ranks=2), "cpu", False),
        (Cell(strategy="pipeline2-zero0", ranks=2, precision="bf16"), "cpu", True),
        (Cell(strategy="pipeline2-zero1", ranks=2, precision="bf16"), "cpu", False),
        (Cell(strategy="ddp", ranks=2, precision="fp16"), "cpu", True),
        (Cell(strategy="ddp", ranks=2, precision="fp16"), "cuda", False),
        (Cell(strategy="zero2", ranks=2, option="compile"), "cpu", False),
        (Cell(strategy="zero3", ranks=2, option="compile"), "cuda", True),
        (Cell(strategy="sequence2-zero0", ranks=2, option="compile"), "cpu", True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_which_cells_are_refused(cell, device, expected):
    assert refusal_expected(cell, device=device) == expected


def test_nothing_in_the_core_is_refused():
    assert not [cell.name for cell in core() if refusal_expected(cell, device="cpu")]
    assert len(core()) <= 75


@pytest.mark.parametrize(
    ("status", "refusal_expected", "bug", "content"),
    [
        ("passed", False, "", True),
        ("refused", True, "", True),
        ("refused", False, "", False),
        ("passed", True, "", False),
        ("failed", False, "", False),
        ("error", True, "", False),
        ("failed", False, "sum-over-ranks", True),
        ("passed", False, "sum-over-ranks", False),
        ("refused", False, "sum-over-ranks", False),
    ],
)
def test_as_expected(status, refusal_expected, bug, content):
    cell = Cell(strategy="ddp", ranks=2, bug=bug)
    result = Result(cell=cell, refusal_expected=refusal_expected, status=status, seconds=0.0)
    assert result.as_expected == content


def test_the_page_counts_refusals_and_names_unexpected_ones(tmp_path):
    suite = Suite(tmp_path, repository=REPOSITORY, device="cpu")
    fp16 = Cell(strategy="zero1", ranks=2, precision="fp16")
    ends = [
        Result(cell=TRAINED, status="passed", seconds=1.0),
        Result(cell=fp16, refusal_expected=True, status="refused", seconds=1.0, message="needs a GPU"),
    ]
    page = parity_page(suite_record(suite, ends, seconds=2.0, device="cpu"), source="x.json")
    assert "| zero1 | 2 | 1 of 2 (1 refused) |" in page
    assert "2 cells: 1 trained and compared with plain PyTorch, **all passed**;\n1 refused by the product" in page
    assert "## Failures" not in page
    ends += [
        Result(cell=Cell(strategy="zero2", ranks=2), status="refused", seconds=1.0, message="no compiler"),
        Result(cell=REFUSED, refusal_expected=True, status="passed", seconds=1.0),
        Result(cell=Cell(strategy="ddp", ranks=2), status="failed", seconds=1.0),
        Result(cell=Cell(strategy="fsdp", ranks=2), status="error", seconds=1.0, message="the launch ended before it"),
    ]
    page = parity_page(suite_record(suite, ends, seconds=2.0, device="cpu"), source="x.json")
    assert "6 cells: 3 trained and compared with plain PyTorch, **1 failed; 1 ended in an error**;\n2 refused" in page
    assert "| zero2 | 2 | **0 of 1 (1 refused)** |" in page
    assert "* zero2, 2 ranks, accumulation 3, adamw, fp32: refused, though it should train: no compiler" in page
    assert "* tensor2-zero3, 2 ranks, accumulation 3, adamw, fp32: trained, though it should be refused" in page


def test_a_cell_without_a_reference_is_an_error(tmp_path, monkeypatch):
    """A stand-in for the reference is refused, as on a machine that cannot train it; the cells say why."""
    cell = Cell(strategy="baseline", ranks=1)
    suite = Suite(tmp_path, repository=REPOSITORY, device="cpu")
    refused = tmp_path / "refused"

    def refuse(_work):
        refused.mkdir()
        return Assignment(folder=str(refused), flags=["--no_such_flag"], reference=True)

    monkeypatch.setattr(suite, "_reference", refuse)
    (result,) = suite.run([cell])
    assert (result.status, result.as_expected) == ("error", False)
    assert result.message.startswith("there is nothing to compare with: the reference --no_such_flag is no known flag")


def test_trainings_with_changes_have_references_of_their_own():
    works = {work_of(cell) for cell in whole_matrix()}
    assert {training for _, _, training in works} == {"", "unclipped", "constant rate", "momentum"}
    assert work_of(Cell(strategy="zero1-unclipped", ranks=2)) == work_of(Cell(strategy="ddp-unclipped", ranks=2))
