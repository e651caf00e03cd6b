"""The parity suite: its command, its page, its committed record, and how it compares."""

import copy
import json
from dataclasses import asdict, fields, replace
from functools import partial

import pytest
import torch
from forked_ranks import launches_fork
from small_run import REPOSITORY

from dsgpt.benchmarks import parity
from dsgpt.benchmarks.cells import Cell, CellEnd
from dsgpt.benchmarks.frame import EXIT_FAILED, record_head, run_suite
from dsgpt.benchmarks.launch import read_ranks
from dsgpt.benchmarks.parity import refusal_expected
from dsgpt.benchmarks.parity_page import parity_page
from dsgpt.benchmarks.parity_rank import BUGS
from dsgpt.benchmarks.parity_reference import CHANGED, GRADIENT, WEIGHT, Measurement, WatchedBatches, compare
from dsgpt.benchmarks.records import REFERENCE
from dsgpt.common.text import BUSY
from dsgpt.data.loader import Batch
from dsgpt.record.provenance import PARAGRAPH

# `python src/benchmark.py parity`: the command, its record and its page.


@pytest.fixture
def suite(tmp_path):
    """The suite in an empty folder, where it has run nothing."""
    suite = parity.Parity(parity.ParityOptions(), REPOSITORY)
    suite.folder = tmp_path
    suite.begin()
    return suite


def test_a_run_writes_its_record_and_page_and_names_what_failed(tmp_path, monkeypatch, capsys):
    """Without a bound for the loss even the baseline fails, because it adds up its micro batches in another order."""
    bounds = parity.CPU | {parity.FP32: replace(parity.CPU[parity.FP32], loss=0)}
    monkeypatch.setattr(parity, "BOUNDS", {"cpu": bounds})
    output, page = tmp_path / "out" / "record.json", tmp_path / "out" / "record.md"
    options = parity.ParityOptions(only=("baseline",), core=True, steps=6, output=output, keep=tmp_path / "kept")
    with launches_fork():
        assert run_suite(parity.Parity, options, repository=REPOSITORY) == EXIT_FAILED
    said, failing = capsys.readouterr().out, "baseline, 1 rank, accumulation 3, sgd, fp32"
    assert "python starts 1 rank for 3 trainings" in said
    assert f"{failing}: FAILED" in said
    assert f"unexpected result: {failing}" in said
    assert (tmp_path / "kept" / "baseline_1-rank_accumulation-3_sgd_fp32" / "recipe.json").exists()
    record = json.loads(output.read_text())
    assert {cell["precision"]: cell["status"] for cell in record["cells"]} == {"fp32": "failed", "bf16": "passed"}
    assert record["launches"][0]["seconds"] > 0
    text = page.read_text()
    beside = (PARAGRAPH, BUSY)  # paragraphs about sources and about a busy machine
    own = "\n\n".join(part for part in text.split("\n\n") if not part.startswith(beside))
    assert own == parity_page(record, source=output.as_posix())
    assert f"\n\n{PARAGRAPH}" in text
    assert f"* {failing}: loss at step " in text
    again = parity.ParityOptions(table_from=output, output=output, page=tmp_path / "again.md")
    assert run_suite(parity.Parity, again, repository=REPOSITORY) == 0
    assert (tmp_path / "again.md").read_text() == text


def test_the_committed_record_is_of_all_cells_under_the_present_bounds():
    record = json.loads((REPOSITORY / REFERENCE / "parity.json").read_text(encoding="utf-8"))
    status = {
        Cell(**{field.name: cell[field.name] for field in fields(Cell)}): cell["status"] for cell in record["cells"]
    }
    assert status.keys() == {*parity.whole_matrix(), *(bug.cell for bug in BUGS.values())}
    assert all(cell["as_expected"] for cell in record["cells"])
    assert record["schema_version"] == parity.Parity.schema_version
    assert record["bounds"] == {name: asdict(bounds) for name, bounds in parity.CPU.items()}
    for cell in parity.whole_matrix():
        assert (status[cell] == "refused") == refusal_expected(cell, device="cpu")


def test_the_page_counts_refusals_and_names_unexpected_ends(suite):
    def end(strategy, status, message="", *, expected=True, **more):
        cell = asdict(Cell(strategy=strategy, ranks=2, **more))
        facts = {"status": status, "as_expected": expected, "message": message or None, "bug_description": "a bug"}
        return cell | facts | {"measured": {}, "failures": [], "cost": None}

    def page_of(ends):
        head = record_head(parity.Parity.schema_version, device="cpu") | {"seconds": 2.0}
        return parity_page(head | suite.record(ends), source="x.json")

    ends = [end("zero1", "passed"), end("zero1", "refused", "needs a GPU", precision="fp16")]
    ends += [end("ddp", "failed", bug="sum-over-ranks")]
    page = page_of(ends)
    assert "| zero1 | 2 | 1 of 2 (1 refused) |" in page
    assert "2 cells: 1 trained and compared with plain PyTorch, **all passed**;\n1 refused by the product" in page
    assert "## Failures" not in page
    wrong = partial(end, expected=False)
    ends += [wrong("zero2", "refused", "no compiler"), wrong("tensor2-zero3", "passed"), wrong("ddp", "failed")]
    ends += [wrong("fsdp", "error", "the launch ended"), wrong("zero1", "passed", bug="biases-decay")]
    page = page_of(ends)
    assert "6 cells: 3 trained and compared with plain PyTorch, **1 failed; 1 ended in an error**;\n2 refused" in page
    assert "| zero2 | 2 | **0 of 1 (1 refused)** |" in page
    for words in (
        "zero2, 2 ranks, accumulation 3, adamw, fp32: refused, though it should train: no compiler",
        "tensor2-zero3, 2 ranks, accumulation 3, adamw, fp32: trained, though it should be refused",
        "zero1, 2 ranks, accumulation 3, adamw, fp32, biases-decay: the planted bug was not noticed",
    ):
        assert f"* {words}" in page


def test_a_cell_without_its_reference_is_an_error(suite):
    cell = Cell(strategy="baseline", ranks=1)
    suite._without_reference[parity.reference_key(cell)] = "it was refused"
    result = suite._judge(cell, CellEnd(folder=suite.folder, ranks=[], status="done"))
    assert (result["status"], result["as_expected"]) == ("error", False)
    assert result["message"] == "cannot be compared, because its reference failed: it was refused"
    refused = CellEnd(folder=suite.folder, ranks=[], status="refused")
    for change, expected in (("fp32", False), ("fp16", True)):
        assert suite._judge(replace(cell, precision=change), refused)["as_expected"] == expected
    assert not suite._judge(replace(cell, bug="biases-decay"), refused)["as_expected"]


@pytest.mark.parametrize(
    ("strategy", "ranks", "kind"),
    [
        ("zero0", 2, parity.BF16),
        ("ddp", 4, parity.BF16),
        ("zero0", 4, parity.BF16_MANY),
        ("pipeline2-zero1", 4, parity.BF16_PIPELINE),
        ("pipeline2-tensor2-zero1", 8, parity.BF16_SPLIT),
        ("sequence2-zero3", 2, parity.BF16_SPLIT),
    ],
)
def test_bounds_are_wider_only_where_the_arithmetic_differs(strategy, ranks, kind):
    for precision, bounds in (("bf16", kind), ("fp32", parity.FP32)):
        cell = Cell(strategy=strategy, ranks=ranks, precision=precision)
        assert parity.bounds_of(cell, "cpu") is parity.CPU[bounds]


# Each fact has its bound. A value just outside of it is reported, with step or parameter.


NAMES = ("wpe.weight", "blocks.0.ln_1.bias", "wte.weight", "blocks.0.attn.qkv.bias")
MATRIX, LAYER_NORM, TIED, QKV = NAMES
KINDS = {GRADIENT: "first gradient", CHANGED: "first update", WEIGHT: "weights"}
STEPS = 3


def weight(name: str) -> torch.Tensor:
    return torch.arange(1, 7, dtype=torch.float32) / (1 + NAMES.index(name))


def write_tensors(folder, change):
    """Write all tensors of rank 0, as ``change`` of their kind, name and value makes them; None leaves one out."""
    measurement = Measurement(data_rank=0)
    for kind in KINDS:
        for name in NAMES:
            if (value := change(kind, name, weight(name))) is not None:
                measurement.tensor(kind, name, value)
    measurement.write(folder, rank=9)


@pytest.fixture
def training(tmp_path):
    """The files of a training of two ranks, which read different samples, and of its reference."""
    for name, rank, samples in (("reference", 0, "abcd"), ("cell", 0, "ca"), ("cell", 1, "bd")):
        (folder := tmp_path / name).mkdir(exist_ok=True)
        measurement = Measurement(data_rank=rank)
        for step in range(STEPS):
            read, lr = [f"{step}{sample}" for sample in samples], 0.1 * step
            facts = {"loss": 5.0 - step, "grad_norm": 2.0, "lr": lr, "used": [lr], "skipped": False}
            measurement.steps.append(facts | {"samples": sorted(read)})
        for after_step, loss in ((0, 5.5), (STEPS, 4.5)):
            measurement.validations.append({"after_step": after_step, "loss": loss, "targets": 17})
        for parameter in NAMES:
            measurement.replica(parameter, weight(parameter))
        measurement.write(folder, rank=rank)
        write_tensors(folder, lambda kind, name, value: value)
    return tmp_path, read_ranks(tmp_path / "reference", 1)[0], read_ranks(tmp_path / "cell", 2)


def found(training, *, bounds=parity.CPU[parity.FP32], replicas="all"):
    """By fact that is out of bounds, the first place where it is."""
    folder, reference, ranks = training
    ends = ((folder / "cell", ranks), (folder / "reference", [reference]))
    cell, expected = (CellEnd(folder=where, ranks=files, status="done") for where, files in ends)
    comparison = compare(cell, expected, bounds=bounds, replicas=replicas)
    return {failure["fact"]: failure["where"] for failure in comparison.failures}


BOTH, FIRST, SECOND = (0, 1), (0,), (1,)
OFF = 0.1 + 1e-9


@pytest.mark.parametrize(
    ("ranks", "part", "index", "key", "value", "fact", "where"),
    [
        (BOTH, "steps", 1, "loss", 4.0 - 4.9e-6, None, None),
        (BOTH, "steps", 1, "loss", 4.0 - 5.1e-6, "loss", "step 2"),
        (BOTH, "steps", 2, "loss", None, "loss", "step 3"),  # it was not finite
        (BOTH, "steps", 1, "grad_norm", 2.0 - 3.9e-6, None, None),
        (BOTH, "steps", 1, "grad_norm", 2.0 - 4.1e-6, "gradient norm", "step 2"),
        (BOTH, "steps", 1, "skipped", True, "skipped", "step 2"),
        (BOTH, "steps", 1, "lr", OFF, "learning rate", "step 2, rank 0"),
        # What an optimizer used, while the rate that was reported is right: of one group, a step early, none.
        (FIRST, "steps", 1, "used", [0.1, OFF], "learning rate", "step 2, rank 0"),
        (SECOND, "steps", 1, "used", [0.2], "learning rate", "step 2, rank 1"),
        (SECOND, "steps", 1, "used", [], "learning rate", "step 2, used by rank 1"),
        (SECOND, "steps", 0, "loss", 5.0 + 1e-6, "reports of all ranks", "step 1, loss of rank 1"),
        (SECOND, "steps", 1, "samples", ["1b", "1b"], "samples", "step 2"),  # one twice
        (SECOND, "steps", 1, "samples", ["1b"], "samples", "step 2"),  # one too few
        (SECOND, "steps", 1, "samples", ["0b", "0d"], "samples", "step 2"),  # another step's
        (SECOND, "validations", 0, "loss", 5.5 + 1.8e-6, None, None),
        (SECOND, "validations", 0, "loss", 5.5 + 2.2e-6, "validation loss", "step 0, rank 1"),
        (SECOND, "validations", 1, "loss", None, "validation loss", "step 3, rank 1"),
        (SECOND, "validations", 1, "targets", 7, "validation targets", "step 3, rank 1"),
    ],
)
def test_a_wrong_figure_is_reported_where_it_is(training, ranks, part, index, key, value, fact, where):
    for rank in ranks:
        training[2][rank][part][index][key] = value
    assert found(training).get(fact) == where
    assert fact or found(training) == {}


def test_a_step_and_a_validation_that_are_missing(training):
    training[2][0]["validations"].pop()
    for rank in training[2]:
        rank["steps"].pop()
    assert found(training) == {"steps": "in all", "validations": "of rank 0", "samples": "step 3"}


def test_peers_of_a_data_rank_take_the_same_samples_or_none(training):
    folder, reference, ranks = training
    both = [*ranks, copy.deepcopy(ranks[1])]
    other = "step 1, rank 2 beside rank 1 of data rank 1"
    for samples, where in ((["0b", "0d"], None), ([], None), (["0a", "0c"], other)):
        both[2]["steps"][0]["samples"] = samples
        assert found((folder, reference, both)).get("samples") == where


@pytest.mark.parametrize(
    ("bounds", "kind", "name", "field"),
    [
        (parity.FP32, GRADIENT, LAYER_NORM, "gradient"),  # of every parameter separately, small biases too
        (parity.FP32, CHANGED, LAYER_NORM, "update"),
        (parity.FP32, WEIGHT, LAYER_NORM, "weights"),
        (parity.BF16, GRADIENT, TIED, "gradient"),
        (parity.BF16_PIPELINE, GRADIENT, MATRIX, "gradient"),
        (parity.BF16_PIPELINE, GRADIENT, TIED, "tied_gradient"),
        (parity.BF16_PIPELINE, CHANGED, TIED, "tied_update"),
        (parity.BF16_SPLIT, GRADIENT, MATRIX, "gradient"),
        (parity.BF16_SPLIT, GRADIENT, LAYER_NORM, "layer_norm_gradient"),
    ],
)
def test_a_tensor_is_bound_as_closely_as_its_arithmetic_allows(training, bounds, kind, name, field):
    for factor, where in ((0.8, {}), (1.2, {KINDS[kind]: name})):
        off = getattr(parity.CPU[bounds], field) * factor
        write_tensors(training[0] / "cell", lambda *of, off=off: of[2] * (1 + off * (of[:2] == (kind, name))))
        assert found(training, bounds=parity.CPU[bounds]) == where


@pytest.mark.parametrize(
    ("name", "change", "caught"),
    [
        (QKV, lambda value: value + torch.eye(6)[0], True),  # queries
        (QKV, lambda value: value + torch.eye(6)[2], False),  # keys, which are left out
        (QKV, lambda value: value + torch.eye(6)[4], True),  # values
        (MATRIX, lambda value: None, True),
        (MATRIX, lambda value: value[:1], True),
    ],
)
def test_weights_that_are_wrong_missing_or_reshaped(training, name, change, caught):
    write_tensors(training[0] / "cell", lambda *of: change(of[2]) if of[:2] == (WEIGHT, name) else of[2])
    assert ("weights" in found(training)) == caught


def test_replicas_that_differ_in_one_bit_or_are_missing(training):
    replicas = training[2][1]["replicas"]
    digest = replicas[MATRIX][0]
    replicas[MATRIX][0] = digest[::-1]
    assert found(training) == {"replicated weights": f"{MATRIX} of rank 1 beside rank 0"}
    replicas.pop(MATRIX)
    assert "replicated weights" in found(training)
    assert found(training, replicas="some") == {}
    replicas.clear()
    assert "replicated weights" in found(training, replicas="some")
    assert found(training, replicas="none") == {}


def test_sample_hashes_depend_on_inputs_and_targets():
    ids = torch.arange(12).view(2, 6)
    watched = WatchedBatches([Batch(ids, ids + 1), Batch(ids, ids + 2)])
    hashes = [(next(watched), watched.take())[1] for _ in range(2)]
    assert len({*hashes[0], *hashes[1]}) == 4
    assert watched.take() == []
