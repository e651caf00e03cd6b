"""The command line of ``charts/dashboard.py``, the server that it starts, and which requests the server answers.

Without the extra ``dashboard`` there is neither Streamlit nor Starlette: they are imported where they are used.
"""

import importlib.util
import os
import re
import sys
import webbrowser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from dsgpt.common.command_line import complain, flag, read_options, value
from dsgpt.common.errors import EXIT_USER_ERROR, UserError
from dsgpt.common.text import REPOSITORY

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.types import ASGIApp, Receive, Scope, Send

SCRIPT = REPOSITORY / "charts" / "dashboard.py"
HOST_NAME = "[A-Za-z0-9._-]+"
"""Pattern of a machine's name, as browsers write it."""
_PORT = value(int, accepts=lambda port: 1 <= port < 1 << 16, must_be="a port from 1 to 65,535")
_NAME = value(str.lower, accepts=lambda name: bool(re.fullmatch(HOST_NAME, name)), must_be="a bare host name")


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    """The command line; ``parse`` fills ``runs``.

    See runs, compare them, watch one, plan the next and try its model, in a browser on this machine.

    The dashboard reads records and changes nothing. It listens on 127.0.0.1 alone; docs/dashboard.md says how to see it
    from another machine. It needs the extra `dashboard`: .venv/bin/python -m pip install -e '.[dashboard]'.

    Examples:
      # the runs in checkpoint/
      .venv/bin/python charts/dashboard.py

      # other runs, on another port; the second command is what the first one starts
      .venv/bin/python charts/dashboard.py --runs /data/runs --port 8600
      streamlit run charts/dashboard.py --server.port 8600 -- --runs /data/runs

    Exit code 0: stopped; 2: a mistake in the command line, or Streamlit is not installed; 130: interrupted.
    """

    runs: Path = flag(Path, "FOLDER")
    """the folder whose runs are shown (default: checkpoint, here or else beside charts/)"""
    port: int = flag(_PORT, "N", default=8501)  # Streamlit's own
    """on 127.0.0.1 (default: %(default)s)"""
    allowed_host: tuple[str, ...] = flag(_NAME, "NAME", default=(), action="append")
    """a name, beside those of loopback, under which browsers reach the dashboard; may be repeated"""


def parse(argv: Sequence[str] | None = None) -> DashboardOptions:
    """The checked command line; ``runs`` is a folder that exists, or ``checkpoint`` if there is none yet.

    Raises:
        UserError: every mistake in it, one line each.
    """
    options, problems = read_options(DashboardOptions, argv, prog="dashboard.py")
    runs = options.runs
    if runs is None:
        runs = Path("checkpoint")
        runs = runs if runs.is_dir() else REPOSITORY / "checkpoint"
    elif not runs.expanduser().is_dir():
        problems.add(f"--runs {runs}: no such folder: name the folder that holds your runs")
    problems.raise_if_any()
    return replace(options, runs=runs.expanduser())


def is_served() -> bool:
    """Whether Streamlit runs this program, to show a page."""
    if "streamlit" not in sys.modules:
        return False
    from streamlit.runtime.scriptrunner import get_script_run_ctx  # noqa: PLC0415 - it is there already

    return get_script_run_ctx(suppress_warning=True) is not None


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process by the server.

    Raises:
        UserError: every mistake in the command line, or Streamlit is not installed.
    """
    arguments = parse(argv)
    if importlib.util.find_spec("streamlit") is None:
        install = "make dashboard, or .venv/bin/python -m pip install -e '.[dashboard]'"
        raise UserError(f"Streamlit is not installed: {install}")
    words = [sys.executable, "-m", "streamlit", "run", str(SCRIPT), "--server.port", str(arguments.port)]
    words += ["--", "--runs", str(arguments.runs.absolute())]
    os.execv(sys.executable, [*words, *(f"--allowed_host={name}" for name in arguments.allowed_host)])


# Which requests the server answers.

_HOST = re.compile(rf"(\[[0-9A-Fa-f:.]+\]|{HOST_NAME})(:[0-9]{{1,5}})?")
REFUSAL = "Refused: open the dashboard as 127.0.0.1 or localhost, or start it with --allowed_host NAME.\n"


class SameOrigin:
    """Refuses what other web pages send, over HTTP and as a websocket, before Streamlit sees it.

    ``Host`` must name loopback, with any port, or one of ``names``: a page of another name that was made to resolve to
    127.0.0.1 is refused. ``Origin``, where there is one, must be that host and port. Streamlit would ask another
    machine for the address of this one to judge an ``Origin`` that differs.
    """

    def __init__(self, app: "ASGIApp", *, names: frozenset[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass a request on, or answer it with 403."""
        from starlette.responses import PlainTextResponse  # noqa: PLC0415

        allowed = scope["type"] not in {"http", "websocket"} or self._allows(scope)
        await (self._app if allowed else PlainTextResponse(REFUSAL, status_code=403))(scope, receive, send)

    def _allows(self, scope: "Scope") -> bool:
        headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        hosts, origins = ([value for name, value in headers if name == wanted] for wanted in (b"host", b"origin"))
        if len(hosts) != 1 or (host := _HOST.fullmatch(hosts[0])) is None:
            return False
        if origins and origins not in ([f"http://{hosts[0]}"], [f"https://{hosts[0]}"]):
            return False
        name = host[1].lower()
        try:
            return name == "localhost" or name in self._names or ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return False


def same_origin() -> "Middleware":
    """The check, with the names of the command line; ends the process if the command line has mistakes."""
    from starlette.middleware import Middleware  # noqa: PLC0415

    try:
        return Middleware(SameOrigin, names=frozenset(parse().allowed_host))
    except UserError as error:
        sys.exit(complain(error.problems, EXIT_USER_ERROR))


@asynccontextmanager
async def open_browser(app: object) -> AsyncIterator[None]:  # noqa: ARG001 - as the server calls it
    """Open the first page if there is a desktop: ``streamlit run`` itself does so only without an ``App``."""
    import streamlit as st  # noqa: PLC0415

    if not st.get_option("server.headless"):
        webbrowser.open(f"http://{st.get_option('browser.serverAddress')}:{st.get_option('server.port')}")
    yield
