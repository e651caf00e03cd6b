"""How a request is resolved: flags over JSON over defaults, with the data and the launcher, and its global batch."""

import itertools
import re
from collections.abc import Sequence
from functools import cache

import pytest
from recipe_files import resolved
from small_run import RECIPE, TOKENS, command_line, random_ids, without_paths, write_recipe, write_tokens

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.text import divisors
from dsgpt.config.run_config import BatchPlan, plan_batch
from dsgpt.machine import device as cpu_kernels
from dsgpt.machine.topology import read_topology
from dsgpt.training.command import train

# How a request is resolved: flags over JSON over defaults, with the data and the launcher.


def test_a_flag_overrides_the_json_and_the_json_the_default(here):
    plain = resolved(here)
    assert (plain.batch.global_batch_size, plain.steps_per_print, plain.precision) == (8, 10, "fp32")
    write_recipe(here / "recipe.json", RECIPE, steps_per_print=7, bf16={"enabled": True})
    written = resolved(here)
    assert (written.steps_per_print, written.precision) == (7, "bf16")
    asked = resolved(here, steps_per_print=3, precision="fp32", global_batch_size=4)
    assert (asked.steps_per_print, asked.precision, asked.batch.global_batch_size) == (3, "fp32", 4)


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        ({}, (8, 4, 2)),
        ({"grad_accum_steps": 8}, (8, 1, 8)),
        ({"micro_batch_size_per_gpu": 2}, (8, 2, 4)),
        ({"global_batch_size": 16, "micro_batch_size_per_gpu": 2}, (16, 2, 8)),
    ],
)
def test_a_flag_for_one_part_of_the_split_drops_the_jsons_other_part(here, flags, split):
    """So it never changes the global batch."""
    write_recipe(here / "recipe.json", RECIPE, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    batch = resolved(here, **flags).batch
    assert (batch.global_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps) == split


@pytest.mark.parametrize(
    ("flags", "epochs", "steps"),
    [
        ({"max_train_steps": None}, 1, 5),
        ({"max_train_steps": None, "epochs": 3}, 3, 15),
        ({"max_train_steps": 12}, 3, 12),
        ({"max_train_steps": 12, "epochs": 2}, 2, 10),
        ({"max_train_steps": 4, "epochs": 2}, 1, 4),
        ({"max_train_steps": None, "global_batch_size": 16}, 1, 2),
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
    ],
)
def test_topology_from_the_launchers_variables(environment, expected):
    found = read_topology(environment)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.launcher) == expected


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
    with pytest.raises(UserError):
        resolved(here, seed=-1)


# The command line: every flag is read and every mistake is reported; no mistake stops the reading.


# The split of the global batch: micro x accumulation x ranks is the global batch, and no rank count changes it.


TOTALS = (None, 1, 2, 6, 7, 8, 12, 32, 36, 97, 480)
PARTS = (None, 1, 2, 3, 4, 5, 8, 16, 40, 600)
RANKS = (1, 2, 3, 4, 6, 8, 64)
EVERYTHING = list(itertools.product(TOTALS, PARTS, PARTS, RANKS))


@cache
def planned(
    asked: Sequence[int | None], ranks: int, *, enforce: bool = False
) -> tuple[BatchPlan | None, str | None, str]:
    """The plan, what was changed, and the error line, for global batch, micro batch and accumulation."""
    problems, notices = Problems(), []
    plan = plan_batch(
        *asked, *[None] * (3 - len(asked)), ranks=ranks, enforce_global=enforce, problems=problems, notices=notices
    )
    changed = notices[0] if notices else None
    try:
        problems.raise_if_any()
    except UserError as error:
        assert plan is None
        assert len(error.problems) == 1
        return plan, changed, error.problems[0]
    assert plan is not None
    return plan, changed, ""


def test_every_plan_keeps_the_given_sizes_and_a_request_is_refused_only_if_none_exists():
    plans = 0
    for total, micro, steps, ranks in EVERYTHING:
        plan, changed, line = planned((total, micro, steps), ranks)
        assert changed is None
        if total is None:
            assert plan is None
            assert "set train_batch_size in the JSON or --global_batch_size" in line
            continue
        if plan is not None:
            plans += 1
            assert (plan.global_batch_size, plan.data_parallel_size) == (total, ranks)
            assert (
                micro or steps or plan.micro_batch_size == max(each for each in divisors(total // ranks) if each <= 8)
            )
            assert plan.micro_batch_size * plan.gradient_accumulation_steps * ranks == total
            assert micro in (None, plan.micro_batch_size)
            assert steps in (None, plan.gradient_accumulation_steps)
            continue
        fits = [
            (m, s)
            for m in ([micro] if micro else range(1, total + 1))
            for s in ([steps] if steps else range(1, total + 1))
            if m * s * ranks == total
        ]
        assert not fits, (total, micro, steps, ranks, line)
    assert plans > 300


def test_values_named_in_errors_are_valid():
    named = {"batch": 0, "ranks": 0, "split": 0}
    for total, micro, steps, ranks in EVERYTHING:
        plan, _, line = planned((total, micro, steps), ranks)
        if plan is not None or total is None:
            continue
        assert str(total) in line
        if f"not divisible by {ranks} ranks" in line:
            batches, counts = line.split("take --global_batch_size ")[1].split(", or ")
            for batch in re.findall(r"\d+", batches):
                assert planned((int(batch),), ranks)[0] is not None, line
                named["batch"] += 1
            for count in re.findall(r"\d+", counts):
                assert planned((total,), int(count))[0] is not None, line
                named["ranks"] += 1
        else:
            pairs = re.findall(r"micro batch (\d+) with accumulation (\d+)", line)
            assert 1 <= len(pairs) <= 2
            for pair in pairs:
                assert planned((total, *map(int, pair)), ranks)[0] is not None, line
                named["split"] += 1
            assert "--enforce_global_batch_size" in line
    assert min(named.values()) > 50


def test_enforcing_keeps_the_global_batch_and_never_raises_the_micro_batch():
    changes = 0
    for total, micro, steps, ranks in EVERYTHING:
        if total is None or total % ranks:
            continue
        plan, changed, line = planned((total, micro, steps), ranks, enforce=True)
        assert line == ""
        assert plan.micro_batch_size * plan.gradient_accumulation_steps * ranks == plan.global_batch_size == total
        plain = planned((total, micro, steps), ranks)[0]
        assert (changed is None) == (plain is not None)
        if plain is not None:
            assert plan == plain
        elif micro is not None:
            assert plan.micro_batch_size <= micro
        if changed:
            changes += 1
            assert f"the global batch of {total} is kept" in changed
            assert f"became {plan.micro_batch_size} and {plan.gradient_accumulation_steps}" in changed
    assert changes > 100
