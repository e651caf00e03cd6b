"""Every refusal is what the committed transcript says.

``pytest tests/goldens --snapshot-update`` writes the transcript anew.
"""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_run import write_tokens
from transcripts import Row, read, remade, require_golden, run

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(checkpoint_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a recipe, a finished run, an export of it, and files that are not what they should be."""
    folder = tmp_path_factory.mktemp("goldens") / "here"
    shutil.copytree(checkpoint_with_tokenizer.parents[1], folder)
    done = run(["src/convert.py", "--from", "run", "--to", "hf", "hf"], cwd=folder)
    assert done.code == 0, done.err
    for name, data in {"empty.txt": b"", "latin.txt": b"caf\xe9", "texts/a.txt": b"a text\n" * 9}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    write_tokens(folder / "few.bin", np.arange(16))
    write_tokens(folder / "large.bin", np.array([1, 900] * 9), vocab_size=1000)
    flipped = write_tokens(folder / "flipped.bin", np.arange(200))
    flipped.write_bytes(b"\1" + flipped.read_bytes()[1:])
    return folder


def test_every_refusal_is_what_the_commands_print(folder, request):
    require_golden("refusals.txt", remade((HERE / "refusals.txt").read_text(encoding="utf-8"), folder), request)


def test_every_refusal_is_lines_without_a_traceback():
    """Also after ``--snapshot-update``. A preparation has made its folder before it reads the text."""
    rows = [row for row in read((HERE / "refusals.txt").read_text()) if isinstance(row, Row)]
    line = r"(error: .*|warning: .*|left out .*|wrote data.*)\n"
    assert [row.command for row in rows if not re.fullmatch(rf"({line})+\[2\]", row.output)] == []
