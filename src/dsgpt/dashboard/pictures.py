"""The SVG pictures of who holds what and of an optimizer step.

The time line of one optimizer step: what each rank computes and sends, in order. Its lengths are not seconds. A
forward pass is one long, a backward pass two, three with recomputation. What is sent during a pass lies below it. What
the step waits for has a place of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dsgpt.charts.options import Theme, contrast
from dsgpt.dashboard.figures import memory
from dsgpt.planner.memory import Peak, peak_memory
from dsgpt.planner.model_state import ModelState, model_state
from dsgpt.planner.plan import held_in_words, place_of
from dsgpt.planner.setup import FULL, Setup, model_parameters, total
from dsgpt.planner.step_order import (
    AFTER_STEP,
    BACKWARD,
    BEFORE_STEP,
    DURING_STEP,
    FORWARD,
    Pass,
    Placed,
    copied,
    passes,
    placed_traffic,
)
from dsgpt.planner.step_time import can_overlap
from dsgpt.planner.traffic import Traffic

# Who holds what: the bytes of every rank, whole or as a shard, and where they are.

_STATE = {
    "weights": ("weights", "parameters"),
    "gradients": ("gradients", "gradients"),
    "optimizer state": ("optimizer", "optimizer"),
    "master weights": ("master", "master"),
}
"""Kinds of model state, each with its part of a peak and its field of ``ModelState``."""
_PASSING = {"activations": {"activations", "logits"}, "new gradients": {"gradients", "new_gradients"}}
"""Kinds that exist for a while, with their parts of a peak. All other parts are ``temporary``."""
KINDS = (*_STATE, *_PASSING, "temporary")
"""What a rank holds at its peak, as pictures stack it; temporary are buckets and gathered weights."""
_WHOLE = 0.99
"""Of the bytes without a split: what holds at least this share is whole, because shards have padding."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What a rank holds of one kind."""

    kind: str
    """One of ``KINDS``."""
    size: int
    """Bytes."""
    whole: int
    """Bytes of this kind on a rank that holds all of the model; at least ``size``."""
    start: float
    """Where the shard begins, as a share of ``whole``."""
    place: str
    """``device``, ``host`` or ``files``."""

    @property
    def is_shard(self) -> bool:
        """Whether the rank holds only a part."""
        return self.size < _WHOLE * self.whole


@dataclass(frozen=True, kw_only=True)
class Holding:
    """All that one rank holds."""

    rank: int
    words: str
    """Its layers, shards and data, and the moment of its peak."""
    blocks: tuple[Block, ...]

    def total(self, *places: str) -> int:
        """Bytes in these places."""
        return sum(block.size for block in self.blocks if block.place in places)


def holdings(setup: Setup, *, ranks: int) -> list[Holding]:
    """What each of the first ``ranks`` ranks, with a GPU each, holds at its peak; on the device that adds up to it."""
    peaks = [peak_memory(setup, rank=rank, device="cuda") for rank in range(min(ranks, setup.world_size))]
    words = [f"{held_in_words(setup, rank)}, peak: {peak.moment}" for rank, peak in enumerate(peaks)]
    blocks = [tuple(_blocks(setup, rank, peak)) for rank, peak in enumerate(peaks)]
    return [Holding(rank=rank, words=words[rank], blocks=blocks[rank]) for rank in range(len(peaks))]


def _blocks(setup: Setup, rank: int, peak: Peak) -> Iterator[Block]:
    state, whole = model_state(setup, rank=rank), total(model_parameters(setup.model))
    widths, parts = _widths(setup, state), dict(peak.parts)
    for kind, (part, field) in _STATE.items():
        held, away = getattr(state, field), state.off_device.get(field, 0)
        here = parts.pop(part) if away < held else 0
        for size, place in ((here, "device"), (away, _elsewhere(setup, field))):
            frame = size  # no shard if it is not the model state's
            if size in {held - away, away}:
                frame = max(size, widths[kind] * whole)
            if size:
                start = min(_start(setup, rank, size, widths[kind]), 1 - size / frame)
                yield Block(kind=kind, size=size, whole=frame, start=start, place=place)
    passing = {kind: sum(parts.pop(name, 0) for name in names) for kind, names in _PASSING.items()}
    for kind, size in (passing | {"temporary": sum(parts.values())}).items():
        if size:
            yield Block(kind=kind, size=size, whole=size, start=0.0, place="device")


def _widths(setup: Setup, state: ModelState) -> dict[str, int]:
    """Bytes per parameter, of each kind."""
    return {
        "weights": FULL if setup.run_type == "fsdp" else setup.low,
        "gradients": FULL,
        "optimizer state": FULL * setup.moments,
        "master weights": FULL if state.master else 0,
    }


def _start(setup: Setup, rank: int, size: int, width: int) -> float:
    """Where the rank's part begins in the whole model: its stage, then its tensor shard, then its ZeRO shard."""
    place, sizes = place_of(setup, rank), setup.sizes
    stages = [total(stage) for stage in setup.stages]
    before, stage = sum(stages[: place.stage]), stages[place.stage]
    share = stage / sum(stages) / sizes.tensor
    start = before / sum(stages) + place.tensor_rank * share
    if size < _WHOLE * width * total(setup.held(rank)):
        start += rank // sizes.tensor % setup.zero_ranks * share / setup.zero_ranks
    return start


def _elsewhere(setup: Setup, field: str) -> str:
    """Where offload puts this part of the model state."""
    recipe = setup.recipe
    swapped = {"parameters": recipe.offload_param, "optimizer": recipe.offload_optimizer}
    swapped["master"] = recipe.offload_optimizer
    return "files" if setup.run_type == "optimized" and swapped.get(field) == "nvme" else "host"


# Pieces of SVG text. Every text is escaped; every shape has a title that browsers show and screen readers read.

FONT = "'Source Sans', 'Source Sans Pro', system-ui, sans-serif"
_LETTER = 0.52
"""Width of a letter, in units of its size."""


def picture(body: Iterable[str], *, width: float, height: float, label: str, theme: Theme) -> str:
    """An SVG picture on the theme's background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="background:{theme.background};display:block" '
        f'font-family="{FONT}" font-size="13" fill="{theme.ink}"><title>{escape(label)}</title>'
        f"{''.join(body)}</svg>"
    )


def rectangle(
    x: float, y: float, width: float, height: float, *, fill: str, title: str, edge: str = "none", dashed: bool = False
) -> str:
    """A box; with ``dashed``, its edge is."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" rx="2" '
        f'fill="{fill}" stroke="{edge}"{dashes}><title>{escape(title)}</title></rect>'
    )


def text(x: float, y: float, words: str, *, fill: str = "", anchor: str = "start", size: float = 13) -> str:
    """Words whose baseline is at ``y``."""
    colour = f' fill="{fill}"' if fill else ""
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" font-size="{size:g}"{colour} '
        f'pointer-events="none">{escape(words)}</text>'
    )


def fits(words: str, width: float, *, size: float = 13) -> bool:
    """Whether ``words`` are narrower than ``width``."""
    return len(words) * _LETTER * size <= width


def ink_on(fill: str, theme: Theme) -> str:
    """The colour of text that is easiest to read on ``fill``."""
    return max((theme.ink, theme.background), key=lambda colour: contrast(colour, fill))


_LEFT, _TOP, _WIDE, _SPACE, _TALL, _BETWEEN = 4, 34, 806, 10, 380, 10
_WIDEST, _NARROWEST = 150.0, 90.0
"""Of a column."""
# The picture of who holds what: a column for each rank, true to scale in bytes, with what each shard leaves out.

_LINE = 17
_PLACES = {"device": "on the device", "host": "in host memory", "files": "in files"}


def holding_svg(held: Sequence[Holding], *, ranks: int, theme: Theme) -> str:
    """Ranks as columns. A filled box is what the rank holds; a dashed one is what it would hold without the split.

    Args:
        held: the ranks that are drawn.
        ranks: how many there are.
        theme: of the page.
    """
    kinds = [kind for kind in KINDS if any(block.kind == kind for each in held for block in each.blocks)]
    most = {kind: max(block.whole for each in held for block in each.blocks if block.kind == kind) for kind in kinds}
    scale = (_TALL - _BETWEEN * (len(kinds) - 1)) / sum(most.values())
    body = list(_legend(kinds, theme))
    column = min(_WIDEST, max(_NARROWEST, _WIDE / len(held) - _SPACE))
    for number, each in enumerate(held):
        left = _LEFT + number * (column + _SPACE)
        body += _column(each, left, column, most=most, scale=scale, theme=theme)
    lines = max(len(_words(each)) for each in held)
    width = max(_LEFT + len(held) * (column + _SPACE), _legend_width(kinds))
    height = _TOP + _LINE + _TALL + (lines + 2) * _LINE
    if ranks > len(held):
        words = f"Ranks {len(held)} to {ranks - 1} are not drawn; they hold their own shards in the same way."
        body.append(text(_LEFT, height, words, fill=theme.quiet))
        height += _LINE
        width = max(width, 520)
    label = f"What each of {ranks} ranks holds, in bytes; the table has the same figures"
    return picture(body, width=width, height=height, label=label, theme=theme)


def colour_of(kind: str, theme: Theme) -> str:
    """The colour of a kind of memory, the same in every picture."""
    return theme.palette[KINDS.index(kind)]


def _legend(kinds: Sequence[str], theme: Theme) -> Iterator[str]:
    left = float(_LEFT)
    for kind in kinds:
        yield rectangle(left, 6, 12, 12, fill=colour_of(kind, theme), title=kind)
        yield text(left + 17, 17, kind)
        left += 17 + 7.2 * len(kind) + 22


def _legend_width(kinds: Sequence[str]) -> float:
    return _LEFT + sum(17 + 7.2 * len(kind) + 22 for kind in kinds)


def _column(
    each: Holding, left: float, wide: float, *, most: dict[str, int], scale: float, theme: Theme
) -> Iterator[str]:
    middle, top = left + wide / 2, float(_TOP + _LINE)
    yield text(middle, top - 7, f"rank {each.rank}", anchor="middle")
    for kind, whole in most.items():
        blocks = [block for block in each.blocks if block.kind == kind]  # on the device, and what offload moved
        for index, block in enumerate(blocks):
            narrow = wide / len(blocks)
            yield from _block(each, block, (left + index * narrow, top, narrow), scale=scale, theme=theme)
        top += whole * scale + _BETWEEN
    bottom = _TOP + _LINE + _TALL + _LINE
    yield text(middle, bottom, memory(each.total("device")), anchor="middle", size=15)
    for number, line in enumerate(_words(each)):
        yield text(middle, bottom + (number + 1) * _LINE, line, anchor="middle", fill=theme.quiet, size=12)


def _block(
    each: Holding, block: Block, place: tuple[float, float, float], *, scale: float, theme: Theme
) -> Iterator[str]:
    """The whole as a dashed frame, the rank's part in it, and its size if there is room for it.

    ``place`` is the left, the top and the width of the frame.
    """
    left, top, wide = place
    fill, tall = colour_of(block.kind, theme), max(block.size * scale, 1.0)
    begin = top + block.start * block.whole * scale
    where = _PLACES[block.place]
    part = f"{block.size / block.whole:.0%} of {memory(block.whole)}" if block.is_shard else "whole"
    title = f"rank {each.rank}, {block.kind}: {memory(block.size)}, {part}, {where}"
    if block.is_shard:
        frame = f"{block.kind}: {memory(block.whole)} without a split"
        yield rectangle(left, top, wide, block.whole * scale, fill="none", edge=theme.edge, title=frame, dashed=True)
    away = block.place != "device"
    yield rectangle(
        left,
        begin,
        wide,
        tall,
        fill=theme.background if away else fill,
        edge=fill if away else "none",
        title=title,
    )
    words = memory(block.size) + (f", {'host' if block.place == 'host' else 'files'}" if away else "")
    if tall >= 15 and fits(words, wide - 6, size=12):
        ink = theme.ink if away else ink_on(fill, theme)
        yield text(left + wide / 2, begin + tall / 2 + 4, words, anchor="middle", fill=ink, size=12)


def _words(each: Holding) -> list[str]:
    """What is not on the device, then the rank's layers, shards and data, a line each, short enough for a column."""
    away = {"in host": each.total("host"), "in files": each.total("files")}
    return [*(f"+ {memory(count)} {where}" for where, count in away.items() if count), *each.words.split(", ")]


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


_STEP_LEFT, _STEP_TOP, _LANE, _THIN, _STEP_WIDE, _NAME = 118, 8, 30, 22, 812, 20
# The picture of an optimizer step: time goes right, a group of lanes for each line of the step.

_LEAST_UNIT = 26
_LINK_NAMES = {
    "computes": "computes",
    "weights": "sends weights",
    "gradients": "sends gradients",
    "activations": "sends activations",
    "host": "device and host",
    "files": "host and files",
}


def step_svg(lines: Sequence[Line], theme: Theme) -> str:
    """The time line of every rank or stage."""
    end = max(bar.end for line in lines for bar in line.bars)
    unit = max(_LEAST_UNIT, (_STEP_WIDE - _STEP_LEFT - 10) / end)
    width, top = _STEP_LEFT + end * unit + 10, float(_STEP_TOP)
    body: list[str] = []
    for line in lines:
        body.append(text(4, top + 13, line.name, size=14))
        top += _NAME
        for lane in line.lanes:
            tall = _LANE if lane == "computes" else _THIN
            body.append(text(4, top + tall / 2 + 4, _LINK_NAMES[lane], fill=theme.quiet, size=12))
            body.append(_track(top + tall, width, theme))
            for bar in line.bars:
                if bar.lane == lane:
                    body += _bar(bar, top, tall - 3, unit=unit, theme=theme)
            top += tall
        top += 12
    label = "One optimizer step, in order from left to right; the table has the same operations"
    return picture(body, width=width, height=top, label=label, theme=theme)


def _track(y: float, width: float, theme: Theme) -> str:
    return f'<line x1="{_STEP_LEFT}" x2="{width - 10:.1f}" y1="{y - 1:.1f}" y2="{y - 1:.1f}" stroke="{theme.grid}"/>'


def _bar(bar: Bar, top: float, tall: float, *, unit: float, theme: Theme) -> Iterator[str]:
    left, width = _STEP_LEFT + bar.start * unit, (bar.end - bar.start) * unit - 2
    fill = _fill(bar, theme)
    yield rectangle(left, top, width, tall, fill=fill, title=bar.title)
    words = next((words for words in _shorter(bar.label) if fits(words, width - 4, size=11.5)), "")
    ink = ink_on(fill, theme)
    yield text(left + width / 2, top + tall / 2 + 4, words, anchor="middle", fill=ink, size=11.5)


def _fill(bar: Bar, theme: Theme) -> str:
    if bar.lane in {"host", "files"}:
        return theme.palette[7]
    if bar.lane != "computes":
        return colour_of(bar.lane, theme)
    if bar.label.startswith("forward"):
        return theme.palette[6]
    return theme.palette[5] if bar.label.startswith("backward") else theme.edge


def _shorter(label: str) -> Iterator[str]:
    """The label, and what is left of it where there is less room: operation and bytes, bytes, a number."""
    yield label
    words = label.split()
    if words[0] in {"forward", "backward"}:
        yield f"{words[0][0].upper()}{words[1]}"
        yield words[1]
    elif len(words) > 3:
        yield f"{words[0]} {words[-2]} {words[-1]}"
        yield f"{words[-2]} {words[-1]}"
