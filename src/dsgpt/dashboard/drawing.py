"""Shows a picture that is SVG text of our own, with the titles of its shapes, and offers it as a file."""

import streamlit as st
from streamlit.components.v2 import component

_FRAME = '<div class="drawing" role="group" tabindex="0" aria-label="Picture" style="overflow-x:auto"></div>'
"""On a narrow page the picture is scrolled sideways."""
_SHOW = """
export default function({ parentElement, data }) {
  parentElement.querySelector(".drawing").innerHTML = data.svg;
}
"""


def drawing(svg: str, *, key: str, name: str) -> None:
    """Show ``svg``, made by ``dsgpt.dashboard.svg``, which escapes every text in it.

    Streamlit's own ``st.html`` drops SVG, and in ``st.image`` the shapes would have no titles.

    Args:
        svg: the picture.
        key: unique on the page.
        name: of the downloaded file, without its ending.
    """
    show = component("dsgpt_drawing", html=_FRAME, js=_SHOW)
    show(data={"svg": svg}, key=key)
    st.download_button(
        "Download SVG",
        svg,
        file_name=f"{name}.svg",
        mime="image/svg+xml",
        key=f"{key}-svg",
        on_click="ignore",
        icon=":material/download:",
        type="tertiary",
    )
