"""``.venv/bin/python src/benchmark.py recipes``: the search behind ``ds_configs/sizes``.

Every training sees the same number of tokens of the demo's text, in the same order for a seed, whatever its batch. The
choice is made on one seed and shown on three others.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite
from dsgpt.benchmarks.harness.corpus import prepare_demo
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.benchmarks.recipes.grid import SEARCHES, SHIPPED_BEFORE, Search, Trial, other_seeds
from dsgpt.benchmarks.recipes.page import recipes_page, summary_lines
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.telemetry.console import Console

PAGE = SuitePage(name="recipes", of="recipes", text=recipes_page, summary=summary_lines)
SCHEMA_VERSION = "1.0"

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RecipesOptions(SuiteOptions):
    """The options of the command line."""

    size: Sequence[str]
    """Model sizes; empty for all."""
    device: str

    @property
    def whole(self) -> bool:
        """See ``SuiteOptions``."""
        return not self.size


def run_recipes(options: RecipesOptions, *, repository: Path) -> int:
    """Search; return 0 when every training has ended.

    Raises:
        UserError: the text could not be prepared, or a training failed.
    """
    return run_suite(_RecipesCommand(options, repository), options, repository=repository)


class _RecipesCommand(SuiteCommand[Result]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "training"

    def __init__(self, options: RecipesOptions, repository: Path) -> None:
        self._options, self._repository = options, repository
        self._searches = [search for size, search in SEARCHES.items() if not options.size or size in options.size]
        self._folder: Path
        self._data: Path

    def plan(self, console: Console) -> int:  # noqa: ARG002
        some = SHIPPED_BEFORE
        on_seeds = 2 * len(other_seeds(some))
        return sum(1 + len(search.grid()) + len(search.changes_of(some)) + on_seeds for search in self._searches)

    def begin(self, folder: Path, console: Console) -> None:  # noqa: ARG002
        self._folder = folder.resolve()
        self._data = prepare_demo(self._repository, self._folder / "data")

    def results(self) -> Iterator[Result]:
        for search in self._searches:
            found = yield from self._train_all(search, "grid", [SHIPPED_BEFORE, *search.grid()])
            good = _best_with_margin(found)
            changed = yield from self._train_all(search, "change", search.changes_of(_settings(good)))
            yield from self._train_all(search, "seed", other_seeds(_settings(_best([good, *changed]))))
            yield from self._train_all(search, "before", other_seeds(SHIPPED_BEFORE))

    def _train_all(self, search: Search, stage: str, trials: Sequence[Trial]) -> Generator[Result, None, list[Result]]:
        """Train them, on a CPU one per core at a time; yields each result, and returns all."""
        jobs, results = 1 if self._options.device == "cuda" else len(os.sched_getaffinity(0)), []
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            for result in pool.map(lambda trial: {"stage": stage, **self._train(search, trial)}, trials):
                results.append(result)
                yield result
        return results

    def _train(self, search: Search, trial: Trial) -> Result:
        run_dir = self._folder / search.size / trial.name()
        run_dir.mkdir(parents=True)
        recipe, steps = run_dir / "recipe.json", search.steps(trial)
        write_json_atomic(recipe, trial.recipe(steps=steps))
        values = {
            "run_type": "baseline",
            "deepspeed_config": recipe,
            "model_size": search.size,
            "seq_length": search.length,
            "train_data_path": self._data / "train.bin",
            "val_data_path": self._data / "val.bin",
            "max_val_steps": 640 // trial.batch,
            "max_train_steps": steps,
            "checkpoint_path": run_dir / "run",
            "seed": trial.seed,
            "device": self._options.device,
        }
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, str(self._repository / "src" / "gpt2.py"), *words, "--no_inference"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"the training {trial.name()} failed: {done.stderr.strip()[-500:]}")
        record = json.loads((run_dir / "run" / "training_metrics.json").read_text(encoding="utf-8"))
        summary = record["summary"]
        return {
            "size": search.size,
            **trial.as_dict(),
            "steps": steps,
            "val_loss": summary["final_val_loss"],
        }

    def line(self, result: Result, *, count: str, left: str) -> str:
        settings = f"batch {result['batch']}, lr {result['lr']:g}, warm-up {result['warm_up']:g}"
        more = f"beta2 {result['beta2']:g}, floor {result['floor']:g}, decay {result['weight_decay']:g}"
        return f"{count} {result['size']}: {settings}, {more}, seed {result['seed']}: {result['val_loss']:.4f}{left}"

    def record(self, results: Sequence[Result], *, seconds: float) -> Record:
        return record_head(SCHEMA_VERSION, device=self._options.device) | {
            "searches": {search.size: {"tokens": search.tokens, "length": search.length} for search in self._searches},
            "seconds": round(seconds, 1),
            "trials": list(results),
        }

    def failures(self, results: Sequence[Result], record: Record) -> list[str]:  # noqa: ARG002
        return []


def _best_with_margin(results: Sequence[Result]) -> Result:
    """The best of the grid whose doubled rate is in it too, and no worse; without one, the best.

    The best rate of one seed may be the last before training becomes unstable, and fail on other seeds.
    """
    losses = {(result["batch"], result["lr"]): float(result["val_loss"]) for result in results}
    stable = [
        result
        for result in results
        if losses.get((result["batch"], 2 * result["lr"]), math.inf) <= float(result["val_loss"])
    ]
    return _best(stable or results)


def _best(results: Sequence[Result]) -> Result:
    """The one with the lowest validation loss."""
    return min(results, key=lambda result: float(result["val_loss"]))


def _settings(result: Result) -> Trial:
    return Trial(**{key: result[key] for key in SHIPPED_BEFORE.as_dict()})
