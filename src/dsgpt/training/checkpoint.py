"""One checkpoint of a run: the state of training, the random states and the tokenizer together.

Ranks write and then compare notes, so that a failure of one is the failure of all, with its reason, and nobody waits
for a rank that has given up.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing import store
from dsgpt.checkpointing.random_state import save_random_state
from dsgpt.checkpointing.run_state import RunState
from dsgpt.checkpointing.training_state import write_training_state
from dsgpt.checkpointing.writing import reason_of, require_room, try_to_write
from dsgpt.config import RunConfig
from dsgpt.errors import NonFiniteError, SaveError, UserError
from dsgpt.files import write_json_atomic
from dsgpt.model.gpt2 import parameter_shapes
from dsgpt.process_group import from_main, gather_objects
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.environment import software_versions
from dsgpt.training.data_check import data_tokenizer


def save_checkpoint(
    config: RunConfig,
    strategy: Strategy,
    device: torch.device,
    *,
    state: RunState,
    fixed: dict[str, Any],
    run_id: str | None,
    prepare: Callable[[], None],
) -> None:
    """Write the checkpoint of ``state``; collective. It appears whole, or not at all.

    Args:
        config: the run.
        strategy: has the state.
        device: of this rank.
        state: where the run stands.
        fixed: what must agree when it is resumed.
        run_id: of the record.
        prepare: makes durable what the checkpoint counts on, on every rank.

    Raises:
        SaveError: on every rank, where one could not write; nothing is left of the attempt.
        NonFiniteError: a weight is NaN or infinite; nothing is left of the attempt.
    """
    folder, is_main = store.partial_folder(config.run_dir, state.step), config.topology.is_main
    spoiled: list[str] = []

    def open_folder() -> None:
        prepare()
        if is_main:
            store.begin(config.run_dir, state.step)
            _require_room_for_another(config.run_dir)

    def complete() -> None:
        if is_main:
            write_json_atomic(folder / store.MODEL, config.model.as_dict())
            _copy_tokenizer(config, folder)
            about = _about(config, fixed=fixed, run_id=run_id)
            store.publish(config.run_dir, folder, state=state, about=about, keep=config.options.keep_checkpoints)

    with _removed_after_failure(folder, is_main=is_main):
        _together(open_folder)
        _together(lambda: try_to_write(folder, rank=config.topology.rank))
        _together(lambda: save_random_state(folder, rank=config.topology.rank, device=device))
        _together(lambda: spoiled.extend(_write_state(config, strategy, folder)))
        _refuse_non_finite(spoiled, step=state.step)
        _together(complete)


def _together(action: Callable[[], None]) -> None:
    """Do ``action`` on this rank, and hear how it went on the others.

    Raises:
        SaveError: on every rank, with the reason of each that could not write.
    """
    reason = None
    try:
        action()
    except OSError as error:
        reason = reason_of(error)
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(gather_objects(reason)) if reason is not None]
    if failures:
        raise SaveError("; ".join(failures))


@contextlib.contextmanager
def _removed_after_failure(folder: Path, *, is_main: bool) -> Iterator[None]:
    try:
        yield
    except (SaveError, NonFiniteError):
        if is_main:
            with contextlib.suppress(OSError):  # the reason of the failure may forbid this too; the next start does it
                store.remove(folder)
        raise


def _require_room_for_another(run_dir: Path) -> None:
    """Before the first byte: the next checkpoint will be about as large as the last."""
    found = store.checkpoints(run_dir)
    with contextlib.suppress(UserError):  # nothing is known of its size
        require_room(run_dir, store.size_of(found[0]) if found else 0)


def _refuse_non_finite(spoiled: list[str], *, step: int) -> None:
    """The last update may have spoiled weights whose loss nobody has seen yet."""
    if spoiled := from_main(spoiled):
        raise NonFiniteError(
            f"step {step}: {', '.join(spoiled[:3])} became NaN or infinite: training stopped, and this state is not "
            "saved; lower the learning rate or lengthen the warm-up"
        )


def _write_state(config: RunConfig, strategy: Strategy, folder: Path) -> list[str]:
    states, counters = strategy.iter_state(), strategy.counters()
    shapes = parameter_shapes(config.model)
    return write_training_state(folder, states, counters, shapes=shapes, writes=config.topology.is_main)


def _copy_tokenizer(config: RunConfig, folder: Path) -> None:
    """Take the tokenizer along where data preparation left one; training itself needs none."""
    source, _ = data_tokenizer(config.train)
    if source is None:
        return
    copy = folder / store.TOKENIZER
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    for place in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        place.chmod(0o755)  # of a read-only folder the copy could never be removed


def _about(config: RunConfig, *, fixed: dict[str, Any], run_id: str | None) -> dict[str, Any]:
    return {
        "strategy": config.strategy_name,
        "topology": asdict(config.topology),
        "device": config.device,
        "versions": software_versions(),
        "precision": config.precision,
        "run_id": run_id,
        "fixed": fixed,
    }
