"""The picture of who holds what: a column for each rank, true to scale in bytes, with what each shard leaves out."""

from collections.abc import Iterator, Sequence

from dsgpt.dashboard.formats import memory
from dsgpt.dashboard.holding import KINDS, Block, Holding
from dsgpt.dashboard.svg import fits, ink_on, picture, rectangle, text
from dsgpt.reports.themes import Theme

_LEFT, _TOP, _WIDE, _SPACE, _TALL, _BETWEEN = 4, 34, 806, 10, 380, 10
_WIDEST, _NARROWEST = 150.0, 90.0
"""Of a column."""
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
