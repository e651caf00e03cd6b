"""preprocess.py with links, and with tokenizers that bring code or are invalid."""

import json
import os
import shutil
from pathlib import Path

import pytest
from harmful_tokenizers import MALFORMED, bring_code
from prep_helpers import errors, hashes
from small_run import write_tokenizer

from dsgpt.common.errors import UserError
from dsgpt.data import preparation as command


@pytest.fixture
def tokenizer(bytes_tokenizer: Path, tmp_path: Path) -> Path:
    """A local tokenizer that a test may damage."""
    return shutil.copytree(bytes_tokenizer, tmp_path / "mine")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"document {number}\nsome words\n" * 3)
    return folder


def refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: object) -> str:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        command.main([str(flag) for flag in flags])
    (line,) = str(caught.value).splitlines()
    return line


def cached(home: Path, name: str, folder: Path) -> None:
    """Put ``folder`` into the hub library's cache, which consists of links, as the model ``name``."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    for path in folder.iterdir():
        blob = model / "blobs" / path.name
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blob)
        link = model / "snapshots" / commit / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path("../../blobs") / path.name)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_a_tokenizers_code_is_refused(run, text, tokenizer, tmp_path, where):
    marker = bring_code(tokenizer, marker=tmp_path / "ran")
    cached(tmp_path / "home", "somebody/words", tokenizer)
    given = tokenizer if where == "folder" else "somebody/words"
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = run("preprocess.py", "--input", text, "--tokenizer", given, cwd=tmp_path, code=2, **variables)
    assert not marker.exists()
    (line,) = errors(done)
    assert line.startswith(f"error: --tokenizer {given}: its tokenizer_config.json asks for its own code (auto_map)")
    assert "[y/N]" not in done.stdout + done.stderr


def test_links_in_the_hubs_cache_are_followed(run, text, tokenizer, tmp_path):
    (tokenizer / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.Model"}}')  # not the tokenizer's
    cached(tmp_path / "home", "somebody/words", tokenizer)
    variables = {"HF_HOME": str(tmp_path / "home")}
    run("preprocess.py", "--input", text, "--tokenizer", "somebody/words", cwd=tmp_path, **variables)
    sidecar = json.loads((tmp_path / "data" / "text" / "train.json").read_text())
    assert sidecar["tokenizer"]["name"] == "somebody/words"


@pytest.mark.parametrize(("name", "harm"), MALFORMED, ids=lambda value: value[:40])
def test_a_malformed_tokenizer_is_one_line_or_none(monkeypatch, text, tokenizer, tmp_path, name, harm):
    (tokenizer / name).write_text(harm, encoding="latin-1")
    try:
        line = refusal(monkeypatch, tmp_path, "--input", text, "--tokenizer", tokenizer)
    except pytest.fail.Exception:  # not refused: the library accepts it
        assert name in ("special_tokens_map.json", "added_tokens.json", "config.json")
    else:
        assert line.startswith(f"--tokenizer {tokenizer}: ")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_no_link_in_a_tokenizer_folder_is_followed(monkeypatch, text, tokenizer, tmp_path, name):
    if (tokenizer / name).exists():
        (tokenizer / name).rename(tmp_path / "moved")
    (tokenizer / name).symlink_to(tmp_path / "moved")
    line = refusal(monkeypatch, tmp_path, "--input", text, "--tokenizer", tokenizer)
    assert line.startswith(f"--tokenizer {tokenizer}: its {name} is a link")
    assert "cp -rL" in line


def test_other_links_there_and_a_link_to_the_folder_are_allowed(prepare_here, text, tokenizer, tmp_path):
    (tokenizer / "itself.json").symlink_to("itself.json")
    (tmp_path / "named").symlink_to(tokenizer)
    prepare_here("--input", text, "--tokenizer", tmp_path / "named", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "data/text/tokenizer").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_links_in_the_input_are_left_out_and_named(prepare_here, text, bytes_tokenizer, tmp_path, capsys, snapshot):
    prepare_here("--input", text, "--tokenizer", bytes_tokenizer, "--output_dir", "plain", cwd=tmp_path)
    (tmp_path / "secret.txt").write_text("a secret\n")
    (tmp_path / "elsewhere").mkdir()
    for name, target in (
        ("b", "../elsewhere"), ("a.txt", "../secret.txt"), ("c.txt", "c.txt"), ("d.txt", "nowhere"), (".e", "nowhere")
    ):  # fmt: skip
        (text / name).symlink_to(target)
    (text / "0").mkdir()
    (text / "0" / "deep.txt").symlink_to(tmp_path / "secret.txt")
    os.mkfifo(text / "pipe")
    capsys.readouterr()
    prepare_here("--input", text, "--tokenizer", bytes_tokenizer, "--output_dir", "linked", cwd=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("left out")] == snapshot
    assert hashes(tmp_path / "plain") == hashes(tmp_path / "linked")


def test_an_input_that_the_user_names_may_be_a_link(prepare_here, text, bytes_tokenizer, tmp_path, capsys):
    (tmp_path / "named").symlink_to(text)
    (tmp_path / "one.txt").symlink_to(text / "0.txt")
    flags = ["--input", "named", "one.txt", "--tokenizer", bytes_tokenizer, "--output_dir", "out"]
    prepare_here(*flags, cwd=tmp_path)
    assert "link" not in capsys.readouterr().out
    counts = [json.loads((tmp_path / "out" / f"{split}.json").read_text())["documents"] for split in ("train", "val")]
    assert sum(counts) == 10


def test_an_input_of_links_alone_is_refused(monkeypatch, bytes_tokenizer, tmp_path, capsys, snapshot):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.txt").symlink_to(bytes_tokenizer / "tokenizer.json")
    line = refusal(monkeypatch, tmp_path, "--input", "links", "--tokenizer", bytes_tokenizer)
    assert [line, *capsys.readouterr().out.splitlines()] == snapshot


@pytest.mark.parametrize("name", [".tokenizer.partial", ".tokenizer.old", ".train.bin.partial", "train.json"])
def test_nothing_is_written_through_a_link(prepare_here, text, bytes_tokenizer, tmp_path, name):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    flags = ["--input", text, "--tokenizer", bytes_tokenizer, "--output_dir", "out"]
    prepare_here(*flags, cwd=tmp_path)
    (tmp_path / "out" / name).unlink(missing_ok=True)
    (tmp_path / "out" / name).symlink_to(precious if "tokenizer" in name else precious / "file")
    prepare_here(*flags, "--overwrite", cwd=tmp_path)
    assert [(path.name, path.read_text()) for path in precious.iterdir()] == [("file", "precious")]
    left = {path.name for path in (tmp_path / "out").iterdir() if path.is_symlink() or path.name.startswith(".")}
    assert left == set()


def test_a_prepared_tokenizer_that_is_a_link_is_refused(monkeypatch, prepare_here, text, bytes_tokenizer, tmp_path):
    flags = ["--input", text, "--tokenizer", bytes_tokenizer, "--output_dir", "out"]
    prepare_here(*flags, cwd=tmp_path)
    (tmp_path / "out" / "tokenizer").rename(tmp_path / "moved")
    (tmp_path / "out" / "tokenizer").symlink_to(tmp_path / "moved")
    line = refusal(monkeypatch, tmp_path, *flags)
    assert line.startswith("out/tokenizer: is a link")
    prepare_here(*flags, "--overwrite", cwd=tmp_path)
    assert not (tmp_path / "out" / "tokenizer").is_symlink()
    assert sorted(path.name for path in (tmp_path / "moved").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(("name", "harm"), [("tokenizer.json", "[]"), ("tokenizer_config.json", "{}")])
def test_a_prepared_tokenizer_that_is_damaged_is_one_line(
    monkeypatch, prepare_here, text, bytes_tokenizer, tmp_path, name, harm
):
    flags = ["--input", text, "--tokenizer", bytes_tokenizer, "--output_dir", "out"]
    prepare_here(*flags, cwd=tmp_path)
    (tmp_path / "out" / "tokenizer" / name).write_text(harm)
    assert refusal(monkeypatch, tmp_path, *flags).startswith("out/tokenizer")


def test_a_tokenizer_without_an_end_of_text_token_is_refused(monkeypatch, text, tmp_path):
    folder = tmp_path / "endless"
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    line = refusal(monkeypatch, tmp_path, "--input", text, "--tokenizer", folder)
    assert "has no end-of-text token (eos_token)" in line


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_a_tokenizer_that_names_other_files_is_refused(monkeypatch, text, tokenizer, tmp_path, where):
    settings = tokenizer / "tokenizer_config.json"
    named = {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named))
    shutil.copy(tokenizer / "tokenizer.json", tokenizer / "tokenizer.4.0.0.json")
    cached(tmp_path / "home", "somebody/words", tokenizer)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    given = tokenizer if where == "folder" else "somebody/words"
    line = refusal(monkeypatch, tmp_path, "--input", text, "--tokenizer", given, "--output_dir", tmp_path / "out")
    start = f"--tokenizer {given}: its tokenizer_config.json names other files to open (fast_tokenizer_files)"
    assert line.startswith(start)
