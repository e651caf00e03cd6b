"""``--exact``: the same bits of the weights under every strategy, on every number of ranks, resumed or not."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training_runs
from forked_ranks import launches_fork
from small_run import REPOSITORY, command_line, write_data, write_recipe
from torch import nn
from training_runs import finished, read_lines, read_record, resolved, roll_back, train, write_optimizer_recipe

from dsgpt.benchmarks import exact
from dsgpt.benchmarks.cells import Corpus
from dsgpt.benchmarks.frame import run_suite
from dsgpt.common.errors import UserError
from dsgpt.record.equal_work import equal_loss_line, judge
from dsgpt.record.runs import read_run
from dsgpt.strategies.exact import LARGEST, ExactSums, _Sum

FLAGS = ("--exact", "--max_train_steps", "3", "--save_every", "2", "--keep_checkpoints", "9", "--no_inference")
PIPELINE: dict[str, Any] = {"pipeline": {"stages": 2}}
SHORT = {
    "ddp": ("ddp", 1, 2, {}), "fsdp": ("fsdp", 1, 2, {}), "zero0": ("optimized", 0, 2, {}),
    "zero3": ("optimized", 3, 2, {}), "pipeline, stage 0": ("optimized", 0, 4, PIPELINE),
}  # fmt: skip
LONG = {
    "ddp of 8": ("ddp", 1, 8, {}), "fsdp of 4": ("fsdp", 1, 4, {}), "zero0 of 4": ("optimized", 0, 4, {}),
    "zero1 of 8": ("optimized", 1, 8, {}), "zero2": ("optimized", 2, 4, {}), "zero3 of 8": ("optimized", 3, 8, {}),
    "pipeline of 4": ("optimized", 1, 4, PIPELINE), "pipeline of 8": ("optimized", 1, 8, PIPELINE),
}  # fmt: skip


@pytest.fixture(scope="module")
def baseline(short_documents: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank. With 66 columns and a batch of 24, no shard and no mean is even; kernels cut sums over 264."""
    return ran(tmp_path_factory.mktemp("exact"), short_documents, "baseline", 1, None, {})


def ran(folder: Path, corpus: Corpus, run_type: str, stage: int, ranks: int | None, more: dict, *flags: str) -> Path:
    """The folder of a run of three steps."""
    recipe = write_optimizer_recipe(folder / "recipe.json", stage=stage, train_batch_size=24, **more)
    words = (*FLAGS, "--embedding_size", "66", *flags)
    finished(train(folder / "run", corpus, recipe, *words, ranks=ranks, run_type=run_type))
    return folder / "run"


def hash_of(run: Path) -> str:
    return read_record(run)["weights_sha256"]


@pytest.mark.parametrize(
    "case", [*SHORT, *(pytest.param(name, marks=pytest.mark.long, id=name) for name in LONG)], ids=str
)
def test_every_strategy_ends_with_the_same_bits(baseline, short_documents, tmp_path, case):
    run = ran(tmp_path, short_documents, *(SHORT | LONG)[case])
    assert hash_of(run) == hash_of(baseline)
    for key in ("loss", "val_loss"):
        assert [line[key] for line in read_lines(run, key)] == [line[key] for line in read_lines(baseline, key)]
    assert [line["grad_norm"] for line in read_lines(run)] == [line["grad_norm"] for line in read_lines(baseline)]
    runs = [read_run(folder, name=folder.parent.name) for folder in (baseline, run)]
    assert judge(runs).line() == "same work: yes, to the bit"
    assert "largest difference per step 0 in training" in equal_loss_line(*runs)


def test_a_resume_on_other_ranks_too(baseline, short_documents, tmp_path):
    left = roll_back(baseline, tmp_path / "run", 2)
    assert hash_of(ran(tmp_path, short_documents, "fsdp", 1, 2, {}, "--resume")) == hash_of(baseline)
    assert read_record(left)["resumed_from"] == "step-00000002"


@pytest.mark.long
@pytest.mark.parametrize("case", ["ddp", "zero3"])
def test_without_the_grid_the_bits_depend_on_the_ranks(baseline, short_documents, tmp_path, monkeypatch, case):
    """The planted bug; and what is not the same is said so."""
    script = tmp_path / "planted.py"
    script.write_text(
        "import runpy, dsgpt.strategies.exact as exact\n"
        "exact.ExactSums.add = lambda self, gradient, own: gradient / self._batch * self._ranks\n"
        f"runpy.run_path({training_runs.SCRIPT!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(training_runs, "SCRIPT", str(script))
    runs = [ran(tmp_path / name, short_documents, *values) for name, values in (("one", ("baseline", 1, None, {})),)]
    runs.append(ran(tmp_path / "two", short_documents, *SHORT[case]))
    assert len({hash_of(run) for run in runs}) == 2
    assert judge([read_run(run, name=run.parent.name) for run in runs]).line() == "same work: yes, not to the bit"


# The sums themselves.


def sums_of(batch: int, steps: int) -> ExactSums:
    batches = SimpleNamespace(data_parallel_size=1, global_batch_size=batch, gradient_accumulation_steps=steps)
    model = SimpleNamespace(padded_parameter_count=lambda: 1000)
    return ExactSums(SimpleNamespace(batch=batches, topology=SimpleNamespace(world_size=1), model=model), rank=0)


def test_gradients_in_any_order_have_the_same_sum():
    """fp32 sums of them have not; it is the mean in fp64, rounded once."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(50, generator=generator) * 10.0 ** -(n % 7) for n in range(6)]
    found, plain = [], []
    for order in itertools.islice(itertools.permutations(parts), 0, 720, 97):
        sums, own = sums_of(6, 6), _Sum()
        *zeros, mean = [sums.add(part, own) for part in order]
        assert not any(zero.any() for zero in zeros)
        found.append(mean)
        plain.append(sum(order) / 6)
    assert all(torch.equal(mean, found[0]) for mean in found)
    assert not all(torch.equal(mean, plain[0]) for mean in plain)
    torch.testing.assert_close(found[0], torch.stack(parts).double().mean(0).float(), rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("value", [LARGEST * 2, -LARGEST * 1e30, torch.inf, torch.nan])
def test_what_has_no_place_on_the_grid_ends_the_run(value):
    """The next step's sum is not touched by it."""
    sums, own = sums_of(2, 2), _Sum()
    gradient = torch.tensor([1.0, value])
    assert not sums.add(torch.ones(2), own).any()
    assert sums.add(gradient, own).isnan().all()
    sums.add(torch.ones(2), own)
    assert torch.equal(sums.add(torch.full((2,), LARGEST), own), torch.full((2,), (1 + LARGEST) / 2))
    assert sums.norm([gradient], group=None, split=False) > LARGEST
    assert sums.norm([torch.tensor([torch.nan, 1.0])], group=None, split=False).isinf()


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e15])
def test_the_norm_does_not_depend_on_the_cuts(size):
    values, sums = torch.randn(997, generator=torch.Generator().manual_seed(1)) * size, sums_of(2, 2)
    norms = {float(sums.norm(values.split(cut), group=None, split=False)) for cut in (1, 7, 100, 997)}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(values.double().norm()), rel=1e-6)
    assert sums.norm([torch.zeros(3), nn.Parameter(torch.zeros(0))], group=None, split=False) == 0


# The suite.


@pytest.mark.long
def test_the_suite_writes_its_record_and_page(tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "RANKS", (1, 2))
    monkeypatch.setattr(exact, "RESUMES", ((("ddp", 2), ("baseline", 1)),))
    monkeypatch.setattr(exact.Exact, "model", replace(exact.Exact.model, n_layer=1, n_head=2, n_embd=18))
    options = exact.ExactOptions(only=("baseline", "ddp"), rounds=0, output=tmp_path / "exact.json")
    with launches_fork():
        assert run_suite(exact.Exact, options, repository=REPOSITORY) == 0
    found = json.loads(options.output.read_text())
    assert [one["kind"] for one in found["ends"]] == ["exact"] * 3 + ["without --exact"] * 2 + ["resumed"]
    short = found["ends"][0]["sha256"][:8]
    page = options.output.with_suffix(".md").read_text()
    assert f"| ddp | `{short}` | `{short}` |" in page
    assert f"| ddp on 2 ranks to baseline on 1 rank | resumed | `{short}` |" in page
    found["ends"][1]["sha256"] = "0" * 64  # as a strategy that ends elsewhere
    assert exact.Exact(options, REPOSITORY).failures(found) == ["ddp on 1 rank, exact"]


# Refusals.

CASES = {
    "tensor": {"ranks": 2, "recipe": {"tensor_parallel": {"autotp_size": 2}}},
    "sequence": {"ranks": 2, "recipe": {"sequence_parallel_size": 2}},
    "offload": {"recipe": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
    "dropout": {"dropout": 0.1},
    "compile": {"compile": True},
    "invariants": {"check_invariants": 1},
    "bf16": {"precision": "bf16"},
    "threads": {"threads_per_device": 2},
    "micro batch": {"micro_batch_size_per_gpu": 4},
    "three ranks": {"ranks": 3, "global_batch_size": 6},
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_exact_says_so(tmp_path, case, snapshot):
    changes = dict(CASES[case])
    write_recipe(write_data(tmp_path) / "recipe.json", **changes.pop("recipe", {}))
    ranks = changes.pop("ranks", 1)
    with pytest.raises(UserError) as caught:
        resolved(command_line(tmp_path, exact=True, run_type="optimized", **changes), ranks=ranks)
    lines = [line for line in caught.value.problems if line.startswith("--exact")]
    assert lines == snapshot
