"""How a model, its gradients and its optimizer state are split over ranks, and what they send."""

import streamlit as st


def show() -> None:
    """Show the page."""
    st.write("This page shows nothing yet.")
