"""``python src/benchmark.py tokens``: that it finds other ids, and its whole course in small."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_run import write_tokenizer

from dsgpt.benchmarks import tokens
from dsgpt.benchmarks.frame import run_suite
from dsgpt.common.text import REPOSITORY
from dsgpt.data.engine import Gigatoken


@pytest.fixture
def options(tmp_path: Path) -> tokens.TokensOptions:
    write_tokenizer(folder := tmp_path / "tokenizer")
    small = {"documents": 300, "points": 400, "megabytes": 1, "peer_megabytes": 1, "rounds": 1, "kills": 1}
    return tokens.TokensOptions(output=tmp_path / "tokens.json", tokenizer=str(folder), **small)


@pytest.mark.long
def test_the_suite(options, capsys):
    assert run_suite(tokens.Tokens, options, repository=REPOSITORY) == 0
    record = json.loads(options.output.read_text())
    assert [(one["what"], one["texts"], one["different"]) for one in record["equality"]] == [
        ("fuzz", 300, 0),
        ("code points", 400, 0),
    ]
    assert 20 < record["equality"][0]["disputed"] <= 30  # the fast engine encodes the others
    assert list(record["speed"]) == ["sources", "one file of rows", "small files"]
    for one in record["speed"].values():
        assert min(one["seconds"].values()) > 0 and one["ratios"]["nanogpt"]["median"] > 0
    one, other, killed = record["kills"]
    assert one["sums"] == other["sums"] == killed["sums"] and (one["workers"], other["workers"]) == (1, 2)
    assert sorted(one["sums"]) == ["train.bin", "train.index", "val.bin", "val.index"]
    assert record["memory"][0]["peak"] > 50e6
    page = options.output.with_suffix(".md").read_text()
    assert "one file of rows" in page and "3 of 3 have the same" in page
    killed["sums"] = one["sums"] | {"val.bin": "0"}
    assert tokens.Tokens.failures(None, record) == [f"{killed['name']}: has other files"]


def test_other_ids_fail_the_suite(options, monkeypatch, capsys):
    encode = Gigatoken.encode

    def wrong(self, texts):
        ids, counts = encode(self, texts)
        return np.where(np.arange(len(ids)) == 5, ids + 1, ids), counts

    monkeypatch.setattr(Gigatoken, "encode", wrong)
    object.__setattr__(options, "only", ("fuzz",))
    assert run_suite(tokens.Tokens, options, repository=REPOSITORY) == 1
    assert "FAILED: fuzz: 1 texts have other ids" in capsys.readouterr().out
