"""The length of a run: windows of text, epochs and optimizer steps."""

from dataclasses import dataclass

from dsgpt.common.problems import Problems
from dsgpt.config.batch import BatchPlan
from dsgpt.config.inputs import Inputs
from dsgpt.data.order import SampleOrder, window_count
from dsgpt.data.token_file import TokenFile


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
