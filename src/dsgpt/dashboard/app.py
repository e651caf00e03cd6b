"""The server of the dashboard: which requests it answers, its pages, and the frame around them.

``charts/dashboard.py`` gives ``same_origin`` and ``open_browser`` to ``streamlit.starlette.App``, which calls ``show``
for every page.
"""

import importlib
import re
import sys
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import streamlit as st
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit.navigation.page import Page
from streamlit.starlette import App

from dsgpt.charts.themes import DARK, LIGHT
from dsgpt.common.command_line import complain
from dsgpt.common.errors import EXIT_USER_ERROR, UserError
from dsgpt.common.files import printable
from dsgpt.dashboard import figures
from dsgpt.dashboard.command import HOST_NAME, parse
from dsgpt.dashboard.summaries import contents, current_folder

_HOST = re.compile(rf"(\[[0-9A-Fa-f:.]+\]|{HOST_NAME})(:[0-9]{{1,5}})?")
REFUSAL = "Refused: open the dashboard as 127.0.0.1 or localhost, or start it with --allowed_host NAME.\n"


class SameOrigin:
    """Refuses what other web pages send, over HTTP and as a websocket, before Streamlit sees it.

    ``Host`` must name loopback, with any port, or one of ``names``: a page of another name that was made to resolve to
    127.0.0.1 is refused. ``Origin``, where there is one, must be that host and port. Streamlit would ask another
    machine for the address of this one to judge an ``Origin`` that differs.
    """

    def __init__(self, app: ASGIApp, *, names: frozenset[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 403."""
        allowed = scope["type"] not in {"http", "websocket"} or self._allows(scope)
        await (self._app if allowed else PlainTextResponse(REFUSAL, status_code=403))(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        hosts, origins = (
            [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
            for wanted in (b"host", b"origin")
        )
        if len(hosts) != 1 or (host := _HOST.fullmatch(hosts[0])) is None:
            return False
        if origins and origins not in ([f"http://{hosts[0]}"], [f"https://{hosts[0]}"]):
            return False
        name = host[1].lower()
        try:
            return name == "localhost" or name in self._names or ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return False


def same_origin() -> Middleware:
    """The check, with the names of the command line; ends the process if the command line has mistakes."""
    try:
        return Middleware(SameOrigin, names=frozenset(parse().allowed_host))
    except UserError as error:
        sys.exit(complain(error.problems, EXIT_USER_ERROR))


@asynccontextmanager
async def open_browser(app: App) -> AsyncIterator[None]:  # noqa: ARG001 - as the server calls it
    """Open the first page if there is a desktop: ``streamlit run`` itself does so only without an ``App``."""
    if not st.get_option("server.headless"):
        webbrowser.open(f"http://{st.get_option('browser.serverAddress')}:{st.get_option('server.port')}")
    yield


def pages() -> dict[str, list[Page]]:
    """Every page by the heading above it, as ``st.navigation`` takes them; the first is the default."""
    return {
        "Runs": [
            _page("overview", "Overview", "table_rows"),
            _page("compare", "Compare", "compare_arrows"),
            _page("live", "Live", "monitoring"),
        ],
        "Before a run": [
            _page("split", "How it is split", "account_tree"),
            _page("plan", "Plan and cost", "payments"),
        ],
        "After a run": [_page("generate", "Try it", "chat")],
    }


def _page(name: str, title: str, icon: str) -> Page:
    """A page whose address is its module's name. Its icon is one of Google's Material Symbols, which Streamlit brings.

    The module is imported when the page is opened: it may need what takes seconds to import.
    """

    def show_page() -> None:
        importlib.import_module(f"dsgpt.dashboard.{name}").show()

    return st.Page(show_page, title=title, icon=f":material/{icon}:", url_path=name, default=name == "overview")


def go_to(name: str, **query: Any) -> None:
    """Leave this page for another, with ``query`` in its address."""
    page = next(page for group in pages().values() for page in group if page.url_path == name)
    st.switch_page(page, query_params=query)


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
{figures.STYLE}
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
        st.error(figures.plain(str(error)))
        return
    with st.sidebar:
        st.caption("Runs in")
        st.text(printable(folder))
    st.title(page.title)
    for name in contents(folder).unnamed:
        st.warning(f"**{figures.plain(name)}** is not shown: its name is not UTF-8; rename it")
    page.run()
