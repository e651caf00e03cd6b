"""One line of a terminal that shows how a run is doing, fitted to the terminal's width."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

_ERASE = "\x1b[K"
"""Erases to the end of the terminal's row, with what was typed there."""


class Field(NamedTuple):
    """A part of the line."""

    text: str
    rank: int
    """Of its importance: in a narrow terminal the highest ranks are left out first."""


def fitted(fields: Sequence[Field], width: int) -> str:
    """The most important fields that fit into ``width`` columns, in their order; the first one is cut if it does not.

    A field is left out with all that are less important.
    """
    kept = list(fields)
    while len(kept) > 1 and len(_line(kept)) > width:
        kept.remove(max(kept, key=lambda field: field.rank))
    return _line(kept)[: max(0, width)]


def _line(fields: Sequence[Field]) -> str:
    return "  ".join(field.text for field in fields)


class LiveBar(tqdm):  # type: ignore[type-arg]  # it iterates over nothing
    """A tqdm bar that shows a text instead of a bar, and gives way to other bars.

    Args:
        text: returns the text for a number of columns.
        named: the arguments of ``tqdm``.
    """

    def __init__(self, *, text: Callable[[int], str], **named: Any) -> None:
        self._text = text
        super().__init__(**named, position=0, leave=False, dynamic_ncols=True, file=sys.stderr)

    def __str__(self) -> str:
        columns: int | None = self.format_dict["ncols"]
        return self._text((columns or 80) - 1)  # a full last column may begin a new line

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the line, unless another bar is in its place."""
        if msg is None and any(other is not self and not other.disable for other in _open_bars()):
            return
        super().display(msg, pos)
        self.fp.write(_ERASE if msg is None else f"\r{_ERASE}")
        self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Clear the line."""
        super().clear(nolock)
        if not self.disable:
            self.fp.write(_ERASE)
            self.fp.flush()


def _open_bars() -> "list[tqdm[Any]]":
    return list(tqdm._instances)  # type: ignore[attr-defined]  # its types leave it out


def make_room() -> int | None:
    """Clear the live line; return its place for another bar, or None if there is no live line."""
    for bar in _open_bars():
        if isinstance(bar, LiveBar) and not bar.disable:
            bar.clear()
            return 0
    return None
