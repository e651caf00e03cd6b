"""``src/convert.py``, called in this process because torch takes seconds to import, and what tests do to its input."""

import contextlib
import io
import json
from pathlib import Path

from small_run import REPOSITORY

from dsgpt.common.command_line import exit_code_of
from dsgpt.inference.commands import convert as command
from dsgpt.model.config import GPT2Config

CONVERT = REPOSITORY / "src" / "convert.py"


def convert(*words: object) -> tuple[int, str, str]:
    """The exit code, the output and the error output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exit_code_of(lambda: command([str(word) for word in words]), kept="nothing was written")
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return code, out.getvalue(), err.getvalue()


def converted(*words: object) -> str:
    """The output of a conversion that works."""
    code, out, err = convert(*words)
    assert (code, err) == (0, "")
    return out


def refusal(*words: object) -> list[str]:
    """The mistakes that it reports."""
    code, _, err = convert(*words)
    assert code == 2, err
    assert all(line.startswith("error: ") for line in err.splitlines())
    return [line.removeprefix("error: ") for line in err.splitlines()]


def config_of(checkpoint: Path) -> GPT2Config:
    """The shape in ``model.json``."""
    return GPT2Config(**json.loads((checkpoint / "model.json").read_text()))


def damage(file: Path) -> None:
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
