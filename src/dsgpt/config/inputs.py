"""The inputs of a run, read one by one: recipe, data, published weights, model, device and precision."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import is_utf8, undecodable
from dsgpt.common.json_files import read_json
from dsgpt.config.options import Options, shape_overrides
from dsgpt.config.recipe import Recipe, read_recipe
from dsgpt.data.data_set import DataSet, open_data
from dsgpt.data.token_file import sidecar_path
from dsgpt.formats.tokenizer_files import model_folder
from dsgpt.machine.topology import Topology
from dsgpt.model.config import GPT2_VOCAB_SIZE, PRESETS, SHAPE_FLAGS, GPT2Config, length_problems, shape_problems

if TYPE_CHECKING:
    from dsgpt.formats.hugging_face import PretrainedWeights


@dataclass(frozen=True, kw_only=True)
class InitFrom:
    """A published model."""

    given: str
    """A Hugging Face folder, or a name on the hub."""
    shape: dict[str, int]
    """The fields of its ``GPT2Config`` without the dropout, which belongs to training."""
    sha256: str | None = None
    """Hash of its weights, if the resumed run recorded it. The source itself is then not opened."""

    @property
    def size_name(self) -> str:
        """The name of the preset that has its shape; without one, the last part of its own name."""
        same = (name for name, preset in PRESETS.items() if preset.as_dict().items() >= self.shape.items())
        return next(same, Path(self.given).name)

    def weights(self, config: GPT2Config, *, quiet: bool = False) -> "PretrainedWeights":
        """Pretrained weights, downloaded if necessary. Names and shapes are checked; values are not read yet.

        Raises:
            UserError: they cannot be fetched, or are not those of a GPT-2 of this shape.
        """
        from dsgpt.formats.hugging_face import PretrainedWeights  # noqa: PLC0415 - torch takes seconds; --help should not

        return PretrainedWeights(model_folder(self.given, weights=True, quiet=quiet), config)


def read_init_from(options: Options, *, run_dir: Path, problems: Problems, quiet: bool) -> InitFrom | None:
    """The source that ``--init_from`` names; None if there is none or it cannot be used.

    Args:
        options: the flags.
        run_dir: the folder of the run. A resumed run recorded its source there.
        problems: receives the mistakes, among them flags that contradict the shape of the source.
        quiet: fetch without progress bars.
    """
    if options.init_from is None:
        return None
    if not is_utf8(options.init_from):
        problems.add(f"--init_from {undecodable(options.init_from)}")
        return None
    source = None
    with problems.collect():
        source = _recorded(options, options.init_from, run_dir) or _open_weights(options.init_from, quiet=quiet)
    if source is None:
        return None
    given = shape_overrides(options)
    for field, flag in SHAPE_FLAGS.items():
        if given.get(field, source.shape[field]) != source.shape[field]:
            theirs = f"--init_from {source.given}, which has {source.shape[field]}"
            problems.add(f"{flag} {given[field]} contradicts {theirs}: leave the flag out")
    preset = PRESETS[options.model_size].as_dict() if options.model_size else source.shape
    if any(preset[field] != source.shape[field] for field in SHAPE_FLAGS if field != "vocab_size"):
        theirs = "{n_layer} layers, {n_head} heads, width {n_embd} and {block_size} positions".format(**source.shape)
        flags = f"--model_size {options.model_size} contradicts --init_from {source.given}"
        problems.add(f"{flags}, which has {theirs}: leave the flag out")
    return source


def _open_weights(given: str, *, quiet: bool) -> InitFrom:
    from dsgpt.formats.hugging_face import published_shape  # noqa: PLC0415 - as above

    folder = model_folder(given, weights=False, quiet=quiet)
    if (folder / "manifest.json").exists() or (folder / "metrics.jsonl").exists():
        command = f".venv/bin/python src/convert.py --from {given} --to hf OUT"
        cure = f"make a Hugging Face folder of it first ({command})"
        raise UserError(f"--init_from {given}: is a run or a checkpoint: {cure}")
    return InitFrom(given=given, shape=published_shape(folder / "config.json"))


def _recorded(options: Options, given: str, run_dir: Path) -> InitFrom | None:
    """The source that the resumed run recorded, if it is ``given``. It is not opened: the run has checkpoints."""
    if not options.resume or not any(run_dir.glob("step-*/manifest.json")):
        return None
    try:
        if (run_dir / "config.json").is_symlink():  # --resume refuses it later
            return None
        trained = read_json(run_dir / "config.json")["training_config"]
        source, shape = trained["init_from"], {field: trained["model"][field] for field in SHAPE_FLAGS}
        if source["source"] != given or not all(isinstance(value, int) for value in shape.values()):
            return None
        return InitFrom(given=given, shape=shape, sha256=source["sha256"])
    except (UserError, KeyError, TypeError):  # written by another program, or without --init_from
        return None


DEFAULT_MODEL_SIZE = "small"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs that the options name. A field is None if its input is missing or wrong; ``problems`` says why."""

    options: Options
    topology: Topology
    """Topology from the launcher's variables; its ``sizes`` are not set yet."""
    run_dir: Path = Path()
    recipe: Recipe | None
    """The recipe without its wrong entries."""
    train: DataSet | None = None
    val: DataSet | None = None
    init_from: InitFrom | None = None
    model: GPT2Config | None
    seq_length: int | None
    """Tokens per sequence."""
    device: str
    """``cpu`` or ``cuda``."""
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""


def read_inputs(options: Options, topology: Topology, problems: Problems) -> Inputs:
    """Read what ``options`` name; each input is checked by itself."""
    from dsgpt.machine.device import cuda_devices, default_precision, gpu_problem  # noqa: PLC0415 - torch takes seconds; --help should not

    recipe = read_recipe(options.deepspeed_config, problems) if options.deepspeed_config else None
    train = _open(options.train_data_path, "--train_data_path", problems)
    val = _open(options.val_data_path, "--val_data_path", problems, apart=True)
    if train and val and len(train.files) + len(val.files) > 2:
        places = {file.path.resolve() for file in train.files}
        for path in [file.path for file in val.files if file.path.resolve() in places]:
            problems.add(f"{path}: is in --train_data_path and in --val_data_path: leave it out of one of them")
    run_dir = options.checkpoint_path or Path("checkpoint") / (options.run_type or "")
    init_from = read_init_from(options, run_dir=run_dir, problems=problems, quiet=not topology.is_main)
    model = None
    if init_from or not options.init_from:
        shape: dict[str, Any] = PRESETS[options.model_size or DEFAULT_MODEL_SIZE].as_dict()
        shape["vocab_size"] = (train.vocab_size if train else None) or GPT2_VOCAB_SIZE
        shape |= shape_overrides(options) | (init_from.shape if init_from else {})
        if options.dropout is not None:
            shape["dropout"] = options.dropout
        wrong = shape_problems(shape)
        problems.add(*wrong)
        model = None if wrong else GPT2Config(**shape)
    seq_length = options.seq_length
    if model is not None:
        seq_length = seq_length or model.block_size
        problems.add(*length_problems(seq_length, model.block_size))
    gpus = cuda_devices()
    device = ("cuda" if gpus else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and not gpus:
        problems.add("--device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu, or check nvidia-smi")
        device = "cpu"
    if device == "cuda" and (trouble := gpu_problem(topology)):
        problems.add(trouble)
    asked = options.precision if options.precision != "auto" else (recipe.precision if recipe else None)
    precision = asked or default_precision(device)
    if device == "cpu" and precision == "fp16":
        where = "--precision fp16" if options.precision == "fp16" else f"{options.deepspeed_config}: fp16"
        problems.add(f"{where} needs a GPU: on CPU take --precision bf16 or fp32")
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


def _open(named: Path | str | None, flag: str, problems: Problems, *, apart: bool = False) -> DataSet | None:
    with problems.collect():
        return open_data(named, flag=flag, apart=apart) if named else None
    return None


def check_vocabulary(inputs: Inputs, problems: Problems, notices: list[str]) -> None:
    """Refuse data with an id that has no embedding, and files of different tokenizers.

    Rank 0 reads the ids of a file whose sidecar does not name a vocabulary that fits.
    """
    model, files = inputs.model, [file for data in (inputs.train, inputs.val) if data for file in data.files]
    known = [(file.path, file.sidecar.tokenizer.sha256) for file in files if file.sidecar.tokenizer]
    for path, sha256 in known[1:]:
        if sha256 != known[0][1]:
            problems.add(f"{known[0][0]} and {path} were made with different tokenizers: prepare them together")
    for file in files:
        if model is None:
            continue
        if file.sidecar.vocab_size is None:
            notices.append(f"{file.path}: has no {file.path.stem}.json beside it; read as uint16 ids")
        fits = file.sidecar.vocab_size is not None and file.sidecar.vocab_size <= model.vocab_size
        if fits or not inputs.topology.is_main:
            continue
        if (largest := file.largest_id()) >= model.vocab_size:
            cure = f"give --vocab_size {max(largest + 1, file.sidecar.vocab_size or 0)} or more"
            if name := inputs.options.init_from:
                cure = f"prepare the text with its tokenizer (data_prep/preprocess.py --tokenizer {name})"
            end = f"the vocabulary ends at {model.vocab_size - 1}"
            problems.add(f"{file.path}: its largest id is {largest}, but {end}: {cure}")


def check_end_of_text(inputs: Inputs, problems: Problems) -> None:
    """With ``--mask_documents``, refuse data that do not all name the same end-of-text id."""
    files = [file for data in (inputs.train, inputs.val) if data for file in data.files]
    for file in files if inputs.options.mask_documents else ():
        own, first, place = file.sidecar.eot_id, files[0].sidecar.eot_id, f"--mask_documents: {sidecar_path(file.path)}"
        if own is None:
            problems.add(f"{place} does not say which id ends a document: write it there as eot_id")
        elif inputs.model is not None and own >= inputs.model.vocab_size:
            end = f"the vocabulary ends at {inputs.model.vocab_size - 1}"
            problems.add(f"{place} says that id {own} ends a document, but {end}: correct its eot_id")
        elif first is not None and own != first:
            problems.add(f"--mask_documents: id {own} ends documents in {file.path}, and {first} in {files[0].path}")
