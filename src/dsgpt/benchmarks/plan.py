"""``benchmark.py plan``: the planner's predictions, held against measurements."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.benchmarks.cells import NARROW, Shape
from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, only_flag, selected
from dsgpt.benchmarks.plan_page import failed, line_of, plan_page, summary_lines
from dsgpt.common.command_line import COUNT, flag
from dsgpt.common.errors import Problems
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import counted
from dsgpt.config.recipe import Recipe, merged, read_recipe
from dsgpt.model.config import GPT2Config
from dsgpt.planner.setup import Setup

if TYPE_CHECKING:
    pass


# The cells of the suite: one strategy on one model each, as the product trains it and as the planner predicts it.

BUCKET = 5_000_000
"""Elements of DeepSpeed's reduce bucket in most cells, so that several are filled. One cell keeps the shipped recipe's,
of which the whole model is one bucket."""


TINY = Shape(name="tiny", n_layer=8, n_head=6, n_embd=192, vocab_size=50_257)
WIDE = Shape(name="6 x 512", n_layer=6, n_head=8, n_embd=512, vocab_size=8192)
VOCABULARIES = (8192, 50_257)


@dataclass(frozen=True, kw_only=True)
class PlanCell:
    """One training to predict and to measure."""

    strategy: str
    shape: Shape
    precision: str
    micro: int
    """Sequences of a micro batch."""
    run_type: str = "optimized"
    recipe: str = "zero1.json"
    """The shipped recipe that it starts from."""
    ranks: int = 2
    copy: int = 1
    """Ranks that share a copy of the model."""
    accumulation: int = 1
    checkpointing: bool = False
    length: int = 256
    """Tokens of a sequence."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the recipe."""
    note: str = ""
    fit: bool = False
    """Whether models of time may be fitted to the cell; the others only test them."""

    @property
    def key(self) -> str:
        """The cell's name on command lines, and its folder."""
        words = [self.strategy, self.shape.name.replace(" ", ""), self.precision, f"b{self.micro}"]
        words += [f"a{self.accumulation}"] * (self.accumulation > 1) + ["checkpointing"] * self.checkpointing
        words += ["alone"] * (self.ranks == 1 and self.run_type != "baseline")
        return "-".join([*words, *([self.note.replace(" ", "-")] if self.note else [])])

    @property
    def title(self) -> str:
        """The cell in a table."""
        words = [f"{self.strategy} on {counted(self.ranks, 'rank')}", self.shape.name, self.precision]
        words += [f"B={self.micro}"] + [f"accumulation {self.accumulation}"] * (self.accumulation > 1)
        words += ["checkpointing"] * self.checkpointing + [self.note] * bool(self.note)
        return ", ".join(words)

    @property
    def sequences(self) -> int:
        """Sequences of an optimizer step."""
        return self.micro * self.accumulation * self.ranks // self.copy

    @property
    def launcher(self) -> str:
        """The launcher that users start it with."""
        if self.run_type == "baseline":
            return "python"
        return "deepspeed" if self.run_type == "optimized" else "torchrun"

    @property
    def work(self) -> dict[str, Any]:
        """What is trained, for the record."""
        return {
            "model": asdict(self.shape),
            "seq_length": self.length,
            "micro_batch_size": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "global_batch_size": self.sequences,
            "precision": self.precision,
            "activation_checkpointing": self.checkpointing,
            "run_type": self.run_type,
            "recipe": self.recipe,
            "changes": dict(self.changes),
        }

    def write_recipe(self, path: Path, *, recipes: Path) -> Path:
        """Write the shipped recipe, found in ``recipes``, with the cell's changes to ``path``."""
        recipe = json.loads((recipes / self.recipe).read_text(encoding="utf-8"))
        recipe["train_batch_size"] = self.sequences
        write_json_atomic(path, merged(recipe, self.changes))
        return path

    def setup(self, recipe: Path) -> Setup:
        """What the planner predicts from, with the recipe that ``write_recipe`` wrote."""
        shape = self.shape
        return Setup(
            run_type=self.run_type,
            model=GPT2Config(
                n_layer=shape.n_layer,
                n_head=shape.n_head,
                n_embd=shape.n_embd,
                vocab_size=shape.vocab_size,
                block_size=self.length,
            ),
            recipe=_read(recipe),
            world_size=self.ranks,
            precision=self.precision,
            micro_batch_size=self.micro,
            gradient_accumulation_steps=self.accumulation,
            seq_length=self.length,
            activation_checkpointing=self.checkpointing,
        )

    def flags(self, *, recipe: Path, tokens: Path, folder: Path) -> list[str]:
        """The flags of ``src/gpt2.py`` for this cell; ``tokens`` holds a file for each vocabulary."""
        shape, data = self.shape, tokens / f"{self.shape.vocab_size}.bin"
        values = {
            "run_type": self.run_type,
            "deepspeed_config": recipe,
            "train_data_path": data,
            "val_data_path": data,
            "checkpoint_path": folder / "run",
            "num_layers": shape.n_layer,
            "num_heads": shape.n_head,
            "embedding_size": shape.n_embd,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": self.length,
            "seq_length": self.length,
            "micro_batch_size_per_gpu": self.micro,
            "grad_accum_steps": self.accumulation,
            "dropout": 0,
            "max_train_steps": 1000,
            "precision": self.precision,
            "device": "cpu",
            "threads_per_device": 1,
        }
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        return [*words, *(["--activation_checkpointing"] if self.checkpointing else [])]


def _read(path: Path) -> Recipe:
    problems = Problems()
    recipe = read_recipe(path, problems)
    problems.raise_if_any()
    assert recipe is not None
    return recipe


def _zero(stage: int, shape: Shape, precision: str, micro: int, **more: Any) -> PlanCell:
    changes = {"zero_optimization": {"reduce_bucket_size": BUCKET}} if stage else {}
    recipe = f"zero{stage}.json"
    return PlanCell(
        **{"strategy": f"zero{stage}", "recipe": recipe, "changes": changes} | more,
        shape=shape,
        precision=precision,
        micro=micro,
    )


def _torch(name: str, shape: Shape, precision: str, micro: int, **more: Any) -> PlanCell:
    return PlanCell(
        strategy=name,
        run_type=name,
        ranks=1 if name == "baseline" else 2,
        shape=shape,
        precision=precision,
        micro=micro,
        **more,
    )


def _split(name: str, shape: Shape, precision: str, micro: int, **more: Any) -> PlanCell:
    """Two ranks that share a copy of the model."""
    changes = {"zero_optimization": {"reduce_bucket_size": BUCKET}}
    settings: dict[str, Any] = {"strategy": name, "recipe": f"{name}.json", "copy": 2, "changes": changes}
    return PlanCell(**settings | more, shape=shape, precision=precision, micro=micro)


def _cells() -> Iterator[PlanCell]:
    yield _torch("baseline", NARROW, "fp32", 8)
    yield _torch("baseline", NARROW, "bf16", 4)
    yield _torch("baseline", NARROW, "fp32", 8, checkpointing=True)
    yield _torch("baseline", NARROW, "bf16", 1, accumulation=2)
    yield _torch("baseline", TINY, "bf16", 4)
    yield _torch("baseline", TINY, "fp32", 2, checkpointing=True)
    yield _torch("baseline", WIDE, "fp32", 1)
    yield _torch("ddp", NARROW, "fp32", 4)
    yield _torch("ddp", NARROW, "bf16", 1, accumulation=2)
    yield _torch("ddp", WIDE, "bf16", 2)
    yield _torch("fsdp", NARROW, "fp32", 4)
    yield _torch("fsdp", NARROW, "bf16", 4)
    yield _torch("fsdp", WIDE, "fp32", 1, accumulation=2)
    yield _torch("fsdp", TINY, "bf16", 2, checkpointing=True)
    yield _zero(0, NARROW, "fp32", 4)
    yield _zero(0, WIDE, "bf16", 1, accumulation=2)
    yield _zero(1, NARROW, "fp32", 4, ranks=1)
    yield _zero(1, NARROW, "fp32", 4)
    yield _zero(1, NARROW, "bf16", 4)
    yield _zero(1, TINY, "bf16", 2, accumulation=2)
    yield _zero(2, NARROW, "fp32", 4)
    yield _zero(2, NARROW, "bf16", 1, accumulation=2)
    yield _zero(2, WIDE, "fp32", 1, changes={}, note="bucket as shipped")
    yield _zero(3, NARROW, "fp32", 4)
    yield _zero(3, NARROW, "bf16", 1)
    yield _zero(3, WIDE, "fp32", 2, checkpointing=True)
    yield _split("tensor", NARROW, "fp32", 4)
    yield _split("tensor", WIDE, "bf16", 2)
    yield _split("sequence", NARROW, "fp32", 4)
    yield _split("sequence", WIDE, "bf16", 2)
    yield _split("pipeline", NARROW, "fp32", 4, accumulation=4)
    yield _split("pipeline", WIDE, "bf16", 1, accumulation=4)
    yield _zero(2, NARROW, "fp32", 4, strategy="zero2-offload", recipe="zero2_offload.json")
    yield _zero(3, NARROW, "bf16", 2, strategy="zero3-offload", recipe="zero3_offload.json")


def cells() -> list[PlanCell]:
    """All cells, in the order of the page. Every second one may be fitted to."""
    return [replace(cell, fit=number % 2 == 0) for number, cell in enumerate(_cells())]


SCHEMA_VERSION = "1.0"

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SuiteOptions):
    """The command line."""

    rounds: int = flag(COUNT, "N", "rounds of step times; 0 for memory only (default: %(default)s)", default=2)
    only: tuple[str, ...] = only_flag("KEY", "cells, by the beginnings of their keys")


class Plan(Suite[PlanOptions, Result]):
    """Predicts every cell, measures it, and compares."""

    name, record_of, schema_version, unit = "plan", "predictions", SCHEMA_VERSION, "cell"
    count_width = 2
    flags, page, summary = PlanOptions, staticmethod(plan_page), staticmethod(summary_lines)
    description = """\
plan: predict the peak memory, the bytes sent and the step time of small trainings under every strategy, then measure
them: the most memory of tensors in a step on every rank, PyTorch's MemTracker as a second witness, DeepSpeed's own
estimator beside it, and step times in rounds without a profiler. Takes about 6 minutes on 2 cores. Exit code 0: every
predicted peak is at most 10% over and 3% under the measured one, and the bytes sent are exact; 1: otherwise."""
    examples = """\
examples:
  .venv/bin/python src/benchmark.py plan
  .venv/bin/python src/benchmark.py plan --only zero fsdp --rounds 0
  .venv/bin/python src/benchmark.py plan --table-from checkpoint/plan/plan.json"""

    def plan(self) -> int:
        self._cells = list(selected({cell.key: cell for cell in cells()}, self.options.only).values())
        return len(self._cells)

    def begin(self) -> None:
        from dsgpt.benchmarks.plan_rank import PlanSuite  # noqa: PLC0415 - torch takes seconds

        say, rounds = self.console.say, self.options.rounds
        self._suite = PlanSuite(
            self.folder.resolve(),
            repository=self.repository,
            rounds=rounds,
            started=lambda one: say(f"starting {counted(one.cells, 'cell')} on {counted(one.ranks, 'rank')}"),
        )
        say(f"peak memory of {counted(len(self._cells), 'cell')}, then {counted(rounds, 'round')} of step times")

    def results(self) -> Iterator[Result]:
        return self._suite.run(self._cells)

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {line_of(result)}{left}"

    def record(self, results: Sequence[Result]) -> Record:
        return {
            "rounds": self.options.rounds,
            "calibration": self._suite.calibration and asdict(self._suite.calibration),
            "factors": self._suite.factors and asdict(self._suite.factors),
            "cells": list(results),
        }

    def failures(self, record: Record) -> list[str]:
        return [why for cell in record["cells"] for why in failed(cell)]

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return [f"outside the bounds: {failure}" for failure in failures]
