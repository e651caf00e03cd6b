"""The state of training in a checkpoint: how it is written, read and verified.

The state of training in a checkpoint, in one form for every strategy: whole tensors in fp32, by canonical name.

    model.safetensors        every weight
    optimizer.safetensors    every moment, as ``NAME.exp_avg``; absent before the first step, and if there are none
    training_state.json      what is not a tensor: ``Counters``

A strategy gathers every tensor whole before it is written, and copies its own part when it loads, so that any strategy
resumes from any other's checkpoint. Tensors are handled one at a time: memory use stays near the largest of them.
"""

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsgpt.checkpoints import store
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import Count, JsonError, read_as
from dsgpt.formats.tensor_files import SafetensorsWriter, StoredTensor, open_safetensors
from dsgpt.model.config import STATE_NAMES
from dsgpt.model.gpt2 import parameter_shapes

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


def try_to_write(folder: Path, *, rank: int) -> None:
    """Make and remove a file in ``folder``; every rank does so before the first collective of a save.

    Raises:
        OSError: no file can be made there.
    """
    probe = folder / f".probe-{rank:05d}"
    with probe.open("wb") as file:
        file.write(b"\0")
        file.flush()
        os.fsync(file.fileno())
    probe.unlink()


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


MOMENTS = "optimizer.safetensors"
COUNTERS = "training_state.json"


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
        """Those of ``STATE_NAMES`` that are not None."""
        return {name: value for name in STATE_NAMES if (value := getattr(self, name)) is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "ParamState":
        """The same with ``change`` applied to every tensor: the weight first, then the moments by ``STATE_NAMES``."""
        return ParamState(change(self.weight), **{name: change(value) for name, value in self.moments.items()})


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """The state of fp16's dynamic loss scale; see ``strategies.optimizer.LossScale``."""

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
    """Of fp16; None in other precisions."""


class KeptState:
    """A copy of the state of training at one step, in host memory of the main rank; written while training continues.

    The memory is kept for the next copy, because allocating it costs more than filling it.
    """

    def __init__(self) -> None:
        self._states: dict[str, ParamState] = {}

    def keep(self, states: Iterator[tuple[str, ParamState]], *, keeps: bool) -> None:
        """Copy what ``states`` gathers if this rank ``keeps`` it, else only take part in gathering; collective."""
        states = _gathered(states)
        try:
            for name, state in states:
                if keeps:
                    self._states[name] = _copied(state, into=self._states.get(name))
        finally:
            _take_part(states)

    def states(self) -> Iterator[tuple[str, ParamState]]:
        """The last copy."""
        return iter(self._states.items())


def _copied(state: ParamState, *, into: ParamState | None) -> ParamState:
    """A copy of ``state`` in host memory: in that of ``into`` if it has the same moments, else in new memory."""
    if into is None or into.moments.keys() != state.moments.keys():
        into = state.mapped(lambda value: torch.empty(value.shape, dtype=value.dtype))
    into.weight.copy_(state.weight)
    for name, value in state.moments.items():
        into.moments[name].copy_(value)
    return into


def write_training_state(
    folder: Path,
    states: Iterator[tuple[str, ParamState]],
    counters: Counters,
    *,
    shapes: Mapping[str, Sequence[int]],
    writes: bool,
) -> list[str]:
    """Write the state of training into a checkpoint; collective.

    Args:
        folder: of the checkpoint.
        states: ``iter_state`` of a strategy.
        counters: as they are at this step.
        shapes: every canonical name with its whole shape.
        writes: whether this rank writes, or only takes part.

    Returns:
        Where this rank ``writes``, the names of weights that hold a NaN or infinity.

    Raises:
        OSError: the file system refuses. This rank has still taken part to the end, so no other rank waits for it.
        GatheringError: a parameter could not be gathered.
    """
    non_finite, states = [], _gathered(states)
    try:
        if writes:
            with ExitStack() as files:
                weights = _announced(folder / store.WEIGHTS, shapes, files)
                optimizer: SafetensorsWriter | None = None
                for name, state in states:
                    moments = state.moments
                    if moments and optimizer is None:
                        names = {_moment(each, key): shape for each, shape in shapes.items() for key in moments}
                        optimizer = _announced(folder / MOMENTS, names, files)
                    weights.put(name, state.weight.to("cpu"))
                    if optimizer is not None:
                        for key, value in moments.items():
                            optimizer.put(_moment(name, key), value.to("cpu"))
                    if not torch.isfinite(state.weight).all():
                        non_finite.append(name)
            write_json_atomic(folder / COUNTERS, asdict(counters))
    finally:
        _take_part(states)
    return non_finite


def _announced(path: Path, shapes: Mapping[str, Sequence[int]], files: ExitStack) -> SafetensorsWriter:
    """A new file of fp32 tensors; durable when ``files`` is closed."""
    tensors = {name: (shape, torch.float32) for name, shape in shapes.items()}
    return files.enter_context(SafetensorsWriter(path, tensors))


class GatheringError(RuntimeError):
    """A parameter could not be gathered. Other ranks may wait in any collective, so no rank can continue."""


def _gathered(states: Iterator[tuple[str, ParamState]]) -> Iterator[tuple[str, ParamState]]:
    """``states``, with its own errors as ``GatheringError``; errors of the code that consumes it stay as they are."""
    try:
        yield from states
    except Exception as error:
        raise GatheringError(f"the state of training could not be gathered: {error}") from error


def _take_part(states: Iterator[tuple[str, ParamState]]) -> None:
    """Gather with the other ranks to the end, even after an error on this rank."""
    for _ in states:
        pass


def _moment(name: str, key: str) -> str:
    return f"{name}.{key}"


class StateReader:
    """The state of training in a checkpoint; a tensor is read when it is asked for."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the headers of the files.

        Raises:
            UserError: they are not those of a checkpoint of this version.
        """
        self.checkpoint = checkpoint
        path = checkpoint / COUNTERS
        try:
            self.counters = read_as(path, Counters)
        except JsonError as error:
            raise UserError(f"{path}: is not a training state of this version ({error})") from error
        self._weights = open_safetensors(checkpoint / store.WEIGHTS)
        moments = checkpoint / MOMENTS
        self._moments = open_safetensors(moments) if moments.exists() else {}
        self._keys = [key for key in STATE_NAMES if any(name.endswith(f".{key}") for name in self._moments)]
        expected = {_moment(name, key) for name in self._weights for key in self._keys}
        if self._moments.keys() != expected:
            raise UserError(f"{moments}: its tensors are not those of the weights in {checkpoint / store.WEIGHTS}")

    @property
    def has_moments(self) -> bool:
        """Whether there are moments: the optimizer has stepped, and keeps some."""
        return bool(self._keys)

    def stored_moments(self) -> dict[str, dict[str, StoredTensor]]:
        """Every moment, by its name such as ``exp_avg``, then by canonical name; none is read yet."""
        return {key: {name: self._moments[_moment(name, key)] for name in self._weights} for key in self._keys}

    def require_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compare the tensors with a model's.

        Raises:
            UserError: they are another model's.
        """
        wanted = {name: tuple(shape) for name, shape in shapes.items()}
        stored = {name: tensor.shape for name, tensor in self._weights.items()}
        moments = {_moment(name, key): shape for name, shape in wanted.items() for key in self._keys}
        if stored != wanted or any(self._moments[name].shape != shape for name, shape in moments.items()):
            raise UserError(f"{self.checkpoint}: its tensors are not those of this model")

    def state(self, name: str) -> ParamState:
        """One parameter's weight and moments, whole, on the CPU."""
        moments = {key: _fp32(self._moments[_moment(name, key)]) for key in self._keys}
        return ParamState(_fp32(self._weights[name]), **moments)


def _fp32(stored: StoredTensor) -> Tensor:
    return stored.read().float()


def open_weights(files: store.ModelFiles) -> dict[str, StoredTensor]:
    """Every weight by canonical name, in the model's order; none is read yet.

    Raises:
        UserError: they are not those of the checkpoint's model.
    """
    tensors, shapes = open_safetensors(files.weights), parameter_shapes(files.config)
    same = {name: tensor.shape for name, tensor in tensors.items()} == {name: tuple(s) for name, s in shapes.items()}
    if not same or any(tensor.dtype is None for tensor in tensors.values()):
        raise UserError(f"{files.weights}: its tensors are not those of {files.checkpoint / store.MODEL}")
    return {name: tensors[name] for name in shapes}


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
        save_file(state, path)
    except SafetensorError as error:
        raise _as_os_error(error, path) from error
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # as any other new file; the library makes it private


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
