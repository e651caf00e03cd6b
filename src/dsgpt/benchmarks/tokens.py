"""``benchmark.py tokens``: whether the fast engine has the reference's ids on every text, and how fast preparation is.

Equality: seeded documents made of what GPT-2's pattern looks at, and every code point in each neighbourhood that the
pattern knows. Speed: raw text to token files, against the bare engine and against the way of nanoGPT's ``prepare.py``.
Kills: preparations killed at any moment and continued have the bytes of an undisturbed one. Memory: of one large
document.
"""

import contextlib
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.frame import Record, section, span_words
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of
from dsgpt.common.text import table

_COUNTED = ("texts", "disputed", "different")
"""Counts of texts in what ``compared`` gives."""
FUZZ, POINTS, SPEED, KILL, MEMORY = "fuzz", "code points", "speed", "kill", "memory"
WAYS = ("dsgpt", "bare", "nanogpt")
PARTS = ("fuzz", "points", "speed", "kills", "memory")
_BATCH = 10_000
_NEIGHBOURS = ("", " ", "  ", "\n", "'", "a", "1", "!", "'s", "\xa0")
_PIECES = (
    *(" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u1680", "\u2028", "\u3000", "\ufeff", "\u200d"),
    *("'", "'s", "'S", "'ll", "'re", "\u2019s", "a", "the", "Dog", "DON'T", "1", "12", "٣", "½", "Ⅷ", "²", "!", "..."),
    *("é", "e\u0301", "ß", "Ελ", "日本", "한", "ﷺ", "\U0001f600", "\U0001f468\u200d\U0001f469", "\ue000"),
    *("==", "<|endoftext|>", "\0", "\x7f", "aaaaaaaa"),
)
"""Every kind of character that GPT-2's pattern tells apart."""
_NEWER = ("\u0378", "\U0010ffff", "\U000323b0", "\U00033479", "\U00016ff6", "\u088f", "\ua7ce")
"""Characters that only the newest Unicode has, or none."""


def adversarial(number: int) -> str:
    """Document ``number``: up to 60 pieces of ``_PIECES``, and code points at random.

    Only one in ten has characters that this Python does not know: the reference encodes those, so they test little.
    """
    chance = random.Random(number)
    words = chance.choices((*_PIECES, *_NEWER) if number % 10 == 0 else _PIECES, k=chance.randrange(60))
    for _ in range(chance.randrange(4)):
        code = chance.randrange(0x80, 0x32000)
        if unicodedata.category(chr(code)) not in ("Cn", "Cs") or (number % 10 == 0 and not 0xD800 <= code < 0xE000):
            words.insert(chance.randrange(len(words) + 1), chr(code))
    return "".join(words)


def neighbourhoods(character: str) -> list[str]:
    """Texts with ``character`` in each neighbourhood, before and after."""
    return [f"{before}{character}{after}" for before in _NEIGHBOURS for after in _NEIGHBOURS]


def characters(first: int, end: int) -> list[str]:
    """Those with code points from ``first`` to before ``end``, without surrogates."""
    return [chr(code) for code in range(first, end) if not 0xD800 <= code < 0xE000]


def ranges_of(codes: Sequence[int]) -> list[str]:
    """``U+323B0-U+33479`` and so on, of sorted code points."""
    ends = [0, *(index + 1 for index, (one, two) in enumerate(pairwise(codes)) if two != one + 1), len(codes)]
    return [f"U+{codes[one]:04X}-U+{codes[two - 1]:04X}" for one, two in pairwise(ends)] if codes else []


def tokens_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.tokens`` makes it.
        source: the record's path, for the reader.
    """
    head = f"""# Preparation: equal ids, and its speed

The tokenizer is `{record["tokenizer"]["name"]}` with {record["tokenizer"]["size"]:,} ids. Engines:
{", ".join(f"{name} {version}" for name, version in record["engines"].items())}.

{frame.made_from(record, source=source, name="tokens")}"""
    differing, kills = record["differing"], record["kills"]
    equal = section(
        "Equal ids",
        ["texts", "how many", "sent to the reference", "with other ids"],
        [[one["what"], *(f"{one[key]:,}" for key in _COUNTED)] for one in record["equality"]],
        text=f"""{differing["count"]:,} code points are classed differently by the two libraries, in
{len(differing["ranges"])} ranges; {differing["not_disputed"]} of them are not sent to the
reference.""",
    )
    rows = []
    for name, one in record["speed"].items():
        speeds = [span_words(one["speeds"][way], ".1f") for way in WAYS]
        ratios = [span_words(one["ratios"][way], ".2f") for way in ("nanogpt", "bare")]
        rows.append([name, f"{one['megabytes']:.0f}", *speeds, *ratios])
    speed = section(
        "Raw text to token files, MB/s",
        ["corpus", "MB", "dsgpt", "bare engine", "nanoGPT's way", "times nanoGPT's way", "times the bare engine"],
        rows,
        text="Medians, in parentheses the range of all rounds. Peers are timed on the first files of the same text.",
    )
    where = section(
        "Where the time goes, one process",
        ["corpus", "reading, CPU s", "encoding, CPU s", "the rest, CPU s"],
        [[name, *(f"{value:.2f}" for value in one["seconds"].values())] for name, one in record["speed"].items()],
    )
    sums = [[one["sums"][f"train.{end}"][:16] for end in ("bin", "index")] for one in kills]
    killed = section(
        "Killed and continued",
        ["preparation", "workers", "parts that were kept", "sha256 of train.bin", "of train.index"],
        [[one["name"], one["workers"], one["parts"], *own] for one, own in zip(kills, sums, strict=True)],
        text=f"""Killed by SIGKILL at seeded moments, then the same command again.
{sum(one["sums"] == kills[0]["sums"] for one in kills)} of {len(kills)} have the same
`.bin` and `.index` of both splits.""",
    )
    memory = section(
        "Memory on one document",
        ["MB of text", "peaks of all processes, added up, MB"],
        [[f"{one['megabytes']:.0f}", f"{one['peak'] / 1e6:.0f}"] for one in record["memory"]],
    )
    return frame.page_of(head, equal, speed, where, killed, memory)


def summary_lines(record: Record) -> list[str]:
    """The lines at the end of a run."""
    rows = [[part["what"], f"{part['texts']:,} texts, {part['different']:,} different"] for part in record["equality"]]
    faster = [(name, span_words(one["ratios"]["nanogpt"], ".1f")) for name, one in record["speed"].items()]
    rows += [[name, f"{times}x nanoGPT's way"] for name, times in faster]
    return table(["", ""], rows).splitlines()[2:]


@dataclass(frozen=True, kw_only=True)
class TokensOptions(frame.SuiteOptions):
    """The command line."""

    tokenizer: str = flag(str, "WHICH", "a local folder or a name on the hub (default: %(default)s)", default="gpt2")
    documents: int = flag(POSITIVE, "N", "seeded documents (default: %(default)s)", default=1_000_000)
    points: int = flag(POSITIVE, "N", "code points, from 0 (default: all)", default=0x110000)
    megabytes: int = flag(POSITIVE, "N", "most of each corpus; the first has 63 (default: %(default)s)", default=1000)
    peer_megabytes: int = flag(POSITIVE, "N", "of which nanoGPT's way gets (default: %(default)s)", default=50)
    rounds: int = flag(POSITIVE, "N", "rounds of each contender (default: %(default)s)", default=3)
    kills: int = flag(POSITIVE, "N", "preparations that are killed (default: %(default)s)", default=20)
    only: tuple[str, ...] = frame.only_flag("PART", f"parts: {', '.join(PARTS)}")


class Tokens(frame.Suite[TokensOptions, Record]):
    """Compares ids, and times preparation.

    tokens: compare the ids of the fast engine with those of Hugging Face's tokenizers, on seeded documents and on every
    code point in each neighbourhood that GPT-2's pattern knows. Then time preparation against the bare engine and
    against nanoGPT's way, on three corpora. Then kill and continue preparations, and measure the memory for one
    document of --megabytes. Exit code 0: all ids and all files of continued preparations are equal; 1: some differ.

    Examples:
      .venv/bin/python src/benchmark.py tokens --only fuzz --documents 100000
      .venv/bin/python src/benchmark.py tokens
    """

    name, record_of, unit = "tokens", "preparation", "result"
    flags, page, summary = TokensOptions, staticmethod(tokens_page), staticmethod(summary_lines)
    failure_line = "FAILED: {}"

    def plan(self) -> int:
        self._parts = self.options.only or PARTS
        if unknown := [part for part in self._parts if part not in PARTS]:
            raise UserError(f"--only {unknown[0]}: there is {', '.join(PARTS)}")
        self._fuzz = -(-self.options.documents // _BATCH) if "fuzz" in self._parts else 0
        self._points = [*range(0, self.options.points, _BATCH)] if "points" in self._parts else []
        speeds = 3 * (self.options.rounds * len(WAYS) + 1) if "speed" in self._parts else 0
        others = ("kills" in self._parts) * (self.options.kills + 2) + ("memory" in self._parts)
        return self._fuzz + len(self._points) + ("points" in self._parts) + speeds + others

    def begin(self) -> None:
        from dsgpt.data.engine import has_fast  # noqa: PLC0415 - numpy takes its time, as what follows
        from dsgpt.data.vocabulary import open_vocabulary, save_loaded  # noqa: PLC0415

        if not has_fast():
            raise UserError("gigatoken is not installed: pip install 'dsgpt[fast]'")
        save_loaded(self.options.tokenizer, self.folder / "loaded")
        save_loaded(str(self.folder / "loaded"), self.folder / "tokenizer")  # as an earlier preparation leaves it
        self._vocabulary = open_vocabulary(self.folder / "tokenizer")

    def results(self) -> Iterator[Record]:
        from dsgpt.data.engine import Gigatoken, Reference, is_disputed  # noqa: PLC0415

        fast, reference = Gigatoken(self._vocabulary), Reference(self._vocabulary)
        if not reference.cuts:
            raise UserError(f"--tokenizer {self.options.tokenizer}: is not of GPT-2's kind")
        for number in range(self._fuzz):
            first, end = number * _BATCH, min((number + 1) * _BATCH, self.options.documents)
            yield {"what": FUZZ} | compared([adversarial(each) for each in range(first, end)], fast, reference)
        for first in self._points:
            # A text for each code point; "x\n" keeps its neighbourhoods apart. One that the reference encodes is alone.
            each = characters(first, min(first + _BATCH, self.options.points))
            texts = [one if is_disputed(one.encode()) else "x\n".join(neighbourhoods(one)) for one in each]
            yield {"what": POINTS} | compared(texts, fast, reference)
        if self._points:
            yield {"what": "differing"} | differing(self.options.points)
        if "speed" in self._parts:
            yield from self._speeds()
        if "kills" in self._parts:
            yield from self._kills()
        if "memory" in self._parts:
            yield self._memory()

    def _speeds(self) -> Iterator[Record]:
        for name, (make, most) in CORPORA.items():
            corpus, peers = self.folder / name, self.folder / f"{name}-peers"
            make(corpus, min(most, self.options.megabytes))
            make(peers, min(most, self.options.megabytes, self.options.peer_megabytes))
            sizes = {one: sum(path.stat().st_size for path in one.iterdir()) for one in (corpus, peers)}
            out = self.folder / "out"
            for number, way in frame.turns(WAYS, rounds=self.options.rounds):
                text = peers if way == "nanogpt" else corpus
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                seconds = timed(command(way, text, out, self.folder / "tokenizer", self.repository))
                yield {"what": SPEED, "corpus": name, "way": way, "round": number, "speed": sizes[text] / 1e6 / seconds}
            yield {"what": "where", "corpus": name, "megabytes": sizes[corpus] / 1e6, "seconds": self._where(corpus)}
            for each in (corpus, peers, out):
                shutil.rmtree(each)

    def _kills(self) -> Iterator[Record]:
        """Two undisturbed preparations, and some that are killed at a moment of their time and continued."""
        corpus, out, chance, seconds = self.folder / "killed", self.folder / "out", random.Random(0), 0.0
        _sources(corpus, min(200, self.options.megabytes))
        words = command("dsgpt", corpus, out, self.folder / "tokenizer", self.repository)
        for number in range(-2, self.options.kills):
            shutil.rmtree(out, ignore_errors=True)
            flags, name = ["--workers", str(workers := 1 + number % 2)], "undisturbed"
            if number >= 0:
                name = f"killed after {(moment := chance.uniform(0, seconds)):.2f} s"
                with contextlib.suppress(subprocess.TimeoutExpired):  # it has been killed
                    timed([*words, *flags], limit=moment)
            parts = len([*out.glob("data/.work-*/*/part-*")])
            seconds = max(seconds, timed([*words, *flags]))
            files = sorted(path for path in out.glob("data/*") if path.suffix in (".bin", ".index"))
            sums = {path.name: sha256_of(path) for path in files}
            yield {"what": KILL, "name": name, "workers": workers, "parts": parts, "sums": sums}

    def _memory(self) -> Record:
        """The memory that one document needs: the peak of each of the processes by itself, added up."""
        shutil.rmtree(folder := self.folder / "memory", ignore_errors=True)
        folder.mkdir()
        with (text := folder / "document.txt").open("w", encoding="utf-8") as file:
            file.writelines(_texts(self.options.megabytes))
        peaks: dict[str, int] = {}
        words = command("dsgpt", text, folder, self.folder / "tokenizer", self.repository)
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                with contextlib.suppress(OSError):  # one has ended
                    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
                    for one in (str(process.pid), *children.split()):
                        if found := re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{one}/status").read_text()):
                            peaks[one] = int(found[1]) << 10
                time.sleep(0.05)
        if process.returncode:
            raise UserError("the preparation of one document failed")
        return {"what": MEMORY, "megabytes": text.stat().st_size / 1e6, "peak": sum(peaks.values())}

    def _where(self, corpus: Path) -> dict[str, float]:
        """CPU seconds of each part of the work, in this process, of whose two threads one encodes and writes."""
        from dsgpt.data.blocks import Reading, blocks_of  # noqa: PLC0415
        from dsgpt.data.parts import Encoder, Encoding  # noqa: PLC0415
        from dsgpt.data.sources import own_source  # noqa: PLC0415

        shutil.rmtree(parts := self.folder / "parts", ignore_errors=True)
        parts.mkdir()
        usual: Any = {"special": False, "on_bad_text": "fail", "split_by": "documents", "seed": 0}
        encoder = Encoder(Encoding(folder=parts, tokenizer=self.folder / "tokenizer", **usual))
        seconds = dict.fromkeys(("read", "encode", "write"), 0.0)
        encode, items_of = encoder.engine.encode, Reading.items

        @contextlib.contextmanager
        def counted(part: str) -> Iterator[None]:
            began = time.thread_time()
            yield
            seconds[part] += time.thread_time() - began

        def encoded(texts: Sequence[bytes]) -> Any:
            with counted("encode"):
                return encode(texts)

        def items(reading: Reading) -> Iterator[Any]:
            each, done = items_of(reading), object()
            while True:
                with counted("read"):
                    item = next(each, done)
                if item is done:
                    return
                yield item

        encoder.engine.encode = encoded  # type: ignore[method-assign]
        began = time.process_time()
        source = own_source([corpus], text_key="text", output_dir=parts)
        blocks = [*blocks_of(source, cuts=True, val_fraction=0.05, whitespace_only=False)]
        seconds["read"] = time.process_time() - began
        with mock.patch.object(Reading, "items", items):
            for block in blocks:
                encoder.encode(block)
        seconds["write"] = time.process_time() - began - seconds["read"] - seconds["encode"]
        return seconds

    def line(self, result: Record, *, count: str, left: str) -> str:
        if result["what"] in (FUZZ, POINTS):
            return f"{count} {result['what']}: {result['texts']:,} texts, {result['different']} different{left}"
        if result["what"] == SPEED:
            return f"{count} {result['corpus']}, {result['way']}: {result['speed']:.1f} MB/s{left}"
        return f"{count} {result['what']}{left}"

    def record(self, results: Sequence[Record]) -> Record:
        equality = []
        for what in (FUZZ, POINTS):
            ones = [result for result in results if result["what"] == what]
            sums = {key: sum(one[key] for one in ones) for key in _COUNTED}
            examples = [one for each in ones for one in each["examples"]][:20]
            equality += [{"what": what, **sums, "examples": examples}] if ones else []
        speed = {}
        for where in (result for result in results if result["what"] == "where"):
            of = [one for one in results if one["what"] == SPEED and one["corpus"] == where["corpus"]]
            speeds = {way: [one["speed"] for one in of if one["way"] == way] for way in WAYS}
            spans = {way: frame.span(values) for way, values in speeds.items()}
            ratios = {way: frame.ratios(speeds["dsgpt"], speeds[way]) for way in ("nanogpt", "bare")}
            figures = {"megabytes": where["megabytes"], "speeds": spans, "ratios": ratios, "seconds": where["seconds"]}
            speed[where["corpus"]] = figures
        empty: Record = {"count": 0, "ranges": [], "not_disputed": 0}
        found = [{key: result[key] for key in empty} for result in results if result["what"] == "differing"]
        vocabulary = {"size": self._vocabulary.size, "sha256": self._vocabulary.sha256}
        return {
            "tokenizer": {"name": self.options.tokenizer, **vocabulary},
            "engines": {name: version(name) for name in ("gigatoken", "tokenizers")},
            "unicode": unicodedata.unidata_version,
            "equality": equality,
            "differing": found[0] if found else empty,
            "rounds": self.options.rounds,
            "speed": speed,
            "kills": [result for result in results if result["what"] == KILL],
            "memory": [result for result in results if result["what"] == MEMORY],
        }

    def failures(self, record: Record) -> list[str]:
        off, kills = [one for one in record["equality"] if one["different"]], record["kills"]
        wrong = [f"{one['what']}: {one['different']} texts have other ids" for one in off]
        if missed := record["differing"]["not_disputed"]:
            wrong.append(f"{missed} code points are not sent to the reference")
        return wrong + [f"{one['name']}: has other files" for one in kills if one["sums"] != kills[0]["sums"]]


def compared(texts: list[str], fast: Any, reference: Any) -> Record:
    """How many of ``texts`` were sent to the reference, and which have other ids than the reference gives."""
    import numpy as np  # noqa: PLC0415

    from dsgpt.data.engine import is_disputed  # noqa: PLC0415

    data = [text.encode() for text in texts]
    (ours, our_counts), (theirs, counts) = fast.encode(data), reference.encode(data)
    different: list[str] = []
    if not (np.array_equal(our_counts, counts) and np.array_equal(ours, theirs)):
        pairs = zip(np.split(ours, np.cumsum(our_counts)[:-1]), np.split(theirs, np.cumsum(counts)[:-1]), strict=True)
        different = [text for text, (one, two) in zip(texts, pairs, strict=True) if not np.array_equal(one, two)]
    facts = {"texts": len(texts), "disputed": sum(map(is_disputed, data)), "different": len(different)}
    return facts | {"examples": [ascii(text) for text in different[:5]]}


def differing(end: int) -> Record:
    """The code points below ``end`` that the two libraries class differently, and how many are not disputed."""
    import gigatoken  # noqa: PLC0415
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    from dsgpt.data.engine import is_disputed  # noqa: PLC0415

    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def differ(each: Sequence[str]) -> bool:
        text = "".join(f"a{one}1{one}!{one}\n" for one in each)
        theirs = [text[one:two].encode() for _, (one, two) in splitter.pre_tokenize_str(text)]
        return list(gigatoken.pretokenizer(text.encode())) != theirs

    batches = [characters(first, min(first + 1024, end)) for first in range(0, end, 1024)]
    found = [one for batch in batches if differ(batch) for one in batch if differ([one])]
    others = [one for one in found if not is_disputed(one.encode())]
    return {"count": len(found), "ranges": ranges_of([*map(ord, found)]), "not_disputed": len(others)}


# Three corpora of package sources, repeated and shuffled by a seed; and the ways to prepare them.


def package_texts() -> list[str]:
    """The sources of the package transformers, in a fixed order."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    paths = sorted(Path(spec.origin).parent.rglob("*.py"))
    return [text for path in paths if (text := path.read_text(encoding="utf-8")).strip()]


def _texts(megabytes: int) -> Iterator[str]:
    texts, chance, left = package_texts(), random.Random(0), megabytes * 1_000_000
    while left > 0:
        text = chance.choice(texts)
        left -= len(text.encode())
        yield text


def _sources(folder: Path, megabytes: int) -> None:
    _write_files(folder, _texts(megabytes))


def _write_files(folder: Path, texts: Iterator[str]) -> None:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:06}.txt").write_text(text, encoding="utf-8")


def _one_file(folder: Path, megabytes: int) -> None:
    folder.mkdir()
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for text in _texts(megabytes):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def _small_files(folder: Path, megabytes: int) -> None:
    """Two hundred files of 5 kB for each megabyte."""
    _write_files(folder, (piece for text in _texts(megabytes) for piece in re.findall(r"(?s).{1,5000}", text)))


CORPORA: Mapping[str, tuple[Callable[[Path, int], None], int]] = {
    "sources": (_sources, 63),
    "one file of rows": (_one_file, 1 << 30),
    "small files": (_small_files, 1 << 30),
}
"""How each is made, and the most megabytes that it has."""


def command(way: str, text: Path, out: Path, tokenizer: Path, repository: Path) -> list[str]:
    """The command that prepares ``text`` into ``out``."""
    words: list[Any] = [Path(__file__).with_name("tokens_ways.py"), way, text, out, tokenizer]
    if way == "dsgpt":
        words = [repository / "data_prep" / "preprocess.py", "--input", text, "--tokenizer", tokenizer]
        words += ["--output_dir", out / "data"]
    return [sys.executable, *map(str, words)]


def timed(words: Sequence[str], *, limit: float | None = None) -> float:
    """Seconds of the command ``words`` in a new process, its start included.

    Raises:
        UserError: it failed.
        subprocess.TimeoutExpired: it was killed after ``limit`` seconds, and its workers have ended.
    """
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit)
    if done.returncode:
        raise UserError(f"{' '.join(words[1:3])} failed: {done.stderr.strip()[-2000:]}")
    return time.perf_counter() - began
