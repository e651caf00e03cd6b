"""The parity suite: its command, its cells, what it expects, and how it compares."""

import copy
import json
from dataclasses import fields, replace

import pytest
import torch
from forked_ranks import launches_fork
from messages import without_sources
from small_run import REPOSITORY
from suite_commands import REFERENCE

from dsgpt.benchmarks import parity
from dsgpt.benchmarks.cells import ACCUMULATED, EVERY, GLOBAL_BATCH, VALIDATION_WINDOWS, Cell, cut_validation
from dsgpt.benchmarks.frame import EXIT_FAILED, record_head, run_suite
from dsgpt.benchmarks.launch import Assignment, read_ranks
from dsgpt.benchmarks.parity import refusal_expected
from dsgpt.benchmarks.parity_page import parity_page
from dsgpt.benchmarks.parity_rank import BUGS, full_gradient, planted_cells
from dsgpt.benchmarks.parity_reference import (
    CHANGED,
    GRADIENT,
    WEIGHT,
    Measurement,
    WatchedBatches,
    compare,
    learning_rate,
)
from dsgpt.config.recipe_blocks import SchedulerRecipe
from dsgpt.data.loader import Batch
from dsgpt.data.token_file import open_token_file
from dsgpt.record.provenance import PARAGRAPH
from dsgpt.strategies.optimizer import build_schedule

# `python src/benchmark.py parity`: the command, its record and its page.


@pytest.fixture
def suite(tmp_path):
    """The suite in an empty folder, where it has run nothing."""
    suite = parity.Parity(parity.ParityOptions(), REPOSITORY)
    suite.folder = tmp_path
    suite.begin()
    return suite


def page_of(suite, *results, **hardware):
    """The page of a record of ``results``, with changes of its block ``hardware``."""
    record = record_head(parity.Parity.schema_version, device="cpu") | {"seconds": 2.0} | suite.record(results)
    return parity_page(record | {"hardware": record["hardware"] | hardware}, source="x.json")


def test_a_run_writes_its_record_and_the_page_made_from_it(tmp_path, capsys):
    output = tmp_path / "out" / "record.json"
    with launches_fork():
        options = parity.ParityOptions(only=("baseline",), core=True, output=output)
        assert run_suite(parity.Parity, options, repository=REPOSITORY) == 0
    printed = capsys.readouterr().out
    assert "python starts 1 rank for 3 trainings" in printed
    assert "[  1/3] baseline, 1 rank, accumulation 1, adamw, fp32: passed" in printed
    assert "| baseline | 1 | 3 of 3 |" in printed
    record = json.loads(output.read_text())
    assert [cell["status"] for cell in record["cells"]] == ["passed"] * 3
    assert all(cell["measured"]["loss"]["difference"] >= 0 for cell in record["cells"])
    assert record["env"]["torch_version"]
    assert record["launches"][0]["seconds"] > 0
    page = (tmp_path / "out" / "record.md").read_text()
    assert without_sources(page) == parity_page(record, source=output.as_posix())
    assert f"\n\n{PARAGRAPH}" in page
    assert "## Bytes per rank" in page
    again = parity.ParityOptions(table_from=output, output=output, page=tmp_path / "again.md")
    assert run_suite(parity.Parity, again, repository=REPOSITORY) == 0
    assert (tmp_path / "again.md").read_text() == page


def test_a_failure_gives_the_exit_code_and_names_the_place(tmp_path, monkeypatch, capsys):
    """With bounds of 0 even the baseline fails, because it adds up its micro batches in another order."""
    none = parity.Bounds(loss=0, validation=0, norm=0, gradient=0, update=0, weights=0)
    monkeypatch.setattr(parity, "BOUNDS", {"cpu": {parity.FP32: none, parity.BF16: none}})
    output = tmp_path / "record.json"
    options = parity.ParityOptions(only=("baseline",), core=True, output=output, keep=tmp_path / "kept")
    with launches_fork():
        assert run_suite(parity.Parity, options, repository=REPOSITORY) == EXIT_FAILED
    said = capsys.readouterr().out
    assert "unexpected result: baseline, 1 rank, accumulation 3, sgd, fp32" in said
    assert "accumulation 3, sgd, fp32: FAILED" in said
    assert "loss at step " in said
    page = (tmp_path / "record.md").read_text()
    assert "## Failures" in page
    assert "* baseline, 1 rank, accumulation 3, sgd, fp32: loss at step " in page
    assert (tmp_path / "kept" / "baseline_1-rank_accumulation-3_sgd_fp32" / "recipe.json").exists()


def test_the_committed_record_is_complete_and_has_no_unexpected_result():
    record = json.loads((REPOSITORY / REFERENCE / "parity.json").read_text(encoding="utf-8"))
    assert all(cell["as_expected"] for cell in record["cells"])
    recorded = {Cell(**{field.name: cell[field.name] for field in fields(Cell)}) for cell in record["cells"]}
    assert record["schema_version"] == parity.Parity.schema_version
    assert recorded == {*parity.whole_matrix(), *(bug.cell(name) for name, bug in BUGS.items())}


# What counts as success: a refusal where one is expected, and nowhere else.


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
    assert not [cell.name for cell in parity.core() if refusal_expected(cell, device="cpu")]
    assert len(parity.core()) <= 75


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
    result = parity.Result(cell=cell, refusal_expected=refusal_expected, status=status, seconds=0.0)
    assert result.as_expected == content


def test_the_page_counts_refusals_and_names_unexpected_ones(suite):
    fp16 = Cell(strategy="zero1", ranks=2, precision="fp16")
    ends = [
        parity.Result(cell=TRAINED, status="passed", seconds=1.0),
        parity.Result(cell=fp16, refusal_expected=True, status="refused", seconds=1.0, message="needs a GPU"),
    ]
    page = page_of(suite, *ends)
    assert "| zero1 | 2 | 1 of 2 (1 refused) |" in page
    assert "2 cells: 1 trained and compared with plain PyTorch, **all passed**;\n1 refused by the product" in page
    assert "## Failures" not in page
    ends += [
        parity.Result(cell=Cell(strategy="zero2", ranks=2), status="refused", seconds=1.0, message="no compiler"),
        parity.Result(cell=REFUSED, refusal_expected=True, status="passed", seconds=1.0),
        parity.Result(cell=Cell(strategy="ddp", ranks=2), status="failed", seconds=1.0),
        parity.Result(cell=Cell(strategy="fsdp", ranks=2), status="error", seconds=1.0, message="the launch ended"),
    ]
    page = page_of(suite, *ends)
    assert "6 cells: 3 trained and compared with plain PyTorch, **1 failed; 1 ended in an error**;\n2 refused" in page
    assert "| zero2 | 2 | **0 of 1 (1 refused)** |" in page
    assert "* zero2, 2 ranks, accumulation 3, adamw, fp32: refused, though it should train: no compiler" in page
    assert "* tensor2-zero3, 2 ranks, accumulation 3, adamw, fp32: trained, though it should be refused" in page


def test_a_page_about_gpus_claims_only_what_their_bounds_show(suite):
    here, there = (" ".join(page_of(suite, device=device).split()) for device in ("cpu", "cuda"))
    assert "equal in six digits" in here and "not measured yet" not in here
    assert "equal in six digits" not in there and "not measured yet" in there
    assert all("`WarmupLR`" in page and "order of samples from the product" in page for page in (here, there))


def test_a_bug_within_the_bounds_of_gpus_is_not_planted_there():
    """In bf16 they allow 1.5e-2 of the gradient and 4e-2 of the update. These bugs change 1e-3 and 3e-4."""
    everywhere = {cell.bug for cell in planted_cells("cuda")}
    assert {cell.bug for cell in planted_cells("cpu")} == BUGS.keys()
    small = {"micro-batches-summed-in-bf16", "rounded-before-the-reduction", "biases-decay"}
    assert BUGS.keys() - everywhere == small == {name for name, bug in BUGS.items() if bug.precision == "bf16"}


def test_a_cell_without_a_reference_is_an_error(suite, monkeypatch):
    """The reference is replaced by one that is refused, as on a machine that cannot train it; the cells say why."""
    (refused := suite.folder / "refused").mkdir()
    call = "dsgpt.benchmarks.parity_rank:train_reference_cell"
    reference = Assignment(folder=str(refused), flags=["--no_such_flag"], call=call, arguments={"split": {}})
    monkeypatch.setattr(suite, "reference", lambda _work: reference)
    with launches_fork():
        (result,) = suite.run([Cell(strategy="baseline", ranks=1)])
    assert (result.status, result.as_expected) == ("error", False)
    because = "cannot be compared, because its reference failed: "
    assert result.message.startswith(f"{because}--no_such_flag is not a known flag")


def test_changed_trainings_have_separate_references():
    works = {parity.work_of(cell) for cell in parity.whole_matrix()}
    assert {work.training for work in works} == {"", "unclipped", "unclipped sgd", "constant rate", "momentum"}
    assert parity.work_of(Cell(strategy="zero1-unclipped", ranks=2)) == parity.work_of(
        Cell(strategy="ddp-unclipped", ranks=2)
    )


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulation", "split"),
    [
        ("baseline", 1, 1, parity.Split()),
        ("baseline", 1, 3, parity.Split(accumulation=3)),
        ("ddp", 2, 3, parity.Split(data_ranks=2, accumulation=3)),
        ("zero0", 2, 3, parity.Split(data_ranks=2, accumulation=3, low=ACCUMULATED)),
        ("zero3", 2, 3, parity.Split(data_ranks=2, accumulation=3, low=EVERY)),
        ("zero3", 2, 1, parity.Split(data_ranks=2, accumulation=1, low=ACCUMULATED)),  # the same computation
        ("zero3", 1, 3, parity.Split(accumulation=3)),
        ("zero0", 1, 3, parity.Split(accumulation=3, low=ACCUMULATED)),
        ("zero1", 1, 3, parity.Split(accumulation=3)),  # nothing is sent, so nothing is rounded for it
        ("pipeline2-zero1", 4, 3, parity.Split(data_ranks=2, accumulation=3, low=ACCUMULATED, whole_logits=True)),
        ("pipeline2-tensor2-zero1", 8, 1, parity.Split(data_ranks=2, low=ACCUMULATED, whole_logits=True)),
    ],
)
def test_the_reference_of_low_precision_is_split_as_its_cells_are(strategy, ranks, accumulation, split):
    cell = Cell(strategy=strategy, ranks=ranks, accumulation=accumulation, precision="bf16")
    assert parity.work_of(cell).split == split
    assert parity.work_of(replace(cell, precision="fp32")).split == parity.Split()


@pytest.mark.parametrize(
    ("strategy", "ranks", "bf16", "fp32"),
    [
        ("zero0", 2, parity.BF16, parity.FP32),
        ("ddp", 4, parity.BF16, parity.FP32),
        ("zero0", 4, parity.BF16_MANY, parity.FP32),
        ("pipeline2-zero1", 4, parity.BF16_PIPELINE, parity.FP32),
        ("pipeline2-tensor2-zero1", 8, parity.BF16_SPLIT, parity.FP32),
        ("sequence2-zero3", 2, parity.BF16_SPLIT, parity.FP32),
        ("zero1-constant-rate", 2, parity.BF16, parity.FP32_CONSTANT_RATE),
    ],
)
def test_which_bounds_a_cell_has(strategy, ranks, bf16, fp32):
    for precision, kind in (("bf16", bf16), ("fp32", fp32)):
        assert parity.bounds_of(Cell(strategy=strategy, ranks=ranks, precision=precision), "cpu") is parity.CPU[kind]


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


# Each fact has its bound. A value just outside of it is reported, with step or parameter and both values.


NAMES = ("wpe.weight", "blocks.0.ln_1.bias", "wte.weight", "blocks.0.attn.qkv.bias")
MATRIX, LAYER_NORM, TIED, QKV = NAMES
KINDS = {GRADIENT: "first gradient", CHANGED: "first update", WEIGHT: "weights"}
STEPS = 3


def weight(name: str) -> torch.Tensor:
    return torch.arange(1, 7, dtype=torch.float32) / (1 + NAMES.index(name))


def write_tensors(folder, change):
    """Write all tensors of rank 0, as ``change`` of their kind, name and value makes them; None leaves one out."""
    measurement = Measurement(data_rank=0, strategy="cell")
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
        measurement = Measurement(data_rank=rank, strategy=name)
        for step in range(STEPS):
            read, lr = [f"{step}{sample}" for sample in samples], 0.1 * step
            measurement.step(loss=5.0 - step, grad_norm=2.0, lr=lr, used=[lr], skipped=False, samples=read)
        for after_step, loss in ((0, 5.5), (STEPS, 4.5)):
            measurement.validation(after_step=after_step, loss=loss, targets=17)
        for parameter in NAMES:
            measurement.replica(parameter, weight(parameter))
        measurement.write(folder, rank=rank)
        write_tensors(folder, lambda kind, name, value: value)
    return tmp_path, read_ranks(tmp_path / "reference", 1)[0], read_ranks(tmp_path / "cell", 2)


def found(training, *, bounds=parity.CPU[parity.FP32], replicas="all"):
    folder, reference, ranks = training
    comparison = compare(
        ranks,
        folder / "cell",
        reference=reference,
        reference_folder=folder / "reference",
        bounds=bounds,
        replicas=replicas,
    )
    return {failure["fact"]: failure for failure in comparison.failures}


def test_equal_trainings_pass(training):
    for bounds in (*parity.CPU.values(), *parity.CUDA.values()):
        assert found(training, bounds=bounds) == {}


@pytest.mark.parametrize(
    ("kind", "loss", "norm"), [(parity.FP32, 5e-6, 2e-6), (parity.BF16, 2.4e-3, 1.7e-2)], ids=["fp32", "bf16"]
)
def test_bounds_of_numbers(training, kind, loss, norm):
    folder, reference, ranks = training
    for key, fact, size in (("loss", "loss", loss), ("grad_norm", "gradient norm", 2.0 * norm)):
        for factor, caught in ((0.99, False), (1.01, True)):
            changed = copy.deepcopy(ranks)
            for rank in changed:
                rank["steps"][1][key] -= size * factor
            failures = found((folder, reference, changed), bounds=parity.CPU[kind])
            assert failures.keys() == ({fact} if caught else set())
    failure = failures["gradient norm"]
    actual = changed[0]["steps"][1]["grad_norm"]
    assert (failure["where"], failure["expected"], failure["actual"]) == ("step 2", 2.0, actual)


BOTH, FIRST, SECOND = (0, 1), (0,), (1,)
OFF = 0.1 + 1e-9


@pytest.mark.parametrize(
    ("ranks", "step", "key", "value", "fact", "where"),
    [
        (BOTH, 3, "loss", None, "loss", "step 3"),  # it was not finite
        (BOTH, 2, "skipped", True, "skipped", "step 2"),
        (BOTH, 2, "lr", OFF, "learning rate", "step 2, rank 0"),
        # What an optimizer used, while the rate that was reported is right: of one group, a step early, none.
        *(
            (ranks, 2, "used", used, "learning rate", f"step 2, {by}rank {ranks[0]}")
            for ranks in (FIRST, SECOND)
            for used, by in (([0.1, OFF], ""), ([0.2], ""), ([], "used by "))
        ),
        (SECOND, 1, "loss", 5.0 + 1e-6, "reports of all ranks", "step 1, loss of rank 1"),
        (SECOND, 2, "samples", ["1b", "1b"], "samples", "step 2"),  # one twice
        (SECOND, 2, "samples", ["1b"], "samples", "step 2"),  # one too few
        (SECOND, 2, "samples", ["0b", "0d"], "samples", "step 2"),  # another step's
    ],
)
def test_a_wrong_figure_of_a_step(training, ranks, step, key, value, fact, where):
    for rank in ranks:
        training[2][rank]["steps"][step - 1][key] = value
    failures = found(training)
    assert failures[fact]["where"] == where
    if key == "used":
        assert failures.keys() == {fact}


@pytest.mark.parametrize("index", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize(
    ("key", "change", "fact"),
    [
        ("loss", 1.8e-6, None),
        ("loss", 2.2e-6, "validation loss"),
        ("loss", -0.4, "validation loss"),
        ("loss", None, "validation loss"),
        ("targets", 7, "validation targets"),
    ],
)
def test_a_validation_of_one_rank(training, index, key, change, fact):
    validation = training[2][1]["validations"][index]
    validation[key] = None if change is None else validation[key] + change
    where = {name: failure["where"] for name, failure in found(training).items()}
    assert where == ({fact: f"step {index * STEPS}, rank 1"} if fact else {})


def test_a_step_and_a_validation_that_are_missing(training):
    training[2][0]["validations"].pop()
    for rank in training[2]:
        rank["steps"].pop()
    failures = found(training)
    assert failures["steps"]["actual"] == STEPS - 1
    assert failures["validations"]["where"] == "of rank 0"


def test_peers_of_a_data_rank_take_the_same_samples_or_none(training):
    folder, reference, ranks = training
    both = [*ranks, copy.deepcopy(ranks[1])]
    for samples, where in (
        (["0b", "0d"], None),
        ([], None),
        (["0a", "0c"], "step 1, rank 2 beside rank 1 of data rank 1"),
    ):
        both[2]["steps"][0]["samples"] = samples
        assert found((folder, reference, both)).get("samples", {}).get("where") == where


@pytest.mark.parametrize(
    ("bounds", "kind", "name", "allowed"),
    [
        *((parity.FP32, kind, LAYER_NORM, 2e-6) for kind in KINDS),  # of every parameter separately, small biases too
        (parity.BF16, GRADIENT, MATRIX, 1e-6),
        (parity.BF16, GRADIENT, LAYER_NORM, 1e-6),
        (parity.BF16, GRADIENT, TIED, 1e-6),
        (parity.BF16, CHANGED, LAYER_NORM, 1e-6),
        (parity.BF16_MANY, GRADIENT, MATRIX, 1.6e-2),
        (parity.BF16_PIPELINE, GRADIENT, MATRIX, 1e-6),
        (parity.BF16_PIPELINE, GRADIENT, TIED, 9e-3),
        (parity.BF16_PIPELINE, CHANGED, MATRIX, 3.6e-5),
        (parity.BF16_PIPELINE, CHANGED, TIED, 4.8e-4),
        (parity.BF16_SPLIT, GRADIENT, MATRIX, 1.5e-2),
        (parity.BF16_SPLIT, GRADIENT, LAYER_NORM, 6e-2),
        (parity.BF16_SPLIT, CHANGED, LAYER_NORM, 4e-2),
    ],
)
def test_a_tensor_is_bound_as_closely_as_its_arithmetic_allows(training, bounds, kind, name, allowed):
    for factor, caught in ((0.8, False), (1.2, True)):
        off = allowed * factor
        write_tensors(training[0] / "cell", lambda *of, off=off: of[2] * (1 + off * (of[:2] == (kind, name))))
        failures = found(training, bounds=parity.CPU[bounds])
        assert failures.keys() == ({KINDS[kind]} if caught else set())
    assert failures[KINDS[kind]]["where"] == name
    assert failures[KINDS[kind]]["difference"] == pytest.approx(off, rel=0.1)


@pytest.mark.parametrize(("part", "caught"), [(0, True), (1, False), (2, True)], ids=["queries", "keys", "values"])
def test_only_the_biases_of_keys_are_left_out_of_the_weights(training, part, caught):
    shift = torch.eye(6)[2 * part]
    write_tensors(training[0] / "cell", lambda *of: of[2] + shift * (of[:2] == (WEIGHT, QKV)))
    assert found(training).keys() == ({"weights"} if caught else set())


@pytest.mark.parametrize("rest", [None, slice(1)], ids=["missing", "reshaped"])
def test_a_parameter_that_is_missing_or_has_another_shape(training, rest):
    def change(kind, name, value):
        return value if (kind, name) != (WEIGHT, MATRIX) else rest and value[rest]

    write_tensors(training[0] / "cell", change)
    assert "weights" in found(training)


def test_replicas_differ_in_one_bit(training):
    measurement = Measurement(data_rank=1, strategy="cell")
    for name in NAMES:
        measurement.replica(name, weight(name) + (1e-6 if name == NAMES[1] else 0.0))
    training[2][1]["replicas"] = {name: list(value) for name, value in measurement.replicas.items()}
    assert found(training)["replicated weights"]["where"] == f"{NAMES[1]} of rank 1 beside rank 0"


def test_a_rank_that_holds_less_than_it_should(training):
    training[2][1]["replicas"].pop(NAMES[0])
    assert "replicated weights" in found(training)
    assert found(training, replicas="some") == {}
    training[2][1]["replicas"].clear()
    assert "replicated weights" in found(training, replicas="some")
    assert found(training, replicas="none") == {}


def test_full_gradient_undoes_adam_and_clipping():
    """Compared with torch's own clipping and AdamW, with active and inactive clipping."""
    for clipping in (0.5, 100.0, 0.0):
        parameter = torch.nn.Parameter(torch.zeros(4))
        gradient = torch.tensor([1.0, -2.0, 3.0, 0.5])
        parameter.grad = gradient.clone()
        norm = torch.linalg.vector_norm(gradient)
        if clipping:
            torch.nn.utils.clip_grad_norm_([parameter], clipping)
        optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.95))
        optimizer.step()
        moment = optimizer.state[parameter]["exp_avg"]
        whole = full_gradient(moment, beta1=0.9, grad_norm=float(norm), clipping=clipping)
        torch.testing.assert_close(whole, gradient, rtol=1e-6, atol=0)


def test_sample_hashes_depend_on_inputs_and_targets():
    ids = torch.arange(12).view(2, 6)
    one, two = Batch(ids, ids + 1), Batch(ids, ids + 2)
    watched = WatchedBatches([one, one, two])
    next(watched)
    first = watched.take()
    assert len(set(first)) == 2
    assert watched.take() == []
    next(watched)
    assert watched.take() == first
    next(watched)
    assert not set(watched.take()) & set(first)
