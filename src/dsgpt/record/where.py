"""The command line of ``data_prep/where.py``: the documents behind a token, a step, or the spikes of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsgpt.common.command_line import COUNT, POSITIVE, flag, read_options
from dsgpt.common.files import printable
from dsgpt.common.json_files import clipped_text
from dsgpt.common.text import counted, next_line, script_words
from dsgpt.data.addresses import Addresses, changed_sources
from dsgpt.data.token_file import TokenFile, open_token_file
from dsgpt.record.readings import Reading, find_spikes, suspects

_SCRIPT = "data_prep/where.py"
TOP = 10


@dataclass(frozen=True, kw_only=True)
class WhereOptions:
    """The command line.

    Print where tokens come from: the document, its source file, its place there, its tokens and the beginning of its
    text. The place is a byte offset or a row; the hash is the first 8 bytes of the SHA-256 of the text. Of a token
    file: a document, or the one that a token belongs to. Of a run: the documents that a step read, or those behind the
    steps whose loss or gradient norm stands out. Tokens, documents, samples and ranks are counted from 0, steps from 1.

    Examples:
      .venv/bin/python data_prep/where.py data/python-transformers/train.bin --token 150000
      .venv/bin/python data_prep/where.py --run checkpoint/run --step 812 --rank 3
      .venv/bin/python data_prep/where.py --spike checkpoint/run
    """

    file: Path | None = flag(Path, "BIN", name="file", nargs="?")
    """a token file; with --run and --spike the training data, if it is no longer where the run read it"""
    token: int | None = flag(COUNT, "N", "the document that token N of BIN belongs to")
    document: int | None = flag(COUNT, "N", "document N of BIN")
    run: Path | None = flag(Path, "RUN", "the folder of a run, for the documents that its --step read")
    step: int | None = flag(POSITIVE, "N", "an optimizer step of --run")
    rank: int | None = flag(COUNT, "N", "only the share of this rank; by default the whole global batch")
    spike: Path | None = flag(Path, "RUN")
    """the steps of this run that stand out, and their documents, the least likely by chance first"""
    top: int | None = flag(POSITIVE, "N", f"documents that --spike prints (default {TOP})")


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the command line asks for.

    Raises:
        UserError: mistakes of the command line; or the run, its token file or the index cannot be used.
    """
    options, problems = read_options(WhereOptions, argv)
    asked = [name for name in ("token", "document", "run", "spike") if getattr(options, name) is not None]
    if len(asked) != 1:
        problems.add("give one of BIN --token N, BIN --document N, --run RUN --step N, and --spike RUN")
    if asked in (["token"], ["document"]) and options.file is None:
        problems.add(f"--{asked[0]}: name the token file, too")
    if (options.step is None) != (options.run is None):
        problems.add("--run and --step go together: give both")
    if options.rank is not None and options.run is None:
        problems.add("--rank: only --run has ranks; leave it out")
    if options.top is not None and options.spike is None:
        problems.add("--top: only --spike prints documents by rank; leave it out")
    problems.raise_if_any()
    if options.run is not None and options.step is not None:
        _print_step(Reading(options.run, data=options.file), options.step, rank=options.rank)
    elif options.spike is not None:
        _print_spikes(Reading(options.spike, data=options.file), top=options.top or TOP)
    elif options.file is not None:
        _print_document(Addresses(open_token_file(options.file)), token=options.token, number=options.document)


EXCERPT_TOKENS, EXCERPT = 48, 100
"""Tokens that are decoded for an excerpt, and characters that are shown of it."""


def excerpt(file: Addresses, start: int, stop: int) -> str:
    """The beginning of the text of a range of tokens, on one line."""
    return clipped_text(printable(file.text(start, min(stop, start + EXCERPT_TOKENS))), width=EXCERPT)


def _end(files: Iterable[TokenFile], *words: object) -> None:
    """Print the last lines: sources that changed, and the next command."""
    for line in filter(None, map(changed_sources, files)):
        print(f"warning: {line}")
    print(next_line(script_words(_SCRIPT, *words)))


def _print_document(file: Addresses, *, token: int | None, number: int | None) -> None:
    number = file.number_at(token or 0) if number is None else number
    document = file[number]
    print(f"{file.file.path}: document {number:,} of {len(file):,}")
    print(f"  source  {document.origin}")
    print(f"  tokens  {document.start:,} to {document.stop - 1:,}; the last is the end-of-text id")
    print(f"  hash    {document.hex}: {file.agreement(document)}")
    if token is not None:
        print(f"  token   {token:,}: {file.text(token, token + 1)!r}, then {excerpt(file, token + 1, document.stop)}")
    print(f"  text    {excerpt(file, document.start, document.stop)}")
    _end([file.file], file.file.path, "--document", (number + 1) % len(file))


def _print_step(reading: Reading, step: int, *, rank: int | None) -> None:
    phase = reading.phase(step)
    windows = phase.steps(range(step, step + 1))[0].tolist()
    places = np.arange(len(windows))[None] if rank is None else reading.share(step, rank)
    samples = [
        (micro, place, [*phase.parts(windows[place])]) for micro, row in enumerate(places.tolist()) for place in row
    ]
    reads = "" if rank is None else f"rank {rank} reads "
    if step > reading.taken:
        reads = f"it is not recorded as taken, and {'' if rank is None else f'rank {rank} '}would read "
    epoch, before = divmod(step - 1, phase.order.steps_per_epoch)
    print(
        f"{reading.run_dir}: step {step:,}, which is step {before + 1:,} of {phase.order.steps_per_epoch:,} of epoch "
        f"{epoch + 1}; {reads}{counted(len(samples), 'sample')} of {reading.seq_length:,} tokens"
    )
    for micro, place, parts in samples:
        spans = phase.windows.spans(windows[place])
        tokens = " and ".join(f"{at:,} to {at + count - 1:,} of {file.path}" for file, at, count in spans)
        print(f"sample {place}{'' if rank is None else f', micro batch {micro}'}: tokens {tokens}")
        for file, document, start, stop in parts:
            print(f"  document {document.number:,}: {document.origin}, {document.hex}: {excerpt(file, start, stop)}")
    _end(phase.windows.data.files, "--spike", reading.run_dir)


def _print_spikes(reading: Reading, *, top: int) -> None:
    judged = find_spikes(reading.run_dir)
    print(f"{reading.run_dir}: {judged.words}")
    for spike in judged.spikes:
        print(f"  step {spike.step:,}: {spike.words}")
    if not (found := suspects(reading, judged)):
        return
    print(f"{counted(len(found), 'document')} behind them; those that chance explains least:")
    for each in found[:top]:
        text = excerpt(each.file, each.document.start, each.document.stop)
        share = f"{len(each.spikes)} of the {counted(each.steps, 'step')} that read it, by chance {each.by_chance:.2g}"
        print(f"  {share}: document {each.document.number:,}: {each.document.origin}, {each.document.hex}: {text}")
    if found[0].by_chance > 0.05:
        print("none of them stands out: by chance alone, as many documents would look like these")
    files = {each.file.file.path: each.file.file for each in found}
    _end(files.values(), "--run", reading.run_dir, "--step", found[0].spikes[0])
