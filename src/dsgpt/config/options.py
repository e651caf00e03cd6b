"""The flags of ``src/gpt2.py`` and their values."""

import argparse
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from dsgpt.common.command_line import Parser, Reader, read_words
from dsgpt.common.errors import Problems
from dsgpt.model.config import PRESETS, GPT2Config

# The values of the command line, and the words that its flags accept.

RUN_TYPES = ("baseline", "ddp", "fsdp", "optimized")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
SAVE_MODES = ("sync", "async")
ON_SAVE_FAILURE = ("stop", "continue")
ALLOW_CHANGED = ("data", "recipe")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "csv")
WHICH_CHECKPOINT = ("latest", "best")
"""The newest checkpoint of a run, or the one with the lowest validation loss."""
EXPORT_FORMS = ("hf", "portable", "deepspeed")
EXPORT_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One field per flag of ``src/gpt2.py``, with its default; None if it was not given and has no constant default."""

    run_type: str | None = None
    train_data_path: Path | None = None
    val_data_path: Path | None = None
    checkpoint_path: Path | None = None
    deepspeed_config: Path | None = None
    model_size: str | None = None
    init_from: str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    embedding_size: int | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    dropout: float | None = None
    seq_length: int | None = None
    epochs: int | None = None
    max_train_steps: int | None = None
    max_val_steps: int | None = None
    global_batch_size: int | None = None
    micro_batch_size_per_gpu: int | None = None
    grad_accum_steps: int | None = None
    enforce_global_batch_size: bool = False
    precision: str = "auto"
    device: str = "auto"
    threads_per_device: int | None = None
    num_workers: int = 0
    compile: bool = False
    activation_checkpointing: bool = False
    steps_per_print: int | None = None
    monitor_every: float = 1.0
    profile_comm: int = 0
    profile: int = 0
    eval_every: int = 0
    save_every: int = 500
    keep_checkpoints: int = 2
    max_hours: float | None = None
    max_cost: float | None = None
    price_per_gpu_hour: float | None = None
    plan: Path | None = None
    on_event: tuple[str, ...] = ()
    save_mode: str = "sync"
    on_save_failure: str = "stop"
    track: tuple[str, ...] = ()
    seed: int = 1337
    resume: bool = False
    allow_changed: tuple[str, ...] = ()
    overwrite: bool = False
    verify_data: bool = False
    no_inference: bool = False
    dry_run: bool = False
    local_rank: int | None = None

    def model_overrides(self) -> dict[str, int | float]:
        """The given shape flags under the names of ``GPT2Config``."""
        given = {
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "n_embd": self.embedding_size,
            "block_size": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "dropout": self.dropout,
        }
        return {name: value for name, value in given.items() if value is not None}


DESCRIPTION = """\
Train GPT-2 from scratch. The same command trains the baseline (one device, plain PyTorch) and any DeepSpeed setup; the
JSON recipe sets the optimizer, schedule, clipping and global batch of both, so that their results can be compared."""

EXAMPLES = """\
examples:
  one device, plain PyTorch:
    .venv/bin/python src/gpt2.py --run_type baseline --train_data_path data/python-stdlib/train.bin \\
        --val_data_path data/python-stdlib/val.bin --deepspeed_config ds_configs/zero1.json --model_size demo
  the same training on all GPUs of this machine, under DeepSpeed:
    .venv/bin/deepspeed --quiet src/gpt2.py --run_type optimized ... (same flags)
  two devices, also without a GPU:
    .venv/bin/deepspeed --quiet --num_gpus 2 src/gpt2.py --run_type optimized ...
    .venv/bin/torchrun --nproc_per_node 2 src/gpt2.py --run_type optimized ...
  look before you run:
    .venv/bin/python src/gpt2.py ... --dry_run

A flag overrides the JSON, the JSON overrides the default. Results go to the folder of --checkpoint_path."""


_RECIPE = "set {} in the recipe, the JSON of --deepspeed_config"
_ELSEWHERE = {
    "--lr": _RECIPE.format("optimizer.params.lr"),
    "--learning_rate": _RECIPE.format("optimizer.params.lr"),
    "--weight_decay": _RECIPE.format("optimizer.params.weight_decay"),
    "--warmup_steps": _RECIPE.format("scheduler.params.warmup_num_steps"),
    "--batch_size": "give --global_batch_size (over all ranks) or --micro_batch_size_per_gpu",
    "--block_size": "give --seq_length",
}
"""Flags of other trainers, and where to set the same value here."""


def _size(shape: GPT2Config) -> str:
    return f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}"


def build_parser(reader: Reader) -> argparse.ArgumentParser:
    """The parser; ``reader`` collects the mistakes."""
    parser = Parser(
        prog="gpt2.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run_flags(parser, reader)
    _add_model_flags(parser, reader)
    _add_batch_flags(parser, reader)
    _add_length_flags(parser, reader)
    _add_machine_flags(parser, reader)
    _add_saving_flags(parser, reader)
    _add_tracking_flags(parser, reader)
    _add_budget_flags(parser, reader)
    _add_resume_flags(parser, reader)
    return parser


def parse_arguments(arguments: Sequence[str]) -> tuple[Options, Problems]:
    """Read a command line; return the options and the mistakes found.

    Raises:
        UserError: argparse cannot read the line at all, for example a value for a flag that takes none.
    """
    reader = Reader()
    namespace = read_words(build_parser(reader), reader, arguments, elsewhere=_ELSEWHERE)
    names = {field.name for field in fields(Options)}
    given = {name: value for name, value in vars(namespace).items() if name in names and value is not None}
    return Options(**given), reader.problems


def _add_run_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--run_type",
        metavar="TYPE",
        type=reader.choice("--run_type", RUN_TYPES, None),
        help="baseline: one process, plain PyTorch. On any number of ranks: ddp and fsdp, PyTorch's data parallelism "
        "with whole or sharded weights; optimized, DeepSpeed as the JSON says",
    )
    group.add_argument(
        "--train_data_path", metavar="BIN", type=Path, help="token file to train on; data_prep/ makes it"
    )
    group.add_argument("--val_data_path", metavar="BIN", type=Path, help="token file to validate on")
    group.add_argument(
        "--checkpoint_path",
        metavar="DIR",
        type=Path,
        help="run folder for records and checkpoints (default: checkpoint/ and the run type)",
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="JSON",
        type=Path,
        help="the recipe, one of ds_configs/ or your own; it also sets the baseline's optimizer, schedule and batch",
    )
    group.add_argument(
        "--seed",
        metavar="N",
        type=reader.whole("--seed", low=0),
        help="sets initial weights, data order and dropout (default: 1337)",
    )
    group.add_argument("--dry_run", action="store_true", help="check everything, print the plan, and stop")


def _add_model_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("model (a preset, and what to change in it)")
    sizes = "; ".join(f"{name}: {_size(shape)}" for name, shape in PRESETS.items())
    group.add_argument(
        "--model_size",
        metavar="SIZE",
        type=reader.choice("--model_size", tuple(PRESETS), None),
        help=f"{sizes} (default: small, the 124M of the paper)",
    )
    group.add_argument(
        "--init_from",
        metavar="MODEL",
        help="start from published GPT-2 weights: a Hugging Face folder (src/convert.py converts a run to one), or a "
        "name on the hub, such as gpt2, gpt2-medium or distilgpt2; they set the shape, and the data must use their "
        "vocabulary",
    )
    for flag, text in (
        ("--num_layers", "transformer blocks"),
        ("--num_heads", "attention heads; must divide the width"),
        ("--embedding_size", "width of the residual stream"),
        ("--max_position_embeddings", "longest sequence the model can read (default: the preset's)"),
        ("--vocab_size", "ids it can read and predict (default: the tokenizer's, from the data's sidecar)"),
    ):
        group.add_argument(flag, metavar="N", type=reader.whole(flag, low=1), help=text)
    group.add_argument(
        "--dropout",
        metavar="P",
        type=reader.fraction("--dropout"),
        help="dropout probability; GPT-2 used 0.1 (default: 0)",
    )


def _add_batch_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("batch (global = micro x accumulation x ranks; two fix the third)")
    for flag, text in (
        ("--global_batch_size", "sequences per optimizer step over all ranks (default: the JSON's train_batch_size)"),
        ("--micro_batch_size_per_gpu", "sequences per rank and forward pass; lower it when memory runs out"),
        ("--grad_accum_steps", "passes per optimizer step; alone it changes the micro batch, never the global one"),
    ):
        group.add_argument(flag, metavar="N", type=reader.whole(flag, low=1), help=text)
    group.add_argument(
        "--enforce_global_batch_size",
        action="store_true",
        help="if micro batch and accumulation do not give the global batch on this many ranks, lower the micro batch "
        "to one that does instead of failing",
    )


def _add_length_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("length and intervals (in optimizer steps)")
    for flag, low, text in (
        ("--seq_length", 1, "tokens per sequence (default: all positions of the model)"),
        ("--epochs", 1, "passes over the training data (default: 1, or as many as --max_train_steps needs)"),
        ("--max_train_steps", 1, "optimizer steps in the whole run; ends it earlier than --epochs would"),
        ("--eval_every", 0, "validate every N steps besides every epoch's end (default: 0, epochs only)"),
        ("--max_val_steps", 1, "validate on the first N global batches only (default: all of the file)"),
        ("--steps_per_print", 1, "print a line every N steps (default: the JSON's, else 10)"),
    ):
        group.add_argument(flag, metavar="N", type=reader.whole(flag, low=low), help=text)
    group.add_argument(
        "--no_inference", action="store_true", help="do not time generation after the last step, for up to 10 s"
    )


def _add_machine_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--device",
        metavar="KIND",
        type=reader.choice("--device", DEVICES, "auto"),
        help="auto, cpu or cuda (default: auto, a GPU where there is one)",
    )
    group.add_argument(
        "--precision",
        metavar="KIND",
        type=reader.choice("--precision", PRECISIONS, "auto"),
        help="fp32, bf16, fp16 or auto: the JSON's block if it has one, else fp32 on CPU, bf16 on GPUs that have it, "
        "fp16 on others (default: auto)",
    )
    for flag, low, text in (
        ("--threads_per_device", 1, "CPU threads of each process; on CPU they are the device (default: 1 on CPU)"),
        ("--num_workers", 0, "processes that read training data beside each rank (default: 0, the rank reads itself)"),
        ("--local_rank", -1, "set by some launchers; the index of this process's GPU"),
    ):
        group.add_argument(flag, metavar="N", type=reader.whole(flag, low=low), help=text)
    group.add_argument(
        "--monitor_every",
        metavar="SECONDS",
        type=reader.interval("--monitor_every", low=0.1),
        help="sample power, clocks, memory and temperature of the GPUs this often; 0 for never (default: 1)",
    )
    for flag, text in (
        ("--profile_comm", "measure time, bytes and waiting of collectives: a table, and communication.json"),
        ("--profile", "trace with PyTorch's profiler: a table, and for each rank a file in the folder profile"),
    ):
        help_ = f"{text}; in this many steps after the warm-up, which figures of speed leave out (default: 0)"
        group.add_argument(flag, metavar="STEPS", type=reader.whole(flag, low=0), help=help_)
    group.add_argument(
        "--compile", action="store_true", help="compile the model with torch.compile (needs a C++ compiler)"
    )
    group.add_argument(
        "--activation_checkpointing",
        action="store_true",
        help="recompute activations in the backward pass: less memory for about a third more computing",
    )


def _add_saving_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("checkpoints")
    for flag, low, text in (
        ("--save_every", 0, "save every N steps besides the end; 0 for the end only (default: 500)"),
        (
            "--keep_checkpoints",
            1,
            "keep the newest N checkpoints, and the one with the lowest validation loss among those saved right after "
            "a validation (default: 2)",
        ),
    ):
        group.add_argument(flag, metavar="N", type=reader.whole(flag, low=low), help=text)
    group.add_argument(
        "--save_mode",
        metavar="HOW",
        type=reader.choice("--save_mode", SAVE_MODES, "sync"),
        help="sync: training waits for each checkpoint; async: it waits only while rank 0 copies the state into memory "
        "of its host (12 bytes per parameter with Adam, from the first save to the end), and continues while the copy "
        "is written; the last checkpoint of a run or before a stop is written as with sync (default: sync)",
    )
    group.add_argument(
        "--on_save_failure",
        metavar="WHAT",
        type=reader.choice("--on_save_failure", ON_SAVE_FAILURE, "stop"),
        help="stop or continue when a checkpoint cannot be written: a full disk, for example (default: stop)",
    )


def _add_tracking_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("experiment trackers")
    group.add_argument(
        "--track",
        metavar="NAMES",
        type=reader.choices("--track", TRACKERS),
        help="send settings, the metrics of every step and the summary to trackers too: tensorboard, wandb, mlflow, "
        "trackio, csv, or several with commas between them. They write to the folder trackers of the run folder and "
        "use no network, unless the tracker's own variables name a server (WANDB_MODE, MLFLOW_TRACKING_URI, "
        "TRACKIO_SPACE_ID or TRACKIO_SERVER_URL). A tracker that fails does not stop the run (default: none)",
    )


def _add_budget_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("time, money and events")
    for flag, metavar, text in (
        ("--max_hours", "HOURS", "save and stop with exit code 75 before this process has run so long"),
        ("--max_cost", "DOLLARS", "the same before the whole run has cost so much, its earlier processes included"),
        ("--price_per_gpu_hour", "DOLLARS", "price of one device (default: that of the plan's cheapest offer)"),
    ):
        group.add_argument(flag, metavar=metavar, type=reader.number(flag), help=text)
    group.add_argument(
        "--plan", metavar="JSON", type=Path, help="plan.json of src/plan.py --recommend, to compare this run with"
    )
    group.add_argument(
        "--on_event",
        metavar="COMMAND",
        type=reader.value(
            "--on_event",
            lambda text: tuple(shlex.split(text)),
            accepts=lambda words: bool(words) and shutil.which(words[0]) is not None,
            must_be="a command that exists",
        ),
        help="call COMMAND EVENT RECORD, without a shell, when the run is done, failed, nan, stalled, preempted (by a "
        "signal) or at a limit; RECORD is the path of training_metrics.json",
    )


def _add_resume_flags(parser: argparse.ArgumentParser, reader: Reader) -> None:
    group = parser.add_argument_group("existing runs")
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint, made by any strategy on any number of ranks; start from "
        "the beginning if there is none yet",
    )
    group.add_argument(
        "--allow_changed",
        metavar="WHAT",
        type=reader.choices("--allow_changed", ALLOW_CHANGED),
        help="resume with other data (data: training or validation file), with another optimizer setting, schedule, "
        "clipping or length (recipe), or both (data,recipe)",
    )
    group.add_argument("--overwrite", action="store_true", help="delete the run that is in the folder and start again")
    group.add_argument(
        "--verify_data",
        action="store_true",
        help="read the data files whole, also where size and time say that they are unchanged, and compare hash and "
        "largest id with their sidecars before training",
    )


# The packages of the experiment trackers that ``--track`` may name.

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
    "csv": (),
}
"""What each tracker imports. The extra of ``pyproject.toml`` with the tracker's name installs it."""


def check_trackers(options: Options, problems: Problems) -> None:
    """Refuse trackers whose packages are not installed; imports none of them."""
    for name in dict.fromkeys(options.track):
        if missing := [package for package in PACKAGES[name] if not _is_installed(package)]:
            problems.add(
                f"--track {name}: needs {' and '.join(missing)}, not installed here: in the root of the repository, "
                f'run .venv/bin/python -m pip install -e ".[{name}]", or leave {name} out of --track'
            )


def _is_installed(package: str) -> bool:
    """Whether ``package`` can be imported; a folder without ``__init__.py``, such as wandb's own output, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
