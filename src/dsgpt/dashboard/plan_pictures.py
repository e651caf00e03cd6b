"""The pictures of the page "Plan and cost", in Vega-Lite. Imports no Streamlit."""

from typing import Any

_X = {"field": "usd", "type": "quantitative", "title": "US dollars", "scale": {"zero": True}}
_Y = {"field": "offer", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 260}}
RANGES: dict[str, Any] = {
    "layer": [
        {
            "mark": {"type": "rule", "strokeWidth": 7, "opacity": 0.4, "strokeCap": "round"},
            "encoding": {"x": {**_X, "field": "least"}, "x2": {"field": "most"}, "y": _Y, "color": {"field": "price"}},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1, "tooltip": {"content": "data"}},
            "encoding": {
                "x": _X,
                "y": _Y,
                "color": {"field": "price", "type": "nominal", "legend": {"orient": "top", "title": None}},
            },
        },
    ],
}
"""A line from the least to the most of each offer, and a point at the likely cost."""


def bars(unit: str) -> dict[str, Any]:
    """A bar for each part, the longest first."""
    return {
        "mark": {"type": "bar", "tooltip": {"content": "data"}},
        "height": {"step": 24},
        "encoding": {
            "y": {"field": "part", "type": "nominal", "sort": "-x", "title": None},
            "x": {"field": unit, "type": "quantitative", "title": unit, "axis": {"tickCount": 4}},
        },
    }
