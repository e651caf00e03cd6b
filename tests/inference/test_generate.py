"""``src/generate.py`` generates text from a real run, or refuses with the reason."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harmful_tokenizers import bring_code, seal
from published import called, publish
from small_run import END_OF_TEXT, REPOSITORY

from dsgpt.common.errors import UserError
from dsgpt.inference.commands import GenerateRequest as Request
from dsgpt.inference.commands import ServeOptions, generate, serve
from dsgpt.inference.generation import Writer
from dsgpt.inference.model_files import export
from dsgpt.inference.server.engine import open_served
from dsgpt.machine.console import Console

SCRIPT = REPOSITORY / "src" / "generate.py"


def texts(path: Path, **changes: Any) -> list[str]:
    """The texts after one prompt, or after several if ``prompt`` is a list."""
    prompt = changes.pop("prompt", "def ma")
    writer = Writer(Request(checkpoint=path, **{"max_new_tokens": 8, "seed": 1, "device": "cpu"} | changes))
    return [str(text) for text in writer.texts([prompt] if isinstance(prompt, str) else prompt)]


def refusal(path: Path, **changes: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        texts(path, **changes)
    assert not any("\n" in line for line in caught.value.problems)
    return [line.replace(f"{path}", "RUN") for line in caught.value.problems]


def test_the_command_continues_the_prompt(run_dir):
    code, out, err = script("--checkpoint", run_dir, "--prompt", "def ma", "--num_samples", 2)
    assert code == 0, err
    first, second, rest = out.split("-" * 80 + "\n")
    assert first.startswith("def ma")
    assert second.startswith("def ma")
    assert first != second
    assert rest == ""


def test_a_text_ends_where_the_context_is_full(run_dir, tmp_path):
    """The prompt keeps its place; the command says why the text is short."""
    writer = Writer(Request(checkpoint=run_dir, max_new_tokens=12, temperature=0, device="cpu"))
    found = {text.prompt: text for text in writer.texts(["x" * 10, "xy"])}
    assert {prompt: text.ended for prompt, text in found.items()} == {"x" * 10: "context", "xy": "length"}
    assert found["x" * 10].added == texts(run_dir, prompt="x" * 10, max_new_tokens=6, temperature=0)[0][10:]
    done = script("--checkpoint", run_dir, "--prompt", "x" * 10)
    assert done[::2] == (0, "note: a text ends where the model's context of 16 tokens is full\n")


def test_the_batch_size_changes_no_text(run_dir):
    def drawn(batch_size: int) -> list[str]:
        return texts(run_dir, prompt=["def", "x = 1 ", ""], num_samples=3, batch_size=batch_size)

    assert len(set(drawn(1))) == 9  # an empty prompt starts a document
    assert [text[:1] for text in drawn(1)[:6]] == ["d", "d", "d", "x", "x", "x"]
    assert drawn(1) == drawn(4) == drawn(9)
    assert texts(run_dir, seed=1) != texts(run_dir, seed=2)
    assert texts(run_dir, seed=1, temperature=0) == texts(run_dir, seed=2, temperature=1e-30)


def test_a_text_is_shown_while_it_is_generated(run_dir):
    pieces: list[str] = []
    writer = Writer(Request(checkpoint=run_dir, max_new_tokens=8, num_samples=2, seed=1, device="cpu"))
    found = [str(text) for text in writer.texts(["def ma"], show=pieces.append)]
    assert "".join(pieces) == "".join(found)
    assert len([piece for piece in pieces if piece]) > 4
    assert found == texts(run_dir, num_samples=2)
    pieces.clear()  # of a text that Ctrl-C ends what there is comes out, and the texts that would follow do not
    (text,) = writer.texts(["ab"], show=pieces.append, stopped=lambda: len(pieces) >= 4)
    assert (text.ended, str(text)) == ("interrupted", "".join(pieces))
    assert len(text.added) > 1


def test_ctrl_c_ends_the_command_in_order(run_dir, tmp_path):
    words = ["--checkpoint", run_dir, "--prompt", "a", "--num_samples", 10**6, "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, words)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert first.startswith(b"a")
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "error: interrupted; the texts so far were printed"
    assert b"Traceback" not in err
    assert out.endswith(b"-" * 80 + b"\n")


def script(*words: object, stdin: str | bytes = b"") -> tuple[int, str, str]:
    return called(generate, *words, "--device", "cpu", stdin=stdin)


def test_prompts_come_from_files_and_the_standard_input(run_dir, tmp_path):
    (tmp_path / "prompt.txt").write_text("two\nlines\n")
    for words in (["--prompt_file", tmp_path / "prompt.txt"], ["--prompt_file", "-"], ["-"]):
        code, out, err = script("--checkpoint", run_dir, "--max_new_tokens", 2, *words, stdin="two\nlines\n")
        assert (code, err, out.startswith("two\nlines"), out.count("-" * 80)) == (0, "", True, 1)


def test_a_prompt_must_be_text(run_dir):
    """``tests/goldens/refusals.txt`` has the other prompts that cannot be read. Python makes a surrogate of a byte."""
    assert refusal(run_dir, prompt="def \udcff") == ["--prompt is not valid UTF-8 text"]
    assert texts(run_dir, prompt="é 日")
    assert script("--checkpoint", run_dir, "-", stdin=b"\xff")[2] == "error: standard input: is not valid UTF-8 text\n"


def test_each_line_is_continued_until_the_input_ends(run_dir):
    """A line that is refused is an error, and the next one is continued."""
    words = ["--checkpoint", run_dir, "--interactive", "--temperature", 0, "--max_new_tokens", 3, "--stop", "zz"]
    code, out, err = script(*words, stdin=f"def\n{'x' * 20}\nabc\n")
    assert code == 0
    assert err == "error: --prompt has 20 tokens, and the model reads at most 15: shorten it\n"
    expected = texts(run_dir, prompt=["def", "abc"], temperature=0, max_new_tokens=3)
    assert out == "".join(f"{text}\n" for text in expected)


def test_a_folder_of_hugging_face_and_a_portable_folder_give_the_same_text(run_dir, tmp_path):
    for form in ("hf", "portable"):
        export(run_dir, tmp_path / form, form=form, dtype="fp32", which="latest", console=Console(speaks=False))
        assert texts(tmp_path / form, num_samples=2) == texts(run_dir, num_samples=2)


def test_every_end_in_a_list_of_the_generation_config_ends_a_text(run_dir, tmp_path):
    export(run_dir, tmp_path / "one", form="hf", dtype="fp32", which="latest", console=Console(speaks=False))
    asked = {"max_new_tokens": 8, "temperature": 1, "device": "cpu"}
    (whole,) = Writer(Request(checkpoint=tmp_path / "one", **asked)).texts(["def"])
    (tmp_path / "one" / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_OF_TEXT, whole.ids[3]]}))
    export(tmp_path / "one", tmp_path / "two", form="hf", dtype="fp32", which="latest", console=Console(speaks=False))
    for folder in ("one", "two"):
        (cut,) = Writer(Request(checkpoint=tmp_path / folder, **asked)).texts(["def"])
        assert (cut.ids, cut.ended) == (whole.ids[: whole.ids.index(whole.ids[3])], "end of text")
    of_server = open_served(ServeOptions(checkpoint=tmp_path / "one", device="cpu")).end_of_text
    assert of_server == {END_OF_TEXT, whole.ids[3]}


def test_prompts_that_a_tokenizer_or_a_model_does_not_know(checkpoint, tmp_path, snapshot):
    publish(tmp_path / "hf", vocab_size=60)
    for path in (checkpoint / "tokenizer").iterdir():
        shutil.copy(path, tmp_path / "hf")
    assert [refusal(tmp_path / "hf", prompt=prompt) for prompt in ("~", "")] == snapshot
    (checkpoint / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    seal(checkpoint)  # without an end of text
    assert refusal(checkpoint, prompt="") == snapshot
    assert texts(checkpoint, prompt="def")
    file = checkpoint / "tokenizer" / "tokenizer.json"  # a vocabulary of one word, and no token for the others
    model = {"type": "WordLevel", "vocab": {"word": 0}, "unk_token": "[UNK]"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": model, "pre_tokenizer": None, "decoder": None}))
    seal(checkpoint)
    (line,) = refusal(checkpoint, prompt="def")
    assert line.startswith("--prompt 'def': the tokenizer cannot encode it (WordLevel error: Missing")


# A checkpoint whose tokenizer brings code or is damaged is refused in one line, and its code never runs.


@pytest.mark.parametrize("command", [generate, serve])
def test_code_is_refused_even_if_the_user_agrees_to_it(checkpoint, tmp_path, command):
    marker = bring_code(checkpoint / "tokenizer", marker=tmp_path / "ran")
    seal(checkpoint)
    words = ["--checkpoint", checkpoint, *(["--prompt", "def"] if command is generate else ["--port", 0])]
    assert called(command, *words, "--device", "cpu", stdin="y\n" * 9) == (
        2,
        "",
        f"error: {'--checkpoint ' * (command is serve)}{checkpoint}/tokenizer: its tokenizer_config.json asks for its "
        "own code (auto_map), which is never run: use a tokenizer of the `tokenizers` library (a tokenizer.json), "
        "without auto_map\n",
    )
    assert not marker.exists(), "the tokenizer's code ran"
