"""The tensors of a checkpoint as pieces: where each lies, in which file, and how whole tensors are read from them.

A piece is a box: a range of every dimension of a whole tensor. A flat range of a tensor, which is what ZeRO gives a
rank, is cut into boxes: the end of a row, whole rows, the beginning of a row. A reader needs no other rule, and reads
a part of a piece as a slice.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from dsgpt.checkpoints import store
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Count, Positive, read_or_refuse
from dsgpt.formats.tensor_files import StoredTensor, open_safetensors, stored_in_fp32
from dsgpt.model.config import STATE_NAMES
from dsgpt.model.gpt2 import parameter_shapes

MOMENTS = "optimizer.safetensors"
_LARGEST_INDEX = 1 << 30
"""Bytes: far more than a thousand ranks need."""


class Box(NamedTuple):
    """A range of every dimension of a whole tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """The box that covers a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index behind it, in every dimension."""
        return tuple(map(sum, zip(self.start, self.shape, strict=True)))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def meet(self, other: "Box") -> "Box | None":
        """Intersection of the two boxes; None if it is empty."""
        start = tuple(map(max, zip(self.start, other.start, strict=True)))
        stop = tuple(map(min, zip(self.stop, other.stop, strict=True)))
        shape = tuple(after - before for before, after in zip(start, stop, strict=True))
        return Box(start, shape) if all(length > 0 for length in shape) else None

    def slices(self, within: "Box") -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds ``within``."""
        starts = (own - other for own, other in zip(self.start, within.start, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    def key(self, name: str) -> str:
        """The name of this piece of the tensor ``name`` in a file: ``wte.weight[0:25129,0:768]``."""
        return f"{name}[{','.join(f'{start}:{stop}' for start, stop in zip(self.start, self.stop, strict=True))}]"


def cut(boxes: Iterable[Box], start: int, stop: int) -> list[Box]:
    """The boxes of the elements from ``start`` to ``stop`` of all ``boxes``, flat and end to end.

    Elements past the end are left out.
    """
    parts: list[Box] = []
    for box in boxes:
        parts += _cut(box, max(start, 0), min(stop, box.numel))
        start, stop = start - box.numel, stop - box.numel
    return parts


def _cut(box: Box, start: int, stop: int) -> Iterator[Box]:
    width = math.prod(box.shape[1:])
    while start < stop:
        row, offset = divmod(start, width)
        first = box.start[0] + row
        if offset == 0 and stop - start >= width:
            rows = (stop - start) // width
            yield Box((first, *box.start[1:]), (rows, *box.shape[1:]))
            start += rows * width
        else:
            end = min(stop, (row + 1) * width)
            for inner in _cut(Box(box.start[1:], box.shape[1:]), offset, end - row * width):
                yield Box((first, *inner.start), (1, *inner.shape))
            start = end


def why_not_whole(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Reason why ``boxes`` do not cover a tensor of ``shape`` exactly once; empty if they do.

    Counts how many boxes have each cell between the edges of all boxes. The corners of a box say how the count changes
    there, and sums along every dimension give the counts.
    """
    dimensions = len(shape)
    if any((len(box.start), len(box.shape)) != (dimensions, dimensions) for box in boxes):
        return "a piece is outside of it"
    both = torch.tensor([(*box.start, *box.shape) for box in boxes], dtype=torch.long)
    starts, sizes = both.view(-1, 2, dimensions).unbind(1)
    if ((starts < 0) | (sizes < 1) | (starts >= torch.tensor(shape)) | (sizes > torch.tensor(shape) - starts)).any():
        return "a piece is outside of it"
    places, edges = [], []
    for axis, length in enumerate(shape):
        ends = torch.cat([starts[:, axis], starts[:, axis] + sizes[:, axis], torch.tensor([0, length])])
        different, place = torch.unique(ends, return_inverse=True)
        places.append(place[:-2].view(2, -1))  # of each box: where it starts, and where it stops
        edges.append(len(different))
    counts = torch.zeros(edges, dtype=torch.int32)
    for corner in itertools.product((0, 1), repeat=dimensions):
        where = tuple(place[end] for place, end in zip(places, corner, strict=True))
        counts.index_put_(where, torch.tensor((-1) ** sum(corner), dtype=torch.int32), accumulate=True)
    for axis in range(dimensions):
        torch.cumsum(counts, axis, out=counts)
    counts = counts[(slice(-1),) * dimensions]  # nothing is behind the last edges
    if (counts > 1).any():
        return "two pieces have the same elements"
    return "" if counts.all() else "no piece has some of its elements"


@dataclass(frozen=True, kw_only=True)
class CutTensor:
    """A parameter whose pieces are in several files; its moments are cut alike."""

    shape: Annotated[tuple[Positive, ...], Field(min_length=1)]
    pieces: list[tuple[Count, tuple[Count, ...], tuple[Positive, ...]]]
    """The writer, and start and shape of the box."""

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Starts and stops of the pieces, each (pieces, dimensions)."""
        starts, sizes = (torch.tensor([piece[part] for piece in self.pieces]) for part in (1, 2))
        return starts, starts + sizes

    def meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Yields each piece that overlaps ``box``: its writer, the piece, and the overlap."""
        starts, stops = self._ends
        met = ((starts < torch.tensor(box.stop)) & (stops > torch.tensor(box.start))).all(1)
        for number in met.nonzero().flatten().tolist():
            writer, start, shape = self.pieces[number]
            common = box.meet(piece := Box(start, shape))
            assert common is not None
            yield writer, piece, common


@dataclass(frozen=True, kw_only=True)
class Index:
    """The contents of ``pieces.json``."""

    version: Literal[2] = 2
    writers: Positive
    """Number of ranks that wrote; writer i is rank i."""
    moments: list[str]
    """Names of the moments of every parameter, such as ``exp_avg``."""
    tensors: dict[str, CutTensor]
    """Shape and pieces of each tensor, by canonical name."""

    @classmethod
    def of(
        cls, written: Sequence[Mapping[str, Iterable[Box]]], *, moments: list[str], shapes: Mapping[str, Sequence[int]]
    ) -> "Index":
        """The index of what each rank has ``written``.

        Raises:
            ValueError: it is not every element of the tensors of ``shapes`` once.
        """
        pieces: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {name: [] for name in shapes}
        for writer, boxes in enumerate(written):
            for name, each in boxes.items():
                pieces[name] += [(writer, *box) for box in each]
        tensors = {name: CutTensor(shape=tuple(shape), pieces=pieces[name]) for name, shape in shapes.items()}
        index = cls(writers=len(written), moments=moments, tensors=tensors)
        if fault := index.fault():
            raise ValueError(fault)
        return index

    def fault(self) -> str:
        """Why the pieces do not make up the tensors; empty if they do."""
        for name, tensor in self.tensors.items():
            if reason := why_not_whole(tensor.shape, [Box(start, shape) for _, start, shape in tensor.pieces]):
                return f"{name} is not whole: {reason}"
            if any(writer >= self.writers for writer, *_ in tensor.pieces):
                return f"{name} is not whole: a piece has no writer"
        return ""

    def files(self, stem: str) -> list[str]:
        """The names of the files that hold pieces, for example of ``model.safetensors``."""
        writers = sorted({writer for tensor in self.tensors.values() for writer, *_ in tensor.pieces})
        return [numbered(stem, writer, self.writers) for writer in writers]


def numbered(name: str, writer: int, writers: int) -> str:
    """``model-00003.safetensors`` of ``model.safetensors``; the name itself if there is one writer."""
    return name if writers == 1 else f"{Path(name).stem}-{writer:05d}{Path(name).suffix}"


def read_index(checkpoint: Path) -> Index | None:
    """The index of a checkpoint; None if it has none, because its tensors are whole.

    Raises:
        UserError: it is not an index of this version, or its pieces do not make up the tensors.
    """
    path = checkpoint / store.INDEX
    if not path.exists():
        return None
    index = read_or_refuse(path, Index, "an index of this version", max_bytes=_LARGEST_INDEX)
    if fault := index.fault():
        raise UserError(f"{path}: {fault}")
    return index


def moment_key(name: str, moment: str) -> str:
    """The name of a moment in a file."""
    return f"{name}.{moment}"


class Pieces:
    """The tensors of a checkpoint of either version; what is asked for is read, and no more.

    Args:
        checkpoint: the folder.
        index: of its pieces; None if its tensors are whole.
    """

    def __init__(self, checkpoint: Path, index: Index | None) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, dict[str, StoredTensor]] = {}
        if index is None:
            weights = self._opened(store.WEIGHTS)
            moments = self._opened(MOMENTS) if (checkpoint / MOMENTS).exists() else {}
            keys = [key for key in STATE_NAMES if any(name.endswith(f".{key}") for name in moments)]
            shapes = {name: tensor.shape for name, tensor in weights.items()}
            whole = {name: CutTensor(shape=shape, pieces=[(0, *Box.whole(shape))]) for name, shape in shapes.items()}
            index = Index(writers=1, moments=keys, tensors=whole)
            if moments.keys() != {moment_key(name, key) for name in weights for key in keys}:
                place = checkpoint / store.WEIGHTS
                raise UserError(f"{checkpoint / MOMENTS}: its tensors are not those of the weights in {place}")
        self.index = index
        self.shapes = {name: tensor.shape for name, tensor in index.tensors.items()}

    def _opened(self, file: str) -> dict[str, StoredTensor]:
        if file not in self._files:
            self._files[file] = open_safetensors(self.checkpoint / file)
        return self._files[file]

    def _piece(self, name: str, moment: str | None, writer: int, box: Box) -> StoredTensor:
        """One piece, which is as large as the index says."""
        writers = self.index.writers
        file = numbered(MOMENTS if moment else store.WEIGHTS, writer, writers)
        key = name if writers == 1 else box.key(name)
        stored = self._opened(file).get(moment_key(key, moment) if moment else key)
        if stored is None or stored.shape != box.shape:
            raise UserError(f"{self.checkpoint / file}: its tensors are not those that its checkpoint says")
        return stored

    def check(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare the names and shapes of pieces in their files with the index: of ``ranks``, each checks some files.

        Raises:
            UserError: they differ.
        """
        for name, tensor in self.index.tensors.items():
            for writer, start, shape in tensor.pieces:
                for moment in (None, *self.index.moments) if writer % ranks == rank else ():
                    self._piece(name, moment, writer, Box(start, shape))

    def read(self, name: str, moment: str | None = None, *, boxes: Sequence[Box] | None = None) -> Tensor:
        """The weight ``name``, or a moment of it, in fp32 on the CPU.

        Args:
            name: canonical.
            moment: such as ``exp_avg``.
            boxes: parts of it.

        Returns:
            The whole tensor; with ``boxes`` their elements, flat and end to end.
        """
        tensor = self.index.tensors[name]
        wanted = [Box.whole(tensor.shape)] if boxes is None else boxes
        if len(tensor.pieces) == len(wanted) == 1 and tensor.pieces[0][1:] == wanted[0]:
            value = self._piece(name, moment, tensor.pieces[0][0], wanted[0]).read().float()
        else:
            value, start = torch.empty(sum(box.numel for box in wanted)), 0
            for box in wanted:
                part = value[start : start + box.numel].view(box.shape)
                start += box.numel
                for writer, piece, common in tensor.meeting(box):
                    read = self._piece(name, moment, writer, piece).read_slices
                    assert read is not None  # it is in a safetensors file
                    part[common.slices(box)] = read(common.slices(piece))
        return value.view(tensor.shape) if boxes is None else value.view(-1)

    def stored(self, moment: str | None = None) -> dict[str, StoredTensor]:
        """Every weight, or every one of a moment, by canonical name; none is read yet."""
        return stored_in_fp32(self.shapes, lambda name: self.read(name, moment))


def open_weights(files: store.ModelFiles) -> dict[str, StoredTensor]:
    """Every weight by canonical name, in the model's order; none is read yet.

    Raises:
        UserError: they are not those of the checkpoint's model.
    """
    shapes, where = parameter_shapes(files.config), files.checkpoint / store.WEIGHTS
    if store.INDEX in files.manifest.files:
        where = files.checkpoint / store.INDEX
        pieces = Pieces(files.checkpoint, index := read_index(files.checkpoint))
        files.manifest.require(files.checkpoint, index.files(store.WEIGHTS) if index else ())
        tensors = pieces.stored()
    else:
        tensors = open_safetensors(where)
    same = {name: tensor.shape for name, tensor in tensors.items()} == {name: tuple(s) for name, s in shapes.items()}
    if not same or any(tensor.dtype is None for tensor in tensors.values()):
        raise UserError(f"{where}: its tensors are not those of {files.checkpoint / store.MODEL}")
    return {name: tensors[name] for name in shapes}
