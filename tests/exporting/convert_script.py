"""``src/convert.py``, called in this process: torch takes seconds to import."""

import contextlib
import importlib.util
import io

from small_run import REPOSITORY

from dsgpt.common.script import exit_code_of

SCRIPT = REPOSITORY / "src" / "convert.py"


def convert(*words: object) -> tuple[int, str, str]:
    """The exit code, and what went to the output and to the error output."""
    specification = importlib.util.spec_from_file_location("convert", SCRIPT)
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exit_code_of(lambda: script.main([str(word) for word in words]), kept=script.KEPT)
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return code, out.getvalue(), err.getvalue()


def converted(*words: object) -> str:
    """What it says when it does as it was told."""
    code, out, err = convert(*words)
    assert (code, err) == (0, "")
    return out


def refusal(*words: object) -> list[str]:
    """The mistakes that it finds."""
    code, _, err = convert(*words)
    assert code == 2, err
    assert all(line.startswith("error: ") for line in err.splitlines())
    return [line.removeprefix("error: ") for line in err.splitlines()]
