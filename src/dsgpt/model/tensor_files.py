"""Files of named tensors, read and written one tensor at a time, so that no whole model is ever in memory.

Written are safetensors files alone (https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON
header, the header, the tensors' bytes); its library writes from a whole model in memory only.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsgpt.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names that flags give them."""
_DTYPE_NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES_OF_DTYPES = {dtype: name for name, dtype in _DTYPE_NAMES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that is not in memory yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for one that no weight has: whole numbers, quantized ones."""
    read: Callable[[], Tensor]
    """Brings it, on the CPU."""

    @property
    def bytes(self) -> int:
        """Of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; only its header is read.

    Raises:
        UserError: the file is none.
    """
    try:
        file = safe_open(path, framework="pt")
        found = {}
        for name in file.keys():  # noqa: SIM118 - no mapping
            part = file.get_slice(name)
            dtype = _DTYPE_NAMES.get(part.get_dtype())
            found[name] = StoredTensor(shape=tuple(part.get_shape()), dtype=dtype, read=partial(file.get_tensor, name))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is no readable safetensors file ({error})") from error
    return found


def open_pickled(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a ``torch.save`` file; nothing but tensors is unpickled, whatever else it asks for.

    Raises:
        UserError: the file holds something else, or is damaged.
    """
    try:
        # Files of torch before 1.6 are no zip archives and cannot be mapped into memory.
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: holds more than tensors, and what it holds could run code: save the weights as safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise UserError(f"{path}: is no readable file of tensors ({str(error).partition(chr(10))[0]})") from error
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise UserError(f"{path}: is no file of named tensors")
    return {
        name: StoredTensor(
            shape=tuple(value.shape),
            dtype=value.dtype if value.dtype in _NAMES_OF_DTYPES else None,
            read=partial(_itself, value),
        )
        for name, value in values.items()
    }


def _itself(value: Tensor) -> Tensor:
    return value


def write_safetensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write ``tensors``, each read when its turn comes; durable on return.

    Args:
        path: the new file.
        tensors: by name, of the dtypes of weights.
        metadata: texts for the header.
        progress: is told the bytes written since its last call.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # The format wants no gaps, and readers want each tensor aligned to its own element size.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    end = 0
    for name in names:
        stored = tensors[name]
        start, end = end, end + stored.bytes
        header[name] = {
            "dtype": _NAMES_OF_DTYPES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [start, end],
        }
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(words).to_bytes(8, "little"))
        file.write(words)
        for name in names:
            file.write(_bytes(name, tensors[name]))
            progress(tensors[name].bytes)
        file.flush()
        os.fsync(file.fileno())


def _bytes(name: str, stored: StoredTensor) -> memoryview:
    value = stored.read()
    if value.dtype != stored.dtype or tuple(value.shape) != stored.shape:
        raise ValueError(
            f"{name} was announced as {stored.dtype} {stored.shape}, and is {value.dtype} {tuple(value.shape)}"
        )
    return memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())
