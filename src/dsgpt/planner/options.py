"""The flags of ``src/plan.py``, and the command line that says what options say."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsgpt.common.command_line import Parser, Reader, read_words, ungrouped
from dsgpt.common.errors import Problems
from dsgpt.config.options import PRECISIONS, RUN_TYPES
from dsgpt.model.config import PRESETS
from dsgpt.planner.rates import CALIBRATION

DESCRIPTION = """\
Predict memory, time and cost of a training before it is paid for, and recommend a setup. Memory follows from formulas.
Time follows from rates: of a GPU's datasheet, of which an assumed share is reached, or of this machine, which
--calibrate measures. docs/planning.md says what is modelled and what is assumed."""

EXAMPLES = """\
examples:
  one setup:
    .venv/bin/python src/plan.py --model_size xl --gpu a100-80gb --gpus 8 --tokens 10e9 \\
      --deepspeed_config ds_configs/zero2.json
  the best setup within limits, written to plan/ with the command that starts it:
    .venv/bin/python src/plan.py --model_size large --gpu a100-40gb --gpus 8 --tokens 3e9 \\
      --recommend --budget 3000 --deadline 72h
  with your own price:
    .venv/bin/python src/plan.py --model_size small --gpu l4 --gpus 1 --tokens 1e9 --price_per_gpu_hour 0.70
  this machine, measured for a minute, then planned for:
    .venv/bin/python src/plan.py --calibrate
    .venv/bin/python src/plan.py --model_size tiny --gpus 2 --deepspeed_config ds_configs/zero1.json --tokens 1e6"""

INTO = Path("plan")
HEADROOM = 8.0
"""Percent of a device's memory that a plan leaves free: fragmentation, and what the formulas do not know."""
STRATEGIES = (
    *("baseline", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"),
    *("zeropp", "tensor", "sequence", "pipeline", "3d"),
)
"""Of ``--strategy``: run types of plain PyTorch, and recipes of ``ds_configs``."""
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """One field per flag."""

    model_size: str = "small"
    num_layers: int | None = None
    num_heads: int | None = None
    embedding_size: int | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    seq_length: int | None = None
    run_type: str | None = None
    deepspeed_config: Path | None = None
    strategy: str | None = None
    precision: str = "auto"
    activation_checkpointing: bool = False
    global_batch_size: int | None = None
    micro_batch_size_per_gpu: int | None = None
    grad_accum_steps: int | None = None
    gpu: str | None = None
    instance: str | None = None
    gpus: int | None = None
    gpus_per_machine: int | None = None
    network_gbps: float | None = None
    host_memory_gb: float | None = None
    headroom: float = HEADROOM
    machine: Path | None = None
    measured: tuple[Path, ...] = ()
    tokens: float | None = None
    eval_every: int = 0
    val_tokens: float = 0.0
    save_every: int = 500
    prices: Path | None = None
    price_per_gpu_hour: float | None = None
    spot: bool = False
    recommend: bool = False
    budget: float | None = None
    deadline: float | None = None
    into: Path = INTO
    train_data_path: Path = Path("data/openwebtext/train.bin")
    val_data_path: Path = Path("data/openwebtext/val.bin")
    json: bool = False
    picture: Path | None = None
    published: Path | None = None
    calibrate: bool = False
    seconds: float = 60.0

    def shape_overrides(self) -> dict[str, int]:
        """The given shape flags under the names of ``GPT2Config``."""
        given = {
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "n_embd": self.embedding_size,
            "block_size": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
        }
        return {name: value for name, value in given.items() if value is not None}


def read_options(words: Sequence[str]) -> tuple[PlanOptions, Problems]:
    """Read a command line; return the options and the mistakes found.

    Raises:
        UserError: argparse cannot read the line at all.
    """
    reader = Reader()
    namespace = read_words(_parser(reader), reader, words, elsewhere=_ELSEWHERE)
    names = {field.name for field in fields(PlanOptions)}
    given = {name: value for name, value in vars(namespace).items() if name in names and value is not None}
    given["measured"] = tuple(given.get("measured", ()))
    return PlanOptions(**given), reader.problems


_ELSEWHERE = {
    "--device": "name a GPU with --gpu, or a measured machine with --machine",
    "--hours": "give --deadline 72h",
    "--batch_size": "give --global_batch_size (over all ranks) or --micro_batch_size_per_gpu",
}
"""Flags that users may expect, and what to give instead."""


class _Flags:
    """Adds flags to a group of the parser."""

    def __init__(self, group: argparse._ArgumentGroup, reader: Reader) -> None:
        self._group, self.reader = group, reader

    def value(self, flag: str, read: Callable[[str], object], metavar: str, text: str) -> None:
        """A flag with one value."""
        self._group.add_argument(flag, type=read, metavar=metavar, help=text)

    def whole(self, flag: str, text: str, *, low: int = 1) -> None:
        """A flag with a whole number."""
        self.value(flag, self.reader.whole(flag, low=low), "N", text)

    def path(self, flag: str, metavar: str, text: str) -> None:
        """A flag with a path."""
        self.value(flag, Path, metavar, text)

    def paths(self, flag: str, metavar: str, text: str) -> None:
        """A flag with one or more paths."""
        self._group.add_argument(flag, type=Path, nargs="+", metavar=metavar, help=text)

    def switch(self, flag: str, text: str) -> None:
        """A flag without a value."""
        self._group.add_argument(flag, action="store_true", help=text)


def _parser(reader: Reader) -> Parser:
    parser = Parser(prog="plan.py", description=DESCRIPTION, epilog=EXAMPLES)

    def group(title: str) -> _Flags:
        return _Flags(parser.add_argument_group(title), reader)

    _add_model(group("what is trained"))
    _add_machine(group("on what"))
    _add_run(group("how long, and for how much"))
    _add_search(group("recommendation"))
    _add_output(group("output"))
    _add_calibration(group("calibration"))
    return parser


def _add_model(flags: _Flags) -> None:
    reader = flags.reader
    sizes = tuple(PRESETS)
    flags.value("--model_size", reader.choice("--model_size", sizes, "small"), "SIZE", f"{', '.join(sizes)} (small)")
    for flag, text in (
        ("--num_layers", "blocks, instead of the size's"),
        ("--num_heads", "attention heads, instead of the size's"),
        ("--embedding_size", "width, instead of the size's"),
        ("--max_position_embeddings", "positions, instead of the size's"),
        ("--vocab_size", "ids (default: 50,257)"),
    ):
        flags.whole(flag, text)
    flags.whole("--seq_length", "tokens per sequence (default: the model's positions)")
    run_types = reader.choice("--run_type", RUN_TYPES, None)
    flags.value("--run_type", run_types, "TYPE", f"{', '.join(RUN_TYPES)} (default: optimized)")
    flags.path("--deepspeed_config", "JSON", "the recipe (default: the size's, in ds_configs/sizes)")
    strategies = reader.choice("--strategy", STRATEGIES, None)
    flags.value("--strategy", strategies, "S", f"{', '.join(STRATEGIES)}: in the size's recipe, with its batch")
    precision = reader.choice("--precision", PRECISIONS, "auto")
    flags.value("--precision", precision, "P", f"{', '.join(PRECISIONS)} (default: auto, as the machine trains)")
    flags.switch("--activation_checkpointing", "recompute each block in the backward pass")
    flags.whole("--global_batch_size", "sequences of an optimizer step (default: the recipe's)")
    flags.whole("--micro_batch_size_per_gpu", "sequences of a forward pass (default: as src/gpt2.py, up to 8)")
    flags.whole("--grad_accum_steps", "micro batches of an optimizer step")


def _add_machine(flags: _Flags) -> None:
    flags.value("--gpu", str, "GPU", "a GPU of the table: t4, v100-16gb, a10g, l4, a100-80gb, h100-80gb, h200, ...")
    flags.value("--instance", str, "NAME", "an instance of the price table: its GPU, number, network and price")
    flags.whole("--gpus", "how many devices (default: 1; of a calibration: all that it measured)")
    flags.whole("--gpus_per_machine", "GPUs of one machine (default: 8)")
    network = _amount(flags.reader, "--network_gbps", example="100")
    flags.value("--network_gbps", network, "X", "Gbit/s between machines (100)")
    host = _amount(flags.reader, "--host_memory_gb", example="512")
    flags.value("--host_memory_gb", host, "X", "memory of a machine for offload (default: twice that of its GPUs)")
    headroom = flags.reader.value(
        "--headroom", float, accepts=lambda value: 0 <= value < 100, must_be="a percentage from 0 to below 100"
    )
    flags.value("--headroom", headroom, "PERCENT", f"memory of a device that is left free (default: {HEADROOM:g})")
    flags.path("--machine", "JSON", f"a calibration (default: {CALIBRATION.as_posix()}, if it exists and no --gpu)")
    flags.paths("--measured", "JSON", "records of sweeps of this machine, to which the rates are fitted")


def _add_run(flags: _Flags) -> None:
    reader = flags.reader
    flags.value("--tokens", _amount(reader, "--tokens"), "N", "tokens of the whole training, such as 10e9 or 10B")
    flags.whole("--eval_every", "optimizer steps between validations (default: none)", low=0)
    flags.value("--val_tokens", _amount(reader, "--val_tokens"), "N", "tokens of a validation")
    flags.whole("--save_every", "optimizer steps between checkpoints (default: 500; 0: only at the end)", low=0)
    flags.path("--prices", "JSON", "your price table, in the form of src/dsgpt/planner/prices.json")
    price = reader.number("--price_per_gpu_hour")
    flags.value("--price_per_gpu_hour", price, "USD", "instead of the price table")
    flags.switch("--spot", "spot prices of the table instead of those on demand")


def _add_search(flags: _Flags) -> None:
    reader = flags.reader
    flags.switch("--recommend", "search strategies, micro batches, checkpointing and splits for the fastest that fits")
    flags.value("--budget", reader.number("--budget"), "USD", "most that the training may cost")
    flags.value("--deadline", _duration(reader, "--deadline"), "TIME", "longest time: 90m, 72h or 3d")
    flags.path("--into", "DIR", f"folder of the recommended recipe and command (default: {INTO})")
    flags.path("--train_data_path", "BIN", "token file of the written command (default: data/openwebtext/train.bin)")
    flags.path("--val_data_path", "BIN", "the same for validation (default: data/openwebtext/val.bin)")


def _add_output(flags: _Flags) -> None:
    flags.switch("--json", "print JSON instead of a table")
    flags.path("--picture", "FILE", "draw who holds what on which rank, as .svg or .png")
    flags.path("--published", "MD", "plan nothing; write the page of predictions beside published figures")


def _add_calibration(flags: _Flags) -> None:
    flags.switch("--calibrate", f"measure this machine, and write {CALIBRATION.as_posix()} (or --machine)")
    flags.value("--seconds", flags.reader.number("--seconds"), "X", "about how long to measure (default: 60)")


def _amount(reader: Reader, flag: str, *, example: str = "10e9") -> Callable[[str], float | None]:
    """A reader of amounts above 0: ``10e9``, ``1_000_000``, ``10B``."""

    def read(word: str) -> float:
        scale = _COUNTS.get(word[-1:].lower())
        return float(ungrouped(word[:-1])) * scale if scale else float(ungrouped(word))

    return reader.value(
        flag,
        read,
        accepts=lambda value: 0 < value < 1e18,
        must_be=f"a number above 0, such as {example}",
    )


def _duration(reader: Reader, flag: str) -> Callable[[str], float | None]:
    """A reader of durations, in seconds: ``90m``, ``72h``, ``3d``."""
    return reader.value(
        flag,
        lambda word: float(word[:-1]) * _UNITS.get(word[-1:], 0),
        accepts=lambda value: 0 < value < 1e12,
        must_be="a time with its unit, such as 90m, 72h or 3d",
    )


def words_of(options: PlanOptions) -> list[str]:
    """The words that ``read_options`` reads as ``options``; flags at their default are left out."""
    return [
        word
        for field in fields(PlanOptions)
        if (value := getattr(options, field.name)) != field.default
        for word in _words(field.name, value)
    ]


def _words(name: str, value: Any) -> Iterator[str]:
    yield f"--{name}"
    if isinstance(value, tuple):
        yield from map(str, value)
    elif name == "deadline":
        hours = value / 3600
        yield f"{int(hours)}h" if hours.is_integer() else f"{value!r}s"
    elif not isinstance(value, bool):
        yield value.as_posix() if isinstance(value, Path) else _number(value)


def _number(value: Any) -> str:
    """A whole number without ``.0``, as people write it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
