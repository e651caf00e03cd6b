"""Weights & Biases, offline unless ``WANDB_MODE`` says otherwise."""

import os

from dsgpt.training.trackers.base import PROJECT, Row, TrackedRun
from dsgpt.training.trackers.folder import keep_id, read_id


class WandbTracker:
    """One run of Weights & Biases; each offline process of it writes a folder ``wandb/offline-run-...``.

    ``WANDB_PROJECT``, ``WANDB_NAME``, ``WANDB_ENTITY`` and the variables of its login have their usual effect. Hardware
    statistics, code and git state are not collected: the settings of the record are sent.
    """

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE") or "offline"
        if mode == "offline":  # the library would report its own use and errors over the network
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415 - only where it is asked for

        self._library = wandb
        self._exit_code = 1
        self._last = Row(0, {})
        run_id = read_id(run.folder, "wandb") or run.run_id
        keep_id(run.folder, "wandb", run_id)
        self._run = wandb.init(
            mode=mode,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            id=run_id,
            resume="allow",
            dir=run.folder,
            config=run.settings,
            settings=wandb.Settings(
                silent=True,
                console="off",
                symlink=False,
                allow_val_change=True,
                save_code=False,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )

    def log(self, rows: list[Row]) -> None:
        """Send the rows; the library itself writes them within seconds.

        It has one row for each step, so a validation only adds what the step lacks; the times stay those of the step.
        """
        for row in rows:
            sent = self._last.metrics if row.step == self._last.step else {}
            self._run.log({name: value for name, value in row.metrics.items() if name not in sent}, step=row.step)
            self._last = row

    def flush(self) -> None:
        """Do nothing: a process of the library, which survives this one, writes what it received."""

    def end(self, status: str, summary: dict[str, float]) -> None:
        """Set the summary; a run that did not complete is marked as failed."""
        self._exit_code = 0 if status == "completed" else 1
        self._run.summary.update({"status": status, **summary})

    def close(self) -> None:
        """Finish the run and stop the library's process: an exit by ``os._exit`` runs no handlers."""
        self._run.finish(exit_code=self._exit_code)
        self._library.teardown(exit_code=self._exit_code)
