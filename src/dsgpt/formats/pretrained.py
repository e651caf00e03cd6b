"""Published weights in a Hugging Face folder, read one tensor at a time."""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of
from dsgpt.common.json_files import JsonError, clipped_text, read_object
from dsgpt.formats.hugging_face import HEAD, PREFIX, canonical_value, hugging_face_name, hugging_face_shape
from dsgpt.formats.tensor_files import StoredTensor, open_pickled, open_safetensors
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import parameter_shapes

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights, in the order of preference; each may be split into parts, listed in ``NAME.index.json``."""
_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
"""The causal mask, which older files contain as a weight."""


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        UserError: the file cannot be read, or does not contain an object.
    """
    try:
        return read_object(path)
    except JsonError as error:
        raise UserError(f"{path}: is not a readable JSON file ({error})") from error


class PretrainedWeights:
    """The weights of a Hugging Face folder as canonical parameters; each call reads one.

    Args:
        folder: contains ``model.safetensors`` or ``pytorch_model.bin``, whole or in parts.
        config: the shape that the weights must have.

    Raises:
        UserError: a file cannot be read, or tensors are missing, unknown, there twice or of another shape.
    """

    def __init__(self, folder: Path, config: GPT2Config) -> None:
        self._config = config
        self.files = weight_files(folder)
        reader = open_safetensors if self.files[0].suffix == ".safetensors" else open_pickled
        self._stored: dict[str, StoredTensor] = {}
        for file in self.files:
            for name, tensor in reader(file).items():
                bare = name.removeprefix(PREFIX)
                if bare in self._stored:
                    raise UserError(
                        f"{file}: {clipped_text(bare)} is there twice, with and without the prefix {PREFIX!r} or in "
                        "two files: which of them belongs to the model is unknown"
                    )
                self._stored[bare] = tensor
        self._shapes = parameter_shapes(config)
        _check(self._stored, self._shapes, config, place=self.files[0])

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """The canonical parameter ``name`` of ``shape``, fp32 on the CPU.

        Raises:
            UserError: the output head in the file differs from the embedding.
        """
        if tuple(shape) != tuple(self._shapes[name]):
            raise ValueError(f"{name} has the shape {tuple(self._shapes[name])}, but {tuple(shape)} was asked for")
        value = self._stored[_stored_name(name)].read()
        if name == "wte.weight" and HEAD in self._stored and not torch.equal(self._stored[HEAD].read(), value):
            raise UserError(f"{self.files[0]}: {HEAD} differs from wte.weight: in GPT-2 they are the same tensor")
        return canonical_value(name, value, self._config)

    def tensors(self) -> dict[str, StoredTensor]:
        """All parameters by canonical name, not read yet."""
        return {
            name: StoredTensor(shape=tuple(shape), dtype=torch.float32, read=partial(self, name, shape))
            for name, shape in self._shapes.items()
        }

    def sha256(self, progress: Callable[[int], None] = lambda _: None) -> str:
        """The hash of the file; of several files, the hash of the lines that ``sha256sum`` prints for them."""
        hashes = {file.name: sha256_of(file, progress) for file in self.files}
        if len(hashes) == 1:
            return hashes[self.files[0].name]
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.stat().st_size for file in self.files)


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a Hugging Face folder.

    Raises:
        UserError: there are none, or a part is missing.
    """
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        if (folder / index_file(name)).is_file():
            return _parts(folder / index_file(name))
    raise UserError(f"{folder}: holds neither {' nor '.join(WEIGHT_FILES)}")


def index_file(name: str) -> str:
    """The file that lists the parts of the weight file ``name``."""
    return f"{name}.index.json"


def parts_of(index: Path) -> list[str]:
    """The names of the parts that ``index`` lists; they are in the same folder.

    Raises:
        UserError: it is not such an index, or names a file elsewhere.
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise UserError(f"{index}: does not say which file holds which weight")
    parts = sorted(set(names.values()))
    for part in parts:
        if Path(part).name != part or len(part.encode()) > 255 or "\0" in part:
            raise UserError(f"{index}: names {clipped_text(part)}, which is not a file beside it")
    return parts


def _parts(index: Path) -> list[Path]:
    parts = [index.parent / name for name in parts_of(index)]
    for part in parts:
        if not part.is_file():
            raise UserError(f"{part}: is missing, but {index.name} names it")
    return parts


def _stored_name(name: str) -> str:
    return hugging_face_name(name).removeprefix(PREFIX)


def _check(stored: dict[str, StoredTensor], shapes: dict[str, torch.Size], config: GPT2Config, *, place: Path) -> None:
    expected = {_stored_name(name): hugging_face_shape(name, shape, config) for name, shape in shapes.items()}
    expected_head = expected["wte.weight"] if HEAD in stored else None
    if expected_head:
        expected[HEAD] = expected_head
    extra = [name for name in stored if name not in expected and not _BUFFERS.fullmatch(name)]
    missing = [name for name in expected if name not in stored]
    problems = [
        f"{place}: {', '.join(names[:3])} {what}"
        for names, what in (
            (missing, "is missing: it must hold every weight that config.json announces"),
            (extra, "is not a weight of a GPT-2 language model"),
        )
        if names
    ]
    problems += [
        f"{place}: {name} has the shape {list(stored[name].shape)}, by config.json it must be {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    problems += [
        f"{place}: {name} holds no floating-point numbers: quantized weights cannot be loaded"
        for name in expected
        if name in stored and stored[name].dtype is None
    ]
    if problems:
        raise UserError(*problems[:4])
