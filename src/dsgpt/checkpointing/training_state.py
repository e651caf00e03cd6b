"""The state of training in a checkpoint, in one form for every strategy: whole tensors in fp32, by canonical name.

    model.safetensors        every weight
    optimizer.safetensors    every moment, as ``NAME.exp_avg``; absent before the first step, and if there are none
    training_state.json      what is not a tensor: ``Counters``

A strategy gathers every tensor whole before it is written, and copies its own part when it loads, so that any strategy
resumes from any other's checkpoint. Tensors are handled one at a time: memory use stays near the largest of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from dsgpt.checkpointing import store
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import Count, JsonError, read_as
from dsgpt.formats.tensor_files import SafetensorsWriter, StoredTensor, open_safetensors
from dsgpt.optimization.optimizer import STATE_NAMES

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
    """The state of fp16's dynamic loss scale; see ``strategies.loss_scale``."""

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


class StateWriter:
    """A context that writes the state of training into a checkpoint's folder; durable when the context ends.

    Args:
        folder: of the checkpoint, in which none of the three files exists.
        shapes: every canonical name with its whole shape.
        counters: as they are at this step.

    Raises:
        OSError: from every method, where the file system refuses.
    """

    def __init__(self, folder: Path, shapes: Mapping[str, Sequence[int]], counters: Counters) -> None:
        self._folder, self._shapes, self._counters = folder, shapes, counters
        self._files = ExitStack()
        self._weights = self._open(store.WEIGHTS, shapes)
        self._moments: SafetensorsWriter | None = None

    def _open(self, name: str, shapes: Mapping[str, Sequence[int]]) -> SafetensorsWriter:
        announced = {tensor: (shape, torch.float32) for tensor, shape in shapes.items()}
        return self._files.enter_context(SafetensorsWriter(self._folder / name, announced))

    def put(self, name: str, state: ParamState) -> None:
        """Write one parameter's weight and moments."""
        moments = state.moments
        if moments and self._moments is None:
            shapes = {_moment(name, key): shape for name, shape in self._shapes.items() for key in moments}
            self._moments = self._open(MOMENTS, shapes)
        self._weights.put(name, state.weight.to("cpu"))
        if self._moments is not None:
            for key, value in moments.items():
                self._moments.put(_moment(name, key), value.to("cpu"))

    def __enter__(self) -> "StateWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)
        if error[0] is None:
            write_json_atomic(self._folder / COUNTERS, asdict(self._counters))


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
        counters: of the same strategy.
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
            with StateWriter(folder, shapes, counters) as writer:
                for name, state in states:
                    writer.put(name, state)
                    if not torch.isfinite(state.weight).all():
                        non_finite.append(name)
    finally:
        _take_part(states)
    return non_finite


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
        self.counters = _read_counters(checkpoint / COUNTERS)
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
        found = {name: stored.shape for name, stored in self._weights.items()}
        moments = {_moment(name, key): shape for name, shape in wanted.items() for key in self._keys}
        if found != wanted or any(self._moments[name].shape != shape for name, shape in moments.items()):
            raise UserError(f"{self.checkpoint}: its tensors are not those of this model")

    def state(self, name: str) -> ParamState:
        """One parameter's weight and moments, whole, on the CPU."""
        moments = {key: _fp32(self._moments[_moment(name, key)]) for key in self._keys}
        return ParamState(_fp32(self._weights[name]), **moments)


def _fp32(stored: StoredTensor) -> Tensor:
    return stored.read().float()


def _read_counters(path: Path) -> Counters:
    try:
        return read_as(path, Counters)
    except JsonError as error:
        raise UserError(f"{path}: is not a training state of this version ({error})") from error
