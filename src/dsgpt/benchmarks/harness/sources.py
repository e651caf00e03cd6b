"""Which source files can change a record, and what a page says about them."""

from pathlib import Path

from dsgpt.telemetry.sources import PARAGRAPH, Hashes, MadeFrom, by_folder, hash_files, made_from

SUITES = ("parity", "resume", "faults", "saving", "plan", "speed", "recipes", "decoding", "inference", "serving")
DEMO, SWEEP = "demo", "sweep"
_TRAINING = ("src/gpt2.py", "data_prep/preprocess.py", "ds_configs/**/*.json", "requirements.txt", "src/dsgpt/**/*.py")
"""What makes text, recipes and trainings. Every record is made from these."""
_ROOMS_OUTSIDE = ("advising", "benchmarks", "calibration", "dashboard", "evaluation", "exporting", "reports", "serving")
_OUTSIDE_TRAINING = tuple(f"src/dsgpt/{room}" for room in _ROOMS_OUTSIDE)
_OF_SUITES = ("src/benchmark.py", "src/dsgpt/benchmarks/harness/*.py")
_MORE_OF_SUITES = {
    "decoding": ("src/dsgpt/evaluation/*.py", "src/dsgpt/exporting/*.py"),
    "plan": ("src/dsgpt/calibration/*.py",),
    "inference": ("src/dsgpt/exporting/*.py", "src/dsgpt/benchmarks/inference/trace.json"),
    "serving": ("src/dsgpt/exporting/*.py", "src/dsgpt/serving/*.py", "src/serve.py"),
}
"""What some suites measure besides."""
_ONLY_READ_RECORDS = ("page", "pages", "page_method", "committed", "records", "sources")
"""Modules of the suites that make pages and tables from an existing record, or that start the commands of records."""


def source_files(repository: Path, name: str) -> list[Path]:
    """The files whose change can change the record ``name``, one of ``SUITES``, ``DEMO`` or ``SWEEP``."""
    outside = tuple(repository / folder for folder in _OUTSIDE_TRAINING)
    found = [
        path
        for pattern in _TRAINING
        for path in repository.glob(pattern)
        if not any(folder in path.parents for folder in outside)
    ]
    of_suite = (*_OF_SUITES, f"src/dsgpt/benchmarks/{name}/*.py", *_MORE_OF_SUITES.get(name, ()))
    own = ("src/demo.py",) if name == DEMO else of_suite
    found += [path for pattern in own for path in repository.glob(pattern) if path.stem not in _ONLY_READ_RECORDS]
    return sorted(set(found))


def source_hashes(repository: Path, name: str) -> Hashes:
    """The sha256 of every file of ``source_files``."""
    return hash_files(repository, source_files(repository, name))


def why_old(record: Path, *, name: str, repository: Path) -> str:
    """Why ``record`` was not made from the present sources; empty if it was.

    Raises:
        UserError: the ``SOURCES.json`` beside it cannot be read.
    """
    if not record.exists():
        return "there is no such record"
    entry = made_from(record)
    if entry is None:
        return "the record does not say from which sources it was made"
    if not entry.complete:
        return "the record is of a part of the suite, or something in it failed"
    changed, new = _differences(entry, source_hashes(repository, name), repository)
    since = f"commit {entry.git_commit}" if entry.git_commit else "then"
    found = []
    if changed:
        found.append(f"{len(changed)} of {len(entry.sources)} sources have changed since {since}: {by_folder(changed)}")
    if new:
        found.append(f"new since {since}: {by_folder(new)}")
    return "; ".join(found)


def sources_paragraph(record: Path, *, name: str, repository: Path) -> str:
    """What a page of ``record`` says about its sources, as they are when the page is made.

    Raises:
        UserError: the ``SOURCES.json`` beside it cannot be read.
    """
    entry = made_from(record)
    if entry is None:
        return f"{PARAGRAPH}the record does not say from which sources it was made."
    changed, new = _differences(entry, source_hashes(repository, name), repository)
    made = f"{PARAGRAPH}the record was made from {len(entry.sources)} files, named with their sha256 in `SOURCES.json`"
    if not changed and not new:
        return f"{made} beside it. This page was made from these sources."
    words = f"{len(changed)} of them had changed: {by_folder(changed)}" if changed else "none of them had changed"
    more = f" These files were new: {by_folder(new)}." if new else ""
    return f"{made} beside it.\nWhen this page was made, {words}.{more}"


def _differences(entry: MadeFrom, now: Hashes, repository: Path) -> tuple[list[str], list[str]]:
    """Files of ``entry`` that have changed or are gone, and sources that are new since then.

    A file that is no source any more, and is as it was, is no difference.
    """
    no_longer = [repository / name for name in entry.sources.keys() - now.keys()]
    present = now | hash_files(repository, [path for path in no_longer if path.is_file()])
    changed = sorted(name for name, digest in entry.sources.items() if present.get(name) != digest)
    return changed, sorted(now.keys() - entry.sources.keys())
