"""The console: progress, and the live line of a training."""

import fcntl
import logging
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
from small_run import REPOSITORY, command_line, write_inputs

from dsgpt.common.files import PRINTABLE
from dsgpt.machine.console import Field, LogFile, fitted, logging_to_console

# Log lines on the console and in the log file.


logger = logging.getLogger("dsgpt.tests")


def test_lines_are_printed_and_copied_as_they_are(tmp_path, capsys):
    """Earlier lines are copied too, after the file's contents; percent signs and levels change nothing.

    Handlers that a library gave the root logger do not repeat lines, and the package's settings end with the context.
    """
    path, package, root = tmp_path / "train.log", logging.getLogger("dsgpt"), logging.StreamHandler(sys.stdout)
    path.write_text("before\n")
    before = (package.level, package.propagate, list(package.handlers))
    sys.stdout.reconfigure(errors=PRINTABLE)  # as ``prepare_output`` does
    logging.getLogger().addHandler(root)
    with logging_to_console(speaks=True), LogFile() as log:
        logger.info("100 % of 1")
        log.open(path)
        logger.warning("two\u00e9\udcff")
    logging.getLogger().removeHandler(root)
    logger.warning("after")
    captured = capsys.readouterr()
    assert captured.out == "100 % of 1\ntwo\u00e9\\xff\n"
    assert path.read_text() == f"before\n{captured.out}"
    assert (package.level, package.propagate, list(package.handlers)) == before


def test_other_ranks_are_silent(tmp_path, capsys):
    """On the console; the first rank of another machine has a log."""
    with logging_to_console(speaks=False), LogFile() as log:
        log.open(tmp_path / "train.log")
        logger.critical("nobody")
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "train.log").read_text() == "nobody\n"


def test_a_line_that_the_disk_refuses_does_not_end_the_run(tmp_path, capsys):
    with logging_to_console(speaks=True), LogFile() as log:
        log.open(tmp_path / "train.log")
        log._file = FileIO("/dev/full", "a")
        logger.info("lost")
    assert capsys.readouterr().out == "lost\n"


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with logging_to_console(speaks=True), LogFile() as log, pytest.raises(OSError):
        log.open(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


# The live line of a run on a terminal: a real pseudo-terminal, and what it would show.


FIELDS = [Field("step 1/9", 0), Field("loss 2.5", 1), Field("lr 1e-3", 3), Field("left 9 s", 2)]


def test_the_most_important_fields_fit():
    shown = {37: "step 1/9  loss 2.5  lr 1e-3  left 9 s", 36: "step 1/9  loss 2.5  left 9 s"}
    shown |= {27: "step 1/9  loss 2.5", 5: "step "}
    assert {width: fitted(FIELDS, width) for width in shown} == shown


class Screen:
    """What a terminal shows of the characters that it received: lines, returns, erasing, and the cursor's way up."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[str] = [""]
        self.states: list[list[str]] = []
        """The rows that are not empty, after each part of the output."""
        self._row = self._column = 0

    def receive(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.", text, flags=re.DOTALL):
            self._show(part)
        self.states.append([row.rstrip() for row in self.rows if row.strip()])

    def _show(self, part: str) -> None:
        row = self.rows[self._row]
        if part == "\r":
            self._column = 0
        elif part == "\n":
            self._row += 1
            if self._row == len(self.rows):
                self.rows.append("")
        elif part == "\x1b[K":
            self.rows[self._row] = row[: self._column]
        elif part == "\x1b[A":
            self._row -= 1
        else:
            assert part.isprintable(), f"a control character that this terminal does not know: {part!r}"
            if self._column == self.columns:
                self._show("\n")
                self._column, row = 0, self.rows[self._row]
            self.rows[self._row] = row[: self._column].ljust(self._column) + part + row[self._column + 1 :]
            self._column += 1

    @property
    def at_start(self) -> bool:
        """Whether the cursor is at the start of an empty last row, where a shell prints its prompt."""
        return (self._column, self._row, self.last_row) == (0, len(self.rows) - 1, "")

    @property
    def last_row(self) -> str:
        """The row of the cursor."""
        return self.rows[self._row].rstrip()


def on_a_terminal(
    command: list[str], *, columns: int, then: Callable[[Screen, int], None] = lambda *_: None
) -> tuple[int, Screen]:
    """Run a command on a terminal of its own; ``then`` is called after each output, with the keyboard's descriptor."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen = Screen(columns)

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(command, **streams, preexec_fn=own_terminal)  # noqa: PLW1509 - no threads here
    os.close(theirs)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the last process with the terminal has ended
                break
            screen.receive(data.decode())
            then(screen, ours)
        return process.wait(timeout=30), screen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("terminal"))


def training(folder: Path, **flags) -> list[str]:
    return [sys.executable, str(REPOSITORY / "src" / "gpt2.py"), *command_line(folder, no_inference=True, **flags)]


LIVE = re.compile(r"step \d+/\d+  .*left |validating:")


def live_lines(screen: Screen) -> list[str]:
    """All that the live line has shown; there is one at a time."""
    shown = [[row for row in rows if LIVE.match(row)] for rows in screen.states]
    assert max(map(len, shown)) == 1
    return [row for rows in shown for row in rows]


def test_a_run_on_a_wide_terminal(inputs, tmp_path):
    """Events stay above the line, steps are only in the log, and at the end the line is gone."""
    run = tmp_path / "run"
    flags = {"max_train_steps": 60, "eval_every": 25, "steps_per_print": 5, "save_every": 0, "checkpoint_path": run}
    code, screen = on_a_terminal(training(inputs, **flags), columns=160)
    assert code == 0
    figures = r"step \d+/60  loss \d\.\d{4}(?: at step \d+)?  lr \d\.\d\de-\d\d  grad norm \d\.\d{3}  [\d,]+ tokens/s"
    assert re.fullmatch(figures + r"  memory \d\.\d\d GB  left \d\.\d s", live_lines(screen)[-1])
    rows = [row.rstrip() for row in screen.rows]
    assert len([row for row in rows if re.match(r"step +(25|50|60)/60  validation loss", row)]) == 3
    assert any(re.match(r"step +60/60  saved", row) for row in rows)
    assert not [row for row in rows if "tokens/s" in row and "finished" not in row]
    assert not [row for row in rows if "validating" in row]
    assert f"the record is {run / 'training_metrics.json'}" in rows
    assert screen.at_start
    log = (run / "train.log").read_text(encoding="utf-8")
    losses = dict(re.findall(r"^step +(\d+)/60  loss (\S+)", log, flags=re.MULTILINE))
    assert len(losses) == 1 + 12
    shown = re.findall(r"^step (\d+)/60  loss (\S+)(?: at step (\d+))?  ", "\n".join(live_lines(screen)), re.MULTILINE)
    assert shown
    assert [row for row in shown if losses.get(row[2] or row[0]) != row[1]] == []
    assert "\x1b" not in log


def test_ctrl_c_on_a_narrow_terminal(inputs, tmp_path):
    """The line fits, and nothing of it is left, nor of what the terminal writes behind it: ``^C``, or typed text."""
    pressed = []

    def press(screen: Screen, keyboard: int) -> None:
        saved = sum("saved in" in row for row in screen.rows)
        if not pressed and re.search("loss.*left", screen.last_row):
            os.write(keyboard, b"####")
            pressed.append(saved)
        elif len(pressed) == 1 and saved > pressed[0] + 1 and re.search("loss.*left", screen.last_row):
            pressed.append(os.write(keyboard, b"\x03"))  # not while a line is written: the terminal puts ^C into it

    flags = {"max_train_steps": 100_000, "epochs": 100_000, "save_every": 20, "checkpoint_path": tmp_path / "run"}
    code, screen = on_a_terminal(training(inputs, **flags), columns=60, then=press)
    assert len(pressed) == 2
    assert not [row for row in screen.rows if "#" in row]
    assert code == 75
    shown = live_lines(screen)
    assert all(len(row) < 60 for row in shown)
    assert re.fullmatch(r"step \d+/100000  loss \d\.\d{4}(?: at step \d+)?  left .*", shown[-1])
    rows = [row.rstrip() for row in screen.rows]
    assert not [row for row in rows if LIVE.match(row) or row.endswith("^C")]
    assert any(row.startswith("SIGINT: the run stops after this step and saves") for row in rows)
    assert "continue with --resume" in "".join(rows)
    assert screen.at_start
