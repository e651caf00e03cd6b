"""Log lines on the console and in the log file."""

import logging
import sys
from io import FileIO

import pytest

from dsgpt.common.files import PRINTABLE
from dsgpt.machine.console import Console, LogFile, Progress, logging_to_console

logger = logging.getLogger("dsgpt.tests")


def test_lines_are_printed_and_copied_as_they_are(tmp_path, capsys):
    """Earlier lines are copied too, after the file's contents; percent signs and levels change nothing."""
    path = tmp_path / "train.log"
    path.write_text("before\n")
    sys.stdout.reconfigure(errors=PRINTABLE)  # as ``prepare_output`` does
    with logging_to_console(speaks=True), LogFile() as log:
        logger.info("100 % of 1")
        log.open(path)
        logger.warning("two\u00e9\udcff")
    logger.warning("after")
    captured = capsys.readouterr()
    assert captured.out == "100 % of 1\ntwo\u00e9\\xff\n"
    assert path.read_text() == f"before\n{captured.out}"


def test_other_ranks_are_silent(tmp_path, capsys):
    with logging_to_console(speaks=False), LogFile() as log:
        log.open(tmp_path / "train.log")
        logger.critical("nobody")
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "train.log").read_text() == ""


def test_handlers_of_the_root_logger_do_not_repeat_lines(capsys):
    root = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(root)
    try:
        with logging_to_console(speaks=True):
            logger.info("once")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr().out == "once\n"


def test_the_setting_ends_with_its_context(capsys):
    package = logging.getLogger("dsgpt")
    before = (package.level, package.propagate, list(package.handlers))
    with logging_to_console(speaks=True), LogFile():
        pass
    assert (package.level, package.propagate, list(package.handlers)) == before


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


@pytest.mark.parametrize(("speaks", "shown"), [(True, True), (False, False)])
def test_bars_are_shown_where_lines_are(monkeypatch, speaks, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with logging_to_console(speaks=speaks):
        bar = Progress(total=2, what="work", unit="step")
    assert bar._bar.disable is not shown
    bar.close()
    console = Console(speaks=speaks).progress(total=2, what="work", unit="step")
    assert console._bar.disable is not shown
    console.close()
