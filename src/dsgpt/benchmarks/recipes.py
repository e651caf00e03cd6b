"""``benchmark.py recipes``: which learning rate, batch and schedule a small model learns most with.

Every training sees the same number of tokens of the demo's text, in the same order for a seed, whatever its batch. The
choice is made on one seed and shown on three others.
"""

import math
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsgpt.benchmarks.cells import file_values, prepare_demo
from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, device_flag, filled, generated_by, page_of
from dsgpt.benchmarks.launch import train
from dsgpt.common.command_line import choice, flag
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import table

SEED, OTHER_SEEDS = 1337, (1, 2, 3)


# The trainings of a search: a grid on one seed, then single changes of a good one, then the best on other seeds.


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The settings of one training."""

    batch: int
    """Sequences of a global batch."""
    lr: float
    warm_up: float = 0.05
    """Share of the steps."""
    beta2: float = 0.95
    weight_decay: float = 0.1
    floor: float = 0.1
    """The last rate, as a share of ``lr``."""
    seed: int = SEED

    def recipe(self, *, steps: int) -> dict[str, Any]:
        """The recipe of a training of ``steps`` steps."""
        adam = {"lr": self.lr, "betas": [0.9, self.beta2], "eps": 1e-8, "weight_decay": self.weight_decay}
        cosine: dict[str, Any] = {"warmup_num_steps": max(2, round(self.warm_up * steps)), "cos_min_ratio": self.floor}
        cosine |= {"warmup_min_ratio": 0.0, "warmup_type": "linear"}
        return {
            "train_batch_size": self.batch,
            "optimizer": {"type": "AdamW", "params": adam},
            "scheduler": {"type": "WarmupCosineLR", "params": cosine},
            "gradient_clipping": 1.0,
        }

    def name(self) -> str:
        """Name for a folder and a console line."""
        return "-".join(f"{key}{value:g}" for key, value in asdict(self).items())


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search for a model size."""

    size: str
    length: int
    """Tokens of a sequence."""
    tokens: int
    """Tokens of every training, whatever its batch."""
    batches: Sequence[int]
    rates: Sequence[float]
    changes: bool = True
    """Whether single changes of a good one are tried."""

    def grid(self) -> list[Trial]:
        """Every batch with every rate."""
        return [Trial(batch=batch, lr=lr) for batch in self.batches for lr in self.rates]

    def changes_of(self, good: Trial) -> list[Trial]:
        """Trials of ``good``, one of the grid, each with one other setting."""
        changed = [replace(good, warm_up=share) for share in (0.02, 0.1)]
        changed += [replace(good, beta2=0.99), replace(good, floor=0.01), replace(good, weight_decay=0.01)]
        return changed if self.changes else []

    def steps(self, trial: Trial) -> int:
        """Optimizer steps of a training."""
        return self.tokens // (trial.batch * self.length)


SEARCHES = {
    "demo": Search(size="demo", length=128, tokens=819_200, batches=(4, 8, 16), rates=(1e-3, 2e-3, 4e-3, 8e-3)),
    "tiny": Search(size="tiny", length=128, tokens=819_200, batches=(8,), rates=(1e-3, 2e-3, 4e-3), changes=False),
}
SHIPPED_BEFORE = Trial(batch=32, lr=6e-4, warm_up=0.25)
"""The trial of ``ds_configs/zero1.json`` in 200 steps, as the demo had it before."""


def other_seeds(best: Trial) -> list[Trial]:
    """The best on seeds that took no part in the choice."""
    return [replace(best, seed=seed) for seed in OTHER_SEEDS]


_SETTINGS = ("batch", "lr", "warm_up", "beta2", "floor", "weight_decay")


def recipes_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.recipes`` makes it.
        source: the record's path, for the reader.
    """
    made = generated_by(source, "recipes", page="recipe-search", ends="repeats it")
    return page_of(filled("recipes", record, made=made), *(_section(size, record) for size in record["searches"]))


def _section(size: str, record: Record) -> str:
    work, trials = record["searches"][size], [trial for trial in record["trials"] if trial["size"] == size]
    seeds, before = ([trial for trial in trials if trial["stage"] == stage] for stage in ("seed", "before"))
    best, rows = _chosen(record, size), []
    for trial in trials:
        if trial["stage"] in {"grid", "change"}:
            loss = f"**{trial['val_loss']:.4f}**" if trial is best else f"{trial['val_loss']:.4f}"
            rows.append([*(f"{trial[key]:g}" for key in _SETTINGS), trial["steps"], loss])
    header = ["batch", "lr", "warm-up", "beta2", "last rate", "decay", "steps", "validation loss"]
    text = f"""## `{size}`, {work["tokens"]:,} tokens in sequences of {work["length"]}

{table(header, rows)}

The first row is what `ds_configs/zero1.json` does in 200 steps. The bold one was chosen."""
    ends = (", ".join(f"{one['val_loss']:.4f} (seed {one['seed']})" for one in some) for some in (seeds, before))
    return f"{text} On other seeds it ends at {'; the first row ends at '.join(ends)}."


def _chosen(record: Record, size: str) -> dict[str, Any]:
    """The first training whose settings were repeated on other seeds."""
    trials: list[dict[str, Any]] = [trial for trial in record["trials"] if trial["size"] == size]
    repeated = next(trial for trial in trials if trial["stage"] == "seed")
    return next(trial for trial in trials if all(trial[key] == repeated[key] for key in _SETTINGS))


def summary_lines(record: Record) -> list[str]:
    """The best of each size, for a console."""
    lines = []
    for size in record["searches"]:
        best = _chosen(record, size)
        settings = ", ".join(f"{key} {best[key]:g}" for key in _SETTINGS)
        lines.append(f"{size}: validation loss {best['val_loss']:.4f} with {settings}")
    return lines


Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RecipesOptions(SuiteOptions):
    """The command line."""

    size: tuple[str, ...] = flag(choice(tuple(SEARCHES)), "SIZE", default=(), nargs="+")
    """only these model sizes (default: all)"""
    device: str = device_flag("cpu, one training per core, or cuda, one at a time")


class Recipes(Suite[RecipesOptions, Result]):
    """Trains every model of the search, and chooses.

    recipes: train small models with many learning rates, batches and schedules on the same tokens, and show which
    learns most; the recipes in ds_configs/sizes come from it. Exit code 0: every training ended.

    Examples:
      .venv/bin/python src/benchmark.py recipes
      .venv/bin/python src/benchmark.py recipes --size demo
    """

    name, record_of, unit = "recipes", "recipes", "training"
    flags, page, summary = RecipesOptions, staticmethod(recipes_page), staticmethod(summary_lines)
    names = f"sizes: {', '.join(SEARCHES)}"

    def plan(self) -> int:
        self._searches = [search for size, search in SEARCHES.items() if size in (self.options.size or SEARCHES)]
        grids = [[*search.grid(), *search.changes_of(SHIPPED_BEFORE)] for search in self._searches]
        return sum(1 + len(grid) + 2 * len(OTHER_SEEDS) for grid in grids)

    def begin(self) -> None:
        self._corpus = prepare_demo(self.repository, self.folder / "data")

    def results(self) -> Iterator[Result]:
        for search in self._searches:
            grid = yield from self._train_all(search, "grid", [SHIPPED_BEFORE, *search.grid()])
            good = _best_with_margin(grid)
            changed = yield from self._train_all(search, "change", search.changes_of(_settings(good)))
            yield from self._train_all(search, "seed", other_seeds(_settings(_best([good, *changed]))))
            yield from self._train_all(search, "before", other_seeds(SHIPPED_BEFORE))

    def _train_all(self, search: Search, stage: str, trials: Sequence[Trial]) -> Generator[Result, None, list[Result]]:
        """Train them, on a CPU one per core at a time; yields each result, and returns all."""
        jobs, results = 1 if self.options.device == "cuda" else len(os.sched_getaffinity(0)), []
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            for result in pool.map(lambda trial: {"stage": stage, **self._train(search, trial)}, trials):
                results.append(result)
                yield result
        return results

    def _train(self, search: Search, trial: Trial) -> Result:
        run_dir = self.folder / search.size / trial.name()
        run_dir.mkdir(parents=True)
        recipe, steps = run_dir / "recipe.json", search.steps(trial)
        write_json_atomic(recipe, trial.recipe(steps=steps))
        values = file_values(self._corpus, recipe=recipe, run_dir=run_dir / "run")
        values |= {"run_type": "baseline", "model_size": search.size, "seq_length": search.length, "seed": trial.seed}
        values |= {"max_train_steps": steps, "max_val_steps": 640 // trial.batch, "no_inference": True}
        values["device"] = self.options.device
        record = train(values, repository=self.repository, what=f"the training {trial.name()}")
        return {"size": search.size, **asdict(trial), "steps": steps, "val_loss": record["summary"]["final_val_loss"]}

    def line(self, result: Result, *, count: str, left: str) -> str:
        settings = f"batch {result['batch']}, lr {result['lr']:g}, warm-up {result['warm_up']:g}"
        more = f"beta2 {result['beta2']:g}, floor {result['floor']:g}, decay {result['weight_decay']:g}"
        return f"{count} {result['size']}: {settings}, {more}, seed {result['seed']}: {result['val_loss']:.4f}{left}"

    def record(self, results: Sequence[Result]) -> Record:
        searches = {search.size: {"tokens": search.tokens, "length": search.length} for search in self._searches}
        return {"searches": searches, "trials": list(results)}


def _best_with_margin(results: Sequence[Result]) -> Result:
    """The best of the grid whose doubled rate is in it too, and no worse; without one, the best.

    The best rate of one seed may be the last before training becomes unstable, and fail on other seeds.
    """
    losses = {(result["batch"], result["lr"]): float(result["val_loss"]) for result in results}
    doubled = [losses.get((result["batch"], 2 * result["lr"]), math.inf) for result in results]
    stable = [result for result, loss in zip(results, doubled, strict=True) if loss <= float(result["val_loss"])]
    return _best(stable or results)


def _best(results: Sequence[Result]) -> Result:
    """The one with the lowest validation loss."""
    return min(results, key=lambda result: float(result["val_loss"]))


def _settings(result: Result) -> Trial:
    return Trial(**{key: result[key] for key in asdict(SHIPPED_BEFORE)})
