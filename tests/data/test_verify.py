"""``dsgpt data verify``: what it says of sound files, and a line for each fault, all at once."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from prep_helpers import documents_of
from small_run import write_tokens

from dsgpt.common.errors import UserError
from dsgpt.data import verify
from dsgpt.data.contamination import Evaluation, words_of
from dsgpt.data.index import ENTRY
from dsgpt.data.token_file import open_token_file
from dsgpt.data.verify import faults_of, read_contents


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Documents go across many reads."""
    monkeypatch.setattr(verify, "CHUNK", 7)


def check(*words: object) -> None:
    verify.main([str(word) for word in words], draw=lambda contents, picture: picture.touch())


def faults(*words: object) -> list[str]:
    with pytest.raises(UserError) as error:
        check(*words)
    return list(error.value.problems)


def tokens(path: Path, *documents: list[int], **changes: object) -> Path:
    """A token file whose documents end with id 9."""
    ids = np.array([id_ for document in documents for id_ in (*document, 9)])
    return write_tokens(path, ids, **{"documents": len(documents), "vocab_size": 10, "eot_id": 9} | changes)


def index(path: Path, *lengths: int) -> None:
    entries = np.zeros(len(lengths), dtype=ENTRY)
    entries["tokens"] = lengths
    path.with_suffix(".index").write_bytes(entries.tobytes())


def test_a_sound_preparation(prepared: Path, capsys):
    check(prepared / "train.bin", prepared / "val.bin", "--excerpt", 12)
    said = capsys.readouterr().out
    for split in ("train", "val"):
        texts = documents_of(prepared, split)
        sizes = np.diff(np.flatnonzero(open_token_file(prepared / f"{split}.bin").memmap() == 0), prepend=-1)
        assert f"documents  {len(texts):,}, of {sizes.min():,} to {sizes.max():,} tokens" in said
        (begins,) = [line for line in said.splitlines() if line.startswith("  begins") and texts[0][:9] in line]
        assert texts[0].startswith(eval(begins.removeprefix("  begins")))
    assert "checked 2 files: all is as noted beside them" in said


def test_texts_are_compared_with_the_hashes_of_the_index(prepared: Path, tmp_path: Path, capsys):
    """A fault if one differs. Without the tokenizer, or with one that changes texts, it says why they were not."""
    folder = shutil.copytree(prepared, tmp_path / "data")
    path, place, sidecar = folder / "val.bin", folder / "tokenizer" / "tokenizer.json", folder / "val.json"
    check(path)
    assert "texts      as the index notes them\n" in capsys.readouterr().out
    entries = np.fromfile(path.with_suffix(".index"), ENTRY)
    entries["hash"][-1] ^= 1
    entries.tofile(path.with_suffix(".index"))
    what = f"has other hashes than the text of 1 document of val.bin (number {len(entries) - 1})"
    assert faults(path) == [f"{folder}/val.index: {what}; make the data again"]
    state = json.loads(place.read_text())
    for change in ({"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": {"type": "WhitespaceSplit"}}):
        place.write_text(json.dumps(state | change))
        check(path)
        assert f"texts      not compared: {folder}/tokenizer: is not the tokenizer" in capsys.readouterr().out
        facts = json.loads(sidecar.read_text())
        facts["tokenizer"]["sha256"] = hashlib.sha256(place.read_bytes()).hexdigest()
        sidecar.write_text(json.dumps(facts))
        check(path)
        assert "not compared: its tokenizer does not give every text back unchanged" in capsys.readouterr().out


def test_contents_are_counted_across_chunks(tmp_path: Path):
    documents = [[1, 2, 3], [1], [2] * 20, [1, 2, 3], [4] * 6]
    file = open_token_file(tokens(tmp_path / "a.bin", *documents))
    contents = read_contents(file)
    assert contents.frequencies.tolist() == [0, 3, 22, 2, 6, 0, 0, 0, 0, 5]
    assert contents.sizes.tolist() == [4, 2, 21, 4, 7]
    assert len(set(contents.hashes.tolist())) == 4 and contents.hashes[0] == contents.hashes[3]
    index(tmp_path / "a.bin", 4, 2, 21, 4, 7)
    assert [*faults_of(read_contents(file))] == []
    index(tmp_path / "a.bin", 4, 2, 21, 5, 6)
    assert [line.partition("; ")[0] for line in faults_of(read_contents(file))] == [
        f"{tmp_path}/a.index: document 3 ends at token 32, in a.bin at 31"
    ]
    other = tokens(tmp_path / "b.bin", [5], [4] * 6, [6], [7], [1, 2, 3], [1, 2])
    index(tmp_path / "a.bin", 4, 2, 21, 4, 7)
    assert "b.bin: shares 2 documents (number 1, 4) with " in faults(file.path, other)[0]


def test_every_fault_is_reported_at_once(tmp_path: Path):
    """A changed file; another count of documents, no end, an empty document; a foreign index; copies; one missing."""
    flipped = tokens(tmp_path / "flipped.bin", [1, 2], [3])
    flipped.write_bytes(b"\5" + flipped.read_bytes()[1:])
    counted = tokens(tmp_path / "counted.bin", [1], [], [2], documents=7)
    endless = write_tokens(tmp_path / "endless.bin", np.array([0, 9, 2, 3]), documents=2, vocab_size=3, eot_id=9)
    train, val = tokens(tmp_path / "train.bin", [1, 2, 3], [4]), tokens(tmp_path / "val.bin", [5], [1, 2, 3])
    index(train, 3, 3)
    index(val, 2, 3)
    found = faults(flipped, counted, endless, train, val, tmp_path / "missing.bin", "--plot", tmp_path / "a.png")
    patterns = [
        r"flipped\.bin: its sha256 is",
        r"counted\.bin: has 3 end-of-text ids, but its sidecar says 7 documents",
        r"counted\.bin: has an empty document",
        r"endless\.bin: its largest id is 9, but its sidecar says a vocabulary of 3",
        r"endless\.bin: its last 2 ids belong to a document without end",
        r"train\.index: document 0 ends at token 3, in train\.bin at 4",
        r"val\.index: has 2 documents with 5 tokens, val\.bin has 2 with 6",
        r"missing\.bin: cannot be read",
        r"val\.bin: shares 1 document \(number 1\) with .*train\.bin",
    ]
    assert [pattern for pattern in patterns if not any(re.search(pattern, line) for line in found)] == []
    assert len(found) == len(patterns)
    assert (tmp_path / "a.png").exists()


def test_ids_of_other_tokenizers_are_not_compared(tmp_path: Path, capsys):
    facts = [{"name": "a", "sha256": digit * 64} for digit in "01"]
    files = [tokens(tmp_path / f"{each['sha256'][0]}.bin", [1, 2], tokenizer=each) for each in facts]
    check(*files, "--excerpt", 0, "--card", "MIT")
    assert "not compared, because other tokenizers made their ids" in capsys.readouterr().err
    assert "| no document is also in | no other file |" in files[0].with_suffix(".card.md").read_text()


def test_files_without_known_documents_are_not_said_to_share_none(tmp_path: Path, capsys):
    files = [tokens(tmp_path / "a.bin", [1, 2]), tokens(tmp_path / "b.bin", [1, 2])]
    files[1].with_suffix(".json").unlink()
    check(*files, "--excerpt", 0, "--card", "MIT")
    said, warned = capsys.readouterr()
    assert "not compared, because nothing says where the documents of both end" in warned
    assert "checked 2 files: 1 as noted, of the rest nothing is noted beside them" in said
    assert "| no document is also in | no other file |" in files[0].with_suffix(".card.md").read_text()


def test_without_anything_beside_it(tmp_path: Path, capsys):
    path = tokens(tmp_path / "a.bin", [1, 2])
    path.with_suffix(".json").unlink()
    check(path)
    said = capsys.readouterr().out
    assert "documents  unknown: nothing beside" in said and "a.bin: its sidecar names no tokenizer" in said
    assert "checked 1 file: nothing is noted beside them" in said
    assert faults(path, "--plot", tmp_path / "a.jpg") == [f"--plot {tmp_path}/a.jpg: must end with .png or .svg"]


@pytest.mark.parametrize("form", [pytest.param("png", marks=pytest.mark.long), "svg"])
def test_the_picture_is_drawn(run, prepared: Path, tmp_path: Path, form: str):
    """Also of a file whose documents are unknown; twice the same bytes."""
    for name in ("train.bin", "val.bin"):
        shutil.copy(prepared / name, tmp_path)
    shutil.copy(prepared / "train.json", tmp_path)
    for number in (1, 2):
        run("verify.py", "train.bin", "val.bin", "--plot", f"{number}.{form}", "--excerpt", 0, cwd=tmp_path)
    one, two = (tmp_path / f"{number}.{form}" for number in (1, 2))
    assert one.read_bytes() == two.read_bytes() and one.stat().st_size > 10_000
    assert json.loads((tmp_path / "train.json").read_text())["eot_id"] == 0


# Evaluation texts, and the data card.


CARD_CURE = "remove it, and make it again with --card"
SENTENCE = "The quick brown fox, at last, jumps over the lazy dog -- and sleeps until noon."


def test_words_have_no_case_and_no_punctuation():
    assert words_of("It's  a _Test_: naïve,\nÉTÉ—1.5 ") == ["its", "a", "test", "naïve", "été15"]


def test_a_run_of_13_words_is_found_and_one_of_12_is_not():
    texts = Evaluation()
    words = words_of(SENTENCE)
    assert len(words) == 15
    texts.add([SENTENCE, "seven words are too few to compare", " ".join(words[:8]), "nothing of this is anywhere " * 4])
    texts.read("dog " + " ".join(words[1:13]) + " dog", document=0)
    assert texts.found == {}
    texts.read("Nothing. " + " ".join(words[2:]).upper(), document=1)
    texts.read(SENTENCE, document=2)
    assert texts.found == {0: (" ".join(words[2:15]), 1), 2: (" ".join(words[:8]), 2)}
    assert (texts.texts, texts.too_short) == (4, 1)


def test_documents_that_resemble_each_other(tmp_path: Path, capsys):
    """Of documents with a known share of runs in common, those above the threshold are found, in order and again."""
    dice = np.random.default_rng(1)
    train = [dice.integers(10, 5000, 200).tolist() for _ in range(40)]

    def changed(number: int, ids: int) -> list[int]:
        return [*train[number][:-ids], *dice.integers(10, 5000, ids).tolist()]  # of 196 runs, ``ids`` are others

    train[30] = changed(3, 10)
    train[31] = changed(30, 10)  # a chain, of one group
    facts = {"vocab_size": 5000}
    one = tokens(tmp_path / "train.bin", *train, [7], [8], **facts)
    check(one, "--near_duplicates", 0.8)
    first = capsys.readouterr().out
    assert "near-duplicates: 2 of 42 documents resemble an earlier one, in 1 group\n" in first
    (similar,) = re.findall(rf"  document 30 of {one}: (\S+) in common with document 3 of", first)
    assert float(similar) == pytest.approx(186 / 206, abs=0.08)
    val = tokens(tmp_path / "val.bin", changed(5, 60), changed(6, 8), train[9][:100], [7, 7], **facts)
    (line,) = faults(one, val, "--near_duplicates", 0.8)
    assert line.startswith(f"document 1 of {val}: resembles document 6 of {one}, as 1 in all do one of another file")
    capsys.readouterr()
    check(one, "--near_duplicates", 0.8)
    assert capsys.readouterr().out == first
    (line,) = faults(one, val, "--near_duplicates", 0.5)
    assert ", as 2 in all do" in line, "the first of them has 136 of 256 runs in common with document 5"


@pytest.fixture
def with_sentence(prepare_here, bytes_tokenizer: Path, tmp_path: Path) -> Path:
    """A preparation whose one training document holds ``SENTENCE``."""
    (text := tmp_path / "text").mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(f"document {number}\n{SENTENCE * (number == 7)}")
    flags = ("--tokenizer", bytes_tokenizer, "--output_dir", "out")
    prepare_here("--input", text, *flags, cwd=tmp_path)
    return tmp_path / "out"


def test_evaluation_texts_in_the_training_data_are_named(with_sentence: Path, tmp_path: Path, capsys):
    evaluation = tmp_path / "evaluation.jsonl"
    rows = ["something else entirely, of no fewer than eight words", "the " + SENTENCE.upper(), "short"]
    evaluation.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    files = [with_sentence / "train.bin", with_sentence / "val.bin"]
    (line,) = faults(*files, "--against", evaluation, "--card", "MIT")
    beginning, document = re.fullmatch(r"(.*) in document (\d+) \('.*quick brown fox at last.*", line).groups()
    assert beginning.endswith(f"train.bin: has 1 of the 3 texts of {evaluation}, such as 1")
    assert SENTENCE in documents_of(with_sentence, "train")[int(document)]
    assert not list(with_sentence.glob("*.card.md"))
    assert "val.bin: compared with 3 texts of" in (said := capsys.readouterr().out) and "1 have fewer than 8" in said
    evaluation.write_text('{"text": "half a pair: \\ud800"}')
    assert "is not valid Unicode" in faults(*files, "--against", evaluation)[0]
    evaluation.write_text(json.dumps({"text": rows[0]}))
    assert "--against nowhere: there is no such" in faults(*files, "--against", "nowhere")[0]
    check(*files, "--against", evaluation, "--card", "MIT | see LICENSE")
    card = (with_sentence / "train.card.md").read_text()
    sidecar = open_token_file(files[0]).sidecar
    for row in (
        "| licence | MIT &#124; see LICENSE |",
        f"| sha256 | {sidecar.sha256} |",
        "| no document is also in | val.bin |",
        "| no run of 13 words is also in | evaluation.jsonl |",
        f"| documents | {sidecar.documents}, of ",
        f"| tokenizer | tokenizer, sha256 {sidecar.tokenizer.sha256} |",
    ):
        assert row in card
    files[0].with_suffix(".card.md").write_text(card.replace(sidecar.sha256, "0" * 64))
    assert faults(*files) == [f"{files[0].with_suffix('.card.md')}: describes another file: " + CARD_CURE]
