"""The file that every rank of a cell writes at its end: a status, and what the rank measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RankEnd = dict[str, Any]
"""``status`` is ``done``, ``refused`` or ``error``; the last two come with a ``message`` and a ``time``."""


def rank_file(folder: Path, rank: int) -> Path:
    """The file that ``rank`` writes into the cell's folder when it ends, however it ends."""
    return folder / f"rank-{rank}.json"


def read_rank(folder: Path, rank: int) -> RankEnd | None:
    """The rank's file; None until it exists."""
    path = rank_file(folder, rank)
    if not path.exists():
        return None
    end: RankEnd = json.loads(path.read_text(encoding="utf-8"))
    return end


def read_ranks(folder: Path, ranks: int) -> list[RankEnd]:
    """The contents of the files of those ranks of a cell that have ended."""
    ends = [read_rank(folder, rank) for rank in range(ranks)]
    return [end for end in ends if end is not None]


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The end of the rank that failed first; others fail after it because they lost a peer. None if none failed."""
    return min((end for end in ends if end["status"] != "done"), key=lambda end: end["time"], default=None)
