"""``--init_from``: the published weights that a run starts from instead of random ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsgpt.common.errors import UserError
from dsgpt.common.files import is_utf8, undecodable
from dsgpt.common.problems import Problems
from dsgpt.config.options import Options
from dsgpt.model.config import PRESETS, SHAPE_FLAGS, GPT2Config

if TYPE_CHECKING:
    from dsgpt.formats.pretrained import PretrainedWeights


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
        """Its weights, downloaded if necessary. Names and shapes are checked; values are not read yet.

        Raises:
            UserError: they cannot be fetched, or are not those of a GPT-2 of this shape.
        """
        from dsgpt.formats.hub_models import model_folder  # noqa: PLC0415 - torch takes seconds; --help should not
        from dsgpt.formats.pretrained import PretrainedWeights  # noqa: PLC0415

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
    try:
        source = _recorded(options, options.init_from, run_dir) or _open(options.init_from, problems, quiet=quiet)
    except UserError as error:
        problems.add(*error.problems)
        return None
    if source is not None:
        _check_flags(options, source, problems)
    return source


def _open(given: str, problems: Problems, *, quiet: bool) -> InitFrom | None:
    from dsgpt.formats.hub_models import model_folder  # noqa: PLC0415 - as above
    from dsgpt.formats.hugging_face import published_shape  # noqa: PLC0415
    from dsgpt.formats.pretrained import read_json  # noqa: PLC0415

    folder = model_folder(given, weights=False, quiet=quiet)
    if (folder / "manifest.json").exists() or (folder / "metrics.jsonl").exists():
        raise UserError(
            f"--init_from {given}: is a run or a checkpoint: make a Hugging Face folder of it first "
            f"(.venv/bin/python src/convert.py --from {given} --to hf OUT)"
        )
    shape = published_shape(read_json(folder / "config.json"), place=str(folder / "config.json"), problems=problems)
    return InitFrom(given=given, shape=shape) if shape else None


def _recorded(options: Options, given: str, run_dir: Path) -> InitFrom | None:
    """The source that the resumed run recorded, if it is ``given``. It is not opened: the run has checkpoints."""
    from dsgpt.formats.pretrained import read_json  # noqa: PLC0415 - as above

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


def _check_flags(options: Options, source: InitFrom, problems: Problems) -> None:
    given = options.model_overrides()
    for field, flag in SHAPE_FLAGS.items():
        if given.get(field, source.shape[field]) != source.shape[field]:
            problems.add(
                f"{flag} {given[field]} contradicts --init_from {source.given}, which has {source.shape[field]}: "
                "leave the flag out"
            )
    preset = PRESETS[options.model_size].as_dict() if options.model_size else source.shape
    if any(preset[field] != source.shape[field] for field in SHAPE_FLAGS if field != "vocab_size"):
        problems.add(
            f"--model_size {options.model_size} contradicts --init_from {source.given}, which has "
            f"{source.shape['n_layer']} layers, {source.shape['n_head']} heads, width {source.shape['n_embd']} and "
            f"{source.shape['block_size']} positions: leave the flag out"
        )
