"""The command line of ``charts/dashboard.py``, and the server that it starts. Imports no Streamlit."""

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsgpt.common.command_line import flag, read_options, value
from dsgpt.common.errors import UserError
from dsgpt.common.text import REPOSITORY

DESCRIPTION = """\
See runs, compare them, watch one, plan the next and try its model, in a browser on this machine.

The dashboard reads records and changes nothing. It listens on 127.0.0.1 alone; docs/dashboard.md says how to see it
from another machine. It needs the extra `dashboard`: .venv/bin/python -m pip install -e '.[dashboard]'.
"""
EXAMPLES = """\
examples:
  # the runs in checkpoint/
  .venv/bin/python charts/dashboard.py

  # other runs, on another port; the second command is what the first one starts
  .venv/bin/python charts/dashboard.py --runs /data/runs --port 8600
  streamlit run charts/dashboard.py --server.port 8600 -- --runs /data/runs

Exit code 0: stopped; 2: a mistake in the command line, or Streamlit is not installed; 130: interrupted.
"""
SCRIPT = REPOSITORY / "charts" / "dashboard.py"
HOST_NAME = "[A-Za-z0-9._-]+"
"""Of a machine, as browsers write it."""


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    """The command line; ``parse`` fills ``runs``."""

    runs: Path = flag(
        Path, "FOLDER", "the folder whose runs are shown (default: checkpoint, here or else beside charts/)"
    )
    port: int = flag(
        value(int, accepts=lambda port: 1 <= port < 1 << 16, must_be="a port from 1 to 65,535"),
        "N",
        "on 127.0.0.1 (default: %(default)s)",
        default=8501,  # Streamlit's own
    )
    allowed_host: tuple[str, ...] = flag(
        value(str.lower, accepts=lambda name: re.fullmatch(HOST_NAME, name) is not None, must_be="a bare host name"),
        "NAME",
        "a name, beside those of loopback, under which browsers reach the dashboard; may be repeated",
        default=(),
        action="append",
    )


def parse(argv: Sequence[str] | None = None) -> DashboardOptions:
    """The checked command line; ``runs`` is a folder that exists, or ``checkpoint`` if there is none yet.

    Raises:
        UserError: every mistake in it, one line each.
    """
    options, problems = read_options(
        DashboardOptions, argv, prog="dashboard.py", description=DESCRIPTION, epilog=EXAMPLES
    )
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
        raise UserError(
            "Streamlit is not installed: make dashboard, or .venv/bin/python -m pip install -e '.[dashboard]'"
        )
    words = [sys.executable, "-m", "streamlit", "run", str(SCRIPT), "--server.port", str(arguments.port)]
    words += ["--", "--runs", str(arguments.runs.absolute())]
    os.execv(sys.executable, [*words, *(f"--allowed_host={name}" for name in arguments.allowed_host)])
