"""The inputs of a run, read one by one: recipe, data, initial weights, model, device and precision."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.problems import Problems
from dsgpt.config.initial_weights import InitFrom, read_init_from
from dsgpt.config.options import RUN_TYPES, Options
from dsgpt.config.recipe import Recipe, read_recipe
from dsgpt.data.sidecar import TokenFileError
from dsgpt.data.token_file import TokenFile, open_token_file
from dsgpt.model.config import GPT2_VOCAB_SIZE, PRESETS, GPT2Config, shape_problems
from dsgpt.runtime.topology import Topology

DEFAULT_MODEL_SIZE = "small"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs that the options name. A field is None if its input is missing or wrong; ``problems`` says why."""

    options: Options
    topology: Topology
    """From the launcher's variables; its ``sizes`` are not set yet."""
    run_dir: Path
    recipe: Recipe | None
    """Without its wrong entries."""
    train: TokenFile | None
    val: TokenFile | None
    init_from: InitFrom | None
    model: GPT2Config | None
    seq_length: int | None
    """Tokens per sequence."""
    device: str
    """``cpu`` or ``cuda``."""
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""


def read_inputs(options: Options, topology: Topology, problems: Problems) -> Inputs:
    """Read what ``options`` name; each input is checked by itself."""
    recipe = read_recipe(options.deepspeed_config, problems) if options.deepspeed_config else None
    train, val = _open(options.train_data_path, problems), _open(options.val_data_path, problems)
    run_dir = options.checkpoint_path or Path("checkpoint") / (options.run_type or "")
    init_from = read_init_from(options, run_dir=run_dir, problems=problems, quiet=not topology.is_main)
    model = _resolve_model(options, train, init_from, problems)
    seq_length = _resolve_seq_length(options.seq_length, model, problems)
    device, precision = _resolve_device(options, recipe, topology, problems)
    return Inputs(
        options=options,
        topology=topology,
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


def check_required(options: Options, problems: Problems) -> None:
    """Refuse a command line without a required flag, or with flags that contradict each other."""
    required = {
        "--run_type": (options.run_type, f"one of {', '.join(RUN_TYPES)}"),
        "--train_data_path": (
            options.train_data_path,
            "a .bin file made by `.venv/bin/python data_prep/preprocess.py`",
        ),
        "--val_data_path": (options.val_data_path, "a .bin file made by `.venv/bin/python data_prep/preprocess.py`"),
        "--deepspeed_config": (options.deepspeed_config, "a recipe, for example ds_configs/zero1.json"),
    }
    for flag, (value, what) in required.items():
        if value is None and not problems.mention(flag):
            problems.add(f"{flag} is missing: give {what}")
    if options.resume and options.overwrite:
        problems.add("--resume continues the run in the folder, --overwrite deletes it: give one of them")


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


def _resolve_seq_length(asked: int | None, model: GPT2Config | None, problems: Problems) -> int | None:
    if model is None:
        return asked
    length = asked or model.block_size
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


def check_vocabulary(inputs: Inputs, problems: Problems, notices: list[str]) -> None:
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
        fits = file.sidecar.vocab_size is not None and file.sidecar.vocab_size <= model.vocab_size
        if fits or not inputs.topology.is_main:
            continue
        largest = file.largest_id()
        if largest >= model.vocab_size:
            cure = f"give --vocab_size {max(largest + 1, file.sidecar.vocab_size or 0)} or more"
            if name := inputs.options.init_from:
                cure = f"prepare the text with its tokenizer (data_prep/preprocess.py --tokenizer {name})"
            problems.add(
                f"{file.path}: its largest id is {largest}, but the vocabulary ends at {model.vocab_size - 1}: {cure}"
            )
