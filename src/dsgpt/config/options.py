"""The options of ``src/gpt2.py``: each field is a flag, with its help and its meaning for equal work.

Two runs did the same work if all facts about them agree; ``record/work.py`` reads the facts from records. Every flag,
and every key of a recipe, declares where it is defined what it means for them. A test compares two runs that differ
only in it, and fails for a flag or key that declares nothing.
"""

import math
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dsgpt.common.command_line import COUNT, NUMBER, POSITIVE, choice, choices, flag, read_options, switch, value, whole
from dsgpt.common.errors import Problems
from dsgpt.common.text import DEVICES
from dsgpt.model.config import PRESETS, SHAPE_FLAGS

# What equal work is: the facts that are compared, and what a flag or a key of the recipe can change.

WORK_FACTS = (
    *("global batch", "sequence length"),
    *("train data", "tokens in the train file"),
    *("validation data", "tokens in the validation file", "validation windows"),
    *("model n_layer", "model n_head", "model n_embd", "model block_size", "model vocab_size", "model dropout"),
    *("optimizer steps", "tokens", "precision"),
)
"""Facts about the amount of work, in the order in which they are shown."""

TRAINING_FACTS = (
    *("initial weights", "optimizer type", "optimizer settings", "learning rate", "scheduler"),
    *("gradient clipping", "loss scaling", "quantized communication", "seed", "document masks", "changed at resume"),
)
"""Facts that change the training, and not the amount of work."""

RESUME_FACTS = frozenset({"quantized communication", "changed at resume"})
"""Members of ``LATER_FACTS`` that a resume may change. They are compared if a run was resumed."""

LATER_FACTS = RESUME_FACTS | {
    *("tokens in the train file", "tokens in the validation file", "validation windows"),
    *("optimizer settings", "initial weights", "loss scaling"),
}
"""Facts that records of generation 2.1 may lack. They are not compared if no run recorded them."""


SPOT_PROVIDERS = ("aws", "gcp", "azure")
"""Providers whose notices ``dsgpt.machine.spot`` reads."""


class ChangesTraining:
    """Marks a flag or key that changes the training. At least one of ``facts`` then differs."""

    def __init__(self, *facts: str) -> None:
        self.facts = facts


class ExecutionOnly(NamedTuple):
    """Marks a flag or key that may differ between runs that did the same work.

    With dropout, another split over ranks or micro batches draws other masks. The work is the same; charts judge the
    losses separately (``equal loss``).
    """

    why: str


_TRAINS_ON = ChangesTraining("train data", "tokens in the train file")
_VALIDATES_ON = ChangesTraining("validation data", "tokens in the validation file")
EXECUTES = ExecutionOnly("changes where a step is computed, not what is computed; the parity suite compares the losses")
SPLITS = ExecutionOnly("splits the same global batch; sums over it differ only in order, which the parity suite bounds")
PLACES = ExecutionOnly("changes where state is kept or how much is sent at once; the values are the same")
PRINTS = ExecutionOnly("prints or measures")
PROFILES = ExecutionOnly("measures some steps, which compute the same; figures of speed leave them out")
SAVES = ExecutionOnly("changes when, where or how a state is written, not its values")
SWAPS = ExecutionOnly("changes how files are read and written while state is swapped")
NAMES = ExecutionOnly("a name; the entries of the file are judged one by one")
_CALLS = ExecutionOnly("calls another program, from which the training reads nothing")
_COPIES = ExecutionOnly(
    "copies figures that the run measures anyway to other programs; the training reads nothing from them"
)
_FUSES = ExecutionOnly("fuses kernels of the same formulas; the parity suite bounds the effect of rounding")
_PADS = ExecutionOnly("adds logits of no probability; the parity suite bounds the effect of rounding")
_EXACTLY = ExecutionOnly("rounds summands instead of sums; the exact suite compares the weights")
_RECOMPUTES = ExecutionOnly("computes the same activations, with the same dropout masks, a second time")
RESUMES = ExecutionOnly("a resumed run is the same run; changes that were allowed count under --allow_changed")


# The flags.

RUN_TYPES = ("baseline", "ddp", "fsdp", "optimized")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
SAVE_MODES = ("sync", "async")
ON_SAVE_FAILURE = ("stop", "continue")
ALLOW_CHANGED = ("data", "recipe")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "csv")
TOKEN_FILE = "a .bin file made by `.venv/bin/python data_prep/preprocess.py`"
_SIZES = "; ".join(
    f"{name}: {shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}" for name, shape in PRESETS.items()
)
_AFTER_WARM_UP = "in this many steps after the warm-up, which figures of speed leave out (default: 0)"


positive, count = partial(flag, POSITIVE, "N"), partial(flag, COUNT, "N")
"""The fields of flags that take a whole number, of at least 1 or 0."""


profiled = partial(flag, COUNT, "STEPS", default=0, work=PROFILES)
"""The fields of flags that profile some steps."""


def path_or_address(text: str) -> Path | str:
    """A path of this machine, or an address such as ``s3://bucket/train.bin`` as it is."""
    return text if "://" in text else Path(text)


_FOLDER = "a folder of this machine (--save_to copies checkpoints to an address)"
_PLACE_HERE = value(path_or_address, accepts=lambda place: isinstance(place, Path), must_be=_FOLDER)
_SHARE = value(float, accepts=lambda share: 0 <= share < 1, must_be="a number of at least 0 and below 1")
_INTERVAL = value(float, accepts=lambda s: s == 0 or 0.1 <= s < math.inf, must_be="0, or a number of at least 0.1")
_LONG = value(float, accepts=lambda seconds: 20 <= seconds < math.inf, must_be="a number of at least 20")
_NOTICE = value(
    str, accepts=lambda word: word in SPOT_PROVIDERS or "/" in word, must_be="aws, gcp, azure or a path with /"
)
_COMMAND = value(
    lambda text: tuple(shlex.split(text)),
    accepts=lambda words: bool(words) and shutil.which(words[0]) is not None,
    must_be="a command that exists",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    r"""The command line; None for a flag that was not given and has no constant default.

    Train GPT-2 from scratch. The same command trains the baseline (one device, plain PyTorch) and any DeepSpeed setup;
    the JSON recipe sets the optimizer, schedule, clipping and global batch of both, so that their results can be
    compared.

    Examples:
      one device, plain PyTorch:
        .venv/bin/python src/gpt2.py --run_type baseline --train_data_path data/python-transformers/train.bin \
            --val_data_path data/python-transformers/val.bin --deepspeed_config ds_configs/zero1.json --model_size demo
      the same training on all GPUs of this machine, under DeepSpeed:
        .venv/bin/deepspeed --quiet src/gpt2.py --run_type optimized ... (same flags)
      two devices, also without a GPU:
        .venv/bin/deepspeed --quiet --num_gpus 2 src/gpt2.py --run_type optimized ...
        .venv/bin/torchrun --nproc_per_node 2 src/gpt2.py --run_type optimized ...
      look before you run:
        .venv/bin/python src/gpt2.py ... --dry_run

    A flag overrides the JSON, the JSON overrides the default. Results go to the folder of --checkpoint_path.
    """

    run_type: str | None = flag(
        choice(RUN_TYPES), "TYPE", group="what to run", needs=f"one of {', '.join(RUN_TYPES)}", work=EXECUTES
    )
    """baseline: one process, plain PyTorch. On any number of ranks: ddp and fsdp, PyTorch's data parallelism with whole
    or sharded weights; optimized, DeepSpeed as the JSON says"""
    train_data_path: Path | str | None = flag(path_or_address, "BIN", needs=TOKEN_FILE, work=_TRAINS_ON)
    """token file to train on; data_prep/ makes it. A folder or quoted pattern of them is read as one, as are the paths
    in a .json list; a list with weights is mixed (docs/data.md). Each machine copies one at s3:// or gs:// into
    ~/.cache/dsgpt (or DSGPT_CACHE) once"""
    val_data_path: Path | str | None = flag(path_or_address, "BIN", needs=TOKEN_FILE, work=_VALIDATES_ON)
    """token file to validate on; of several, named in the same ways, each has a loss of its own, too"""
    checkpoint_path: Path | None = flag(_PLACE_HERE, "DIR", work=NAMES)
    """run folder for records and checkpoints (default: checkpoint/ and the run type)"""
    deepspeed_config: Path | None = flag(Path, "JSON", needs="a recipe, for example ds_configs/zero1.json", work=NAMES)
    """the recipe, one of ds_configs/ or your own; it also sets the baseline's optimizer, schedule and batch"""
    seed: int = count(default=1337, work=ChangesTraining("seed"))
    """sets initial weights, data order and dropout (default: %(default)s)"""
    dry_run: bool = switch("check everything, print the plan, and stop", work=ExecutionOnly("trains nothing"))

    model_size: str | None = flag(
        choice(tuple(PRESETS)),
        "SIZE",
        f"{_SIZES} (default: small, the 124M of the paper)",
        group="model (a preset, and what to change in it)",
        work=ChangesTraining("model n_layer", "model n_head", "model n_embd", "model block_size"),
    )
    init_from: str | None = flag(str, "MODEL", work=ChangesTraining("initial weights"))
    """start from published GPT-2 weights: a Hugging Face folder (src/convert.py converts a run to one), or a name on
    the hub, such as gpt2 or distilgpt2. They set the shape. The data must use their vocabulary"""
    num_layers: int | None = positive("transformer blocks", work=ChangesTraining("model n_layer"))
    num_heads: int | None = positive("attention heads; must divide the width", work=ChangesTraining("model n_head"))
    embedding_size: int | None = positive("width of the residual stream", work=ChangesTraining("model n_embd"))
    max_position_embeddings: int | None = positive(work=ChangesTraining("model block_size"))
    """longest sequence the model can read (default: the preset's)"""
    vocab_size: int | None = positive(work=ChangesTraining("model vocab_size"))
    """ids it can read and predict (default: the tokenizer's, from the data's sidecar)"""
    dropout: float | None = flag(_SHARE, "P", work=ChangesTraining("model dropout"))
    """dropout probability; GPT-2 used 0.1 (default: 0)"""
    mask_documents: bool = switch(work=ChangesTraining("document masks"))
    """no token sees another document of its window, and positions begin anew in each (docs/data.md)"""

    global_batch_size: int | None = positive(
        group="batch (global = micro x accumulation x ranks; two fix the third)", work=ChangesTraining("global batch")
    )
    """sequences per optimizer step over all ranks (default: the JSON's train_batch_size)"""
    micro_batch_size_per_gpu: int | None = positive(work=SPLITS)
    """sequences per rank and forward pass; lower it when memory runs out"""
    grad_accum_steps: int | None = positive(work=SPLITS)
    """micro batches per optimizer step; if it is given alone, the micro batch size changes and the global batch does
    not"""
    enforce_global_batch_size: bool = switch(work=SPLITS)
    """lower the micro batch size if micro batch x accumulation x ranks is not the global batch; default: fail"""

    seq_length: int | None = positive(
        group="length and intervals (in optimizer steps)", work=ChangesTraining("sequence length")
    )
    """tokens per sequence (default: all positions of the model)"""
    epochs: int | None = positive(work=ChangesTraining("optimizer steps", "scheduler"))
    """passes over the training data (default: 1, or as many as --max_train_steps needs)"""
    max_train_steps: int | None = positive(work=ChangesTraining("optimizer steps", "scheduler"))
    """optimizer steps in the whole run; ends it earlier than --epochs would"""
    eval_every: int = count(default=0, work=ExecutionOnly("changes how often a run validates, which changes no weight"))
    """validate every N steps besides every epoch's end (default: %(default)s, epochs only)"""
    max_val_steps: int | None = positive(work=ChangesTraining("validation windows"))
    """validate on the first N global batches only (default: all of the file)"""
    steps_per_print: int | None = positive("print a line every N steps (default: the JSON's, else 10)", work=PRINTS)
    no_inference: bool = switch(work=ExecutionOnly("leaves out a measurement after the last step"))
    """do not time generation after the last step, for up to 10 s"""

    device: str = flag(choice(DEVICES), "KIND", default="auto", group="machine", work=EXECUTES)
    """auto, cpu or cuda (default: %(default)s, a GPU where there is one)"""
    precision: str = flag(choice(PRECISIONS), "KIND", default="auto", work=ChangesTraining("precision"))
    """fp32, bf16, fp16 or auto: the JSON's block if it has one, else fp32 on CPU, bf16 on GPUs that have it, fp16 on
    others (default: %(default)s)"""
    threads_per_device: int | None = positive(work=EXECUTES)
    """CPU threads of each process; on CPU they are the device (default: 1 on CPU)"""
    num_workers: int = count(
        default=0, work=ExecutionOnly("reads the same windows in the same order with other processes")
    )
    """processes that read training data beside each rank (default: %(default)s, the rank reads itself)"""
    local_rank: int | None = flag(whole(low=-1), "N", work=EXECUTES)
    """set by some launchers; the index of this process's GPU"""
    monitor_every: float = flag(_INTERVAL, "SECONDS", default=1.0, work=PRINTS)
    """sample power, clocks, memory and temperature of the GPUs this often; 0 for never (default: %(default)g)"""
    profile_comm: int = profiled(
        "measure time, bytes and waiting of collectives: a table, and communication.json; " + _AFTER_WARM_UP
    )
    profile: int = profiled(
        "trace with PyTorch's profiler: a table, and for each rank a file in the folder profile; " + _AFTER_WARM_UP
    )
    check_invariants: int = count(default=0, work=ExecutionOnly("compares what was computed, and changes none of it"))
    """check every N steps, and before each save, what must hold without a reference: replicas, samples, gradients, the
    update (docs/training.md). The first violation ends the run with exit code 7 (default: %(default)s, never)"""
    compile: bool = switch(work=_FUSES)
    """compile the model, or each of its blocks, with torch.compile (needs a C++ compiler)"""
    pad_logits: bool = switch(work=_PADS)
    """give each padded row of the embedding a logit in the loss, too: its products then have sizes at which GPUs are
    fast. Padding gets no probability and no gradient"""
    exact: bool = switch(work=_EXACTLY)
    """end with the same bits under every strategy and number of ranks: one sequence at a time, sums on a grid. It is
    slower and needs more memory (docs/training.md)"""
    cuda_graphs: bool = switch(work=ExecutionOnly("launches the same kernels"))
    """with --compile, replay the kernels of each micro batch as CUDA graphs; never run on a GPU before `benchmark.py
    gpu --only faster` has compared its losses there"""
    activation_checkpointing: bool = switch(work=_RECOMPUTES)
    """recompute activations in the backward pass: less memory for about a third more computing"""

    save_every: int = count(default=500, group="checkpoints", work=SAVES)
    """save every N steps besides the end; 0 for the end only (default: %(default)s)"""
    keep_checkpoints: int = positive(default=2, work=SAVES)
    """keep the newest N checkpoints, and the one with the lowest validation loss among those saved right after a
    validation (default: %(default)s)"""
    save_mode: str = flag(choice(SAVE_MODES), "HOW", default="sync", work=SAVES)
    """sync: training waits for each checkpoint. async: training waits only until every rank has copied its part to host
    memory (12 bytes per parameter with Adam, summed over all ranks). The files are written in the background. The last
    checkpoint, and the one before a stop, are written as with sync (default: %(default)s)"""
    on_save_failure: str = flag(choice(ON_SAVE_FAILURE), "WHAT", default="stop", work=SAVES)
    """stop or continue when a checkpoint cannot be written: a full disk, for example (default: %(default)s)"""
    save_to: str | None = flag(str, "PLACE", work=SAVES)
    """copy each checkpoint to a second place: a folder, or s3://BUCKET/RUN or gs://BUCKET/RUN (pip install
    'dsgpt[stores]'). Training never waits for the copy, and its failure is a warning. --resume takes the newest
    complete checkpoint of both places"""

    track: tuple[str, ...] = flag(choices(TRACKERS), "NAMES", default=(), group="experiment trackers", work=_COPIES)
    """send settings, the metrics of every step and the summary to trackers too: tensorboard, wandb, mlflow, trackio,
    csv, or several with commas between them. They write to the folder trackers of the run folder and use no network,
    unless the tracker's own variables name a server (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL). A tracker that fails does not stop the run (default: none)"""

    max_hours: float | None = flag(NUMBER, "HOURS", group="time, money and events", work=RESUMES)
    """save and stop with exit code 75 before this process has run so long"""
    max_cost: float | None = flag(NUMBER, "DOLLARS", work=RESUMES)
    """the same before the whole run has cost so much, its earlier processes included"""
    price_per_gpu_hour: float | None = flag(NUMBER, "DOLLARS", work=PRINTS)
    """price of one device (default: that of the plan's cheapest offer)"""
    plan: Path | None = flag(Path, "JSON", work=PRINTS)
    """plan.json of src/plan.py --recommend, to compare this run with"""
    on_event: tuple[str, ...] = flag(_COMMAND, "COMMAND", default=(), work=_CALLS)
    """call COMMAND EVENT RECORD, without a shell, when the run is done, failed, nan, stalled, preempted (by a signal)
    or at a limit; RECORD is the path of training_metrics.json"""
    stall_timeout: float = flag(_LONG, "SECONDS", default=60.0, work=ExecutionOnly("ends a run that stands still"))
    """if a step makes no progress for this long on several ranks, name the rank that the others wait for, and end with
    exit code 6 (default: %(default)g)"""
    spot_notice: str | None = flag(_NOTICE, "WHERE", work=RESUMES)
    """save and stop with exit code 75 when the provider takes one of the machines back: aws, gcp or azure, whose
    metadata service is asked every 5 s. Or the path of a file: the run stops when the file exists"""

    resume: bool = switch(group="existing runs", work=RESUMES)
    """continue from the newest complete checkpoint, made by any strategy on any number of ranks; start from the
    beginning if there is none yet"""
    allow_changed: tuple[str, ...] = flag(
        choices(ALLOW_CHANGED), "WHAT", default=(), work=ChangesTraining("changed at resume")
    )
    """resume with other data (data: training or validation file), with another optimizer setting, schedule, clipping or
    length (recipe), or both (data,recipe)"""
    overwrite: bool = switch(work=ExecutionOnly("decides what happens to an earlier run in the folder"))
    """delete the run that is in the folder and start again"""
    verify_data: bool = switch(work=ExecutionOnly("reads the data once more to check its hash; the hash itself counts"))
    """read the data files whole, also where size and time say that they are unchanged, and compare hash and largest id
    with their sidecars before training"""


def shape_overrides(options: object) -> dict[str, Any]:
    """The given flags of a model's shape under the names of ``GPT2Config``, of any options that have them."""
    given = {field: getattr(options, name.removeprefix("--")) for field, name in SHAPE_FLAGS.items()}
    return {field: size for field, size in given.items() if size is not None}


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


def parse_arguments(arguments: Sequence[str]) -> tuple[Options, Problems]:
    """Read a command line; return the options and the mistakes found.

    Raises:
        UserError: argparse cannot read the line at all, for example a value for a flag that takes none.
    """
    return read_options(Options, arguments, elsewhere=_ELSEWHERE, complete=False, prog="gpt2.py")


# The packages of the experiment trackers that ``--track`` may name.

PACKAGES = {name: (name,) for name in TRACKERS} | {"mlflow": ("mlflow", "sqlalchemy", "alembic"), "csv": ()}
"""Packages that each tracker imports. The extra of ``pyproject.toml`` with the tracker's name installs them."""


def check_trackers(options: Options, problems: Problems) -> None:
    """Refuse trackers whose packages are not installed; imports none of them."""
    for name in dict.fromkeys(options.track):
        specs = {package: find_spec(package) for package in PACKAGES[name]}
        # a folder without ``__init__.py``, such as wandb's own output, has no origin
        if missing := [package for package, spec in specs.items() if spec is None or spec.origin is None]:
            needed, install = " and ".join(missing), f'run .venv/bin/python -m pip install -e ".[{name}]"'
            cure = f"in the root of the repository, {install}, or leave {name} out of --track"
            problems.add(f"--track {name}: needs {needed}, not installed here: {cure}")
