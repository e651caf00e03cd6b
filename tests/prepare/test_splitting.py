"""The split of each document, and cutting long texts without changing their tokens."""

import random
from pathlib import Path

import pytest
from prep_helpers import CORPUS

from dsgpt.data.sources import Document, own_source
from dsgpt.data.vocabulary import divide, encode, open_vocabulary, pieces


def collection(count: int) -> list[tuple[None, Document]]:
    return [(None, Document(key=f"d{number}", text=f"text {number}", source_bytes=9)) for number in range(count)]


def validation(documents: list[tuple[None, Document]], *, fraction: float = 0.05, seed: int = 1337) -> set[str]:
    divided = list(divide(documents, val_fraction=fraction, seed=seed))
    assert [document for _, document in divided] == [document for _, document in documents]
    return {document.key for split, document in divided if split == "val"}


def test_a_document_stays_in_its_split_when_others_are_added():
    before, after = validation(collection(2000)), validation(collection(3000))
    assert 60 < len(before) < 140
    assert before == {key for key in after if int(key[1:]) < 2000}
    assert validation(collection(2000), seed=1) != before


@pytest.mark.parametrize("fraction", [0.0001, 0.5, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 256])
def test_small_collections_have_both_sides(count: int, fraction: float):
    assert 1 <= len(validation(collection(count), fraction=fraction)) <= count - 1


def test_pieces_encode_as_the_whole(prepared: Path):
    vocabulary = open_vocabulary(prepared / "tokenizer")
    chance = random.Random(0)
    marks = [" ", "  ", "\n", "\n\n ", "\t", "\x1c", "\x85", "\xa0", "the", "dog's", "!?", "12", "\r\n", "\u2028", "é"]
    for _ in range(300):
        text = "".join(chance.choices([*marks, *CORPUS.values()], weights=[9] * len(marks) + [1] * len(CORPUS), k=80))
        cut = list(pieces(text, characters=7))
        assert "".join(cut) == text
        whole = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        encodings = vocabulary.tokenizer.encode_batch(cut, add_special_tokens=False)
        assert [token for encoding in encodings for token in encoding.ids] == whole


def test_a_document_larger_than_a_batch_stays_one(prepared: Path):
    vocabulary = open_vocabulary(prepared / "tokenizer")
    text = "a long line of words that goes on\n" * 130_000
    documents = iter([("train", Document(key="long", text=text, source_bytes=7)), *[("val", collection(1)[0][1])]])
    (split, size, ids), (other, _, short) = encode(vocabulary, documents)
    assert (split, size, other) == ("train", 7, "val")
    assert vocabulary.tokenizer.decode(ids.tolist()) == text
    assert vocabulary.tokenizer.decode(short.tolist()) == "text 0"


def test_own_output_is_not_read_back(tmp_path: Path):
    (tmp_path / "note.txt").write_text("text")
    (tmp_path / "data" / "x").mkdir(parents=True)
    (tmp_path / "data" / "x" / "train.json").write_text("{}")
    source = own_source([tmp_path], text_key="text", output_dir=tmp_path / "data" / "x")
    assert [file.key for file in source.files] == ["note.txt"]
