"""Headings of pictures and columns, whose text may be foreign."""

from html import escape

import streamlit as st

STYLE = """.small-heading {font-size: 1rem; font-weight: 600; line-height: 1.6; margin: 0; padding: 0}
.small-heading {overflow-wrap: anywhere}"""
"""They look like bold text: ``st.header`` is for the parts of a page."""


def heading(text: str, *, level: int) -> None:
    """Show ``text``, as it is, as a heading; one above it has the level before, and that of the page has level 1."""
    st.html(f'<h{level} class="small-heading">{escape(text)}</h{level}>')
