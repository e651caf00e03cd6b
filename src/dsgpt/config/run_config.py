"""Everything about one run, resolved and checked: flags over JSON over defaults, against the data and the machine.

``resolve`` looks at all of it before it complains, and complains about all of it at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.problems import Problems
from dsgpt.config.batch import BatchPlan, BatchRequest, plan_batch
from dsgpt.config.compatibility import Request, check_accumulation, check_compatibility, notices
from dsgpt.config.initial_weights import InitFrom, read_init_from
from dsgpt.config.length import plan_length
from dsgpt.config.options import RUN_TYPES, Options
from dsgpt.config.recipe import Recipe, read_recipe
from dsgpt.data.order import SampleOrder
from dsgpt.data.token_file import TokenFile, TokenFileError, open_token_file
from dsgpt.model.config import GPT2_VOCAB_SIZE, PRESETS, GPT2Config, shape_problems
from dsgpt.runtime.topology import Topology

DEFAULT_STEPS_PER_PRINT = 10
DEFAULT_MODEL_SIZE = "small"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, ready to be trained."""

    options: Options
    """The flags as given; what they led to is in the fields below."""
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
    """What the user should know about how the request was understood, a line each."""

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
    """Check a request whole.

    Args:
        options: the flags.
        topology: what the launcher announced.
        problems: mistakes found so far, those of the command line; all are raised together.

    Raises:
        UserError: with every mistake, a line each.
    """
    told: list[str] = []
    _check_required(options, problems)
    recipe = read_recipe(options.deepspeed_config, problems) if options.deepspeed_config else None
    train = _open(options.train_data_path, problems)
    val = _open(options.val_data_path, problems)
    run_dir = options.checkpoint_path or Path("checkpoint") / (options.run_type or "")
    init_from = read_init_from(options, run_dir=run_dir, problems=problems, quiet=not topology.is_main)
    model = _resolve_model(options, train, init_from, problems)
    seq_length = _resolve_seq_length(options, model, problems)
    device, precision = _resolve_device(options, recipe, topology, problems)
    _check_vocabulary(model, (train, val), options, topology, problems, told)
    if recipe is not None:
        request = Request(
            options=options,
            recipe=recipe,
            topology=topology,
            model=model,
            seq_length=seq_length,
            device=device,
            precision=precision,
            run_dir=run_dir,
        )
        check_compatibility(request, problems)
        told += notices(request)
        topology = topology.split(request.sizes)
    batch = _resolve_batch(options, recipe, topology, problems, told)
    if recipe is not None and batch is not None:
        check_accumulation(request, batch.gradient_accumulation_steps, problems)
    length = plan_length(options, (train, val), seq_length=seq_length, batch=batch, problems=problems, notices=told)
    problems.raise_if_any()
    if init_from and init_from.sha256 is None:
        init_from.weights(model, quiet=not topology.is_main)  # may be no GPT-2's
    if recipe.scheduler and length.total_steps <= recipe.scheduler.warmup_num_steps:
        warm_up = recipe.scheduler.warmup_num_steps
        told.append(f"the run ends at step {length.total_steps}, inside the {warm_up} warm-up steps of {recipe.path}")
    return RunConfig(
        options=options,
        topology=topology,
        recipe=recipe,
        model=model,
        init_from=init_from,
        batch=batch,
        train=train,
        val=val,
        run_dir=run_dir,
        seq_length=seq_length,
        epochs=length.epochs,
        total_steps=length.total_steps,
        order=length.order,
        val_windows=length.val_windows,
        precision=precision,
        device=device,
        threads_per_device=options.threads_per_device or (1 if device == "cpu" else None),
        steps_per_print=options.steps_per_print or recipe.steps_per_print or DEFAULT_STEPS_PER_PRINT,
        notices=tuple(told),
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


def _resolve_batch(
    options: Options, recipe: Recipe | None, topology: Topology, problems: Problems, notices: list[str]
) -> BatchPlan | None:
    flags = BatchRequest(
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size_per_gpu,
        gradient_accumulation_steps=options.grad_accum_steps,
    )
    if recipe is None or topology.world_size % topology.sizes.ranks_per_copy:
        return None
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


def _check_vocabulary(
    model: GPT2Config | None,
    files: tuple[TokenFile | None, TokenFile | None],
    options: Options,
    topology: Topology,
    problems: Problems,
    notices: list[str],
) -> None:
    """Every id must have an embedding. Reads the ids, on one rank, where no sidecar vouches for them."""
    train, val = files
    if train and val:
        ours, theirs = train.sidecar.tokenizer, val.sidecar.tokenizer
        if ours and theirs and ours.sha256 != theirs.sha256:
            problems.add(f"{train.path} and {val.path} were made with different tokenizers: prepare them together")
    for file in files:
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
            if options.init_from:
                cure = f"prepare the text with its tokenizer (data_prep/preprocess.py --tokenizer {options.init_from})"
            problems.add(
                f"{file.path}: its largest id is {largest}, but the vocabulary ends at {model.vocab_size - 1}: {cure}"
            )
