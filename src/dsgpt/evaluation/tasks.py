"""The tasks of lm-evaluation-harness, on a model exported for transformers."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsgpt.checkpointing.selection import is_hugging_face
from dsgpt.common.errors import UserError
from dsgpt.exporting.export import export
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.inference.loading import load
from dsgpt.telemetry.console import Console

Metrics = dict[str, dict[str, float]]
"""By task, then by the harness's name of the metric, such as ``acc`` or ``acc_stderr``."""


def evaluate_tasks(
    checkpoint: Path,
    names: Sequence[str],
    *,
    which: str,
    device: str,
    precision: str,
    batch_size: int,
    limit: int | None,
    include_path: Path | None,
) -> Metrics:
    """Let the harness evaluate the model of ``checkpoint``, which is exported first if it is not a Hugging Face folder.

    Args:
        checkpoint: as ``src/convert.py --from`` takes it.
        names: of tasks or of groups of tasks.
        which: the ``latest`` or the ``best`` checkpoint of a run.
        device: ``cpu`` or ``cuda``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        batch_size: examples at a time.
        limit: most examples of each task; None for all.
        include_path: a folder with the YAML files of further tasks.

    Raises:
        UserError: the harness is not installed, a task is unknown, or the model cannot be exported.
    """
    try:
        from lm_eval import simple_evaluate  # noqa: PLC0415 - optional, and takes seconds
        from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
        from lm_eval.tasks import TaskManager  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"--tasks needs lm-evaluation-harness ({error}): install it with "
            ".venv/bin/python -m pip install -e '.[eval]'"
        ) from error
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise UserError(
            f"--tasks: there is no task {', '.join(unknown)}; .venv/bin/python -m lm_eval ls tasks lists them"
        )
    with _exported(checkpoint, which=which) as folder:
        model = HFLM(pretrained=str(folder), device=device, dtype=DTYPES[precision], batch_size=batch_size)
        found = simple_evaluate(model=model, tasks=list(names), limit=limit, task_manager=manager)
    return _metrics(found["results"])


@contextlib.contextmanager
def _exported(checkpoint: Path, *, which: str) -> Iterator[Path]:
    """A Hugging Face folder of the model: ``checkpoint`` itself, or a temporary export of it."""
    if not is_hugging_face(checkpoint):
        with tempfile.TemporaryDirectory(prefix="dsgpt-eval-") as temporary:
            folder = Path(temporary) / "model"
            export(checkpoint, folder, form="hf", dtype="fp32", which=which, console=Console(speaks=False))
            yield folder
    elif which == "best":
        raise UserError(f"--checkpoint {checkpoint}: is a Hugging Face folder; --which best needs a run folder")
    else:
        load(checkpoint, which=which, device=torch.device("cpu"), precision="fp32")  # refuses what is unusable
        yield checkpoint


def _metrics(results: Mapping[str, Mapping[str, Any]]) -> Metrics:
    """The figures of each task; the harness writes ``acc,none`` for the metric ``acc`` without a filter."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
        }
        for task, values in results.items()
    }
