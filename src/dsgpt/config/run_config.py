"""The configuration of one run: flags over JSON over defaults, checked against the data and the machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.problems import Problems
from dsgpt.config.batch import BatchPlan, BatchRequest, plan_batch
from dsgpt.config.compatibility import Request, check_accumulation, check_compatibility, compatibility_notices
from dsgpt.config.initial_weights import InitFrom, read_init_from
from dsgpt.config.length import LengthPlan, plan_length
from dsgpt.config.options import RUN_TYPES, Options
from dsgpt.config.recipe import Recipe, read_recipe
from dsgpt.data.order import SampleOrder
from dsgpt.data.sidecar import TokenFileError
from dsgpt.data.token_file import TokenFile, open_token_file
from dsgpt.model.config import GPT2_VOCAB_SIZE, PRESETS, GPT2Config, shape_problems
from dsgpt.runtime.topology import Topology

DEFAULT_STEPS_PER_PRINT = 10
DEFAULT_MODEL_SIZE = "small"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, ready to be trained."""

    options: Options
    """The flags as given. Where a field below has a value, it takes the place of the flag's."""
    topology: Topology
    recipe: Recipe
    model: GPT2Config
    init_from: InitFrom | None
    """Where the initial weights come from; None for random ones."""
    batch: BatchPlan
    train: TokenFile
    val: TokenFile
    run_dir: Path
    seq_length: int
    """Tokens per sequence."""
    epochs: int
    """Passes over the training data that the steps touch."""
    total_steps: int
    """Optimizer steps of the whole run."""
    order: SampleOrder
    val_windows: int
    """Windows of every validation."""
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""
    device: str
    """``cpu`` or ``cuda``."""
    threads_per_device: int | None
    """CPU threads per process; None for torch's choice, on GPUs."""
    steps_per_print: int
    notices: tuple[str, ...]
    """Lines for the user about decisions that no flag asked for."""

    @property
    def run_type(self) -> str:
        """``baseline``, ``ddp``, ``fsdp`` or ``optimized``."""
        return self.options.run_type or ""

    @property
    def model_size(self) -> str:
        """What to call the model's size: a preset, or what the initial weights came from."""
        return self.init_from.size_name if self.init_from else self.options.model_size or DEFAULT_MODEL_SIZE

    @property
    def strategy_name(self) -> str:
        """What executes the recipe, in one word: ``baseline``, ``fsdp``, ``zero2-offload``, ``tensor2-zero1`` ..."""
        if self.run_type != "optimized":
            return self.run_type
        sizes = self.topology.sizes
        split = {"pipeline": sizes.pipeline, "sequence": sizes.sequence, "tensor": sizes.tensor}
        devices = {self.recipe.offload_optimizer, self.recipe.offload_param}
        places = {"nvme": ["nvme"], "cpu": ["offload"]}
        place = next((places[device] for device in places if device in devices), [])
        names = [f"{name}{size}" for name, size in split.items() if size > 1]
        return "-".join([*names, f"zero{self.recipe.zero_stage}", *place])

    @property
    def activation_checkpointing(self) -> bool:
        """Whether each block's activations are recomputed in the backward pass: by flag, or by the JSON's block."""
        return self.options.activation_checkpointing or self.recipe.activation_checkpointing is not None

    @property
    def tokens_per_step(self) -> int:
        """Targets per optimizer step over all ranks."""
        return self.batch.global_batch_size * self.seq_length


def resolve(options: Options, *, topology: Topology, problems: Problems) -> RunConfig:
    """Read what ``options`` name, check all of it, and decide what they leave open.

    First the inputs are read: recipe, data, initial weights, model and device. Then the checks that need several of
    them run, then the global batch is split over the ranks and the length of the run is counted. A step whose input is
    wrong is left out, and the others go on, so that one run reports every mistake.

    Args:
        options: the flags.
        topology: what the launcher announced.
        problems: the mistakes found so far, those of the command line.

    Raises:
        UserError: with every mistake, a line each.
    """
    notices: list[str] = []
    _check_required(options, problems)
    inputs = _read_inputs(options, topology, problems)
    _check_vocabulary(inputs, topology, problems, notices)
    if inputs.recipe is not None:
        request = _request(inputs, inputs.recipe, topology)
        check_compatibility(request, problems)
        notices += compatibility_notices(request)
        topology = topology.split(request.sizes)
        batch = _plan_batch(options, inputs.recipe, topology, problems, notices)
        if batch is not None:
            check_accumulation(request, batch.gradient_accumulation_steps, problems)
    else:
        batch = None
    length = plan_length(
        options,
        (inputs.train, inputs.val),
        seq_length=inputs.seq_length,
        batch=batch,
        problems=problems,
        notices=notices,
    )
    problems.raise_if_any()
    assert batch is not None  # whatever is None has left a problem
    assert length is not None
    return _run_config(inputs, topology, batch, length, notices)


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """What the options name, read. A field is None where it is missing or wrong, which ``problems`` then say."""

    options: Options
    run_dir: Path
    recipe: Recipe | None
    train: TokenFile | None
    val: TokenFile | None
    init_from: InitFrom | None
    model: GPT2Config | None
    seq_length: int | None
    device: str
    precision: str


def _read_inputs(options: Options, topology: Topology, problems: Problems) -> _Inputs:
    recipe = read_recipe(options.deepspeed_config, problems) if options.deepspeed_config else None
    train, val = _open(options.train_data_path, problems), _open(options.val_data_path, problems)
    run_dir = options.checkpoint_path or Path("checkpoint") / (options.run_type or "")
    init_from = read_init_from(options, run_dir=run_dir, problems=problems, quiet=not topology.is_main)
    model = _resolve_model(options, train, init_from, problems)
    seq_length = _resolve_seq_length(options, model, problems)
    device, precision = _resolve_device(options, recipe, topology, problems)
    return _Inputs(
        options=options,
        run_dir=run_dir,
        recipe=recipe,
        train=train,
        val=val,
        init_from=init_from,
        model=model,
        seq_length=seq_length,
        device=device,
        precision=precision,
    )


def _request(inputs: _Inputs, recipe: Recipe, topology: Topology) -> Request:
    return Request(
        options=inputs.options,
        recipe=recipe,
        topology=topology,
        model=inputs.model,
        seq_length=inputs.seq_length,
        device=inputs.device,
        precision=inputs.precision,
        run_dir=inputs.run_dir,
    )


def _run_config(
    inputs: _Inputs, topology: Topology, batch: BatchPlan, length: LengthPlan, notices: list[str]
) -> RunConfig:
    """The run of ``inputs`` without a mistake.

    Raises:
        UserError: the published weights cannot be fetched, or do not fit the model.
    """
    options, recipe, model, init_from = inputs.options, inputs.recipe, inputs.model, inputs.init_from
    assert recipe is not None
    assert model is not None
    assert inputs.train is not None
    assert inputs.val is not None
    assert inputs.seq_length is not None
    if init_from and init_from.sha256 is None:
        init_from.weights(model, quiet=not topology.is_main)
    warm_up = recipe.scheduler.warmup_num_steps if recipe.scheduler else 0
    if length.total_steps <= warm_up:
        notices.append(
            f"the run ends at step {length.total_steps}, inside the {warm_up} warm-up steps of {recipe.path}"
        )
    return RunConfig(
        options=options,
        topology=topology,
        recipe=recipe,
        model=model,
        init_from=init_from,
        batch=batch,
        train=inputs.train,
        val=inputs.val,
        run_dir=inputs.run_dir,
        seq_length=inputs.seq_length,
        epochs=length.epochs,
        total_steps=length.total_steps,
        order=length.order,
        val_windows=length.val_windows,
        precision=inputs.precision,
        device=inputs.device,
        threads_per_device=options.threads_per_device or (1 if inputs.device == "cpu" else None),
        steps_per_print=options.steps_per_print or recipe.steps_per_print or DEFAULT_STEPS_PER_PRINT,
        notices=tuple(notices),
    )


def _check_required(options: Options, problems: Problems) -> None:
    required = {
        "--run_type": (options.run_type, f"one of {', '.join(RUN_TYPES)}"),
        "--train_data_path": (options.train_data_path, "a .bin file made by `python data_prep/preprocess.py`"),
        "--val_data_path": (options.val_data_path, "a .bin file made by `python data_prep/preprocess.py`"),
        "--deepspeed_config": (options.deepspeed_config, "a recipe, for example ds_configs/zero1.json"),
    }
    for flag, (value, what) in required.items():
        if value is None and not problems.mention(flag):
            problems.add(f"{flag} is missing: give {what}")
    if options.resume and options.overwrite:
        problems.add("--resume goes on with the run in the folder, --overwrite deletes it: give one of them")


def _open(path: Path | None, problems: Problems) -> TokenFile | None:
    if path is None:
        return None
    try:
        return open_token_file(path)
    except TokenFileError as error:
        problems.add(str(error))
        return None


def _resolve_model(
    options: Options, train: TokenFile | None, init_from: InitFrom | None, problems: Problems
) -> GPT2Config | None:
    if options.init_from and not init_from:
        return None
    data_vocabulary = train.sidecar.vocab_size if train else None
    shape: dict[str, Any] = PRESETS[options.model_size or DEFAULT_MODEL_SIZE].as_dict()
    shape["vocab_size"] = data_vocabulary or GPT2_VOCAB_SIZE
    shape.update(options.model_overrides())
    shape.update(init_from.shape if init_from else {})
    found = shape_problems(shape)
    problems.add(*found)
    return None if found else GPT2Config(**shape)


def _resolve_seq_length(options: Options, model: GPT2Config | None, problems: Problems) -> int | None:
    if model is None:
        return options.seq_length
    length = options.seq_length or model.block_size
    if length > model.block_size:
        problems.add(
            f"--seq_length {length} is longer than the model's {model.block_size} positions: lower it, or add "
            f"--max_position_embeddings {length}"
        )
    return length


def _resolve_device(options: Options, recipe: Recipe | None, topology: Topology, problems: Problems) -> tuple[str, str]:
    from dsgpt.runtime.device import cuda_devices, default_precision, gpu_problem  # noqa: PLC0415 - torch takes seconds; --help should not

    gpus = cuda_devices()
    kind = ("cuda" if gpus else "cpu") if options.device == "auto" else options.device
    if kind == "cuda" and not gpus:
        problems.add("--device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu, or check nvidia-smi")
        kind = "cpu"
    if kind == "cuda" and (trouble := gpu_problem(topology)):
        problems.add(trouble)
    asked = options.precision if options.precision != "auto" else (recipe.precision if recipe else None)
    precision = asked or default_precision(kind)
    if kind == "cpu" and precision == "fp16":
        where = "--precision fp16" if options.precision == "fp16" else f"{options.deepspeed_config}: fp16"
        problems.add(f"{where} needs a GPU: on CPU take --precision bf16 or fp32")
    return kind, precision


def _plan_batch(
    options: Options, recipe: Recipe, topology: Topology, problems: Problems, notices: list[str]
) -> BatchPlan | None:
    """The global batch over the ranks of ``topology``; None where it cannot be split, or the model cannot."""
    if topology.world_size % topology.sizes.ranks_per_copy:
        return None
    flags = BatchRequest(
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size_per_gpu,
        gradient_accumulation_steps=options.grad_accum_steps,
    )
    written = BatchRequest(
        global_batch_size=recipe.train_batch_size,
        micro_batch_size=recipe.train_micro_batch_size_per_gpu,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
    )
    plan, changed = plan_batch(
        flags.over(written),
        data_parallel_size=1 if options.run_type == "baseline" else topology.data_parallel_size,
        enforce_global=options.enforce_global_batch_size,
        problems=problems,
    )
    if changed:
        notices.append(changed)
    return plan


def _check_vocabulary(inputs: _Inputs, topology: Topology, problems: Problems, notices: list[str]) -> None:
    """Refuse data with an id that has no embedding, and files of different tokenizers.

    Rank 0 reads the ids of a file whose sidecar does not name a vocabulary that fits.
    """
    train, val, model = inputs.train, inputs.val, inputs.model
    if train and val:
        ours, theirs = train.sidecar.tokenizer, val.sidecar.tokenizer
        if ours and theirs and ours.sha256 != theirs.sha256:
            problems.add(f"{train.path} and {val.path} were made with different tokenizers: prepare them together")
    for file in (train, val):
        if file is None or model is None:
            continue
        if file.inferred:
            notices.append(f"{file.path}: has no {file.path.stem}.json beside it; read as uint16 ids")
        vouched = file.sidecar.vocab_size is not None and file.sidecar.vocab_size <= model.vocab_size
        if vouched or not topology.is_main:
            continue
        largest = file.largest_id()
        if largest >= model.vocab_size:
            cure = f"give --vocab_size {max(largest + 1, file.sidecar.vocab_size or 0)} or more"
            if name := inputs.options.init_from:
                cure = f"prepare the text with its tokenizer (data_prep/preprocess.py --tokenizer {name})"
            problems.add(
                f"{file.path}: its largest id is {largest}, but the vocabulary ends at {model.vocab_size - 1}: {cure}"
            )
