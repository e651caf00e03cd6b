"""The state of training in a checkpoint: how it is written, read and verified.

    model.safetensors        every weight, fp32, by canonical name
    optimizer.safetensors    every moment, as ``NAME.exp_avg``; absent before the first step, and if there are none
    training_state.json      what is not a tensor: ``Counters``

That is what one rank writes: version 1. Several ranks write version 2: each its own pieces, in
``model-00000.safetensors``, ``optimizer-00000.safetensors`` and so on. The main rank writes an index of all of them,
``pieces.json``: the place of every piece in the whole tensors, and its file. A strategy says which parts of which
tensors a rank has, and nothing is gathered. A reader puts whole tensors, or the parts that a rank needs, together from
the pieces (``checkpoints/pieces.py``). So any strategy resumes from any other's checkpoint.
"""

import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter
from safetensors.torch import load_file, save
from torch import Tensor

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import FileFacts
from dsgpt.checkpoints.pieces import MOMENTS, Box, Index, Pieces, cut, moment_key, numbered, read_index
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.common.json_files import Count, read_or_refuse
from dsgpt.formats.tensor_files import SafetensorsWriter, open_safetensors
from dsgpt.model.config import STATE_NAMES

COUNTERS = "training_state.json"


def is_state_file(name: str) -> bool:
    """Whether a file of a checkpoint, by its name in the manifest, has what ``StateReader`` reads besides weights."""
    return name in (store.INDEX, MOMENTS, COUNTERS) or bool(re.fullmatch(r"optimizer-\d{5,}\.safetensors", name))


def state_files(checkpoint: Path) -> list[str]:
    """The names of the files that ``StateReader`` reads of a checkpoint.

    Raises:
        UserError: its index is not one of this version.
    """
    if index := read_index(checkpoint):
        return [store.INDEX, *index.files(store.WEIGHTS), *(index.files(MOMENTS) if index.moments else ())]
    return [store.WEIGHTS, *([MOMENTS] if (checkpoint / MOMENTS).exists() else ())]


# Writes files of a checkpoint. Every failure is an ``OSError`` that names the reason and the file.

_EXPECTED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE)
"""Errors of a file system that does not accept a file."""


def save_pickled(value: Any, path: Path) -> None:
    """Write the new file ``path`` with ``torch.save``, for other programs; durable on return. Never read such a file.

    Raises:
        OSError: it could not be written.
    """
    with path.open("xb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise _as_os_error(error, path) from error
        file.flush()
        os.fsync(file.fileno())


def _as_os_error(error: Exception, path: Path) -> Exception:
    """The ``OSError`` that caused ``error``; ``error`` itself if none did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror, str(path))
        for number in _EXPECTED:
            if os.strerror(number) in str(cause):
                return OSError(number, os.strerror(number), str(path))
        cause = cause.__cause__ or cause.__context__
    return error


def require_room(folder: Path, needed: int) -> None:
    """Check that the file system has the ``needed`` bytes free.

    Raises:
        OSError: it has fewer.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"{os.strerror(errno.ENOSPC)}: the last checkpoint took {needed:,} bytes, and {free:,} are free"
        raise OSError(errno.ENOSPC, reason, str(folder))


def reason_of(error: OSError) -> str:
    """``/data/run/step-...: No space left on device``, for a message."""
    if isinstance(error, shutil.Error):  # from a copied folder: source, target and reason of each file
        return "; ".join(str(reason) for _, _, reason in error.args[0])
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what


class ParamState(NamedTuple):
    """The weight and the moments of one parameter, in fp32."""

    weight: Tensor
    exp_avg: Tensor | None = None
    """Adam's first moment; None before the first step and for SGD."""
    exp_avg_sq: Tensor | None = None
    """Adam's second moment."""
    momentum_buffer: Tensor | None = None
    """SGD's momentum; None before the first step, for SGD without momentum and for Adam."""

    @property
    def moments(self) -> dict[str, Tensor]:
        """Moments that are not None, by the names of ``STATE_NAMES``."""
        return {name: value for name in STATE_NAMES if (value := getattr(self, name)) is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "ParamState":
        """This state with ``change`` applied to every tensor: the weight first, then the moments by ``STATE_NAMES``."""
        return ParamState(change(self.weight), **{name: change(value) for name, value in self.moments.items()})


@dataclass(frozen=True)
class Shards:
    """The part of the state of training that one rank writes."""

    boxes: dict[str, list[Box]]
    """Boxes of each part in the whole tensors, by canonical name; parameters of which the rank writes nothing are left
    out."""
    states: Iterator[tuple[str, ParamState]]
    """Weights and moments, flat or not, one parameter at a time in any order; each is valid until the next one.

    The elements are those of the boxes, end to end. No communication."""

    def only(self, chosen: Callable[[str], bool]) -> "Shards":
        """The part of the ``chosen`` parameters."""
        boxes = {name: each for name, each in self.boxes.items() if chosen(name)}
        return Shards(boxes, ((name, state) for name, state in self.states if name in boxes))

    def share(self, rank: int, ranks: int, *, among: Callable[[str], bool] = lambda _: True) -> "Shards":
        """The share that ``rank`` writes of a state that ``ranks`` ranks hold alike: equal element counts, end to end.

        Args:
            rank: index of the rank among them.
            ranks: number of ranks.
            among: whether they hold a parameter alike; the share of other parameters is this rank's whole part.
        """
        if ranks == 1:
            return self
        sizes = {name: sum(box.numel for box in boxes) for name, boxes in self.boxes.items()}
        total, before = sum(size for name, size in sizes.items() if among(name)), 0
        ends: dict[str, tuple[int, int]] = {}
        for name, size in sizes.items():
            ends[name] = 0, size
            if among(name):
                first, last = total * rank // ranks - before, total * (rank + 1) // ranks - before
                ends[name] = max(first, 0), min(last, size)
                before += size
        boxes = {name: cut(self.boxes[name], *ends[name]) for name in sizes if ends[name][0] < ends[name][1]}

        def states() -> Iterator[tuple[str, ParamState]]:
            for name, state in self.states:
                if name in boxes:
                    part = slice(*ends[name])
                    moments = {key: moment.reshape(-1)[part] for key, moment in state.moments.items()}
                    yield name, ParamState(state.weight.reshape(-1)[part], **moments)

        return Shards(boxes, states())


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """The state of fp16's dynamic loss scale; see ``strategies.base.LossScale``."""

    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    step: int
    last_overflow: int
    patience: int


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The state of an optimizer that is not tensors."""

    optimizer_steps: Count
    """Steps that changed the weights; fewer than the run's where fp16 gradients overflowed."""
    loss_scale: LossScaleState | None = None
    """Loss scale of fp16; None in other precisions."""


# Brings what a rank saves into host memory.

BLOCK = 16 << 20
"""Elements of a pinned buffer, 64 MiB, so that waits are rare. PyTorch rounds pinned memory up to powers of two."""

Take = Callable[[int, Tensor], None]
"""Gets the index of a tensor's element and elements from there on, flat, in host memory; they are valid in the call."""


class HostCopies:
    """Hands on tensors in host memory; what is there already is not copied.

    What is on a GPU goes through two pinned buffers of ``BLOCK`` elements, on a stream of its own. While one is filled,
    the elements in the other are handed on. So the host waits once per buffer, however many tensors there are, and a
    tensor of any size needs no more memory.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        """None until the first tensor on a GPU comes, as all below."""
        self._buffers: list[Tensor] = []
        """The one that is filled, and the other."""
        self._filled = 0
        self._coming: list[tuple[Take, int, Tensor, Tensor]] = []
        """Of each part in the first buffer: who takes it, its first element, the part, and what it is copied from."""
        self._full: tuple[torch.cuda.Event, list[tuple[Take, int, Tensor, Tensor]]] | None = None
        """The same of the other buffer, and when its copies have ended."""

    def hand_on(self, value: Tensor, take: Take) -> None:
        """Let ``take`` have all elements of ``value``, in one or several calls, from now until ``finish`` returns.

        A ``value`` on a GPU must not change until then.
        """
        flat = value.detach().reshape(-1)
        if flat.device.type == "cpu":
            take(0, flat)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._buffers = [torch.empty(BLOCK, pin_memory=True) for _ in range(2)]
        self._stream.wait_stream(torch.cuda.current_stream())
        start = 0
        while start < len(flat):
            if self._filled == BLOCK:
                self._turn(self._stream)
            count = min(len(flat) - start, BLOCK - self._filled)
            part = self._buffers[0][self._filled : self._filled + count]
            with torch.cuda.stream(self._stream):
                part.copy_(flat[start : start + count], non_blocking=True)
            self._coming.append((take, start, part, flat))
            start, self._filled = start + count, self._filled + count

    def _turn(self, stream: torch.cuda.Stream) -> None:
        """Hand on what is in the other buffer, and fill that one next."""
        before, self._full = self._full, (stream.record_event(), self._coming)
        self._coming, self._filled = [], 0
        self._buffers.reverse()
        if before is not None:
            before[0].synchronize()
            for take, start, part, _ in before[1]:
                take(start, part)

    def finish(self) -> None:
        """Hand on what has not been yet; call it once, at the end."""
        if self._stream is not None:
            self._turn(self._stream)
            self._turn(self._stream)


class KeptState:
    """A copy of what a rank writes of the state at one step, in host memory; written while training continues.

    The memory is kept for the next copy, because allocating it costs more than filling it.
    """

    def __init__(self) -> None:
        self._boxes: dict[str, list[Box]] = {}
        self._states: dict[str, ParamState] = {}

    def keep(self, shards: Shards) -> None:
        """Copy ``shards``."""
        self._boxes, copies = shards.boxes, HostCopies()
        for name, state in shards.states:
            into = self._states.get(name)
            if into is None or into.moments.keys() != state.moments.keys():
                into = state.mapped(lambda value: torch.empty(value.shape, dtype=value.dtype))
            self._states[name] = into
            for kept, value in zip(into, state, strict=True):
                if kept is not None and value is not None:  # both or none
                    copies.hand_on(value, partial(_fill, kept))
        copies.finish()

    def shards(self) -> Shards:
        """The last copy."""
        return Shards(self._boxes, iter(self._states.items()))


def _fill(into: Tensor, start: int, part: Tensor) -> None:
    into.view(-1)[start : start + len(part)].copy_(part)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files and boxes that one rank wrote of the state of training."""

    boxes: dict[str, list[Box]]
    moments: list[str]
    """The moments that it wrote of each parameter."""
    files: dict[str, FileFacts]
    """Size and hash of its files, by name; the files are durable."""
    non_finite: list[str]
    """Weights of which it has an element that is NaN or infinite."""


def write_shards(folder: Path, shards: Shards, *, rank: int, ranks: int) -> Written:
    """Write a rank's part of the state of training into a checkpoint; no communication.

    What is on a GPU is copied in blocks (``HostCopies``); nothing is copied that is in host memory already.

    Args:
        folder: of the checkpoint.
        shards: of a strategy.
        rank: this one.
        ranks: all that write; a single one writes whole tensors.

    Raises:
        OSError: the file system refuses.
        ValueError: the tensors are not those of the boxes.
    """
    boxes, keys, copies = shards.boxes, list[str](), HostCopies()
    finite: dict[str, Tensor] = {}
    weights, moments = (folder / numbered(name, rank, ranks) for name in (store.WEIGHTS, MOMENTS))
    pieces = {name: {(name if ranks == 1 else box.key(name)): box for box in each} for name, each in boxes.items()}
    with ExitStack() as files:
        announced = {key: (box.shape, torch.float32) for each in pieces.values() for key, box in each.items()}
        writer = files.enter_context(SafetensorsWriter(weights, announced))
        optimizer: SafetensorsWriter | None = None
        for name, state in shards.states:
            if state.moments and optimizer is None:
                keys = list(state.moments)
                of_moments = {moment_key(piece, key): facts for piece, facts in announced.items() for key in keys}
                optimizer = files.enter_context(SafetensorsWriter(moments, of_moments))
            # NaN is both; needs no second tensor. All answers are read together, below.
            finite[name] = torch.stack(torch.aminmax(state.weight)).isfinite().all()
            _put(writer, state.weight, pieces[name], copies)
            for key, moment in state.moments.items():
                assert optimizer is not None  # every parameter has the same moments
                _put(optimizer, moment, {moment_key(piece, key): box for piece, box in pieces[name].items()}, copies)
        copies.finish()
    written = [weights, moments] if optimizer is not None else [weights]
    facts = {path.name: FileFacts.synced(path) for path in written}
    answers = torch.stack(list(finite.values())).tolist() if finite else []
    non_finite = [name for name, answer in zip(finite, answers, strict=True) if not answer]
    return Written(boxes=boxes, moments=keys, files=facts, non_finite=non_finite)


def _put(writer: SafetensorsWriter, held: Tensor, pieces: Mapping[str, Box], copies: HostCopies) -> None:
    """Write a tensor as ``pieces``, end to end."""
    ends = dict(zip(pieces, itertools.accumulate(box.numel for box in pieces.values()), strict=True))
    count = sum(box.numel for box in pieces.values())
    if count != held.numel():
        raise ValueError(f"a tensor has {held.numel():,} elements, and its boxes {', '.join(pieces)} have {count:,}")

    def take(start: int, part: Tensor) -> None:
        for key, end in ends.items():
            begin = end - pieces[key].numel
            first, last = max(start, begin), min(start + len(part), end)
            if first < last:
                writer.put_part(key, first - begin, part[first - start : last - start])

    copies.hand_on(held, take)


def complete_state(
    folder: Path, parts: Sequence[Written], counters: Counters, *, shapes: Mapping[str, Sequence[int]]
) -> dict[str, FileFacts]:
    """Check that the ``parts`` of all ranks are the state of training, and add what is not in them; main rank only.

    Args:
        folder: of the checkpoint.
        parts: by rank.
        counters: as they are at this step.
        shapes: every canonical name with its whole shape.

    Returns:
        The files of all parts.

    Raises:
        OSError: the file system refuses.
        ValueError: an element of the state is in no part, or in two.
    """
    moments = {tuple(part.moments) for part in parts if part.boxes}
    if len(moments) != 1:
        raise ValueError(f"the ranks wrote different moments: {sorted(moments)}")
    index = Index.of([part.boxes for part in parts], moments=list(*moments), shapes=shapes)
    write_json_atomic(folder / COUNTERS, asdict(counters))
    if len(parts) > 1:
        write_atomic(folder / store.INDEX, TypeAdapter(Index).dump_json(index) + b"\n")
    return {name: facts for part in parts for name, facts in part.files.items()}


class StateReader(Pieces):
    """The state of training in a checkpoint; a tensor is read when it is asked for."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the index of the tensors.

        Raises:
            UserError: they are not those of a checkpoint of this version.
        """
        self.counters = read_or_refuse(checkpoint / COUNTERS, Counters, "a training state of this version")
        super().__init__(checkpoint, read_index(checkpoint))
        self.heard: Callable[[], object] = lambda: None
        """Called whenever a weight has been read."""

    def read(self, name: str, moment: str | None = None, *, boxes: Sequence[Box] | None = None) -> Tensor:
        """See ``Pieces``."""
        value = super().read(name, moment, boxes=boxes)
        if moment is None:
            self.heard()
        return value

    @property
    def has_moments(self) -> bool:
        """Whether there are moments: the optimizer has stepped, and keeps some."""
        return bool(self.index.moments)

    def require_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compare the tensors with a model's.

        Raises:
            UserError: they are another model's.
        """
        if self.shapes != {name: tuple(shape) for name, shape in shapes.items()}:
            raise UserError(f"{self.checkpoint}: its tensors are not those of this model")

    def state(self, name: str, boxes: Sequence[Box] | None = None) -> ParamState:
        """One parameter's weight and moments on the CPU: whole, or the elements of ``boxes``, flat and end to end."""
        moments = {key: self.read(name, key, boxes=boxes) for key in self.index.moments}
        return ParamState(self.read(name, boxes=boxes), **moments)


# The random state of every rank, so that a resumed run draws the same dropout masks as an uninterrupted one.


def save_random_state(folder: Path, *, rank: int, device: torch.device) -> None:
    """Write this rank's random state, of CPU and GPU.

    Raises:
        OSError: it could not be written.
    """
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    path = _file(folder, rank)
    try:
        path.write_bytes(save(state))
    except OSError as error:
        raise _as_os_error(error, path) from error


def load_random_state(folder: Path, *, rank: int, device: torch.device) -> None:
    """Set this rank's random state to what ``save_random_state`` wrote."""
    state = load_file(_file(folder, rank))
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def check_random_states(folder: Path, *, named: Collection[str], ranks: int, device: str) -> None:
    """Check that ``load_random_state`` will find its file on every rank.

    Args:
        folder: of the checkpoint.
        named: the files that its manifest names.
        ranks: how many.
        device: ``cpu`` or ``cuda``.

    Raises:
        UserError: a file is missing, or does not hold random states.
    """
    wanted = {"cpu": torch.get_rng_state().shape} | ({"cuda": None} if device == "cuda" else {})
    for rank in range(ranks):
        file = _file(folder, rank)
        if file.name not in named:
            raise UserError(f"{folder}: its manifest does not name {file.name}: the checkpoint is incomplete")
        tensors = open_safetensors(file)
        for name, shape in wanted.items():
            value = tensors[name].read() if name in tensors else torch.empty(0)
            if value.dtype != torch.uint8 or (shape is not None and value.shape != shape):
                raise UserError(f"{file}: holds no random state ({name}) of this version of PyTorch")


def _file(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:05d}.safetensors"
