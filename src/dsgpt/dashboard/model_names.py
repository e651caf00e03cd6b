"""What a model is called: the name of its size only if it has that size's shape. Imports no Streamlit."""

from dsgpt.model.config import PRESETS
from dsgpt.reports.fields import Fields

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
