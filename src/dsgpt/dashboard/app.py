"""The frame around every page: title, navigation, and which folder is shown."""

import streamlit as st

from dsgpt.charts.options import DARK, LIGHT
from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.dashboard import figures
from dsgpt.dashboard.formats import plain
from dsgpt.dashboard.navigation import pages
from dsgpt.dashboard.runs import current_folder
from dsgpt.dashboard.summaries import contents_of

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    f'<path d="M2 2v12h12" fill="none" stroke="{LIGHT.palette[5]}" stroke-width="1.5"/>'
    f'<path d="M3 3c2 7 5 8 11 8.5" fill="none" stroke="{LIGHT.palette[0]}" stroke-width="2.5"/></svg>'
)
"""A loss curve. An icon of Google's or an emoji would be fetched from another machine."""

STYLE = f"""<style>
[data-testid=stMainBlockContainer] {{padding-top: 2.75rem; padding-bottom: 3rem}}
@media (min-width: 700px) {{[data-testid=stMainBlockContainer] {{padding-left: 2.5rem; padding-right: 2.5rem}}}}
[data-testid=stCaptionContainer] {{color: light-dark({LIGHT.quiet}, {DARK.quiet}); opacity: 1}}
{figures.HEADING_STYLE}
{figures.ALIGNED_STYLE}
button[kind^=primary]:enabled *, [data-tag-index] * {{color: light-dark({LIGHT.background}, {DARK.background})}}
</style>"""
"""Streamlit leaves a fifth of the screen empty around a page, and some of its colours have too little contrast to read
(WCAG 2.2, 1.4.3). The browser chooses between the themes: it may change them while the page is open.
"""


def show() -> None:
    """Show the page that the address names."""
    st.set_page_config(page_title="dsgpt", page_icon=ICON, layout="wide", initial_sidebar_state=240)
    st.html(STYLE)
    page = st.navigation(pages(), expanded=True)
    try:
        folder = current_folder()
    except UserError as error:
        st.error(plain(str(error)))
        return
    with st.sidebar:
        st.caption("Runs in")
        st.text(printable(folder))
    st.title(page.title)
    for name in contents_of(folder).unnamed:
        st.warning(f"**{plain(name)}** is not shown: its name is not UTF-8; rename it")
    page.run()
