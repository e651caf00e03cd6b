"""A cell: one strategy on a number of ranks under one setting, and how it is run."""

import itertools
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from dsgpt.benchmarks.launch import Assignment, Launch, RankEnd, read_ranks, run_job, training_words
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import counted
from dsgpt.config.recipe import merged
from dsgpt.data.token_file import TokenFileWriter, open_token_file
from dsgpt.machine.launcher import LAUNCHERS
from dsgpt.model.config import PRESETS, GPT2Config

ACCUMULATED, EVERY = "accumulated", "every micro batch"
"""Gradients that a strategy rounds to the low precision between ranks: the sums of all micro batches once per step, or
those of every micro batch."""


# The strategies under test: each is a shipped recipe, or one with a setting changed.


@dataclass(frozen=True, kw_only=True)
class TestedStrategy:
    """A strategy under test: how it is started, with which recipe, on how many ranks."""

    name: str
    """Name as in ``RunConfig.strategy_name``, with a suffix where a setting of the recipe is varied."""
    run_type: str
    recipe: str
    """The shipped recipe that it starts from, a file of ``ds_configs/``."""
    ranks: tuple[int, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the recipe, block by block; None removes a key."""
    training: str = ""
    """A key of ``TRAININGS``: changes of the recipe that are also made for its reference."""
    replicas: str = "all"
    """Weights that every rank holds whole: ``all``, ``some``, or ``none``."""
    model_ranks: int = 1
    """Ranks that share a micro batch: each computes a part of the model, or a part of every sequence."""
    low: str = ""
    """Gradients rounded to the low precision between ranks: ``ACCUMULATED``, ``EVERY``, or empty for none."""
    low_alone: bool = True
    """Whether a single rank, which sends nothing, rounds them all the same."""
    whole: bool = True
    """Whether it has a cell for every setting; otherwise it has one cell."""
    optimizer: str = "adamw"
    """The optimizer of that one cell."""
    precision: str = "fp32"
    """The precision of that one cell."""
    refused: bool = False
    """Whether the product must refuse it under every setting."""
    fp32_only: bool = False
    """Whether the product must refuse it in bf16 and fp16."""

    @property
    def launcher(self) -> str:
        """The launcher that users start it with."""
        return LAUNCHERS[self.run_type]


TRAININGS: dict[str, dict[str, Any]] = {
    "": {},
    "unclipped": {"gradient_clipping": 0},
    "unclipped sgd": {"gradient_clipping": 0, "optimizer": {"params": {"lr": 0.25}}},
    "constant rate": {"scheduler": None},
    "momentum": {"optimizer": {"params": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}}},
}
"""Changes of the recipe that change what is computed, so that the reference needs them too."""


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def _deepspeed(name: str, recipe: str, *, ranks: tuple[int, ...] = (1, 2, 4), **more: Any) -> TestedStrategy:
    """ZeRO. From stage 2 on, a rank keeps no whole gradient from one micro batch to the next."""
    low = EVERY if recipe.startswith(("zero2", "zero3")) else ACCUMULATED
    settings: dict[str, Any] = {"low": low, "low_alone": recipe != "zero1"} | more
    return TestedStrategy(name=name, run_type="optimized", recipe=f"{recipe}.json", ranks=ranks, **settings)


def _sharded(name: str, recipe: str, **more: Any) -> TestedStrategy:
    return _deepspeed(name, recipe, replicas="some", **more)


def _split(name: str, recipe: str, stage: int, *, ranks: tuple[int, ...] = (2, 4), **more: Any) -> TestedStrategy:
    """A model or sequences split over ranks, at one ZeRO stage. Sequence ranks reduce gradients in fp32."""
    low = "" if recipe == "sequence" else EVERY if stage >= 2 else ACCUMULATED
    shared = {"model_ranks": 4 if recipe == "3d" else 2, "low": low}
    return _deepspeed(name, recipe, ranks=ranks, changes=_zero(stage), **shared, **more)


def _torch(name: str, *, ranks: tuple[int, ...] = (1, 2, 4), **more: Any) -> TestedStrategy:
    return TestedStrategy(name=name, run_type=name.split("-", maxsplit=1)[0], recipe="zero1.json", ranks=ranks, **more)


_TORCH = (
    TestedStrategy(name="baseline", run_type="baseline", recipe="zero1.json", ranks=(1,)),
    _torch("ddp"),
    _torch("ddp-copied-buckets", ranks=(2,), changes={"dsgpt": {"ddp": {"gradient_as_bucket_view": False}}}),
    _torch("fsdp", replicas="none"),
    _torch("fsdp-kept", ranks=(2,), replicas="none", changes={"dsgpt": {"fsdp": {"reshard_after_forward": False}}}),
    _torch("fsdp-sharded-sums", ranks=(2,), replicas="none", changes={"dsgpt": {"fsdp": {"accumulation": "sharded"}}}),
    _torch("fsdp-offload", ranks=(2,), replicas="none", changes={"dsgpt": {"fsdp": {"cpu_offload": True}}}),
)
_DATA_PARALLEL = (
    *(_deepspeed(f"zero{stage}", f"zero{stage}") for stage in (0, 1, 2)),
    _sharded("zero3", "zero3"),
    _deepspeed("zero2-offload", "zero2_offload"),
    _sharded("zero3-offload", "zero3_offload"),
    _sharded("zero3-nvme", "zero3_nvme"),
)
_SPLIT = (
    *(_split(f"tensor2-zero{stage}", "tensor", stage, replicas="some") for stage in (0, 1, 2)),
    _split("pipeline2-zero0", "pipeline", 0, replicas="some", fp32_only=True),
    _split("pipeline2-zero1", "pipeline", 1, replicas="some"),
    *(_split(f"sequence2-zero{stage}", "sequence", stage) for stage in (0, 1, 2)),
    _split("sequence2-zero3", "sequence", 3, replicas="some"),
    _split("pipeline2-tensor2-zero1", "3d", 1, ranks=(8,), replicas="some"),
    _split("pipeline2-tensor2-zero0", "3d", 0, ranks=(8,), replicas="some", whole=False),
)
_REFUSED = tuple(
    _split(f"{recipe}2-zero{stage}", recipe, stage, ranks=(2,), whole=False, refused=True)
    for recipe, stage in (("tensor", 3), ("pipeline", 2), ("pipeline", 3))
)
_WITHOUT_CLIPPING = (
    *("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"),
    *("tensor2-zero1", "pipeline2-zero0", "pipeline2-zero1", "sequence2-zero1"),
)
"""Strategies that are also trained with SGD and no clipping. That shows whether gradients are scaled wrongly after
the reported norm was read: clipping would undo the wrong scale."""


_ONE_CELL: dict[str, Any] = {"ranks": (2,), "whole": False}
_OTHER_TRAININGS = (
    _torch("ddp-unclipped", **_ONE_CELL, training="unclipped"),
    _deepspeed("zero1-unclipped", "zero1", **_ONE_CELL, training="unclipped"),
    *(
        replace(strategy, **_ONE_CELL, name=f"{strategy.name}-unclipped-sgd", training="unclipped sgd", optimizer="sgd")
        for strategy in (*_TORCH, *_DATA_PARALLEL, *_SPLIT)
        if strategy.name in _WITHOUT_CLIPPING
    ),
    _deepspeed("zero1-constant-rate", "zero1", **_ONE_CELL, training="constant rate"),
    _deepspeed("zero1-momentum", "zero1", **_ONE_CELL, training="momentum", optimizer="sgd"),
)
_IMMEDIATE = {"bf16": {"enabled": True, "immediate_grad_update": True}}
_OTHER_SETTINGS = (
    *(
        build(name, recipe, **_ONE_CELL, changes=changes)
        for build, name, recipe, changes in (
            (_deepspeed, "zero2-whole-reduction", "zero2", _zero(2, reduce_scatter=False)),
            (_deepspeed, "zero2-scattered-gradients", "zero2", _zero(2, contiguous_gradients=False)),
            (_deepspeed, "zero2-bucket-per-rank", "zero2", _zero(2, use_multi_rank_bucket_allreduce=False)),
            (_deepspeed, "zero2-overlap", "zero2", _zero(2, overlap_comm=True)),
            (_deepspeed, "zero2-offload-torch-adam", "zero2_offload", {"optimizer": {"params": {"torch_adam": True}}}),
            (_deepspeed, "zero1-offload", "zero1", _zero(1, offload_optimizer={"device": "cpu"})),
            (_sharded, "zero3-overlap", "zero3", _zero(3, overlap_comm=True)),
            (_sharded, "zero3-offload-weights", "zero3_offload", _zero(3, offload_optimizer=None)),
            (_sharded, "zero3-offload-optimizer", "zero3_offload", _zero(3, offload_param=None)),
        )
    ),
    _deepspeed("zero1-immediate-update", "zero1", **_ONE_CELL, changes=_IMMEDIATE, precision="bf16"),
)

STRATEGIES = {
    strategy.name: strategy
    for strategy in (*_TORCH, *_DATA_PARALLEL, *_SPLIT, *_REFUSED, *_OTHER_TRAININGS, *_OTHER_SETTINGS)
}
"""Strategies by name, in the order in which the suite runs and shows them."""


# A cell: one strategy on a number of ranks under one setting. Every suite except ``saving`` launches cells.

ACCUMULATIONS = (1, 3)


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One training of a suite."""

    strategy: str
    """A key of ``STRATEGIES``."""
    ranks: int
    accumulation: int = 3
    """Micro batches per optimizer step and data rank."""
    optimizer: str = "adamw"
    """``adamw``, clipped at 1; or ``sgd`` with learning rate 1, clipped at 0.3, which hides no wrong scale."""
    precision: str = "fp32"
    option: str = ""
    """``activation checkpointing``, ``compile``, ``pad logits``, or nothing."""
    bug: str = ""
    """The bug planted in the strategy, a key of ``parity_rank.BUGS``; the parity suite must report such a cell as
    failed."""

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        words = [self.strategy, counted(self.ranks, "rank"), f"accumulation {self.accumulation}"]
        return ", ".join(filter(None, [*words, self.optimizer, self.precision, self.option, self.bug]))

    @property
    def place(self) -> tuple[int, str]:
        """Its ranks, and the launcher of a launch that serves every strategy."""
        return self.ranks, "torchrun" if self.ranks > 1 else "python"

    @property
    def folder(self) -> str:
        """The name without blanks, for a folder."""
        return self.name.replace(", ", "_").replace(" ", "-")


def by(cell: Cell) -> str:
    """``fsdp-offload on 4 ranks``."""
    return f"{cell.strategy} on {counted(cell.ranks, 'rank')}"


def executed_by(cell: Cell) -> str:
    """Strategy and ranks in the product's words, without settings of PyTorch's strategies: ``fsdp on 4 ranks``."""
    strategy = STRATEGIES[cell.strategy]
    name = cell.strategy if strategy.run_type == "optimized" else strategy.run_type
    return f"{name} on {counted(cell.ranks, 'rank')}"


# A model by its sizes, and the one that several suites measure.


DIMENSIONS = ("n_layer", "n_head", "n_embd", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model."""

    name: str
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int

    @classmethod
    def published(cls, name: str, **more: Any) -> Self:
        """That of a preset of ``src/gpt2.py``, with other fields if given."""
        return cls(name=name, **{size: getattr(PRESETS[name], size) for size in DIMENSIONS} | more)

    def config(self, positions: int) -> GPT2Config:
        """The model with that many positions."""
        return GPT2Config(**{size: getattr(self, size) for size in DIMENSIONS}, block_size=positions)


NARROW = Shape(name="4 x 256", n_layer=4, n_head=4, n_embd=256, vocab_size=8192)


# The texts that suites train on, prepared by ``data_prep/preprocess.py``: of the standard library, a part or all.

SOURCES = ("abc.py", "bisect.py", "calendar.py", "heapq.py", "textwrap.py", "shlex.py", "json/decoder.py", "this.py")
"""About 90 kB, in files that every Python since 3.11 has."""
VOCABULARY = 300


@dataclass(frozen=True)
class Corpus:
    """Prepared token files."""

    train: Path
    val: Path


def prepare_corpus(repository: Path, folder: Path) -> Corpus:
    """Token files in ``folder``, with a tokenizer of 300 ids trained on the text.

    Raises:
        UserError: this Python has no sources of its library, or the script failed; the message has its output.
    """
    library, text = Path(sysconfig.get_path("stdlib")), folder / "text"
    text.mkdir(parents=True)
    for name in SOURCES:
        if not (library / name).exists():
            raise UserError(f"{library / name}: is missing, but the suite trains on it: use a Python with its sources")
        shutil.copy(library / name, text / name.replace("/", "-").replace(".py", ".txt"))
    tokenizer = ("--tokenizer", "train", "--vocab_size", str(VOCABULARY))
    return prepare_demo(repository, folder / "data", "--input", str(text), *tokenizer, "--val_fraction", "0.2")


def prepare_demo(repository: Path, folder: Path, *flags: str) -> Corpus:
    """The text of ``make demo`` in ``folder``, or with ``flags`` of the script another; prepared once.

    Raises:
        UserError: the script failed.
    """
    corpus = Corpus(train=folder / "train.bin", val=folder / "val.bin")
    if corpus.train.exists():
        return corpus
    command = [sys.executable, str(repository / "data_prep" / "preprocess.py"), *flags, "--output_dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"data_prep/preprocess.py failed: {done.stderr.strip() or done.stdout.strip()}")
    return corpus


def file_values(corpus: Corpus, *, recipe: Path, run_dir: Path) -> dict[str, object]:
    """The flags of a training's files, for ``training_words``."""
    data = {"train_data_path": corpus.train, "val_data_path": corpus.val}
    return {**data, "deepspeed_config": recipe, "checkpoint_path": run_dir}


def cut_validation(corpus: Corpus) -> Corpus:
    """The corpus with a validation file of the first ``VALIDATION_WINDOWS`` windows, next to the whole one."""
    path = corpus.val.with_name("val-cut.bin")
    # an end-of-text id follows: the last window's target
    cut_tokens(corpus.val, path, first=0, end=VALIDATION_WINDOWS * SEQUENCE)
    return Corpus(train=corpus.train, val=path)


def cut_tokens(whole: Path, part: Path, *, first: int, end: int) -> None:
    """Write the tokens from ``first`` to before ``end`` of the prepared file ``whole`` to the new file ``part``."""
    file = open_token_file(whole)
    about, source = file.sidecar, f"a part of {whole.name}"
    ids = {"vocab_size": about.vocab_size or VOCABULARY, "eot_id": about.eot_id or 0}
    with TokenFileWriter(part, **ids, tokenizer=about.tokenizer, source=source) as writer:
        writer.append(file.memmap()[first:end])


def write_random_tokens(folder: Path, *, vocab_sizes: Iterable[int], count: int) -> None:
    """Files ``V.bin`` of ``count`` ids below V, all equally likely, so that a batch uses as many rows as it can."""
    import numpy as np  # noqa: PLC0415 - takes its time

    for vocab_size in vocab_sizes:
        path, eot_id = folder / f"{vocab_size}.bin", vocab_size - 1
        with TokenFileWriter(path, vocab_size=vocab_size, eot_id=eot_id, tokenizer=None, source="random ids") as writer:
            writer.append(np.random.default_rng(0).integers(0, eot_id, size=count))


# Makes the recipe file and the flags of ``src/gpt2.py`` for a cell.

STEPS = 20
GLOBAL_BATCH = 12
"""Divisible by 1, 2 and 4 data ranks times 1 and 3 micro batches."""
SEQUENCE = 32
VALIDATION_WINDOWS = 17
"""The second global batch of a validation is padded: of two data ranks the second has no target in it, of four the last
two. Ranks and micro batches then have unequal weights."""
CLIPPING = {"adamw": 1.0, "sgd": 0.3}
OPTIMIZERS = {
    "adamw": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "sgd": {"type": "SGD", "params": {"lr": 1.0}},
}
RATE_BOUND = 1e-12
"""Bound on the learning rate, absolute: two formulas of one schedule differ in the last of 16 digits."""
BYTES_BOUND = 0.05
"""Bound on the planner's bytes per rank, relative; all cells of the record are within 1.8%."""
SCHEDULER = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "cos_min_ratio": 0.1}}
WIDTHS = {"cpu": 34, "cuda": 128}
"""34 is not divisible by 4 ranks: shards are uneven or padded. The fused attention of GPUs needs heads of 64."""
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 8}
"""Dynamic, and so low that this model never overflows: after a skipped step, different steps would be compared."""

SMALL_BUCKETS = {"reduce_bucket_size": 5_000, "allgather_bucket_size": 5_000}
SMALL_BUCKETS_3 = {
    **{"reduce_bucket_size": 5_000, "stage3_prefetch_bucket_size": 5_000, "stage3_param_persistence_threshold": 200},
    **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"), 20_000),
}
"""Bucket sizes in parameters. At the usual sizes this model would fit into one bucket, and ZeRO-3 would shard
nothing."""


def shape(device: str) -> dict[str, int]:
    """The model's shape on ``device``, ``cpu`` or ``cuda``, as flags of ``src/gpt2.py``."""
    sizes = {"num_layers": 2, "num_heads": 2, "embedding_size": WIDTHS[device]}
    return sizes | {"max_position_embeddings": SEQUENCE, "seq_length": SEQUENCE}


def write_recipe(path: Path, cell: Cell, *, recipes: Path, training: str | None = None) -> Path:
    """Write the shipped recipe of the cell's strategy, as the cell changes it, to ``path``.

    Args:
        path: the new file.
        cell: which strategy and settings.
        recipes: the folder of the shipped ones.
        training: a key of ``TRAININGS``; by default that of the cell's strategy.
    """
    strategy = STRATEGIES[cell.strategy]
    recipe = json.loads((recipes / strategy.recipe).read_text(encoding="utf-8"))
    torch_adam = recipe["optimizer"]["params"].get("torch_adam") if cell.optimizer == "adamw" else None
    recipe["optimizer"] = merged(OPTIMIZERS[cell.optimizer], {"params": {"torch_adam": torch_adam}})
    recipe |= {"train_batch_size": GLOBAL_BATCH, "scheduler": SCHEDULER, "gradient_clipping": CLIPPING[cell.optimizer]}
    if cell.precision == "fp16":
        recipe["fp16"] = FP16
    if cell.option != "compile":  # PyTorch compiles DDP with buckets of at least 1 MiB
        recipe = merged(recipe, {"dsgpt": {"ddp": {"bucket_cap_mb": 0.02}}})
    recipe = merged(recipe, TRAININGS[strategy.training if training is None else training])
    recipe = merged(recipe, strategy.changes)
    if stage := recipe.get("zero_optimization", {}).get("stage", 0):
        recipe = merged(recipe, {"zero_optimization": SMALL_BUCKETS_3 if stage == 3 else SMALL_BUCKETS})
    write_json_atomic(path, recipe)
    return path


def flags(cell: Cell, *, recipe: Path, corpus: Corpus, run_dir: Path, device: str, steps: int = STEPS) -> list[str]:
    """The flags of ``src/gpt2.py`` that train this cell for ``steps`` optimizer steps."""
    values: dict[str, object] = {"run_type": STRATEGIES[cell.strategy].run_type}
    values |= {**file_values(corpus, recipe=recipe, run_dir=run_dir), **shape(device), "dropout": 0}
    values |= {"max_train_steps": steps, "grad_accum_steps": cell.accumulation, "precision": cell.precision}
    values |= {"device": device} | ({cell.option.replace(" ", "_"): True} if cell.option else {})
    return training_words(values)


# Runs cells in a folder: text, recipes and flags for each, then one launch for many of them.


@dataclass(frozen=True, kw_only=True)
class CellEnd:
    """Common end of all ranks of one assignment."""

    folder: Path
    ranks: list[RankEnd]
    """The file of every rank; empty if the launch was lost."""
    status: str
    """``done``, or that of the rank that failed first: ``refused`` or ``error``."""
    message: str = ""
    """The error of the rank that failed first, without the paths of this machine."""
    seconds: float = 0.0


S = TypeVar("S")
"""Type of what a suite runs: a cell, or a description that it makes of one."""


class CellRunner:
    """Runs cells.

    Args:
        folder: an existing folder; every cell gets a folder in it.
        repository: holds the scripts and recipes.
        device: ``cpu`` or ``cuda``.
        steps: optimizer steps of a cell.
    """

    def __init__(self, folder: Path, *, repository: Path, device: str, steps: int = STEPS) -> None:
        self.folder, self.device, self._repository, self._steps = folder, device, repository, steps
        self.launches: list[Launch] = []
        """Launches, for the record."""

    @cached_property
    def corpus(self) -> Corpus:
        """The text, prepared when it is first needed.

        Raises:
            UserError: it could not be prepared.
        """
        return cut_validation(prepare_corpus(self._repository, self.folder / "corpus"))

    def assignment(
        self,
        cell: Cell,
        *,
        call: str,
        name: str = "",
        training: str | None = None,
        more: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Assignment:
        """Make the cell's folder with its recipe; return what its ranks must call.

        Args:
            cell: what to run.
            call: ``module:function``.
            name: of the folder; by default the cell's.
            training: a key of ``TRAININGS``; by default that of the cell's strategy.
            more: further flags of ``src/gpt2.py``.
            arguments: of the call.
        """
        folder = self.folder / (name or cell.folder)
        folder.mkdir()
        recipe = write_recipe(folder / "recipe.json", cell, recipes=self._repository / "ds_configs", training=training)
        words = flags(
            cell, recipe=recipe, corpus=self.corpus, run_dir=folder / "run", device=self.device, steps=self._steps
        )
        return Assignment(folder=str(folder), flags=[*words, *more], call=call, arguments=dict(arguments or {}))

    def run(
        self,
        subjects: Iterable[S],
        *,
        place: Callable[[S], tuple[int, str]],
        assign: Callable[[S], Assignment],
        started: Callable[[Launch], None] | None = None,
        imports: Sequence[str] | None = None,
    ) -> Iterator[tuple[S, CellEnd]]:
        """Run ``subjects``, those with the same place in one launch; yield each with its end, also the lost ones.

        Args:
            subjects: what to run, in any order; those of one place stay in it.
            place: the number of ranks, and their launcher: ``python``, ``torchrun`` or ``deepspeed``.
            assign: makes the assignment of a subject, just before its launch.
            started: called with each launch before it starts; without it, the record does not list the launches.
            imports: as for ``run_job``.
        """
        for (ranks, launcher), group in itertools.groupby(sorted(subjects, key=place), key=place):
            together = list(group)
            assignments = [assign(subject) for subject in together]
            launch = Launch(launcher=launcher, ranks=ranks, cells=len(assignments))
            if started:
                self.launches.append(launch)
                started(launch)
            job_file, done = self.folder / f"job-{len(list(self.folder.glob('job-*.json'))) + 1}.json", 0
            for index, seconds in run_job(launch, assignments, job_file=job_file, device=self.device, imports=imports):
                done = index + 1
                yield together[index], self._end_of(Path(assignments[index].folder), ranks, seconds)
            for subject, assignment in zip(together[done:], assignments[done:], strict=True):
                log = job_file.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
                last = " / ".join(log.strip().splitlines()[-3:])
                message = f"the launch ended before this cell did; the last lines of its log: {last}"
                yield subject, CellEnd(folder=Path(assignment.folder), ranks=[], status="error", message=message)

    def _end_of(self, folder: Path, ranks: int, seconds: float) -> CellEnd:
        """End of a cell: that of its first rank that failed; others fail after it because they lost a peer."""
        ends = read_ranks(folder, ranks)
        failures = [end for end in ends if end["status"] != "done"]
        if not failures:
            return CellEnd(folder=folder, ranks=ends, status="done", seconds=seconds)
        failure = min(failures, key=lambda end: end["time"])
        message = failure["message"].replace(f"{folder}/", "").replace(f"{self.folder}/", "")
        return CellEnd(folder=folder, ranks=ends, status=failure["status"], message=message, seconds=seconds)


def weights_apart(one: Path, other: Path) -> float:
    """The largest distance between a weight of two checkpoints, relative to its length in the ``other``."""
    from torch.linalg import vector_norm  # noqa: PLC0415 - takes its time

    from dsgpt.checkpoints.training_state import StateReader  # noqa: PLC0415

    state, expected = StateReader(one), StateReader(other)
    pairs = ((state.read(name), expected.read(name)) for name in expected.shapes)
    return max(float(vector_norm(value - whole) / vector_norm(whole)) for value, whole in pairs)
