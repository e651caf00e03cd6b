"""The SVG pictures of who holds what and of an optimizer step.

The time line of one optimizer step: what each rank computes and sends, in order. Its lengths are not seconds. A
forward pass is one long, a backward pass two, three with recomputation. What is sent during a pass lies below it. What
the step waits for has a place of its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dsgpt.charts.themes import Theme, contrast
from dsgpt.common.text import byte_size
from dsgpt.planner.formulas import Pass, Peak, Placed, copied, model_state, passes, peak_memory, placed_traffic
from dsgpt.planner.plan import held_in_words, place_of
from dsgpt.planner.pytorch_formulas import AFTER_STEP, BACKWARD, BEFORE_STEP, DURING_STEP, FORWARD, Place, Traffic
from dsgpt.planner.setup import FULL, Setup, model_parameters, total

# Who holds what: the bytes of every rank, whole or as a shard, and where they are.

_STATE = {"weights": ("weights", "parameters"), "gradients": ("gradients", "gradients")}
_STATE |= {"optimizer state": ("optimizer", "optimizer"), "master weights": ("master", "master")}
"""Kinds of model state, each with its part of a peak and its field of ``ModelState``."""
_PASSING = {"activations": {"activations", "logits"}, "new gradients": {"gradients", "new_gradients"}}
"""Kinds that exist for a while, with their parts of a peak. All other parts are ``temporary``."""
KINDS = (*_STATE, *_PASSING, "temporary")
"""Kinds of memory at a rank's peak, as pictures stack them; temporary are buckets and gathered weights."""
_WHOLE = 0.99
"""Least share of the bytes without a split from which a part counts as whole, because shards have padding."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Memory of one kind on one rank."""

    kind: str
    """Kind of memory, one of ``KINDS``."""
    size: int
    """Bytes."""
    whole: int
    """Bytes of this kind on a rank that holds all of the model; at least ``size``."""
    start: float
    """Beginning of the shard, as a share of ``whole``."""
    place: str
    """``device``, ``host`` or ``files``."""

    @property
    def is_shard(self) -> bool:
        """Whether the rank holds only a part."""
        return self.size < _WHOLE * self.whole


@dataclass(frozen=True, kw_only=True)
class RankState:
    """Peak memory of one rank."""

    rank: int
    words: str
    """Sentence with the rank's layers, shards and data, and the moment of its peak."""
    blocks: tuple[Block, ...]

    def total(self, *places: str) -> int:
        """Sum of bytes in these places."""
        return sum(block.size for block in self.blocks if block.place in places)


def state_by_rank(setup: Setup, *, ranks: int) -> list[RankState]:
    """Peak memory of each of the first ``ranks`` ranks, with a GPU each.

    The blocks on the device add up to the peak.
    """
    peaks = [peak_memory(setup, rank=rank, device="cuda") for rank in range(min(ranks, setup.world_size))]
    words = [f"{held_in_words(setup, rank)}, peak: {peak.moment}" for rank, peak in enumerate(peaks)]
    blocks = [tuple(_blocks(setup, rank, peak)) for rank, peak in enumerate(peaks)]
    return [RankState(rank=rank, words=words[rank], blocks=blocks[rank]) for rank in range(len(peaks))]


def _blocks(setup: Setup, rank: int, peak: Peak) -> Iterator[Block]:
    state, whole = model_state(setup, rank=rank), total(model_parameters(setup.model))
    widths = {"weights": FULL if setup.run_type == "fsdp" else setup.low, "gradients": FULL}  # bytes per parameter
    widths |= {"optimizer state": FULL * setup.moments, "master weights": FULL if state.master else 0}
    recipe, parts = setup.recipe, dict(peak.parts)
    swapped = {"parameters": recipe.offload_param} | dict.fromkeys(("optimizer", "master"), recipe.offload_optimizer)
    for kind, (part, field) in _STATE.items():
        state_bytes, away = getattr(state, field), state.off_device.get(field, 0)
        here = parts.pop(part) if away < state_bytes else 0
        elsewhere = "files" if setup.run_type == "optimized" and swapped.get(field) == "nvme" else "host"
        for size, place in ((here, "device"), (away, elsewhere)):
            frame = size  # no shard if it is not the model state's
            if size in {state_bytes - away, away}:
                frame = max(size, widths[kind] * whole)
            if size:
                start = min(_start(setup, rank, size, widths[kind]), 1 - size / frame)
                yield Block(kind=kind, size=size, whole=frame, start=start, place=place)
    passing = {kind: sum(parts.pop(name, 0) for name in names) for kind, names in _PASSING.items()}
    for kind, size in (passing | {"temporary": sum(parts.values())}).items():
        if size:
            yield Block(kind=kind, size=size, whole=size, start=0.0, place="device")


def _start(setup: Setup, rank: int, size: int, width: int) -> float:
    """Beginning of the rank's part in the whole model, as a share: its stage, its tensor shard, its ZeRO shard."""
    place, sizes = place_of(setup, rank), setup.sizes
    stages = [total(stage) for stage in setup.stages]
    before, stage = sum(stages[: place.stage]), stages[place.stage]
    share = stage / sum(stages) / sizes.tensor
    start = before / sum(stages) + place.tensor_rank * share
    if size < _WHOLE * width * total(setup.parameters(rank)):
        start += rank // sizes.tensor % setup.zero_ranks * share / setup.zero_ranks
    return start


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


# The picture of memory: a column for each rank, true to scale in bytes. Dashed frames show sizes without the split.

_LEFT, _TOP, _WIDE, _SPACE, _TALL, _BETWEEN, _LINE = 4, 34, 806, 10, 380, 10, 17
_WIDEST, _NARROWEST = 150.0, 90.0
"""Width of a column."""
_PLACES = {"device": "on the device", "host": "in host memory", "files": "in files"}


def state_svg(states: Sequence[RankState], *, ranks: int, theme: Theme) -> str:
    """Ranks as columns. A filled box is what the rank holds; a dashed one is what it would hold without the split.

    Args:
        states: the ranks that are drawn.
        ranks: number of ranks of the setup.
        theme: the theme of the page.
    """
    kinds = [kind for kind in KINDS if any(block.kind == kind for each in states for block in each.blocks)]
    most = {kind: max(block.whole for each in states for block in each.blocks if block.kind == kind) for kind in kinds}
    scale = (_TALL - _BETWEEN * (len(kinds) - 1)) / sum(most.values())
    body, end, most_lines = [], float(_LEFT), 0
    for kind in kinds:
        body.append(rectangle(end, 6, 12, 12, fill=colour_of(kind, theme), title=kind))
        body.append(text(end + 17, 17, kind))
        end += 17 + 7.2 * len(kind) + 22
    column = min(_WIDEST, max(_NARROWEST, _WIDE / len(states) - _SPACE))
    for number, each in enumerate(states):
        left, top = _LEFT + number * (column + _SPACE), float(_TOP + _LINE)
        middle, bottom = left + column / 2, top + _TALL + _LINE
        body.append(text(middle, top - 7, f"rank {each.rank}", anchor="middle"))
        for kind, whole in most.items():
            blocks = [block for block in each.blocks if block.kind == kind]  # on the device, and what offload moved
            for index, block in enumerate(blocks):
                narrow = column / len(blocks)
                body += _block(each, block, (left + index * narrow, top, narrow), scale=scale, theme=theme)
            top += whole * scale + _BETWEEN
        body.append(text(middle, bottom, byte_size(each.total("device")), anchor="middle", size=15))
        away = {"in host": each.total("host"), "in files": each.total("files")}
        moved = [f"+ {byte_size(count)} {where}" for where, count in away.items() if count]
        for line, words in enumerate([*moved, *each.words.split(", ")], start=1):
            body.append(text(middle, bottom + line * _LINE, words, anchor="middle", fill=theme.quiet, size=12))
            most_lines = max(most_lines, line)
    width = max(_LEFT + len(states) * (column + _SPACE), end)
    height = _TOP + _LINE + _TALL + (most_lines + 2) * _LINE
    if ranks > len(states):
        words = f"Ranks {len(states)} to {ranks - 1} are not drawn; they hold their own shards in the same way."
        body.append(text(_LEFT, height, words, fill=theme.quiet))
        height += _LINE
        width = max(width, 520)
    label = f"What each of {ranks} ranks holds, in bytes; the table has the same figures"
    return picture(body, width=width, height=height, label=label, theme=theme)


def colour_of(kind: str, theme: Theme) -> str:
    """The colour of a kind of memory, the same in every picture."""
    return theme.palette[KINDS.index(kind)]


def _block(
    each: RankState, block: Block, place: tuple[float, float, float], *, scale: float, theme: Theme
) -> Iterator[str]:
    """The whole as a dashed frame, the rank's part in it, and its size if there is room for it.

    ``place`` is the left, the top and the width of the frame.
    """
    left, top, wide = place
    fill, tall = colour_of(block.kind, theme), max(block.size * scale, 1.0)
    begin = top + block.start * block.whole * scale
    part = f"{block.size / block.whole:.0%} of {byte_size(block.whole)}" if block.is_shard else "whole"
    title = f"rank {each.rank}, {block.kind}: {byte_size(block.size)}, {part}, {_PLACES[block.place]}"
    if block.is_shard:
        frame = f"{block.kind}: {byte_size(block.whole)} without a split"
        yield rectangle(left, top, wide, block.whole * scale, fill="none", edge=theme.edge, title=frame, dashed=True)
    away = block.place != "device"
    inner, edge = (theme.background, fill) if away else (fill, "none")
    yield rectangle(left, begin, wide, tall, fill=inner, edge=edge, title=title)
    words = byte_size(block.size) + (f", {'host' if block.place == 'host' else 'files'}" if away else "")
    if tall >= 15 and fits(words, wide - 6, size=12):
        ink = theme.ink if away else ink_on(fill, theme)
        yield text(left + wide / 2, begin + tall / 2 + 4, words, anchor="middle", fill=ink, size=12)


_SENT, _STEP = 1.4, 1.0
_MOST_ALIKE = 4
"""More micro batches than this are not drawn one by one, except in a pipeline, whose stages differ."""
LANES = {"computes": "computes", "weights": "sends weights", "gradients": "sends gradients"}
LANES |= {"activations": "sends activations", "host": "device and host", "files": "host and files"}
"""Lanes from top to bottom, and what is written before them."""
MOST_IN_PIPELINE = 64
"""Micro batches of a pipeline that can be drawn."""
LINKS = {("host", True): "from host to device", ("host", False): "from device to host"}
LINKS |= {("files", True): "from files to host", ("files", False): "from host to files"}
_ORDER = {"all_gather": 0, "send": 2}
"""Order of activations in a pass: a stage gathers what it received first, and sends its result last."""
_LEFT_OUT = "left out"
"""Kind of the pass that stands for micro batches that are not drawn."""
_Move = tuple[str, str, str]
"""Lane, label and title of what is sent or copied."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Something that a rank does for a while."""

    lane: str
    """``computes``, ``weights``, ``gradients`` or ``activations``, which are sent, ``host`` or ``files``."""
    label: str
    title: str
    """The label as a sentence, with bytes and ranks."""
    start: float
    end: float


def operation_name(traffic: Traffic) -> str:
    """``all-gather weights``."""
    return f"{traffic.operation.replace('_', '-')} {traffic.what}"


def step_lines(setup: Setup) -> dict[str, list[Bar]]:
    """The time line of every pipeline stage, by name; without a pipeline, of all ranks, which do the same.

    Raises:
        ValueError: a pipeline with more than ``MOST_IN_PIPELINE`` micro batches.
    """
    stages, batches = setup.sizes.pipeline, setup.gradient_accumulation_steps
    orders = [passes(setup, rank=rank) for rank in setup.first_ranks]
    if stages > 1 and batches > MOST_IN_PIPELINE:
        raise ValueError(f"more than {MOST_IN_PIPELINE} micro batches are not drawn: take a larger micro batch")
    if stages == 1 and batches > _MOST_ALIKE:
        orders = [[*orders[0][:4], Pass(kind=_LEFT_OUT, micro_batch=2), *orders[0][-2:]]]
    backward = 3.0 if setup.activation_checkpointing else 2.0
    placed = _pipelined(orders, {FORWARD: 1.0, BACKWARD: backward, _LEFT_OUT: 0.7})
    end, ranks = max(of_stage[-1][2] for of_stage in placed), setup.world_size // stages
    lines: dict[str, list[Bar]] = {}
    for stage, rank in enumerate(setup.first_ranks):
        name = f"ranks {rank} to {rank + ranks - 1}" if ranks > 1 else f"rank {rank}"
        if stages > 1:
            name = f"stage {stage}: {name}"
        elif ranks > 1:
            name = f"{name}, at the same time"
        lines[name] = [*_bars(setup, rank, placed[stage], end)]
    return lines


def _pipelined(orders: Sequence[Sequence[Pass]], lengths: dict[str, float]) -> list[list[tuple[Pass, float, float]]]:
    """Start and end of every pass of every stage: after its stage's pass before it, and after its input has come."""
    ends = dict[tuple[str, int, int], float]()
    placed: list[list[tuple[Pass, float, float]]] = [[] for _ in orders]
    waiting = [list(order) for order in orders]
    while any(waiting):
        for stage, order in enumerate(waiting):
            while order:
                each, source = order[0], None
                if each.kind == FORWARD and stage:
                    source = FORWARD, stage - 1, each.micro_batch
                elif each.kind == BACKWARD and stage == len(orders) - 1:
                    source = FORWARD, stage, each.micro_batch
                elif each.kind == BACKWARD:
                    source = BACKWARD, stage + 1, each.micro_batch
                if source is not None and source not in ends:
                    break
                start = max(placed[stage][-1][2] if placed[stage] else 0.0, ends[source] if source else 0.0)
                ends[each.kind, stage, each.micro_batch] = start + lengths[each.kind]
                placed[stage].append((each, start, start + lengths[each.kind]))
                order.pop(0)
    return placed


def _bars(setup: Setup, rank: int, placed: Sequence[tuple[Pass, float, float]], time: float) -> Iterator[Bar]:
    """Bars of ``rank``: its passes at these starts and ends, and its step, which all stages begin at ``time``."""
    sends, copies = defaultdict[Place, list[_Move]](list), defaultdict[Place, list[_Move]](list)
    for sent in sorted(placed_traffic(setup, rank=rank), key=lambda sent: _ORDER.get(sent.traffic.operation, 1)):
        payload, among = byte_size(sent.traffic.payload_bytes), f"{sent.traffic.group_size} {sent.traffic.axis} ranks"
        label = f"{operation_name(sent.traffic)} {payload}"
        title = f"{operation_name(sent.traffic)}, {payload}, among {among}: this rank sends "
        title += f"{byte_size(sent.traffic.ring_bytes)}; {waits(sent)}"
        sends[sent.moment, sent.micro_batch].append((sent.traffic.what, label, title))
    for copy in copied(setup, rank=rank):
        title = f"copies {copy.what}, {byte_size(copy.size)}, {LINKS[copy.link, copy.to_device]}"
        copies[copy.moment, copy.micro_batch].append((copy.link, f"copies {copy.what} {byte_size(copy.size)}", title))
    last = setup.gradient_accumulation_steps - 1
    for each, start, end in placed:
        label, title = f"{each.kind} {each.micro_batch}", f"{each.kind} pass of micro batch {each.micro_batch}"
        if each.kind == BACKWARD and setup.activation_checkpointing:
            title += ", with recomputation"
        if each.kind == _LEFT_OUT:
            label = f"+{last - each.micro_batch}"
            title = f"micro batches {each.micro_batch} to {last - 1} do the same as micro batch 1"
        yield Bar(lane="computes", label=label, title=title, start=start, end=end)
        here = each.kind, each.micro_batch
        yield from _beside([*sends[here], *copies[here]], start, end)
    for move in sends[BEFORE_STEP, None]:
        yield from _beside([move], time, time + _SENT)
        time += _SENT
    yield from _beside(copies[BEFORE_STEP, None], time - _SENT, time)
    title = "the optimizer steps on what this rank holds of its state"
    yield Bar(lane="computes", label="step", title=title, start=time, end=time + _STEP)
    yield from _beside(copies[DURING_STEP, None], time, time + _STEP)
    time += _STEP
    yield from _beside(copies[AFTER_STEP, None], time, time + _SENT)
    time += _SENT if any(copies.values()) else 0.0
    for move in sends[AFTER_STEP, None]:
        yield from _beside([move], time, time + _SENT)
        time += _SENT


def _beside(moves: Sequence[_Move], start: float, end: float) -> Iterator[Bar]:
    """Bars between ``start`` and ``end``; those of a lane share the time evenly, one after the other."""
    for lane in LANES:
        here = [move for move in moves if move[0] == lane]
        width = (end - start) / max(1, len(here))
        for index, (_, label, title) in enumerate(here):
            begin, stop = start + index * width, start + (index + 1) * width
            yield Bar(lane=lane, label=label, title=title, start=begin, end=stop)


def waits(placed: Placed) -> str:
    """Whether the rank computes meanwhile."""
    if placed.moment in {BEFORE_STEP, AFTER_STEP}:
        return "nothing is computed meanwhile"
    if placed.traffic.hidden:
        return "a GPU computes meanwhile"
    return "the layers wait for it in turn"


# The picture of an optimizer step: time goes right, a group of lanes for each line of the step.

_STEP_LEFT, _STEP_TOP, _LANE, _THIN, _STEP_WIDE, _NAME, _LEAST_UNIT = 118, 8, 30, 22, 812, 20, 26


def step_svg(lines: Mapping[str, Sequence[Bar]], theme: Theme) -> str:
    """The time line of every rank or stage."""
    end = max(bar.end for bars in lines.values() for bar in bars)
    unit = max(_LEAST_UNIT, (_STEP_WIDE - _STEP_LEFT - 10) / end)
    width, top = _STEP_LEFT + end * unit + 10, float(_STEP_TOP)
    body: list[str] = []
    for name, of_line in lines.items():
        body.append(text(4, top + 13, name, size=14))
        top += _NAME
        for lane, words_before in LANES.items():
            bars = [bar for bar in of_line if bar.lane == lane]
            if not bars:
                continue
            tall = _LANE if lane == "computes" else _THIN
            body.append(text(4, top + tall / 2 + 4, words_before, fill=theme.quiet, size=12))
            ends, y = f'x1="{_STEP_LEFT}" x2="{width - 10:.1f}"', top + tall - 1
            body.append(f'<line {ends} y1="{y:.1f}" y2="{y:.1f}" stroke="{theme.grid}"/>')
            for bar in bars:
                left, wide, fill = _STEP_LEFT + bar.start * unit, (bar.end - bar.start) * unit - 2, _fill(bar, theme)
                body.append(rectangle(left, top, wide, tall - 3, fill=fill, title=bar.title))
                words = next((words for words in _shorter(bar.label) if fits(words, wide - 4, size=11.5)), "")
                middle, base, ink = left + wide / 2, top + (tall - 3) / 2 + 4, ink_on(fill, theme)
                body.append(text(middle, base, words, anchor="middle", fill=ink, size=11.5))
            top += tall
        top += 12
    label = "One optimizer step, in order from left to right; the table has the same operations"
    return picture(body, width=width, height=top, label=label, theme=theme)


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
