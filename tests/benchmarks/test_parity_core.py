"""The core of the parity suite: every cell agrees, bugs are caught, traffic is as predicted."""

import pytest
from forked_ranks import launches_fork
from small_run import REPOSITORY

from dsgpt.benchmarks import museum
from dsgpt.benchmarks.cells import STRATEGIES, Cell
from dsgpt.benchmarks.parity import core, whole_matrix
from dsgpt.benchmarks.parity_page import cell_name, failure_words
from dsgpt.benchmarks.parity_rank import BUGS

museum.load()


@pytest.fixture(scope="module")
def result_of(request, tmp_path_factory):
    """A function from a cell to its result. Cells run in the suite's order, up to the one whose result is needed.

    All tests share the launches, and only selected cells run.
    """
    wanted = {
        item.callspec.params["cell"]
        for item in request.session.items
        if "result_of" in getattr(item, "fixturenames", ()) and "cell" in item.callspec.params
    }
    suite = museum.Trainings(wanted, tmp_path_factory.mktemp("parity"), REPOSITORY)
    coming, results = suite.results(), {}

    def get(cell):
        with launches_fork():
            while cell.name not in results:
                result = next(coming)
                results[cell_name(result)] = result
        return results[cell.name]

    yield get
    coming.close()


# Every strategy trains the same model as plain PyTorch, on the fewest ranks that split anything, and keeps and sends as
# many bytes as the formulas say.


QUICK_BUGS = {"sum-over-ranks", "positions-not-shifted", "clipping-norm-of-one-stage", "biases-decay"}
"""One of the reduction, of the data, of clipping and of the optimizer."""


COVERED = {
    "pipeline2-tensor2-zero1": "the golden run of 3d, and its steps on four ranks (tests/strategies)",
    "zero3-nvme": "the golden run of zero3-nvme, and its resumed runs (tests/strategies)",
    "tensor2-zero2": "zero2, and tensor2-zero1",
    "sequence2-zero2": "zero2, and sequence2-zero1",
}
"""Strategies that other tests of ``make test`` cover, and which."""


def quick(cell):
    """Whether ``make test`` trains it: every strategy in fp32, and its family in bf16 and SGD.

    ``make parity-to-4``, a part of ``make test-long``, trains all on up to four ranks.
    """
    if cell.strategy in COVERED:
        return False
    if cell.option:
        return {"activation checkpointing": "zero3", "pad logits": "pipeline2-zero1"}.get(cell.option) == cell.strategy
    if cell.optimizer == "sgd" and "unclipped" not in cell.strategy:
        family = f"{cell.strategy}-unclipped-sgd" in STRATEGIES and cell.strategy not in {"fsdp", "zero2"}
        return family and cell.precision == "bf16"
    return cell.ranks != 4


MORE = (
    # At stage 0 DeepSpeed takes a step on zero gradients before the first.
    *(Cell(strategy=f"zero{stage}", ranks=1, accumulation=1, precision="bf16") for stage in (0, 1, 3)),
    Cell(strategy="zero2-offload-torch-adam", ranks=2),  # needs no compiler
)
"""Cells of one rank and of the other AdamW."""


LONG = pytest.mark.long
CELLS = [
    pytest.param(cell, marks=[] if quick(cell) else LONG, id=cell.name)
    for cell in (*core(), *MORE)
    if quick(cell) or cell.ranks > 4
]


@pytest.mark.parametrize("cell", CELLS)
def test_same_training_as_plain_pytorch(result_of, cell):
    result = result_of(cell)
    assert result["status"] == "passed", result["message"] or "\n".join(map(failure_words, result["failures"]))
    assert set(result["cost"]) == {"parameters", "gradients", "optimizer", "master", "sent"}
    assert None not in {size["measured"] for size in result["cost"].values()}


def test_the_core_contains_every_strategy():
    whole = {strategy.name for strategy in STRATEGIES.values() if strategy.whole}
    unclipped = {strategy.name for strategy in STRATEGIES.values() if strategy.training == "unclipped sgd"}
    assert {cell.strategy for cell in core()} == whole | unclipped
    assert {*core(), *MORE} <= set(whole_matrix())


# The suite can fail: it reports every bug that is planted in a strategy, by the facts that must show it.


FACTS = {
    # Adam hides a wrong scale of the gradients from the loss; their norm shows it in the first step.
    "sum-over-ranks": {"gradient norm": "step 1", "first gradient": None},
    "accumulation-counted-twice": {"gradient norm": "step 1", "first gradient": None},
    "clipping-before-averaging": {"gradient norm": "step 1", "loss": "step 4"},
    # All samples are read and the loss is that of all of them: only the gradients lack some.
    "dropped-last-micro-batch": {"gradient norm": "step 1", "first gradient": None},
    "positions-not-shifted": {"loss": "step 1", "first gradient": None},
    "not-reduced-over-sequence-ranks": {"gradient norm": "step 1", "replicated weights": None},
    "skipped-tied-gradient-sum": {"first gradient": "wte.weight", "replicated weights": None},
    # The reported norm is right. The third step is the first with a learning rate; the fourth uses its weights.
    "clipping-norm-of-one-stage": {"loss": "step 4", "weights": None},
    # 6 of 17 windows are the second rank's; gradients, and so everything else, are right.
    "mean-of-ranks-means": {"validation loss": "step 3, rank 0"},
    # One more rounding in each of two sums: 1e-3 of the gradient; another split of the batch changes it by 5e-2.
    "micro-batches-summed-in-bf16": {"first gradient": None},
    "rounded-before-the-reduction": {"first gradient": None},
    # Norm and clipping are right, but there is no clipping to undo the factor.
    "scaled-after-the-norm": {"first gradient": None, "loss": "step 4"},
    # The reported rate is right; the first two steps of the schedule have none.
    "second-group-keeps-its-rate": {"learning rate": "step 1, rank 0", "first update": None},
    # 3e-4 of each LayerNorm's weight in one step.
    "biases-decay": {"first update": None},
    "large-epsilon": {"first update": None, "weights": None},
}
"""For each bug the facts that must be reported, and the first place where each is out of bounds; None for any."""


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(bug.cell, marks=[] if bug.cell.bug in QUICK_BUGS else LONG, id=bug.cell.bug)
        for bug in BUGS.values()
    ],
)
def test_the_bug_is_caught(result_of, cell):
    result = result_of(cell)
    assert result["status"] == "failed", result["message"] or result["measured"]
    found = {failure["fact"]: failure["where"] for failure in result["failures"]}
    for fact, where in FACTS[cell.bug].items():
        assert fact in found
        assert where in (None, found[fact])
    assert "samples" not in found


# Bugs that real trainers shipped (``dsgpt.benchmarks.museum``), in the launches of the cells above.


SHOWN = (
    *("deepspeed-8154", "deepspeed-7985", "deepspeed-7967", "deepspeed-5664", "deepspeed-7718"),
    *("torchtitan-3412", "megatron-lm-5338"),
)
"""Of a pipeline, of fp32 sums, of accumulation under offload, of a layout, of an affected release, of a chunked loss
under tensor parallelism, and of an input that is not contiguous. The record of the museum has all."""


@pytest.mark.parametrize(
    ("cell", "exhibit"),
    [pytest.param(museum.marked(museum.EXHIBITS[name], name), museum.EXHIBITS[name], id=name) for name in SHOWN],
)
def test_the_exhibit_is_noticed(result_of, cell, exhibit):
    result = museum.compared(exhibit, {"status": "passed"}, result_of(cell))
    assert result["status"] == "caught", result["message"]
    if not exhibit.ends:
        assert (result["check"], result["step"]) == ("parity: first gradient", 1)
        assert result["measured"] > 1000 * result["bound"]
