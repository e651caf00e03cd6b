"""The page ``overview``."""

import streamlit as st

from dsgpt.dashboard.folders import current_folder
from dsgpt.dashboard.readers import contents_of


def show() -> None:
    """Show the page."""
    st.dataframe({"run": list(contents_of(current_folder()).runs)})
