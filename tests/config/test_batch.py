"""The split of the global batch: micro x accumulation x ranks is the global batch, and no rank count changes it."""

import itertools
import re
from collections.abc import Sequence

import pytest

from dsgpt.common.errors import Problems, UserError
from dsgpt.config.run_config import BatchPlan, plan_batch

TOTALS = (None, 1, 2, 6, 7, 8, 12, 32, 36, 97, 480)
PARTS = (None, 1, 2, 3, 4, 5, 8, 16, 40, 600)
RANKS = (1, 2, 3, 4, 6, 8, 64)
EVERYTHING = list(itertools.product(TOTALS, PARTS, PARTS, RANKS))


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


def test_every_plan_gives_the_global_batch_and_keeps_the_given_sizes():
    plans = 0
    for total, micro, steps, ranks in EVERYTHING:
        plan, changed, _ = planned((total, micro, steps), ranks)
        assert changed is None
        if plan is None:
            continue
        plans += 1
        product = plan.micro_batch_size * plan.gradient_accumulation_steps * plan.data_parallel_size
        assert plan.global_batch_size == product
        assert plan.data_parallel_size == ranks
        assert total == plan.global_batch_size
        assert micro in (None, plan.micro_batch_size)
        assert steps in (None, plan.gradient_accumulation_steps)
    assert plans > 300


def test_a_request_is_refused_only_if_no_plan_exists():
    for total, micro, steps, ranks in EVERYTHING:
        plan, _, line = planned((total, micro, steps), ranks)
        if total is None:
            assert plan is None
            assert "set train_batch_size in the JSON or --global_batch_size" in line
        if plan is not None or total is None:
            continue
        fits = [
            (m, s)
            for m in ([micro] if micro else range(1, total + 1))
            for s in ([steps] if steps else range(1, total + 1))
            if m * s * ranks == total
        ]
        assert not fits, (total, micro, steps, ranks, line)


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
            assert f"kept the global batch of {total}" in changed
            assert f"became {plan.micro_batch_size} and {plan.gradient_accumulation_steps}" in changed
    assert changes > 100


@pytest.mark.parametrize("enforce", [False, True])
def test_the_number_of_ranks_never_changes_the_global_batch(enforce):
    for total, micro, steps in itertools.product(TOTALS[1:], PARTS, PARTS):
        sizes = {
            plan.global_batch_size for n in RANKS if (plan := planned((total, micro, steps), n, enforce=enforce)[0])
        }
        assert sizes <= {total}


def test_default_micro_batch():
    for total, micro in ((32, 8), (36, 6), (7, 7), (97, 1), (8, 8), (480, 8)):
        assert planned((total,), 1)[0].micro_batch_size == micro
