"""What counts as success: a refusal where one is expected, and nowhere else."""

from dataclasses import replace

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.cells import ACCUMULATED, EVERY, GLOBAL_BATCH, VALIDATION_WINDOWS, Cell, cut_validation
from dsgpt.benchmarks.launch import Assignment
from dsgpt.benchmarks.parity import core, refusal_expected, whole_matrix
from dsgpt.benchmarks.parity_bounds import (
    BF16,
    BF16_MANY,
    BF16_PIPELINE,
    BF16_SPLIT,
    CPU,
    FP32,
    FP32_CONSTANT_RATE,
    Split,
    work_of,
)
from dsgpt.benchmarks.parity_page import parity_page
from dsgpt.benchmarks.parity_rank import BUGS, planted_cells
from dsgpt.benchmarks.parity_reference import learning_rate
from dsgpt.benchmarks.parity_suite import ParitySuite, Result, bounds_of, suite_record
from dsgpt.config.recipe_blocks import SchedulerRecipe
from dsgpt.data.token_file import open_token_file
from dsgpt.strategies.schedule import build_schedule

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
    suite = ParitySuite(tmp_path, repository=REPOSITORY, device="cpu")
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
        Result(cell=Cell(strategy="fsdp", ranks=2), status="error", seconds=1.0, message="the launch ended"),
    ]
    page = parity_page(suite_record(suite, ends, seconds=2.0, device="cpu"), source="x.json")
    assert "6 cells: 3 trained and compared with plain PyTorch, **1 failed; 1 ended in an error**;\n2 refused" in page
    assert "| zero2 | 2 | **0 of 1 (1 refused)** |" in page
    assert "* zero2, 2 ranks, accumulation 3, adamw, fp32: refused, though it should train: no compiler" in page
    assert "* tensor2-zero3, 2 ranks, accumulation 3, adamw, fp32: trained, though it should be refused" in page


def test_a_page_about_gpus_claims_only_what_their_bounds_show(tmp_path):
    record = suite_record(ParitySuite(tmp_path, repository=REPOSITORY, device="cpu"), [], seconds=2.0, device="cpu")
    on_gpus = record | {"hardware": record["hardware"] | {"device": "cuda"}}
    here, there = (" ".join(parity_page(one, source="x.json").split()) for one in (record, on_gpus))
    assert "equal in six digits" in here and "not measured yet" not in here
    assert "equal in six digits" not in there and "not measured yet" in there
    assert all("`WarmupLR`" in page and "order of samples from the product" in page for page in (here, there))


def test_a_bug_within_the_bounds_of_gpus_is_not_planted_there():
    """In bf16 they allow 1.5e-2 of the gradient and 4e-2 of the update. These bugs change 1e-3 and 3e-4."""
    everywhere = {cell.bug for cell in planted_cells("cuda")}
    assert {cell.bug for cell in planted_cells("cpu")} == BUGS.keys()
    small = {"micro-batches-summed-in-bf16", "rounded-before-the-reduction", "biases-decay"}
    assert BUGS.keys() - everywhere == small == {name for name, bug in BUGS.items() if bug.precision == "bf16"}


def test_a_cell_without_a_reference_is_an_error(tmp_path, monkeypatch):
    """The reference is replaced by one that is refused, as on a machine that cannot train it; the cells say why."""
    cell = Cell(strategy="baseline", ranks=1)
    suite = ParitySuite(tmp_path, repository=REPOSITORY, device="cpu")
    refused = tmp_path / "refused"

    def refuse(_work):
        refused.mkdir()
        call = "dsgpt.benchmarks.parity_rank:train_reference_cell"
        return Assignment(folder=str(refused), flags=["--no_such_flag"], call=call, arguments={"split": {}})

    monkeypatch.setattr(suite, "_reference", refuse)
    (result,) = suite.run([cell])
    assert (result.status, result.as_expected) == ("error", False)
    because = "cannot be compared, because its reference failed: "
    assert result.message.startswith(f"{because}--no_such_flag is not a known flag")


def test_changed_trainings_have_separate_references():
    works = {work_of(cell) for cell in whole_matrix()}
    assert {work.training for work in works} == {"", "unclipped", "unclipped sgd", "constant rate", "momentum"}
    assert work_of(Cell(strategy="zero1-unclipped", ranks=2)) == work_of(Cell(strategy="ddp-unclipped", ranks=2))


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulation", "split"),
    [
        ("baseline", 1, 1, Split()),
        ("baseline", 1, 3, Split(accumulation=3)),
        ("ddp", 2, 3, Split(data_ranks=2, accumulation=3)),
        ("zero0", 2, 3, Split(data_ranks=2, accumulation=3, low=ACCUMULATED)),
        ("zero3", 2, 3, Split(data_ranks=2, accumulation=3, low=EVERY)),
        (
            "zero3",
            2,
            1,
            Split(data_ranks=2, accumulation=1, low=ACCUMULATED),
        ),  # the same computation
        ("zero3", 1, 3, Split(accumulation=3)),
        ("zero0", 1, 3, Split(accumulation=3, low=ACCUMULATED)),
        ("zero1", 1, 3, Split(accumulation=3)),  # nothing is sent, so nothing is rounded for it
        ("pipeline2-zero1", 4, 3, Split(data_ranks=2, accumulation=3, low=ACCUMULATED, whole_logits=True)),
        ("pipeline2-tensor2-zero1", 8, 1, Split(data_ranks=2, low=ACCUMULATED, whole_logits=True)),
    ],
)
def test_the_reference_of_low_precision_is_split_as_its_cells_are(strategy, ranks, accumulation, split):
    cell = Cell(strategy=strategy, ranks=ranks, accumulation=accumulation, precision="bf16")
    assert work_of(cell).split == split
    assert work_of(replace(cell, precision="fp32")).split == Split()


@pytest.mark.parametrize(
    ("strategy", "ranks", "kind"),
    [
        ("zero0", 2, BF16),
        ("ddp", 4, BF16),
        ("zero0", 4, BF16_MANY),
        ("pipeline2-zero1", 4, BF16_PIPELINE),
        ("pipeline2-tensor2-zero1", 8, BF16_SPLIT),
        ("sequence2-zero3", 2, BF16_SPLIT),
    ],
)
def test_which_bounds_a_cell_has(strategy, ranks, kind):
    cell = Cell(strategy=strategy, ranks=ranks, precision="bf16")
    assert bounds_of(cell, "cpu") is CPU[kind]
    assert bounds_of(replace(cell, precision="fp32"), "cpu") is CPU[FP32]


def test_a_constant_rate_has_bounds_of_its_own():
    assert bounds_of(Cell(strategy="zero1-constant-rate", ranks=2), "cpu") is CPU[FP32_CONSTANT_RATE]


def test_the_reference_computes_the_schedule_of_the_product():
    """Its formula is separate, so a mistake in the product's formula would not be in both."""
    recipe = SchedulerRecipe(type="WarmupCosineLR", warmup_num_steps=2, cos_min_ratio=0.1)
    schedule = build_schedule(recipe, base_lr=0.003, total_steps=20)
    for step in range(1, 21):
        assert learning_rate(recipe, base=0.003, total_steps=20, step=step) == pytest.approx(schedule(step), abs=1e-15)
    assert learning_rate(None, base=0.003, total_steps=20, step=1) == 0.003


def test_the_last_batch_of_a_validation_is_padded_unequally(corpus):
    cut = cut_validation(corpus, windows=VALIDATION_WINDOWS, length=32)
    file = open_token_file(cut.val)
    assert file.tokens == VALIDATION_WINDOWS * 32 + 1
    assert file.sidecar.tokenizer == open_token_file(corpus.val).sidecar.tokenizer
    for ranks in (2, 4):
        share = -(-GLOBAL_BATCH // ranks)
        last = VALIDATION_WINDOWS % GLOBAL_BATCH
        found = [min(share, max(0, last - rank * share)) for rank in range(ranks)]
        assert len(set(found)) > 1
        assert found[-1] == 0
