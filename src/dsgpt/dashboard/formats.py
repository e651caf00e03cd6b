"""Numbers with their units, names of models, and tables, as pages show them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsgpt.common.files import printable
from dsgpt.model.config import PRESETS
from dsgpt.record.fields import Fields

# Numbers with their units, and foreign text, as pages show them.

UNKNOWN = "unknown"
_SPECIAL = re.compile(r"[\\`*_{}\[\]()<>#+\-.!|~$^=&]|:(?=[\w:])|(?<=:material)/")
_REPLACED = re.compile(
    r"((?::(?:[+-]1|(?!\d\d:)[\w-]+):|(?:[a-z]+://|www\.)[^\s`]+|[^\s`@]+@[^\s`@]+)+"
    r"|(?<!\S)(?:<->|->|<-|--|>=|<=|~=)(?!\S))",
    re.IGNORECASE,
)
"""What Streamlit replaces by icons, emoji, typographic signs and links even behind a backslash, but not in code.

Two digits between colons are of a time: no emoji is called so.
"""


def plain(text: str) -> str:
    """Foreign text for a place that reads Markdown: nothing in it is markup, a link, a formula or an icon.

    The reader sees, and copies, the text itself. A part that only code protects looks like code.
    """
    pieces = _REPLACED.split(" ".join(printable(text).split()))
    return "".join(f"`{piece}`" if place % 2 else _SPECIAL.sub(r"\\\g<0>", piece) for place, piece in enumerate(pieces))


def count(value: float | None, unit: str = "") -> str:
    """``15,300 tokens``."""
    return _with(unit, None if value is None else f"{value:,.0f}")


def rate(tokens_per_sec: float | None) -> str:
    """``15,300 tokens/s``."""
    return count(tokens_per_sec, "tokens/s")


def seconds(value: float | None) -> str:
    """``85 ms``, ``1.24 s``, ``75.7 s``, ``3 min 05 s``, ``2 h 07 min`` or ``3 d 04 h``."""
    if value is None:
        return UNKNOWN
    if value < 99.95:
        return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s"
    whole = round(value)
    for large, small, size, part in (("d", "h", 86_400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part:02d} {small}"
    return f"{whole} s"


def memory(value: float | None) -> str:
    """``3.4 GB``: decimal units, as on the datasheets of GPUs."""
    if value is None:
        return UNKNOWN
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.0f} B"


def money(value: float | None, currency: str = "$") -> str:
    """``$17.69``; less than ten cents with three digits that count, ``$0.0123``."""
    if value is None:
        return UNKNOWN
    return f"{currency}{value:,.2f}" if value == 0 or value >= 0.1 else f"{currency}{value:.3g}"


def loss(value: float | None) -> str:
    """``3.4957``, nats per token."""
    return UNKNOWN if value is None else f"{value:.4f}"


def share(value: float | None) -> str:
    """A share of 1 as ``43%``."""
    return UNKNOWN if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    """A factor as ``1.40x``."""
    return UNKNOWN if value is None else f"{value:.2f}x"


def _with(unit: str, text: str | None) -> str:
    if text is None:
        return UNKNOWN
    return f"{text} {unit}" if unit else text


# What a model is called: the name of its size only if it has that size's shape.

_SHAPE = ("n_layer", "n_head", "n_embd", "block_size")
"""Without the vocabulary, which the data decide, and the dropout, which belongs to training."""


def model_name(config: Fields) -> str | None:
    """``small (124M)``, ``2 x 128 (0.452M)`` (layers and width) or, of a published model, ``distilgpt2 (81.9M)``.

    A record calls a model by its ``--model_size``, also if other flags changed its shape. What the record does not say
    is left out; None if it says nothing.

    Args:
        config: the ``training_config`` of a record.
    """
    parameters = config.number("parameters")
    parts = [_size_name(config), None if parameters is None else _count(parameters)]
    if None in parts:
        return parts[0] or parts[1]
    return f"{parts[0]} ({parts[1]})"


def _size_name(config: Fields) -> str | None:
    given = config.text("model_size")
    preset, model = PRESETS.get(given or ""), config.section("model")
    shape = {field: model.whole(field) for field in _SHAPE}
    layers, width = shape["n_layer"], shape["n_embd"]
    if layers is None or width is None or (given and not preset):
        return given
    if preset and all(getattr(preset, field) == value for field, value in shape.items() if value is not None):
        return given
    return f"{layers} x {width}"


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


# Rows of figures as the columns of a table.


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of every heading; the first row has all headings."""
    return {heading: [row[heading] for row in rows] for heading in rows[0]} if rows else {}
