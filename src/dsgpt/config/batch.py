"""Splits the global batch over ranks, and counts the steps of a run."""

from dataclasses import dataclass

from dsgpt.common.errors import Problems
from dsgpt.common.text import divisors, divisors_around, largest_divisor, multiples_around
from dsgpt.config.inputs import Inputs
from dsgpt.data.order import SampleOrder, window_count
from dsgpt.data.token_file import TokenFile

# Splits the global batch over ranks, micro batches and accumulation steps. The ranks never change its size.

DEFAULT_MICRO_BATCH_SIZE = 8
"""The default micro batch is the largest divisor of a rank's share that is at most this many sequences.

With 8 sequences of 1,024 tokens, GPT-2 124M fits in 16 GB.
"""


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
    """The sizes given by flags or by the JSON; None where one is not given."""

    global_batch_size: int | None
    micro_batch_size: int | None
    gradient_accumulation_steps: int | None

    def over(self, other: "BatchRequest") -> "BatchRequest":
        """This request (the flags), completed by ``other`` (the JSON).

        A flag for the micro batch or for the accumulation drops the JSON's value of the other one. So a flag for one of
        them changes the split, and never the global batch.
        """
        split_by_flag = self.micro_batch_size is not None or self.gradient_accumulation_steps is not None
        split = self if split_by_flag else other
        return BatchRequest(
            global_batch_size=other.global_batch_size if self.global_batch_size is None else self.global_batch_size,
            micro_batch_size=split.micro_batch_size,
            gradient_accumulation_steps=split.gradient_accumulation_steps,
        )


LARGEST_BATCH = 1 << 31
"""Sequences. No training needs more, and finding the divisors of a number up to this takes milliseconds."""


def plan_batch(
    request: BatchRequest, *, data_parallel_size: int, enforce_global: bool, problems: Problems
) -> tuple[BatchPlan | None, str | None]:
    """Compute all three sizes from those that are given.

    Args:
        request: the sizes given by flags and by the JSON, merged.
        data_parallel_size: ranks that read different data.
        enforce_global: if the given split does not give the global batch, change the split instead of failing.
        problems: receives a line about an impossible split, with the nearest valid values.

    Returns:
        The plan, or None if there is none; and a line about what ``enforce_global`` changed, or None.
    """
    total, micro, steps = request.global_batch_size, request.micro_batch_size, request.gradient_accumulation_steps
    trouble = _impossible(total, micro, steps, ranks=data_parallel_size)
    if trouble or total is None:
        problems.add(trouble)
        return None, None
    share, changed = total // data_parallel_size, None
    chosen = _matching_micro_batch(share, micro, steps)
    if chosen is None:
        if not enforce_global:
            problems.add(_inconsistent(total, data_parallel_size, micro, steps))
            return None, None
        chosen = largest_divisor(share, at_most=micro or max(1, share // (steps or 1)))
        changed = (
            f"--enforce_global_batch_size: kept the global batch of {total}; micro batch {micro or 'unset'} and "
            f"accumulation {steps or 'unset'} became {chosen} and {share // chosen}"
        )
    plan = BatchPlan(
        global_batch_size=total,
        micro_batch_size=chosen,
        gradient_accumulation_steps=share // chosen,
        data_parallel_size=data_parallel_size,
    )
    return plan, changed


def _impossible(total: int | None, micro: int | None, steps: int | None, *, ranks: int) -> str:
    """Why ``total`` cannot be split over ``ranks``; empty if it can."""
    if total is None:
        # DeepSpeed would multiply the other two by the ranks, so the training would depend on their number.
        here = f" ({micro * steps * ranks} is what the split gives on these ranks)" if micro and steps else ""
        return f"the global batch is not given: set train_batch_size in the JSON or --global_batch_size{here}"
    given = {"global batch": total, "micro batch": micro, "accumulation": steps}
    too_large = [f"{name} {value:,}" for name, value in given.items() if value is not None and value > LARGEST_BATCH]
    if too_large:
        return f"{' and '.join(too_large)} is too large: at most {LARGEST_BATCH:,}"
    if total % ranks:
        return (
            f"global batch {total} is not divisible by {ranks} ranks: take --global_batch_size "
            f"{multiples_around(total, ranks)}, or {divisors_around(total, ranks)} ranks"
        )
    return ""


def _matching_micro_batch(share: int, micro: int | None, steps: int | None) -> int | None:
    """The micro batch for a rank's ``share`` of sequences, with the given sizes; None if they do not fit."""
    if micro is None and steps is None:
        return largest_divisor(share, at_most=DEFAULT_MICRO_BATCH_SIZE)
    if micro is None:
        return share // steps if steps and share % steps == 0 else None
    return micro if share % micro == 0 and steps in (None, share // micro) else None


def _inconsistent(total: int, ranks: int, micro: int | None, steps: int | None) -> str:
    share = total // ranks
    wanted = micro if micro is not None else max(1, round(share / (steps or 1)))
    closest = sorted(divisors(share), key=lambda d: (abs(d - wanted), d))[:2]
    nearest = " or ".join(f"micro batch {d} with accumulation {share // d}" for d in sorted(closest))
    asked = " x ".join([f"micro batch {micro}"] * (micro is not None) + [f"accumulation {steps}"] * (steps is not None))
    return (
        f"{asked} on {ranks} rank{'s' if ranks > 1 else ''} does not give the global batch of {total}: take {nearest}, "
        "or add --enforce_global_batch_size to let the program choose"
    )


# The length of a run: windows of text, epochs and optimizer steps.


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """The length of one run."""

    epochs: int
    """Passes over the training data; the last one may be incomplete."""
    total_steps: int
    """Optimizer steps of the whole run."""
    order: SampleOrder
    val_windows: int
    """Windows per validation."""


def plan_length(
    inputs: Inputs, batch: BatchPlan | None, *, problems: Problems, notices: list[str]
) -> LengthPlan | None:
    """Compute the length of a run.

    Args:
        inputs: the flags, the data and the sequence length.
        batch: None if the global batch cannot be split.
        problems: receives a line about each file that is too short.
        notices: receives a line about windows that are dropped.

    Returns:
        The plan, or None if one of the above is missing or too short.
    """
    options, train, val, seq_length = inputs.options, inputs.train, inputs.val, inputs.seq_length
    windows, val_windows = _windows(train, seq_length, problems), _windows(val, seq_length, problems)
    if not (train and val and windows and val_windows and batch):
        return None
    size = batch.global_batch_size
    if windows < size:
        problems.add(
            f"{train.path}: holds {windows:,} windows of {seq_length} tokens, fewer than one global batch of {size}: "
            "lower --global_batch_size or --seq_length, or use more text"
        )
        return None
    order = SampleOrder(windows=windows, global_batch_size=size, seed=options.seed)
    per_epoch = order.steps_per_epoch
    total = (options.epochs or 1) * per_epoch
    if options.max_train_steps:
        total = min(total, options.max_train_steps) if options.epochs else options.max_train_steps
    if windows % size:
        notices.append(
            f"each epoch drops the last {windows % size} of its {windows:,} shuffled windows: "
            "they do not fill a global batch"
        )
    if options.max_val_steps:
        val_windows = min(val_windows, options.max_val_steps * size)
    return LengthPlan(epochs=-(-total // per_epoch), total_steps=total, order=order, val_windows=val_windows)


def _windows(file: TokenFile | None, seq_length: int | None, problems: Problems) -> int:
    """Windows of ``file``; 0 if the file or the length of a window is unknown."""
    if file is None or seq_length is None:
        return 0
    count = window_count(file.tokens, seq_length)
    if count == 0:
        problems.add(
            f"{file.path}: its {file.tokens:,} tokens are fewer than one window of {seq_length} and its target: lower "
            "--seq_length or use more text"
        )
    return count
