"""Memory, time and cost of a setup before it runs, and the best setup."""

import streamlit as st


def show() -> None:
    """Show the page."""
    st.write("This page shows nothing yet.")
