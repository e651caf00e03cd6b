"""How one global batch is split over ranks, micro batches and accumulation. The number of ranks never changes it."""

import math
from dataclasses import dataclass

from dsgpt.common.problems import Problems

DEFAULT_MICRO_BATCH_SIZE = 8
"""Where nobody says: the largest divisor of a rank's share up to this; fits GPT-2 124M at 1,024 tokens in 16 GB."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x gradient_accumulation_steps x data_parallel_size, in sequences."""

    global_batch_size: int
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int
    """Sequences per rank and forward pass."""
    gradient_accumulation_steps: int
    """Forward and backward passes per optimizer step."""
    data_parallel_size: int
    """Ranks that read different data."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """What was asked for, by flag or JSON; None where nothing was said."""

    global_batch_size: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None

    def over(self, other: "BatchRequest") -> "BatchRequest":
        """This request (the flags) laid over ``other`` (the JSON).

        A flag for the micro batch alone or accumulation alone drops the JSON's other one, so that it changes the split
        and never the global batch.
        """
        split_by_flag = self.micro_batch_size is not None or self.gradient_accumulation_steps is not None
        split = self if split_by_flag else other
        return BatchRequest(
            global_batch_size=other.global_batch_size if self.global_batch_size is None else self.global_batch_size,
            micro_batch_size=split.micro_batch_size,
            gradient_accumulation_steps=split.gradient_accumulation_steps,
        )


LARGEST_BATCH = 1 << 31
"""Sequences; beyond any training, and its divisors are still found in milliseconds."""


def plan_batch(
    request: BatchRequest, *, data_parallel_size: int, enforce_global: bool, problems: Problems
) -> tuple[BatchPlan | None, str | None]:
    """Fix all three sizes from those that were asked for.

    Args:
        request: flags over JSON.
        data_parallel_size: ranks that read different data.
        enforce_global: where the asked split does not give the global batch, change the split instead of failing.
        problems: takes what cannot be, with the nearest valid values.

    Returns:
        The plan, or None; and what ``enforce_global`` changed, in words, or None.
    """
    total, micro, steps = request.global_batch_size, request.micro_batch_size, request.gradient_accumulation_steps
    if total is None:
        # DeepSpeed would multiply the other two by the ranks, and so train another model on every number of them.
        here = (
            f" ({micro * steps * data_parallel_size} is what the split gives on these ranks)" if micro and steps else ""
        )
        problems.add(f"the global batch is not given: set train_batch_size in the JSON or --global_batch_size{here}")
        return None, None
    given = {"global batch": total, "micro batch": micro, "accumulation": steps}
    too_large = [f"{name} {value:,}" for name, value in given.items() if value is not None and value > LARGEST_BATCH]
    if too_large:
        problems.add(f"{' and '.join(too_large)} is too large: at most {LARGEST_BATCH:,}")
        return None, None
    if total % data_parallel_size:
        problems.add(_indivisible(total, data_parallel_size))
        return None, None
    share = total // data_parallel_size
    wanted_micro = micro or (share // steps if steps and share % steps == 0 else None)
    if micro is None and steps is None:
        wanted_micro = _largest_divisor(share, at_most=DEFAULT_MICRO_BATCH_SIZE)
    fits = wanted_micro and share % wanted_micro == 0 and steps in (None, share // wanted_micro)
    changed = None
    if not fits and enforce_global:
        target = micro or max(1, share // (steps or 1))
        wanted_micro = _largest_divisor(share, at_most=target)
        changed = (
            f"--enforce_global_batch_size: kept the global batch of {total}; micro batch {micro or 'unset'} and "
            f"accumulation {steps or 'unset'} became {wanted_micro} and {share // wanted_micro}"
        )
    elif not fits:
        problems.add(_inconsistent(total, data_parallel_size, micro, steps))
        return None, None
    plan = BatchPlan(
        global_batch_size=total,
        micro_batch_size=wanted_micro,
        gradient_accumulation_steps=share // wanted_micro,
        data_parallel_size=data_parallel_size,
    )
    return plan, changed


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _largest_divisor(number: int, *, at_most: int) -> int:
    return max(d for d in _divisors(number) if d <= at_most)


def _indivisible(total: int, ranks: int) -> str:
    lower, upper = total // ranks * ranks, -(-total // ranks) * ranks
    batches = f"{lower} or {upper}" if lower else str(upper)
    counts = _divisors(total)
    below, above = max(n for n in counts if n < ranks), min((n for n in counts if n > ranks), default=None)
    return (
        f"global batch {total} is not divisible by {ranks} ranks: take --global_batch_size {batches}, "
        f"or {below}{f' or {above}' if above else ''} ranks"
    )


def _inconsistent(total: int, ranks: int, micro: int | None, steps: int | None) -> str:
    share = total // ranks
    wanted = micro if micro is not None else max(1, round(share / (steps or 1)))
    divisors = sorted(_divisors(share), key=lambda d: (abs(d - wanted), d))[:2]
    nearest = " or ".join(f"micro batch {d} with accumulation {share // d}" for d in sorted(divisors))
    asked = " x ".join([f"micro batch {micro}"] * (micro is not None) + [f"accumulation {steps}"] * (steps is not None))
    return (
        f"{asked} on {ranks} rank{'s' if ranks > 1 else ''} does not give the global batch of {total}: take {nearest}, "
        "or add --enforce_global_batch_size to have it chosen"
    )
