"""How a request is resolved: flags over JSON over defaults, with the data and the launcher, and its global batch."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from recipe_files import resolved
from small_run import RECIPE, TOKENS, command_line, random_ids, without_paths, write_recipe, write_tokens

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.text import divisors
from dsgpt.config.run_config import BatchPlan, plan_batch
from dsgpt.data.order import SampleOrder
from dsgpt.machine import device as cpu_kernels
from dsgpt.machine.topology import read_topology
from dsgpt.training.command import train

# How a request is resolved: flags over JSON over defaults, with the data and the launcher.


SPLIT = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AS_FLAGS = ("micro_batch_size_per_gpu", "grad_accum_steps")


@st.composite
def requested(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], int]:
    """A recipe, flags and ranks. Most of their sizes fit together; each may be another, and all but one be left out."""
    ranks, micro, steps = (draw(st.integers(1, most)) for most in (4, 3, 3))

    def size(value: int) -> st.SearchStrategy[int]:
        return st.sampled_from([value, value, value, 5])

    total, split = size(ranks * micro * steps), (size(micro), size(steps))
    lines = {"steps_per_print": st.integers(1, 99)}
    low = {"bf16": st.builds(lambda on: {"enabled": on}, st.booleans())}
    flags = {"global_batch_size": total, "precision": st.sampled_from(["fp32", "bf16"])}
    recipe = st.fixed_dictionaries(
        {"train_batch_size": total}, optional=dict(zip(SPLIT, split, strict=True)) | lines | low
    )
    asked = st.fixed_dictionaries({}, optional=dict(zip(AS_FLAGS, split, strict=True)) | lines | flags)
    return draw(recipe), draw(asked), ranks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requested())
def test_a_request_is_refused_or_the_same_work_on_any_ranks(here, request):
    """A flag overrides the JSON, and the JSON the default; a flag for a part of the split drops the JSON's other part.

    It is refused only if no split has the sizes that were given.
    """
    recipe, flags, ranks = request
    write_recipe(here / "recipe.json", RECIPE, **recipe)
    total = flags.get("global_batch_size", recipe["train_batch_size"])
    micro, steps = (flags.get(name) for name in AS_FLAGS)
    if micro is steps is None:
        micro, steps = (recipe.get(name) for name in SPLIT)
    share = total / ranks
    splits = (
        share % (micro or 1) == 0 and share % (steps or 1) == 0 and (not (micro and steps) or micro * steps == share)
    )
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "x"}
    try:
        config = resolved(here, read_topology(places), run_type="ddp", max_train_steps=None, **flags)
    except UserError as error:
        assert not splits
        assert len(error.problems) == 1 and str(total) in error.problems[0]
        return
    assert splits
    batch = config.batch
    assert (batch.global_batch_size, batch.data_parallel_size) == (total, ranks)
    assert batch.micro_batch_size * batch.gradient_accumulation_steps == share
    assert (micro or batch.micro_batch_size, steps or batch.gradient_accumulation_steps) == (
        batch.micro_batch_size,
        batch.gradient_accumulation_steps,
    )
    assert config.steps_per_print == flags.get("steps_per_print", recipe.get("steps_per_print", 10))
    assert config.precision == flags.get("precision", "bf16" if recipe.get("bf16", {}).get("enabled") else "fp32")
    assert config.order == SampleOrder(windows=40, global_batch_size=total, seed=config.options.seed)
    assert config.total_steps == 40 // total


@pytest.mark.parametrize(
    ("flags", "epochs", "steps"),
    [
        ({"max_train_steps": None, "epochs": 3}, 3, 15),
        ({"max_train_steps": 12}, 3, 12),
        ({"max_train_steps": 12, "epochs": 2}, 2, 10),
        ({"max_train_steps": 4, "epochs": 2}, 1, 4),
        ({"max_train_steps": None, "seq_length": 8}, 1, 10),
    ],
)
def test_length_of_a_run(here, flags, epochs, steps):
    config = resolved(here, **flags)
    assert (config.epochs, config.total_steps) == (epochs, steps)


def test_a_precision_that_this_cpu_has_no_instructions_for_is_noted(here, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "multiplies", lambda dtype: False)
    noted = {precision: resolved(here, precision=precision).notices for precision in ("fp32", "bf16")}
    assert [len([line for line in lines if "is slow on this CPU" in line]) for lines in noted.values()] == [0, 1]


def test_what_the_program_decides_is_noted(here, snapshot):
    """Keys that the baseline ignores, windows that no batch takes, and a run that ends inside the warm-up."""
    noted = resolved(here, global_batch_size=16, max_train_steps=2).notices
    assert [without_paths(notice, here) for notice in noted] == snapshot
    assert resolved(here, run_type="optimized", max_train_steps=3).notices == ()


def test_validation_length(here):
    assert [resolved(here, max_val_steps=steps).val_windows for steps in (None, 1, 9)] == [10, 8, 10]


def test_vocabulary_comes_from_the_data(here):
    assert resolved(here).model.vocab_size == 257
    assert resolved(here, vocab_size=300).model.vocab_size == 300
    (here / "train.json").unlink()
    config = resolved(here)
    assert config.model.vocab_size == 50_257
    assert f"{here}/train.bin: has no train.json beside it; read as uint16 ids" in config.notices
    for name in ("train", "val"):  # a smaller one is accepted if the ids fit
        write_tokens(here / f"{name}.bin", random_ids(TOKENS, below=100))
    assert resolved(here, vocab_size=100).model.vocab_size == 100


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0, 1, 1, "python")),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, (1, 1, 2, 2, "torchrun")),
        (
            {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1"},
            (3, 1, 4, 2, "deepspeed"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "1"}, (1, 0, 2, 1, "deepspeed")),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1"}, (1, 0, 2, 2, "slurm")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 0, 2, 2, "launcher")),
    ],
)
def test_topology_from_the_launchers_variables(environment, expected):
    found = read_topology(environment)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.launcher) == expected
    assert found.machines is None
    elastic = read_topology(environment | {"PET_NNODES": "1:3"})
    assert elastic.machines == ((1, 3) if "RANK" in environment else None)


def test_dry_run_shows_the_plan_and_writes_nothing(here, capsys):
    """What a rank holds, in fp32 with AdamW: 4 bytes each of weights, gradients and two moments; it sends nothing."""
    shape = resolved(here, model_size="tiny", num_layers=None).model
    elements = shape.parameter_count() + (shape.padded_vocab_size - shape.vocab_size) * shape.n_embd
    before = sorted(here.rglob("*"))
    assert train(command_line(here, dry_run=True, model_size="tiny", num_layers=None)) == 0
    printed = capsys.readouterr().out
    for part in (
        "strategy    baseline",
        "batch       8 sequences = 8 micro x 1 accumulation x 1 rank",
        "vocabulary 257 (320 with padding)",
        "641 tokens in 40 windows of 16",
        "2 optimizer steps of 128 tokens",
        f"state       {16 * elements / 1e6:,.1f} MB of weights, gradients and optimizer per rank",
        "each step a rank sends 0.0 MB",
        "dry run",
    ):
        assert part in printed
    assert sorted(here.rglob("*")) == before
    peak = float(re.search(r"([\d.]+) MB at the peak of a step, with activations and buffers", printed)[1])
    assert 16 * elements / 1e6 < peak < 4  # 128 tokens need more than the model


def test_any_seed_works(here):
    """It seeds dropout's random stream, and torch accepts at most 64 bits."""
    assert train(command_line(here, seed=20_260_101_123_456_789, dropout=0.1, max_train_steps=1)) == 0


# The split of the global batch: micro x accumulation x ranks is the global batch, and no rank count changes it.


@cache
def planned(
    asked: Sequence[int | None], ranks: int, *, enforce: bool = False
) -> tuple[BatchPlan | None, str | None, str]:
    """The plan, what was changed, and the error line, for global batch, micro batch and accumulation."""
    problems, notices = Problems(), []
    sizes, keep = (*asked, *[None] * (3 - len(asked))), notices if enforce else None
    plan = plan_batch(*sizes, ranks=ranks, problems=problems, keep=keep)
    changed = notices[0] if notices else None
    try:
        problems.raise_if_any()
    except UserError as error:
        assert plan is None
        assert len(error.problems) == 1
        return plan, changed, error.problems[0]
    assert plan is not None
    return plan, changed, ""


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int | None, int | None, int]:
    """Global batch, micro batch, accumulation and ranks; many fit together; two may be left out."""
    ranks, micro, steps = (draw(st.integers(1, 64)) for _ in range(3))
    total = draw(
        st.sampled_from([ranks * micro * steps, ranks * draw(st.integers(1, 500)), draw(st.integers(1, 10**6))])
    )
    return total, *(draw(st.sampled_from([value, None])) for value in (micro, steps)), ranks


@given(requests())
@example((12, None, 5, 1))
def test_a_plan_keeps_the_given_sizes_and_a_request_is_refused_only_if_none_exists(request):
    """Values that an error names are valid; enforcing keeps the global batch and never raises the micro batch."""
    total, micro, steps, ranks = request
    plan, changed, line = planned((total, micro, steps), ranks)
    assert changed is None
    forced, changed, _ = planned((total, micro, steps), ranks, enforce=True)
    if plan is None:
        assert str(total) in line
    if total % ranks:
        assert plan is forced is None
        batches, counts = line.split("take --global_batch_size ")[1].split(", or ")
        assert all(planned((int(batch),), ranks)[0] for batch in re.findall(r"\d+", batches)), line
        assert all(planned((total,), int(count))[0] for count in re.findall(r"\d+", counts)), line
        return
    share = total // ranks
    for found in filter(None, (plan, forced)):
        assert (found.global_batch_size, found.data_parallel_size) == (total, ranks)
        assert found.micro_batch_size * found.gradient_accumulation_steps == share
    fits = [each for each in divisors(share) if micro in (None, each) and steps in (None, share // each)]
    if plan is None:
        assert not fits, line
        pairs = re.findall(r"micro batch (\d+) with accumulation (\d+)", line)
        assert 1 <= len(pairs) <= 2
        assert all(planned((total, *map(int, pair)), ranks)[0] for pair in pairs), line
        assert "--enforce_global_batch_size" in line
        largest = micro or max(1, share // steps)  # of the given size, or with at least the given accumulation
        assert forced.micro_batch_size == max(each for each in divisors(share) if each <= largest)
        assert f"the global batch of {total} is kept" in changed
        assert f"became {forced.micro_batch_size} and {forced.gradient_accumulation_steps}" in changed
    else:
        assert plan == forced and changed is None
        assert plan.micro_batch_size == (fits[0] if micro or steps else max(each for each in fits if each <= 8))


def test_a_missing_global_batch_is_refused():
    """DeepSpeed would multiply the split by the ranks."""
    plan, changed, line = planned((None, 2, 3), 4)
    assert plan is changed is None
    assert "set train_batch_size in the JSON or --global_batch_size" in line
