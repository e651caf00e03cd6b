"""Columns whose elements begin at one height."""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

_KEY = "aligned"
ROWS = 6
"""Elements of the fullest column."""
_BLOCK = f".st-key-{_KEY} > div > [data-testid=stHorizontalBlock]"
_COLUMN = f"{_BLOCK} > [data-testid=stColumn]"
STYLE = f"""@media (min-width: 640px) {{
  {_BLOCK} {{display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr)}}
  {_BLOCK} {{grid-template-rows: repeat({ROWS}, auto); row-gap: 1rem}}
  {_COLUMN} {{grid-row: span {ROWS}; width: auto}}
  {_COLUMN}, {_COLUMN} > [data-testid=stVerticalBlock] {{display: grid; grid-template: subgrid / minmax(0, 1fr)}}
  {_COLUMN} > [data-testid=stVerticalBlock] {{grid-row: span {ROWS}}}
}}"""
"""On a narrower page, Streamlit shows one column below the other."""


def aligned(count: int) -> list[DeltaGenerator]:
    """Columns, as ``st.columns`` makes them; of each, the first ``ROWS`` elements share their rows with the others'.

    A page may call it once.
    """
    with st.container(key=_KEY):
        return st.columns(count)
