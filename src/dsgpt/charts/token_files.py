"""The picture of ``dsgpt data verify --plot``: the lengths of documents, and the frequencies of tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from dsgpt.charts.comparison import shorten
from dsgpt.charts.style import Texts, legend_height, look, note_inside, number_axis, quiet_style, save
from dsgpt.charts.themes import LIGHT
from dsgpt.data.verify import Contents

BINS = 8
"""Bins of document lengths per factor of two."""


def draw_contents(contents: Sequence[Contents], picture: Path) -> None:
    """Write two panels into ``picture``, a .png or .svg: documents by length, and tokens by rank of their frequency."""
    with quiet_style(LIGHT):
        caption = (
            "Lengths count the end-of-text id. A straight line in the lower panel is Zipf's law: the frequency is a "
            "power of the rank. A line ends at the last token that occurs; a steep end has tokens that hardly do."
        )
        height = 6.2 + legend_height(len(contents), columns=1)
        frame = Texts().frame("What the token files hold", caption, height=height)
        lengths, frequencies = frame.panels(2)
        handles = []
        for index, each in enumerate(contents):
            line = look(index, count=len(contents)).line | {"marker": ""}
            handles.append(Line2D([], [], label=shorten(str(each.file.path), 60), **line))
            if len(each.sizes):
                bins = (np.log2(each.sizes) * BINS).astype(np.int64)
                up_to = 100 * np.cumsum(np.bincount(bins - bins.min())) / len(bins)
                ends = 2.0 ** (np.arange(bins.min() + 1, bins.max() + 2) / BINS)
                edges = np.append(each.sizes.min(), np.minimum(ends, each.sizes.max()))
                lengths.plot(edges, np.append(0, up_to), **line)
            else:
                note_inside(lengths, "which id ends a document is not known", x=0.3, y=0.5, transform=lengths.transAxes)
            counts = np.sort(each.frequencies[each.frequencies > 0])[::-1]
            frequencies.plot(np.arange(1, len(counts) + 1), 100 * counts / each.file.tokens, **line)
        lengths.set(xscale="log", ylim=(0, 101), xlabel="tokens of a document", ylabel="documents up to it (%)")
        frequencies.set(xscale="log", yscale="log", xlabel="rank of the token", ylabel="of all tokens (%)")
        lengths.set_title("Length of documents")
        frequencies.set_title("Frequency of tokens")
        for axis in (lengths.xaxis, frequencies.xaxis, frequencies.yaxis):
            number_axis(axis)
        frame.legend(handles, columns=1)
        save(frame.figure, picture)
