"""The command line of ``src/plan.py`` that says what options say."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from dsgpt.advising.options import PlanOptions


def words_of(options: PlanOptions) -> list[str]:
    """The words that ``read_options`` reads as ``options``; flags at their default are left out."""
    return [
        word
        for field in fields(PlanOptions)
        if (value := getattr(options, field.name)) != field.default
        for word in _words(field.name, value)
    ]


def _words(name: str, value: Any) -> Iterator[str]:
    yield f"--{name}"
    if isinstance(value, tuple):
        yield from map(str, value)
    elif name == "deadline":
        hours = value / 3600
        yield f"{int(hours)}h" if hours.is_integer() else f"{value!r}s"
    elif not isinstance(value, bool):
        yield value.as_posix() if isinstance(value, Path) else _number(value)


def _number(value: Any) -> str:
    """A whole number without ``.0``, as people write it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
