"""A table in Markdown."""

from typing import Any


def table(header: list[str], rows: list[list[Any]]) -> str:
    """``header`` and ``rows`` as Markdown; None is an empty field."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join('' if value is None else str(value) for value in line)} |" for line in lines)
