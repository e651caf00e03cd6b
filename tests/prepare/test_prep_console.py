"""What the scripts print: progress bars on a terminal only, and numbers in words."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsgpt.data import download
from dsgpt.data.options import counted, duration, parse_options, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows(total: int | None) -> Iterator[int]:
    with progress(total=total, description="reading", unit=" rows") as bar:
        for number in range(10):
            bar.update(1)
            yield number


def test_no_bar_in_a_log(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert len(list(rows(10))) == 10
    assert not sys.stderr.getvalue()


@pytest.mark.parametrize("total", [10, 12, 9, None])
def test_bar_ends_at_100_percent(monkeypatch: pytest.MonkeyPatch, total: int | None):
    monkeypatch.setattr(sys, "stderr", Terminal())
    list(rows(total))
    assert "reading: 100%" in sys.stderr.getvalue().splitlines()[-1]


def test_bar_ends_at_100_percent_when_a_limit_ends_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    some = rows(10)
    next(some)
    some.close()
    assert "reading: 100%" in sys.stderr.getvalue().splitlines()[-1]


def test_bar_stays_where_an_error_ends_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="torn"), progress(total=10, description="reading", unit="B") as bar:
        bar.update(1)
        raise ValueError("torn")
    assert "100%" not in sys.stderr.getvalue()


def test_numbers_in_words():
    assert [counted(number, "binary file") for number in (0, 1, 2000)] == [
        "0 binary files", "1 binary file", "2,000 binary files",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (0.3, 1.2, 61)] == ["less than 1 s", "1 s", "61 s"]


def test_an_empty_output_folder_is_the_default():
    """As of a shell variable that is not set. The path of an empty word would be the current folder."""
    default = Path("data/python-stdlib")
    assert parse_options(["--output_dir", ""], description="", examples="", small=False).output_dir == default
    assert download.parse_options(["--output_dir", ""]).folder == default / "raw"
