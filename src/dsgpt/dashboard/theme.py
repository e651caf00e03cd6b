"""The theme of the page that is shown."""

import streamlit as st

from dsgpt.reports.themes import LIGHT, THEMES, Theme


def page_theme() -> Theme:
    """Light or dark, as the browser shows the page; light before it has said so."""
    return THEMES.get(st.context.theme.type or LIGHT.name, LIGHT)
