"""download_data.py: sets of the hub, replaced by local files; the embedded corpus; and no network."""

import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
from prep_helpers import documents_of, errors
from pyarrow import parquet

from dsgpt.common.command_line import exit_code_of
from dsgpt.common.errors import UserError
from dsgpt.data import download
from dsgpt.data.options import KEPT
from dsgpt.data.sources import HUB_SETS, HubSet, join_articles

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
    (line,) = errors(run("preprocess.py", *flags, "--val_fraction", 0.5, cwd=tmp_path, code=2))
    assert "has its own validation split" in line
    prepare_here(*flags, cwd=tmp_path)
    assert documents_of(raw.parent, "train") == STORIES
    assert documents_of(raw.parent, "val") == VALIDATION
    run("preprocess_small.py", *flags, "--num_documents", 40, cwd=tmp_path)
    assert documents_of(raw.parent, "train", "_small") == STORIES[:38]
    assert documents_of(raw.parent, "val", "_small") == VALIDATION[:2]


def test_set_read_as_parquet_files_with_a_limit(hub_folder: Path, tmp_path: Path):
    stand_in = HubSet(
        path="parquet", data_files={"train": str(hub_folder / "train-*.parquet")}, about="", splits={"train": 0}
    )
    download.keep_hub_set(tmp_path / "raw", stand_in, name="openwebtext", max_documents=7)
    assert texts(tmp_path / "raw" / "documents.jsonl") == STORIES[:7]
    assert not (tmp_path / "raw" / "train.jsonl").exists()


def test_a_missing_set_is_an_error_of_one_line(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    missing = HubSet(path=str(tmp_path / "empty"), about="", splits={"train": 0})
    with pytest.raises(UserError, match="cannot be read from the hub") as caught:
        download.keep_hub_set(tmp_path / "raw", missing, name="x", max_documents=None)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "raw").iterdir())


def test_an_interrupted_download_leaves_nothing(tmp_path: Path):
    def rows():
        yield {"text": STORIES[0]}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.keep(tmp_path / "raw", {"train": rows()}, name="x", source="x", max_documents=None)
    assert not list((tmp_path / "raw").iterdir())


def test_wikitext_lines_become_articles():
    first = ["", " = Valkyria Chronicles III = \n", "", " A game . x = y \n", " = = Gameplay = = \n", "", " Turns . \n"]
    second = ["", "", " = 9 = \n", "", " A number . \n", " = not a title = \n", " More . \n", ""]
    articles = list(join_articles(first + second))
    assert "".join(articles) == "".join(first + second)
    assert len(articles) == 2
    assert articles[1].startswith(" = 9 = \n A number")


@pytest.mark.parametrize("name", ["tinystories", "webtext"])
def test_without_network_one_line_in_seconds(run, tmp_path: Path, name: str):
    started = time.monotonic()
    (line,) = errors(run("download_data.py", name, cwd=tmp_path, code=2))
    assert time.monotonic() - started < 20
    assert f"the set {name}: no network" in line
    assert "python-stdlib" in line
    assert "preprocess.py --input" in line
    assert not (tmp_path / "data").exists()


def test_offline_switch_is_named(run, tmp_path: Path):
    (line,) = errors(run("download_data.py", "fineweb-edu", cwd=tmp_path, code=2, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set" in line


def test_embedded_corpus_keeps_its_names(run, tmp_path: Path):
    out = run("download_data.py", "--max_documents", 3, cwd=tmp_path).stdout
    assert "3 documents" in out
    raw = tmp_path / "data" / "python-stdlib" / "raw"
    rows = [json.loads(line) for line in (raw / "documents.jsonl").read_bytes().splitlines()]
    assert [row["key"] for row in rows] == sorted(row["key"] for row in rows)
    assert rows[0]["text"]
    assert "3 documents" in run("download_data.py", "--max_documents", 3, cwd=tmp_path).stdout
    (line,) = errors(run("download_data.py", cwd=tmp_path, code=2))
    assert "max_documents 3, not None" in line


def test_mistakes_are_reported_together(run, tmp_path: Path):
    lines = errors(run("download_data.py", "tinystory", "--max_documents", "0", "--jobs", "2", cwd=tmp_path, code=2))
    assert len(lines) == 3
    assert "did you mean tinystories?" in "".join(lines)


def test_webtext_says_that_it_is_openwebtext():
    assert "never published" in HUB_SETS["webtext"].about
    assert HUB_SETS["webtext"].source == HUB_SETS["openwebtext"].source


def test_a_full_disk_is_an_error(capsys: pytest.CaptureFixture):
    def full() -> None:
        with Path("/dev/full").open("w") as file:
            file.write("x")

    assert exit_code_of(full, kept=KEPT) == 2
    assert "No space left" in capsys.readouterr().err
