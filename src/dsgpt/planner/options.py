"""The flags of ``src/plan.py``, and the command line that says what options say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from dsgpt.common.command_line import NUMBER, choice, flag, read_options, switch, ungrouped, value
from dsgpt.common.errors import Problems
from dsgpt.config.options import PRECISIONS, RUN_TYPES, count, positive
from dsgpt.model.config import PRESETS

CALIBRATION = Path("checkpoint") / "calibration.json"
"""Default path of a calibration, written and read."""
HEADROOM = 8.0
"""Percent of a device's memory that a plan leaves free: fragmentation, and what the formulas do not know."""
SAVE_EVERY = 500
"""Optimizer steps between checkpoints, without ``--save_every`` and ``--mtbf``."""
STRATEGIES = (
    *("baseline", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"),
    *("zeropp", "tensor", "sequence", "pipeline", "3d"),
)
"""Values of ``--strategy``: run types of plain PyTorch, and recipes of ``ds_configs``."""
JOB_LAUNCHERS = ("python", "deepspeed", "torchrun", "slurm", "kubernetes")
"""Starters of the ranks of a user's training, on one machine or on several."""
_LAUNCHED = f"what starts the ranks of the written command: {', '.join(JOB_LAUNCHERS)} (default: what suits it)"
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ELSEWHERE = {
    "--device": "name a GPU with --gpu, or a measured machine with --machine",
    "--hours": "give --deadline 72h",
    "--batch_size": "give --global_batch_size (over all ranks) or --micro_batch_size_per_gpu",
}
"""Flags that users may expect, and what to give instead."""


def executed(strategy: str) -> tuple[str, str]:
    """The run type of a value of ``--strategy``, and the name of its recipe in ``ds_configs``."""
    return (strategy, "zero0") if strategy in RUN_TYPES else ("optimized", strategy)


def _amount(example: str = "10e9") -> Callable[[str], float]:
    """A reader of amounts above 0: ``10e9``, ``1_000_000``, ``10B``."""

    def read(word: str) -> float:
        scale = _COUNTS.get(word[-1:].lower())
        return float(ungrouped(word[:-1])) * scale if scale else float(ungrouped(word))

    return value(read, accepts=lambda amount: 0 < amount < 1e18, must_be=f"a number above 0, such as {example}")


_time = value(
    lambda word: float(word[:-1]) * _UNITS.get(word[-1:], 0),
    accepts=lambda seconds: 0 < seconds < 1e12,
    must_be="a time with its unit, such as 90m, 72h or 3d",
)
_PERCENT = value(float, accepts=lambda percent: 0 <= percent < 100, must_be="a percentage from 0 to below 100")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    r"""The command line; None for a flag that was not given and has no constant default.

    Predict memory, time and cost of a training before it is paid for, and recommend a setup. Memory follows from
    formulas. Time follows from rates: of a GPU's datasheet, of which an assumed share is reached, or of this machine,
    which --calibrate measures. docs/planning.md says what is modelled and what is assumed.

    Examples:
      one setup:
        .venv/bin/python src/plan.py --model_size xl --gpu a100-80gb --gpus 8 --tokens 10e9 \
          --deepspeed_config ds_configs/zero2.json
      the best setup within limits, written to plan/ with the command that starts it:
        .venv/bin/python src/plan.py --model_size large --gpu a100-40gb --gpus 8 --tokens 3e9 \
          --recommend --budget 3000 --deadline 72h
      with your own price:
        .venv/bin/python src/plan.py --model_size small --gpu l4 --gpus 1 --tokens 1e9 --price_per_gpu_hour 0.70
      this machine, measured for a minute, then planned for:
        .venv/bin/python src/plan.py --calibrate
        .venv/bin/python src/plan.py --model_size tiny --gpus 2 --deepspeed_config ds_configs/zero1.json --tokens 1e6
    """

    model_size: str = flag(
        choice(tuple(PRESETS)), "SIZE", f"{', '.join(PRESETS)} (small)", default="small", group="what is trained"
    )
    num_layers: int | None = positive("blocks, instead of the size's")
    num_heads: int | None = positive("attention heads, instead of the size's")
    embedding_size: int | None = positive("width, instead of the size's")
    max_position_embeddings: int | None = positive("positions, instead of the size's")
    vocab_size: int | None = positive("ids (default: 50,257)")
    seq_length: int | None = positive("tokens per sequence (default: the model's positions)")
    run_type: str | None = flag(choice(RUN_TYPES), "TYPE", f"{', '.join(RUN_TYPES)} (default: optimized)")
    deepspeed_config: Path | None = flag(Path, "JSON", "the recipe (default: the size's, in ds_configs/sizes)")
    strategy: str | None = flag(
        choice(STRATEGIES), "S", f"{', '.join(STRATEGIES)}: in the size's recipe, with its batch"
    )
    precision: str = flag(
        choice(PRECISIONS), "P", f"{', '.join(PRECISIONS)} (default: auto, as the machine trains)", default="auto"
    )
    activation_checkpointing: bool = switch("recompute each block in the backward pass")
    mask_documents: float | None = flag(_amount("300"), "TOKENS")
    """no attention across documents, of which a token's has so many tokens in its window on average: attended_length of
    a record of such a run"""
    global_batch_size: int | None = positive("sequences of an optimizer step (default: the recipe's)")
    micro_batch_size_per_gpu: int | None = positive("sequences of a forward pass (default: as src/gpt2.py, up to 8)")
    grad_accum_steps: int | None = positive("micro batches of an optimizer step")

    gpu: str | None = flag(str, "GPU", group="on what")
    """a GPU of the table: t4, v100-16gb, a10g, l4, a100-80gb, h100-80gb, h200, ..."""
    instance: str | None = flag(str, "NAME", "an instance of the price table: its GPU, number, network and price")
    gpus: int | None = positive("how many devices (default: 1; of a calibration: all that it measured)")
    gpus_per_machine: int | None = positive("GPUs of one machine (default: 8)")
    network_gbps: float | None = flag(_amount("100"), "X", "Gbit/s between machines (100)")
    host_memory_gb: float | None = flag(_amount("512"), "X")
    """memory of a machine for offload (default: twice that of its GPUs)"""
    headroom: float = flag(_PERCENT, "PERCENT", default=HEADROOM)
    """memory of a device that is left free (default: %(default)g)"""
    machine: Path | None = flag(
        Path, "JSON", f"a calibration (default: {CALIBRATION.as_posix()}, if it exists and no --gpu)"
    )
    measured: tuple[Path, ...] = flag(Path, "JSON", default=(), nargs="+")
    """records of sweeps of this machine, to which the rates are fitted"""

    runs: Path = flag(Path, "DIR", default=Path("checkpoint"))
    """run folders: the last 3 runs there on this machine with a --plan correct this one (default: %(default)s)"""

    tokens: float | None = flag(_amount(), "N", group="how long, and for how much")
    """tokens of the whole training, such as 10e9 or 10B"""
    eval_every: int = count("optimizer steps between validations (default: none)", default=0)
    val_tokens: float = flag(_amount(), "N", "tokens of a validation", default=0.0)
    save_every: int = count(default=SAVE_EVERY)
    """optimizer steps between checkpoints (default: %(default)s; 0: only at the end)"""
    mtbf: float | None = flag(_time, "TIME")
    """mean time between interruptions of the job, such as 8h: plan the best --save_every, and count what they cost"""
    prices: Path | None = flag(Path, "JSON", "your price table, in the form of src/dsgpt/planner/prices.json")
    price_per_gpu_hour: float | None = flag(NUMBER, "USD", "instead of the price table")
    spot: bool = switch("spot prices of the table instead of those on demand")

    recommend: bool = switch(group="recommendation")
    """search strategies, micro batches, checkpointing and splits for the fastest that fits"""
    budget: float | None = flag(NUMBER, "USD", "most that the training may cost")
    deadline: float | None = flag(_time, "TIME", "longest time: 90m, 72h or 3d")
    """Longest training, in seconds."""
    into: Path = flag(Path, "DIR", default=Path("plan"))
    """folder of the recommended recipe and command (default: %(default)s)"""
    launcher: str | None = flag(choice(JOB_LAUNCHERS), "KIND", _LAUNCHED)
    train_data_path: Path = flag(Path, "BIN", default=Path("data/openwebtext/train.bin"))
    """token file of the written command (default: %(default)s)"""
    val_data_path: Path = flag(Path, "BIN", default=Path("data/openwebtext/val.bin"))
    """the same for validation (default: %(default)s)"""

    json: bool = switch("print JSON instead of a table", group="output")
    picture: Path | None = flag(Path, "FILE", "draw who holds what on which rank, as .svg or .png")
    rows: Path | None = flag(Path, "JSON")
    """plan nothing else; with --json, answer every row of a list in the form of planner/measured.json"""
    published: Path | None = flag(Path, "MD", "plan nothing; write the page of predictions beside published figures")
    projections: Path | None = flag(Path, "MD", "plan nothing; write the page of predictions for up to 1,024 GPUs")

    calibrate: bool = switch(
        f"measure this machine, and write {CALIBRATION.as_posix()} (or --machine)", group="calibration"
    )
    seconds: float = flag(NUMBER, "X", "about how long to measure (default: %(default)g)", default=60.0)


def read_plan_options(words: Sequence[str]) -> tuple[PlanOptions, Problems]:
    """Read a command line; return the options and the mistakes found.

    Raises:
        UserError: argparse cannot read the line at all.
    """
    return read_options(PlanOptions, words, elsewhere=_ELSEWHERE, prog="plan.py")


def words_of(options: PlanOptions) -> list[str]:
    """The words that ``read_plan_options`` reads as ``options``; flags at their default are left out."""
    words = []
    for field in fields(PlanOptions):
        if (value := getattr(options, field.name)) == field.default:
            continue
        words.append(f"--{field.name}")
        if isinstance(value, tuple):
            words += map(str, value)
        elif field.name in {"deadline", "mtbf"}:
            words.append(f"{value / 3600:.0f}h" if value % 3600 == 0 else f"{value!r}s")
        elif isinstance(value, float) and value.is_integer():  # as people write it
            words.append(str(int(value)))
        elif not isinstance(value, bool):
            words.append(value.as_posix() if isinstance(value, Path) else str(value))
    return words
