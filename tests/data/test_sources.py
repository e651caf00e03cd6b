"""Where text comes from: downloads, folders with links, and the library of Python."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pytest
from harmful_tokenizers import MALFORMED, bring_code
from prep_helpers import documents_of, errors, hashes
from pyarrow import parquet

from dsgpt.common.errors import UserError
from dsgpt.data import download
from dsgpt.data.download import HubSet, downloaded_source, join_articles
from dsgpt.data.sources import EMBEDDED, stdlib_source, transformers_source
from dsgpt.data.token_file import open_token_file

# download_data.py: sets of the hub, replaced by local files; the embedded corpus; and no network.


STORIES = [f"story {number}\nwith “two” lines" for number in range(300)]
VALIDATION = [f"held out {number}" for number in range(20)]


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A folder with the layout of a set on the hub: Parquet files named by split."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    parquet.write_table(pa.table({"text": [*STORIES[:150], "", None]}), folder / "train-00000-of-00002.parquet")
    parquet.write_table(pa.table({"text": STORIES[150:]}), folder / "train-00001-of-00002.parquet")
    parquet.write_table(pa.table({"text": VALIDATION}), folder / "validation-00000-of-00001.parquet")
    return folder


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_bytes().splitlines()]


def test_set_with_its_own_split(run, prepare_here, hub_folder: Path, bytes_tokenizer: Path, tmp_path: Path):
    stand_in = HubSet(path=str(hub_folder), about="", splits={"train": 0, "validation": 0})
    raw = tmp_path / "data" / "tinystories" / "raw"
    download.keep_hub_set(raw, stand_in, name="tinystories", max_documents=None)
    assert sorted(path.name for path in raw.iterdir()) == ["download.json", "train.jsonl", "validation.jsonl"]
    assert texts(raw / "train.jsonl") == STORIES
    assert texts(raw / "validation.jsonl") == VALIDATION

    flags = ["--dataset", "tinystories", "--tokenizer", bytes_tokenizer]
    assert "has its own validation split" in refusal(prepare_here, *flags, "--val_fraction", 0.5, cwd=tmp_path)
    prepare_here(*flags, cwd=tmp_path)
    prepare_here(*flags, "--num_documents", 40, cwd=tmp_path, small=True)
    for split, documents, first in (("train", STORIES, 38), ("val", VALIDATION, 2)):
        assert documents_of(raw.parent, split) == documents
        assert documents_of(raw.parent, split, "_small") == documents[:first]


def test_set_read_as_parquet_files_with_a_limit(hub_folder: Path, tmp_path: Path):
    stand_in = HubSet(
        path="parquet", data_files={"train": str(hub_folder / "train-*.parquet")}, about="", splits={"train": 0}
    )
    download.keep_hub_set(tmp_path / "raw", stand_in, name="openwebtext", max_documents=7)
    assert texts(tmp_path / "raw" / "documents.jsonl") == STORIES[:7]
    assert not (tmp_path / "raw" / "train.jsonl").exists()


def test_a_missing_set_and_an_interrupted_download_leave_nothing(tmp_path: Path):
    def rows():
        yield {"text": STORIES[0]}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.keep(tmp_path / "raw", {"train": rows()}, name="x", source="x", max_documents=None)
    (tmp_path / "empty").mkdir()
    missing = HubSet(path=str(tmp_path / "empty"), about="", splits={"train": 0})
    with pytest.raises(UserError, match=r"^[^\n]*: cannot be read from the hub[^\n]*$"):
        download.keep_hub_set(tmp_path / "raw", missing, name="x", max_documents=None)
    assert not list((tmp_path / "raw").iterdir())


def test_wikitext_lines_become_articles():
    first = ["", " = Valkyria Chronicles III = \n", "", " A game . x = y \n", " = = Gameplay = = \n", "", " Turns . \n"]
    second = ["", "", " = 9 = \n", "", " A number . \n", " = not a title = \n", " More . \n", ""]
    articles = list(join_articles(first + second))
    assert "".join(articles) == "".join(first + second) and len(articles) == 2
    assert articles[1].startswith(" = 9 = \n A number")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["download_data.py", "webtext"],
            ["the set webtext: no network", "python-transformers", "preprocess.py --input"],
        ),
        (["preprocess.py", "--input", "a.txt"], ["no network", "--tokenizer train"]),
    ],
)
def test_without_network_one_line_in_seconds(run, tmp_path: Path, words, said):
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    started = time.monotonic()
    (line,) = errors(run(*words, cwd=tmp_path, code=2))
    assert time.monotonic() - started < 20
    assert [part for part in said if part not in line] == []
    assert not list(tmp_path.rglob("*.jsonl"))


def test_embedded_corpus_keeps_its_names(run, tmp_path: Path):
    for _ in range(2):
        assert "3 documents" in run("download_data.py", "--max_documents", 3, cwd=tmp_path).stdout
    rows = (tmp_path / "data" / "python-transformers" / "raw" / "documents.jsonl").read_bytes().splitlines()
    keys = [json.loads(row)["key"] for row in rows]
    assert len(keys) == 3 and keys == sorted(keys)
    (line,) = errors(run("download_data.py", cwd=tmp_path, code=2))
    assert "max_documents 3, not None" in line


# preprocess.py with links, and with tokenizers that bring code or are invalid.

TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def tokenizer(bytes_tokenizer: Path, tmp_path: Path) -> Path:
    """A local tokenizer that a test may damage."""
    return shutil.copytree(bytes_tokenizer, tmp_path / "mine")


def refusal(prepare: Callable[..., None], *flags: object, **more: Path) -> str:
    with pytest.raises(UserError) as caught:
        prepare(*flags, **more)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.fixture
def cached(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Put the tokenizer into the hub library's cache, which consists of links; returns the name that it has there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def put() -> str:
        model, commit = tmp_path / "hub" / "models--somebody--words", "0123456789abcdef0123456789abcdef01234567"
        for folder in (snapshot := model / "snapshots" / commit, model / "refs"):
            folder.mkdir(parents=True)
        shutil.copytree(tokenizer, model / "blobs")
        for path in tokenizer.iterdir():
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
        (model / "refs" / "main").write_text(commit)
        return "somebody/words"

    return put


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_a_tokenizers_code_is_refused(prepare_here, text, tokenizer, cached, tmp_path, capsys, where):
    """``tests/formats`` has what else is refused."""
    bring_code(tokenizer, marker=tmp_path / "ran")
    given = tokenizer if where == "folder" else cached()
    line = refusal(prepare_here, "--input", text, "--tokenizer", given, cwd=tmp_path)
    assert line.startswith(f"--tokenizer {given}: its tokenizer_config.json asks for its own code (auto_map)")
    assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in "".join(capsys.readouterr())


def test_links_in_the_hubs_cache_are_followed(prepare_here, text, tokenizer, cached, tmp_path):
    (tokenizer / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.Model"}}')  # not the tokenizer's
    prepare_here("--input", text, "--tokenizer", cached(), cwd=tmp_path)
    assert open_token_file(tmp_path / "data" / "text" / "train.bin").sidecar.tokenizer.name == "somebody/words"


@pytest.mark.parametrize(("name", "harm"), MALFORMED, ids=lambda value: value[:40])
def test_a_malformed_tokenizer_is_one_line_or_none(prepare_here, text, tokenizer, tmp_path, name, harm):
    (tokenizer / name).write_text(harm, encoding="latin-1")
    try:
        line = refusal(prepare_here, "--input", text, "--tokenizer", tokenizer, cwd=tmp_path)
    except pytest.fail.Exception:  # not refused: the library accepts it
        assert name in ("special_tokens_map.json", "added_tokens.json", "config.json")
    else:
        assert line.startswith(f"--tokenizer {tokenizer}: ")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_no_link_in_a_tokenizer_folder_is_followed(prepare_here, text, tokenizer, tmp_path, name):
    if (tokenizer / name).exists():
        (tokenizer / name).rename(tmp_path / "moved")
    (tokenizer / name).symlink_to(tmp_path / "moved")
    line = refusal(prepare_here, "--input", text, "--tokenizer", tokenizer, cwd=tmp_path)
    assert line.startswith(f"--tokenizer {tokenizer}: its {name} is a link")
    assert "cp -rL" in line


def test_other_links_there_and_a_link_to_the_folder_are_allowed(prepare_here, text, tokenizer, tmp_path):
    (tokenizer / "itself.json").symlink_to("itself.json")
    (tmp_path / "named").symlink_to(tokenizer)
    prepare_here("--input", text, "--tokenizer", tmp_path / "named", cwd=tmp_path)
    assert {path.name for path in (tmp_path / "data/text/tokenizer").iterdir()} == TOKENIZER_FILES


def test_links_in_the_input_are_left_out_and_named(again, text, tmp_path, capsys, snapshot):
    plain = hashes(tmp_path / "out")
    (tmp_path / "secret.txt").write_text("a secret\n")
    (tmp_path / "elsewhere").mkdir()
    (text / "0").mkdir()
    for name, target in {"b": "../elsewhere", "a.txt": "../secret.txt", "c.txt": "c.txt", "d.txt": "nowhere",
                         ".e": "nowhere", "0/deep.txt": tmp_path / "secret.txt"}.items():  # fmt: skip
        (text / name).symlink_to(target)
    os.mkfifo(text / "pipe")
    capsys.readouterr()
    again("--overwrite")
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")] == snapshot
    assert hashes(tmp_path / "out") == plain


def test_an_input_that_the_user_names_may_be_a_link(prepare_here, text, bytes_tokenizer, tmp_path, capsys):
    (tmp_path / "named").symlink_to(text)
    (tmp_path / "one.txt").symlink_to(text / "0.txt")
    flags = ["--input", "named", "one.txt", "--tokenizer", bytes_tokenizer, "--output_dir", "out"]
    prepare_here(*flags, cwd=tmp_path)
    assert "link" not in capsys.readouterr().out
    assert sum(open_token_file(tmp_path / "out" / f"{split}.bin").sidecar.documents for split in ("train", "val")) == 10


@pytest.mark.parametrize("name", [".tokenizer.partial", ".tokenizer.old", ".train.bin.partial", "train.json"])
def test_nothing_is_written_through_a_link(again, tmp_path, name):
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("precious")
    (tmp_path / "out" / name).unlink(missing_ok=True)
    (tmp_path / "out" / name).symlink_to(precious if "tokenizer" in name else precious / "file")
    again("--overwrite")
    assert [(path.name, path.read_text()) for path in precious.iterdir()] == [("file", "precious")]
    left = {path.name for path in (tmp_path / "out").iterdir() if path.is_symlink() or path.name.startswith(".")}
    assert left == set()


def test_a_prepared_tokenizer_that_is_a_link_is_refused(again, tmp_path):
    (folder := tmp_path / "out" / "tokenizer").rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert refusal(again).startswith("out/tokenizer: is a link")
    again("--overwrite")
    assert not folder.is_symlink()
    assert {path.name for path in (tmp_path / "moved").iterdir()} == TOKENIZER_FILES


# The embedded corpora: real text, no tests, prepared in seconds.


def test_contents_of_the_standard_library():
    documents = [document for _, document in stdlib_source().documents()]
    texts = {document.key: document.text for document in documents}
    assert len(texts) == len(documents) and {"argparse.py", "json/decoder.py"} <= texts.keys()
    assert not {part for key in texts for part in key.split("/")[:-1]} & {"test", "tests", "site-packages"}
    assert not any(key.startswith(("_sysconfigdata", "config-")) for key in texts)
    assert texts["pydoc_data/topics/assert.txt"].startswith('The "assert" statement\n')
    assert 6e6 < sum(len(text.encode()) for text in texts.values()) < 20e6


def test_the_transformers_corpus_is_that_of_the_pinned_release(capsys):
    """Its sum is in the code, so this fails when the pin in requirements.txt changes without it."""
    source = transformers_source()
    assert capsys.readouterr().err == ""
    keys = [file.key for file in source.files]
    assert keys == sorted(keys) and "transformers/trainer.py" in keys
    assert not [key for key in keys if key.startswith("transformers/models/")]
    assert 7.5e6 < source.total_bytes() < 8.5e6


def test_another_release_of_the_corpus_warns_and_strays_do_not_count(tmp_path: Path, monkeypatch, capsys):
    """A package with two files, one of them noted by the installer; then one without a list of its files; then none."""
    about, package = tmp_path / "transformers-9.9.dist-info", tmp_path / "transformers"
    (package / "models").mkdir(parents=True)
    for path in ("noted.py", "stray.py", "models/left_out.py"):
        (package / path).write_text(f"# {path}\n")
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9\n")
    record = about / "RECORD"
    record.write_text("".join(f"transformers/{name},,\n" for name in ("noted.py", "models/left_out.py", "removed.py")))
    found = metadata.PathDistribution(about)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)
    source = transformers_source()
    assert [(document.key, document.text) for _, document in source.documents()] == [
        ("transformers/noted.py", "# noted.py\n")
    ]
    (line,) = capsys.readouterr().err.splitlines()
    assert source.fingerprint() in line and "5ef08dabd78e" in line and "transformers 9.9;" in line
    record.unlink()
    with pytest.raises(UserError, match=r"transformers 9\.9 is installed without a list of its files"):
        transformers_source()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UserError, match="transformers is not installed"):
        transformers_source()


def test_the_default_command_prepares_it(run, tmp_path: Path):
    assert not run("preprocess.py", cwd=tmp_path).stderr, "no progress bars in a log"
    folder = tmp_path / "data" / "python-transformers"
    train, val = (open_token_file(folder / f"{split}.bin") for split in ("train", "val"))
    assert train.sidecar.vocab_size == 8192 and train.tokens > 1_500_000
    assert 0.02 < val.sidecar.documents / (train.sidecar.documents + val.sidecar.documents) < 0.09
    decoded = documents_of(folder, "val")
    assert len(decoded) == val.sidecar.documents
    assert set(decoded) <= {document.text for _, document in transformers_source().documents()}


@pytest.mark.parametrize("name", EMBEDDED)
def test_downloaded_documents_are_the_same_input(name: str, tmp_path: Path):
    raw = tmp_path / "raw"
    download.keep_embedded(raw, name=name, max_documents=None)
    direct, kept = EMBEDDED[name](), downloaded_source(name, output_dir=tmp_path)
    assert (kept.fingerprint(), kept.description) == (direct.fingerprint(), direct.description)
    filled = [(document.key, document.text) for _, document in direct.documents() if document.text.strip()]
    assert [(document.key, document.text) for _, document in kept.documents()] == filled

    download.keep_embedded(raw, name=name, max_documents=50)
    assert downloaded_source(name, output_dir=tmp_path).fingerprint() != direct.fingerprint()
