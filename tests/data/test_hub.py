"""The path from the Hugging Face hub, with the real code of ``datasets`` and ``huggingface_hub``.

There is no network in the tests. A server on 127.0.0.1 stands in for the hub: it answers the few addresses that these
libraries ask for with what the hub would say of a small set of Parquet files.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from forked_ranks import run_script
from prep_helpers import documents_of
from pyarrow import parquet
from small_run import Quiet, running

NAME, COMMIT = "someone/stories", "a" * 40
ROWS = [f"story {number} “quoted”\n" for number in range(60)]
SPLITS = {"train": ROWS[:40], "validation": ROWS[40:50], "test": ROWS[50:]}


def parquet_file(rows: list[str]) -> bytes:
    parquet.write_table(pa.table({"id": range(len(rows)), "story": rows}), file := io.BytesIO(), row_group_size=16)
    return file.getvalue()


FILES = {f"data/{split}-00000-of-00001.parquet": parquet_file(rows) for split, rows in SPLITS.items()}
FILES["README.md"] = b"---\nlicense: mit\n---\n"


def entry(name: str) -> dict[str, object]:
    data = FILES.get(name, b"")
    kind = "file" if name in FILES else "directory"
    return {"type": kind, "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


class StandIn(Quiet):
    """Answers as the hub does: about a set, its folders and its files, whole or in ranges of bytes."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        path, status, data, headers = self.path.partition("?")[0], 200, b"", {"Content-Type": "application/json"}
        self.asked.append((self.command, path))
        about, _, rest = path.partition(NAME)
        _, what, _, *names = [*rest.split("/"), "", ""]
        name = "/".join(filter(None, names))
        if about == "/api/datasets/" and what == "tree":
            below = [each for each in ("data", *FILES) if each.rpartition("/")[0] == name]
            data = json.dumps([entry(each) for each in below]).encode()
        elif about == "/api/datasets/":
            siblings = [{"rfilename": each} for each in FILES]
            data = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}).encode()
        elif about == "/datasets/" and what == "resolve" and name in FILES:
            data = FILES[name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry(name)["oid"]}"', "Accept-Ranges": "bytes"}
            if wanted := self.headers["Range"]:
                first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"
                status, data = 206, data[first : last + 1]
        elif path != "/":
            status, headers = 404, {"X-Error-Code": "EntryNotFound"}
        self.send_response(status)
        for key, text in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(StandIn, "asked", [])
    with running(ThreadingHTTPServer(("127.0.0.1", 0), StandIn)) as address:
        yield address


def test_a_set_is_streamed_from_the_hub(hub, script_command, prepare_here, bytes_tokenizer, tmp_path: Path):
    """Its rows, of the column that is found; nothing of its test split is fetched, and no copy of its files is kept."""
    refusal = f"{NAME}: has the columns 'id', 'story'; name that of the text: --text_key"
    for flags, code, said in (("--text_key", "body"), 2, refusal), ((), 0, ""):
        (_, script, *words), environment = script_command("download_data.py", NAME, *flags)
        environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache")}
        done = run_script(script, words, cwd=tmp_path, environment=environment)
        assert done.returncode == code and said in done.stderr, done.stderr
    prepare_here("--dataset", NAME, "--tokenizer", bytes_tokenizer, cwd=tmp_path)
    out = tmp_path / "data" / NAME
    assert documents_of(out, "train") == SPLITS["train"] and documents_of(out, "val") == SPLITS["validation"]
    got = {Path(path).name for command, path in StandIn.asked if command == "GET" and "/resolve/" in path}
    assert got == {"README.md", *(f"{split}-00000-of-00001.parquet" for split in ("train", "validation"))}
    assert not list((tmp_path / "cache").rglob("*.parquet"))
