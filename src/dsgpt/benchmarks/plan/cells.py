"""The cells of the suite: one strategy on one model each, as the product trains it and as the planner predicts it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.cells import counted
from dsgpt.benchmarks.harness.shapes import NARROW, Shape
from dsgpt.benchmarks.harness.work import merged
from dsgpt.common.files import write_json_atomic
from dsgpt.common.problems import Problems
from dsgpt.config.recipe import Recipe, read_recipe
from dsgpt.model.config import GPT2Config
from dsgpt.planning.setup import Setup

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
        write_json_atomic(path, merged(recipe, dict(self.changes)))
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
