"""The cells that the tests in this folder run in ``strategy_worker.py``: one launch for each number of ranks."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from small_run import REPOSITORY
from training_runs import data_flags

from dsgpt.benchmarks.cells import STRATEGIES, Cell, Corpus, write_recipe
from dsgpt.benchmarks.launch import IMPORTS, Assignment, Launch, read_ranks, run_job
from dsgpt.machine.probe import compiler, libaio_problem

NO_LIBAIO = not (found := compiler()) or bool(libaio_problem(found))
LAYERS = ("--num_layers", "6")
"""Enough that one parameter is a small part of the model."""
DROPOUT = ("--dropout", "0.2")
RUN = ("--max_train_steps", "4", "--save_every", "2", "--keep_checkpoints", "9", "--max_val_steps", "1")
CHANGED = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.5, 0.6], "weight_decay": 20.0}},
    "gradient_clipping": 0.05,
}
"""Another recipe for a resumed run; betas, weight decay and clipping each have an effect within two steps."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One cell: a strategy of the parity suite, on its recipe."""

    what: str
    """A key of ``strategy_worker.OBSERVATIONS``."""
    strategy: str
    flags: tuple[str, ...] = ()
    after: str = ""
    """The cell whose run, killed in the middle, this one resumes."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """New values for keys of the recipe."""

    def words(self, corpus: Corpus, recipe: Path, run: Path) -> list[str]:
        """The flags of ``src/gpt2.py`` except the run type."""
        words = [*data_flags(corpus), "--num_heads", "2", "--embedding_size", "32", "--max_position_embeddings", "32"]
        words += [*self.flags, *([] if "--num_layers" in self.flags else ["--num_layers", "2"]), "--device", "cpu"]
        return [*words, "--grad_accum_steps", "2", "--deepspeed_config", str(recipe), "--checkpoint_path", str(run)]


def recipe_of(cell: Observation, ranks: int, path: Path) -> None:
    """Write the recipe of the cell's strategy to ``path``, without a schedule: the first step changes weights."""
    plain = Cell(strategy=cell.strategy, ranks=ranks)
    write_recipe(path, plain, recipes=REPOSITORY / "ds_configs")
    values = json.loads(path.read_text(encoding="utf-8")) | {"train_batch_size": 8} | cell.recipe
    values.pop("scheduler", None)
    path.write_text(json.dumps(values), encoding="utf-8")


def _starts(*names: str, flags: tuple[str, ...]) -> dict[str, Observation]:
    return {f"start {name} {flags[-1]}": Observation(what="start", strategy=name, flags=flags) for name in names}


def _steps(*names: str) -> dict[str, Observation]:
    flags = (*DROPOUT, *LAYERS)
    return {f"steps {name}": Observation(what="steps", strategy=name, flags=flags) for name in names}


def _checkpoints(*names: str) -> dict[str, Observation]:
    return {f"checkpoint {name}": Observation(what="checkpoint", strategy=name, flags=LAYERS) for name in names}


def _runs(*names: str, save_mode: str = "sync") -> Iterator[tuple[str, Observation]]:
    """A run with dropout, and the same run resumed from its first checkpoint."""
    flags = (*RUN, *DROPOUT, "--save_mode", save_mode)
    for name in names:
        run = f"run {name}"
        yield run, Observation(what="run", strategy=name, flags=flags)
        yield f"resumed {name}", Observation(what="run", strategy=name, flags=(*flags, "--resume"), after=run)


def _recomputed(*names: str) -> dict[str, Observation]:
    """The run of ``_runs`` again; it computes activations, and therefore dropout masks, twice."""
    flags = (*RUN, *DROPOUT, "--activation_checkpointing")
    return {f"recomputed {name}": Observation(what="run", strategy=name, flags=flags) for name in names}


def _changed(*names: str) -> Iterator[tuple[str, Observation]]:
    """A run, and the same run resumed with another recipe."""
    for name in names:
        run = f"before the change {name}"
        yield run, Observation(what="run", strategy=name, flags=RUN)
        flags = (*RUN, "--resume", "--allow_changed", "recipe")
        yield f"changed {name}", Observation(what="run", strategy=name, flags=flags, after=run, recipe=CHANGED)


def _full_disks(*names: str, of: str) -> dict[str, Observation]:
    flags, what = (*RUN, "--on_save_failure", "stop"), f"full disk of {of}"
    return {f"{what} {name}": Observation(what=what, strategy=name, flags=flags) for name in names}


SPLIT = ("tensor2-zero1", "sequence2-zero1", "pipeline2-zero1")
NVME = () if NO_LIBAIO else ("zero3-nvme",)
DEEP = ("zero3-offload", *NVME, "fsdp")
START_FP32 = ("zero0", "zero1", "zero2-offload")
START_BF16 = ("zero0", "zero1", "zero3", *NVME, *SPLIT)
SPLIT_STATE = ("zero1", "zero3", *NVME, "fsdp", "tensor2-zero1", "pipeline2-zero1")
RESUMED = (*SPLIT, "zero2-offload", "zero3-offload", *NVME)
SAVED_BESIDE = ("zero0", "zero3", "fsdp")
"""Strategies whose runs save while they train, and are resumed."""
RECOMPUTED = (*SPLIT, "zero3-offload")
SUMMED_BY_MANY = "ddp"
"""A strategy that needs more than two ranks here: the sum of two numbers does not depend on their order."""
CHANGED_STRATEGIES = ("zero1", "zero3-offload", *NVME, "pipeline2-zero1", "fsdp")
FULL_DISK = ("zero3", *NVME, "pipeline2-zero1", "fsdp")
THREE_D = "pipeline2-tensor2-zero1"

CELLS: dict[int, dict[str, Observation]] = {
    2: {
        **_starts(*START_FP32, flags=("--precision", "fp32")),
        **_starts(*START_BF16, flags=("--precision", "bf16")),
        **_starts(*DEEP, flags=LAYERS),
        **_steps("zero3", *SPLIT),
        **_checkpoints(*SPLIT_STATE),
        **dict(_runs(*RESUMED)),
        **dict(_runs(*SAVED_BESIDE, save_mode="async")),
        **_recomputed(*RECOMPUTED),
        **dict(_changed(*CHANGED_STRATEGIES)),
        **_full_disks(*FULL_DISK, of="main"),
        **_full_disks(*FULL_DISK[:1], of="last"),
    },
    4: {**_steps(*SPLIT), **dict(_runs(SUMMED_BY_MANY))},
    8: {**_steps(THREE_D), **dict(_runs(THREE_D))},
}
"""Number of ranks to name of a cell to the cell, in the order in which they run."""


class Asked(NamedTuple):
    """The cell that a test needs, as its parameter ``cell``."""

    ranks: int
    name: str

    def __str__(self) -> str:
        """For test ids."""
        return f"{self.name}-{self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a cell ended."""

    folder: Path
    ranks: list[dict[str, Any]]
    """What each rank observed."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(json.loads((self.folder / "run.json").read_text(encoding="utf-8")))

    def log(self, rank: int) -> str:
        """What a rank printed."""
        return (self.folder / f"rank-{rank}.log").read_text(encoding="utf-8")


class Launched:
    """A launch of cells on one number of ranks, in order. ``seen`` waits for a cell and those before it."""

    def __init__(self, ranks: int, wanted: set[str], folder: Path, corpus: Corpus) -> None:
        self._folder, self._ranks = folder, ranks
        wanted = wanted | {CELLS[ranks][name].after for name in wanted}
        self._names = [name for name in CELLS[ranks] if name in wanted]
        assignments = [self._assignment(name, corpus) for name in self._names]
        job = Launch(launcher="torchrun", ranks=ranks, cells=len(assignments))  # starts in a third of deepspeed's time
        imports = [*IMPORTS["torchrun"], *IMPORTS["deepspeed"]]
        self._coming = run_job(job, assignments, job_file=folder / "job.json", device="cpu", imports=imports)
        self._done = 0

    def _assignment(self, name: str, corpus: Corpus) -> Assignment:
        cell = CELLS[self._ranks][name]
        folder = self._folder / name
        folder.mkdir()
        recipe_of(cell, self._ranks, folder / "recipe.json")
        run = self._folder / cell.after / "killed" if cell.after else folder / "run"
        (folder / "run.json").write_text(json.dumps(str(run)), encoding="utf-8")
        words = [cell.what, "--run_type", STRATEGIES[cell.strategy].run_type]
        words += cell.words(corpus, folder / "recipe.json", run)
        return Assignment(folder=str(folder), flags=words, call="strategy_worker:observe")

    def seen(self, name: str) -> Seen:
        """How the cell of this name ended."""
        index, folder = self._names.index(name), self._folder / name
        with pytest.MonkeyPatch.context() as patch:
            here = Path(__file__).parent
            patch.setenv("PYTHONPATH", f"{here}:{here.parent}", prepend=os.pathsep)
            while self._done <= index:
                if (end := next(self._coming, None)) is None:
                    pytest.fail((self._folder / "job.log").read_text(encoding="utf-8", errors="replace")[-3000:])
                self._done = end[0] + 1
        seen = Seen(folder=folder, ranks=read_ranks(folder, self._ranks))
        for rank, end in enumerate(seen.ranks):
            assert end["status"] == "done", f"rank {rank}: {end['message']}\n{seen.log(rank)}"
        return seen

    def close(self) -> None:
        """Stop the launch."""
        self._coming.close()
