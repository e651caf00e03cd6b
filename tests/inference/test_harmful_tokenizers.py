"""A checkpoint whose tokenizer brings code or is damaged is refused in one line, and its code never runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harmful_tokenizers import MALFORMED, bring_code, seal
from small_run import REPOSITORY

from dsgpt.common.errors import UserError
from dsgpt.inference.commands import GenerateRequest as Request
from dsgpt.inference.sample import Writer


def refusal(checkpoint: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(Writer(Request(checkpoint=checkpoint, max_new_tokens=2, temperature=0, device="cpu")).texts(["def"]))
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def test_code_is_refused_even_if_the_user_agrees_to_it(checkpoint, tmp_path):
    marker = bring_code(checkpoint / "tokenizer", marker=tmp_path / "ran")
    seal(checkpoint)
    script = REPOSITORY / "src" / "generate.py"
    done = subprocess.run(
        [sys.executable, script, "--checkpoint", checkpoint, "--prompt", "def", "--device", "cpu"],
        input="y\n" * 9, capture_output=True, text=True, check=False, cwd=tmp_path,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert not marker.exists(), "the tokenizer's code ran"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {checkpoint}/tokenizer: its tokenizer_config.json asks for its own code (auto_map), which is "
        "never run: use a tokenizer of the `tokenizers` library (a tokenizer.json), without auto_map\n"
    )


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoTokenizer"])
def test_code_that_a_configuration_beside_asks_for_is_refused(checkpoint, tmp_path, kind):
    marker = bring_code(checkpoint / "tokenizer", marker=tmp_path / "ran")
    settings = checkpoint / "tokenizer" / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    del values["auto_map"]
    settings.write_text(json.dumps(values))
    beside = {"model_type": "planted", "auto_map": {kind: "planted.Planted"}}
    (checkpoint / "tokenizer" / "config.json").write_text(json.dumps(beside))
    seal(checkpoint)
    line = refusal(checkpoint)
    assert line.startswith(f"{checkpoint}/tokenizer: its config.json asks for its own code (auto_map)")
    assert not marker.exists()


@pytest.mark.parametrize(("name", "text"), MALFORMED, ids=lambda value: value[:40])
def test_a_malformed_tokenizer_is_one_line_or_none(checkpoint, name, text):
    (checkpoint / "tokenizer" / name).write_text(text, encoding="latin-1")
    seal(checkpoint)
    try:
        assert refusal(checkpoint).startswith(f"{checkpoint}/tokenizer")
    except pytest.fail.Exception:  # nothing was refused: the library finds a meaning in it
        assert name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json", "config.json")


def test_a_prompt_that_the_tokenizer_cannot_encode_is_one_line(checkpoint):
    """A vocabulary of one word, and no token for the others."""
    file = checkpoint / "tokenizer" / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"word": 0}, "unk_token": "[UNK]"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": model, "pre_tokenizer": None, "decoder": None}))
    seal(checkpoint)
    assert refusal(checkpoint).startswith("--prompt 'def': the tokenizer cannot encode it (WordLevel error: Missing")


def test_no_link_in_a_tokenizer_is_followed(checkpoint, tmp_path):
    (checkpoint / "tokenizer" / "vocab.json").symlink_to("/etc/hostname")
    line = refusal(checkpoint)
    assert line.startswith(f"{checkpoint}/tokenizer: its vocab.json is a link")
    assert "cp -rL" in line
