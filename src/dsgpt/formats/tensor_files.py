"""Files of named tensors, read and written one tensor at a time, so that a whole model need not be in memory.

Only safetensors files are written (https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON
header, the header, the tensors' bytes). The safetensors library can only write a model that is entirely in memory.
"""

import contextlib
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsgpt.common.errors import UserError
from dsgpt.common.files import Advance
from dsgpt.common.json_files import clipped_text
from dsgpt.formats.tokenizer_files import reason_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of numbers by their names in flags."""
_DTYPE_NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES_OF_DTYPES = {dtype: name for name, dtype in _DTYPE_NAMES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """Type of the numbers; None if it is not fp64, fp32, fp16 or bf16: no weight has such a type."""
    read: Callable[[], Tensor]
    """Reads the tensor, to the CPU."""
    read_slices: Callable[[tuple[slice, ...]], Tensor] | None = None
    """Reads no more than a slice of every dimension; None if the file cannot."""

    @property
    def bytes(self) -> int:
        """Size of the data of a weight."""
        assert self.dtype is not None  # it is a weight
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def stored_in_fp32(shapes: Mapping[str, Sequence[int]], read: Callable[[str], Tensor]) -> dict[str, StoredTensor]:
    """Tensors in fp32 of these ``shapes``, by name; ``read`` reads one by its name."""
    shaped = {name: partial(StoredTensor, shape=tuple(shape)) for name, shape in shapes.items()}
    return {name: stored(dtype=torch.float32, read=partial(read, name)) for name, stored in shaped.items()}


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; only the header is read.

    Raises:
        UserError: it is not a safetensors file.
    """
    try:
        file: Any = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part, read = file.get_slice(name), partial(file.get_tensor, name)
            shape, dtype = tuple(part.get_shape()), _DTYPE_NAMES.get(part.get_dtype())
            tensors[name] = StoredTensor(shape=shape, dtype=dtype, read=read, read_slices=part.__getitem__)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is not a readable safetensors file ({clipped_text(str(error))})") from error
    return tensors


def open_pickled(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a ``torch.save`` file. Only tensors are unpickled: no code in the file runs.

    Raises:
        UserError: the file contains anything else, or is damaged.
    """
    try:
        # Files of torch before 1.6 are not zip archives. They cannot be mapped into memory, so they are read whole.
        with warnings.catch_warnings(action="ignore"):  # advice to report to PyTorch
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # the unpickler calls what the file says: any error may come from this one call
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            reason = "holds more than tensors, and loading it could run code: save the weights as safetensors"
        else:
            reason = f"is not a readable file of tensors ({reason_of(error)})"
        raise UserError(f"{path}: {reason}") from error
    plain = (torch.strided, "cpu", False)  # the numbers are in memory, one after the other or in strides
    if not isinstance(values, dict) or not all(
        isinstance(name, str)
        and type(value) in {Tensor, torch.nn.Parameter}
        and (value.layout, value.device.type, value.is_nested) == plain
        for name, value in values.items()
    ):
        raise UserError(f"{path}: is not a file of named tensors")
    dtypes = {name: value.dtype if value.dtype in _NAMES_OF_DTYPES else None for name, value in values.items()}
    return {
        name: StoredTensor(shape=tuple(value.shape), dtype=dtypes[name], read=partial(values.__getitem__, name))
        for name, value in values.items()
    }


class SafetensorsWriter:
    """Writes a safetensors file whose tensors come one at a time, in any order, with known names, shapes and dtypes.

    A context manager: when it ends without an error, the file is complete and durable.
    """

    def __init__(self, path: Path, announced: Mapping[str, tuple[Sequence[int], torch.dtype]], **metadata: str) -> None:
        """Create the file and write its header.

        Args:
            path: must not exist.
            announced: shape and dtype by name.
            metadata: texts for the header.

        Raises:
            OSError: the file cannot be created.
        """
        header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        # The format allows no gaps, and readers need each tensor aligned to its element size: widest dtypes first.
        self.names = sorted(announced, key=lambda name: -announced[name][1].itemsize)
        """The order of the tensors in the file."""
        self._announced = announced
        self._missing: dict[str, int] = {}
        """Elements that have not come yet."""
        self._starts: dict[str, int] = {}
        end = 0
        for name in self.names:
            shape, dtype = announced[name]
            self._missing[name] = torch.Size(shape).numel()
            start, end = end, end + self._missing[name] * dtype.itemsize
            self._starts[name] = start
            header[name] = {"dtype": _NAMES_OF_DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        words = json.dumps(header, separators=(",", ":")).encode()
        words += b" " * (-len(words) % _ALIGNMENT)
        self._data_start = 8 + len(words)
        self._file = path.open("xb")
        try:
            with self._named_errors():
                self._file.write(len(words).to_bytes(8, "little") + words)
        except OSError:
            self._file.close()
            raise

    def put_part(self, name: str, start: int, part: Tensor) -> None:
        """Write elements of a tensor, flat and on the CPU, from its element ``start`` on; each of them must come once.

        Raises:
            OSError: the file system refuses.
            ValueError: their dtype is not the announced one.
        """
        dtype = self._announced[name][1]
        if part.dtype != dtype:
            raise ValueError(f"{name} was announced as {dtype}, but is {part.dtype}")
        self._missing[name] -= part.numel()
        with self._named_errors():
            self._file.seek(self._data_start + self._starts[name] + start * dtype.itemsize)
            self._file.write(part.detach().contiguous().view(torch.uint8).numpy().data)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Add the file's name to errors of the file system."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file.name)) from error

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._named_errors(), self._file:  # closed even if something below fails
            if kind is None:
                if missing := [name for name, count in self._missing.items() if count]:
                    raise ValueError(f"announced tensors were not written once: {', '.join(missing)}")
                self._file.flush()
                os.fsync(self._file.fileno())


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor], *, progress: Advance, **metadata: str) -> None:
    """Write ``tensors``, reading one at a time; the file is durable on return.

    Args:
        path: the new file.
        tensors: by name, all floating-point.
        progress: gets the number of bytes written since its last call.
        metadata: texts for the header.

    Raises:
        ValueError: one is no weight, or of another shape than it says.
    """
    announced = {}
    for name, stored in tensors.items():
        if stored.dtype is None:
            raise ValueError(f"{name}: no weight has the dtype of this tensor")
        announced[name] = stored.shape, stored.dtype
    with SafetensorsWriter(path, announced, **metadata) as file:
        for name in file.names:
            value = tensors[name].read()
            if value.shape != tensors[name].shape:
                raise ValueError(f"{name} was announced as {tensors[name].shape}, but is {tuple(value.shape)}")
            file.put_part(name, 0, value.reshape(-1))
            progress(tensors[name].bytes)
