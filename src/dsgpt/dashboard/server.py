"""The server around the pages: who may ask it. ``charts/dashboard.py`` gives both to ``streamlit.starlette.App``."""

import re
import sys
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import streamlit as st
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit.starlette import App

from dsgpt.common.command_line import complain
from dsgpt.common.errors import EXIT_USER_ERROR, UserError
from dsgpt.dashboard.command import HOST_NAME, parse

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
        if len(hosts) != 1 or (found := _HOST.fullmatch(hosts[0])) is None:
            return False
        name = found[1].lower()
        same = not origins or origins in ([f"http://{hosts[0]}"], [f"https://{hosts[0]}"])
        return same and (name in self._names or _is_loopback(name))


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


@asynccontextmanager
async def open_browser(app: App) -> AsyncIterator[None]:  # noqa: ARG001 - as the server calls it
    """Open the first page if there is a desktop: ``streamlit run`` itself does so only without an ``App``."""
    if not st.get_option("server.headless"):
        webbrowser.open(f"http://{st.get_option('browser.serverAddress')}:{st.get_option('server.port')}")
    yield


def same_origin() -> Middleware:
    """The check, with the names of the command line; ends the process if the command line has mistakes."""
    try:
        return Middleware(SameOrigin, names=frozenset(parse().allowed_host))
    except UserError as error:
        sys.exit(complain(error.problems, EXIT_USER_ERROR))
