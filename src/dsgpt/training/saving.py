"""When a run saves, what a failure to save does to it, and how it is told."""

import time
from collections.abc import Callable
from typing import Any

import torch

from dsgpt.config import RunConfig
from dsgpt.errors import SaveError
from dsgpt.strategies.base import Strategy
from dsgpt.telemetry.console import Console
from dsgpt.training.checkpoint import save_checkpoint
from dsgpt.training.journal import Journal


def saver(
    config: RunConfig,
    console: Console,
    device: torch.device,
    strategy: Strategy,
    journal: Journal,
    *,
    fixed: dict[str, Any],
    run_id: str | None,
) -> Callable[[int, bool], None]:
    """What writes a checkpoint of the step it is given.

    Its second argument says whether the run cannot do without: its last checkpoint, for example. It raises
    ``SaveError`` on every rank where the checkpoint could not be written and the run cannot do without, or was told to
    stop then.
    """

    def save(step: int, needed: bool) -> None:
        started = time.perf_counter()
        try:
            save_checkpoint(
                config,
                strategy,
                device,
                state=journal.state(step),
                fixed=fixed,
                run_id=run_id,
                prepare=journal.before_save,
            )
        except SaveError as error:
            journal.save_failed()
            line = f"step {step:>6}/{config.total_steps}  not saved: {error}; earlier checkpoints are untouched"
            if needed or config.options.on_save_failure == "stop":
                raise SaveError(f"{line}: make room or mend the folder, then continue with --resume") from error
            console.say(f"{line}; going on (--on_save_failure continue)")
        else:
            console.say(f"step {step:>6}/{config.total_steps}  saved in {time.perf_counter() - started:.1f} s")
        journal.after_save()

    return save
