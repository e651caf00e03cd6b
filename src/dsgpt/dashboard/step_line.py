"""The time line of one optimizer step: what each rank computes and sends, in order. Its lengths are not seconds.

A forward pass is one long, a backward pass two, three with recomputation. What is sent during a pass lies below it.
What the step waits for has a place of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsgpt.dashboard.formats import memory
from dsgpt.planning.communication import Traffic
from dsgpt.planning.host_link import copied
from dsgpt.planning.setup import Setup
from dsgpt.planning.step_order import (
    AFTER_STEP,
    BACKWARD,
    BEFORE_STEP,
    DURING_STEP,
    FORWARD,
    Pass,
    Placed,
    passes,
    placed_traffic,
)
from dsgpt.planning.transfers import can_overlap

_SENT, _STEP, _GAP = 1.4, 1.0, 0.7
_MOST_ALIKE = 4
"""More micro batches than this are not drawn one by one, except in a pipeline, whose stages differ."""
LANES = ("computes", "weights", "gradients", "activations", "host", "files")
"""From top to bottom."""
MOST_IN_PIPELINE = 64
"""Micro batches of a pipeline that can be drawn."""
LINKS = {
    ("host", True): "from host to device",
    ("host", False): "from device to host",
    ("files", True): "from files to host",
    ("files", False): "from host to files",
}
_NAMES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reduce": "reduce",
    "all_to_all": "all-to-all",
    "send": "send",
}
_ORDER = {"all_gather": 0, "send": 2}
"""Of activations in a pass: a stage gathers what it received first, and sends its result last."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that a rank does for a while."""

    lane: str
    """``computes``, ``weights``, ``gradients`` or ``activations``, which are sent, ``host`` or ``files``."""
    label: str
    title: str
    """The same in a sentence, with bytes and ranks."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """One rank, or several that do the same at the same time."""

    name: str
    bars: tuple[Bar, ...]

    @property
    def lanes(self) -> list[str]:
        """Those that are used, computing first."""
        used = {bar.lane for bar in self.bars}
        return [lane for lane in LANES if lane in used]


def operation_name(traffic: Traffic) -> str:
    """``all-gather weights``."""
    return f"{_NAMES[traffic.operation]} {traffic.what}"


def step_lines(setup: Setup) -> list[Line]:
    """The time line of every pipeline stage; without a pipeline, of all ranks, which do the same.

    Raises:
        ValueError: a pipeline with more than ``MOST_IN_PIPELINE`` micro batches.
    """
    if setup.sizes.pipeline == 1:
        others = f"ranks 0 to {setup.world_size - 1}, at the same time" if setup.world_size > 1 else "rank 0"
        return [Line(name=others, bars=tuple(_Drawing(setup, 0).alone()))]
    if setup.gradient_accumulation_steps > MOST_IN_PIPELINE:
        raise ValueError(f"more than {MOST_IN_PIPELINE} micro batches are not drawn: take a larger micro batch")
    drawings = [_Drawing(setup, rank) for rank in setup.first_ranks]
    placed = _pipelined([drawing.passes for drawing in drawings], drawings[0].lengths)
    end = max(end for stage in placed for _, _, end in stage)
    return [
        Line(name=_stage_name(setup, stage), bars=tuple(drawing.in_pipeline(placed[stage], end)))
        for stage, drawing in enumerate(drawings)
    ]


def _stage_name(setup: Setup, stage: int) -> str:
    ranks = setup.world_size // setup.sizes.pipeline
    first = stage * ranks
    return f"stage {stage}: rank{f's {first} to {first + ranks - 1}' if ranks > 1 else f' {first}'}"


def _pipelined(orders: Sequence[Sequence[Pass]], lengths: dict[str, float]) -> list[list[tuple[Pass, float, float]]]:
    """Start and end of every pass of every stage: after its stage's pass before it, and after its input has come."""
    stages, ends = len(orders), dict[tuple[str, int, int], float]()
    found: list[list[tuple[Pass, float, float]]] = [[] for _ in orders]
    waiting = [list(order) for order in orders]
    while any(waiting):
        for stage, order in enumerate(waiting):
            while order:
                each = order[0]
                source = _source(each, stage, stages)
                if source is not None and source not in ends:
                    break
                free = found[stage][-1][2] if found[stage] else 0.0
                start = max(free, ends[source] if source else 0.0)
                ends[each.kind, stage, each.micro_batch] = start + lengths[each.kind]
                found[stage].append((each, start, start + lengths[each.kind]))
                order.pop(0)
    return found


def _source(each: Pass, stage: int, stages: int) -> tuple[str, int, int] | None:
    """The pass whose output this one needs."""
    if each.kind == FORWARD:
        return (FORWARD, stage - 1, each.micro_batch) if stage else None
    if stage == stages - 1:
        return FORWARD, stage, each.micro_batch
    return BACKWARD, stage + 1, each.micro_batch


class _Drawing:
    """The bars of one rank."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._setup = setup
        self.passes = passes(setup, rank=rank)
        self._placed = placed_traffic(setup, rank=rank)
        self._copied = copied(setup, rank=rank)
        self.lengths = {FORWARD: 1.0, BACKWARD: 3.0 if setup.activation_checkpointing else 2.0}

    def alone(self) -> Iterator[Bar]:
        """Of a rank outside of a pipeline."""
        last, time = self._setup.gradient_accumulation_steps - 1, 0.0
        left_out = range(2, last) if last >= _MOST_ALIKE else range(0)
        for each in self.passes:
            if each.micro_batch in left_out:
                if each.kind == FORWARD and each.micro_batch == left_out.start:
                    yield self._gap(left_out, time)
                    time += _GAP
                continue
            yield from self._pass(each, time, time + self.lengths[each.kind])
            time += self.lengths[each.kind]
        yield from self._end(time)

    def in_pipeline(self, placed: Sequence[tuple[Pass, float, float]], end: float) -> Iterator[Bar]:
        """Of a stage; all stages step together, at ``end``."""
        for each, start, stop in placed:
            yield from self._pass(each, start, stop)
        yield from self._end(end)

    def _gap(self, left_out: range, time: float) -> Bar:
        title = f"micro batches {left_out.start} to {left_out.stop - 1} do the same as micro batch 1"
        return Bar(lane="computes", label=f"+{len(left_out)}", title=title, start=time, end=time + _GAP)

    def _pass(self, each: Pass, start: float, end: float) -> Iterator[Bar]:
        again = ", with recomputation" if each.kind == BACKWARD and self._setup.activation_checkpointing else ""
        title = f"{each.kind} pass of micro batch {each.micro_batch}{again}"
        label = f"{each.kind} {each.micro_batch}"
        yield Bar(lane="computes", label=label, title=title, start=start, end=end)
        for lane in ("weights", "gradients", "activations"):
            sent = [placed for placed in self._at(each.kind, each.micro_batch) if placed.traffic.what == lane]
            sent.sort(key=lambda placed: _ORDER.get(placed.traffic.operation, 1))
            width = (end - start) / max(1, len(sent))
            for index, placed in enumerate(sent):
                yield self._sent(placed, start + index * width, start + (index + 1) * width)
        yield from self._copies(each.kind, each.micro_batch, start, end)

    def _end(self, time: float) -> Iterator[Bar]:
        for placed in self._at(BEFORE_STEP, None):
            yield self._sent(placed, time, time + _SENT)
            time += _SENT
        title = "the optimizer steps on what this rank holds of its state"
        yield from self._copies(BEFORE_STEP, None, time - _SENT, time)
        yield Bar(lane="computes", label="step", title=title, start=time, end=time + _STEP)
        yield from self._copies(DURING_STEP, None, time, time + _STEP)
        time += _STEP
        yield from self._copies(AFTER_STEP, None, time, time + _SENT)
        time += _SENT if self._copied else 0.0
        for placed in self._at(AFTER_STEP, None):
            yield self._sent(placed, time, time + _SENT)
            time += _SENT

    def _copies(self, moment: str, micro_batch: int | None, start: float, end: float) -> Iterator[Bar]:
        """What offload copies at this place, beside each other."""
        for link in ("host", "files"):
            here = [
                each
                for each in self._copied
                if (each.moment, each.micro_batch, each.link) == (moment, micro_batch, link)
            ]
            width = (end - start) / max(1, len(here))
            for index, each in enumerate(here):
                label = f"copies {each.what} {memory(each.size)}"
                title = f"copies {each.what}, {memory(each.size)}, {LINKS[link, each.to_device]}"
                yield Bar(
                    lane=link, label=label, title=title, start=start + index * width, end=start + (index + 1) * width
                )

    def _at(self, moment: str, micro_batch: int | None) -> list[Placed]:
        return [each for each in self._placed if each.moment == moment and each.micro_batch == micro_batch]

    def _sent(self, placed: Placed, start: float, end: float) -> Bar:
        traffic = placed.traffic
        among = f"among {traffic.group_size} {traffic.axis} ranks"
        title = (
            f"{operation_name(traffic)}, {memory(traffic.payload_bytes)}, {among}: this rank sends "
            f"{memory(traffic.ring_bytes)}; {waits(self._setup, placed)}"
        )
        label = f"{operation_name(traffic)} {memory(traffic.payload_bytes)}"
        return Bar(lane=traffic.what, label=label, title=title, start=start, end=end)


def waits(setup: Setup, placed: Placed) -> str:
    """Whether the rank computes meanwhile."""
    if placed.moment in {BEFORE_STEP, AFTER_STEP}:
        return "nothing is computed meanwhile"
    if can_overlap(setup, placed.traffic):
        return "a GPU computes meanwhile"
    return "the layers wait for it in turn"
