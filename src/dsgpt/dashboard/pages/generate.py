"""Generates text from a checkpoint."""

import streamlit as st


def show() -> None:
    """Show the page."""
    st.write("This page shows nothing yet.")
