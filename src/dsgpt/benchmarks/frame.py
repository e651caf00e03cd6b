"""The frame of all suites: their flags, their command, their records and pages."""

import math
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from dsgpt.common.command_line import choice, flag, value
from dsgpt.common.errors import EXIT_DONE, UserError
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.common.json_files import JsonError, clipped_text, read_object
from dsgpt.common.text import (
    BUSY,
    NO_DIFFERENCE,
    bullets,
    busy_words,
    counted,
    machine_words,
    next_line,
    no_difference,
    table,
)
from dsgpt.machine.console import Console
from dsgpt.record.provenance import SourceChanges, changes_since, git_commit, marked, training_sources
from dsgpt.record.schema import finite, percentile
from dsgpt.record.suites import Spread
from dsgpt.telemetry.monitor import LoadOfOthers

# Which source files can change the record of a suite, of a sweep or of the demo.

TRAINED = Path("checkpoint/demo-zero1")
"""The run whose model some suites measure; the demo makes it."""
SUITES = (
    *("parity", "resume", "faults", "clusters", "saving", "loading", "network", "plan", "exam", "speed", "recipes"),
    *("decoding", "inference", "serving", "museum", "mutants", "crashes", "tokens", "exact", "oracles", "band"),
)
DEMO, SWEEP = "demo", "sweep"
GPU = "gpu"
"""The proof on GPUs: it runs other suites, and no record of it is made on the machine of ``SUITES``."""
_ROOMS = {"serving": ("inference/server",), GPU: ("inference/server",)}
"""Rooms that some suites measure besides training."""
_FILES = {"inference": "src/dsgpt/benchmarks/trace.json", "serving": "src/serve.py", GPU: "src/serve.py"}
_SHARED = {
    "contenders.py": ("speed", "decoding", GPU),
    "hosts.py": ("faults", "clusters", "network"),
    "gpu*.py": (GPU,),
    "tokens*.py": ("tokens",),
    "mutants*.py": ("mutants",),
    "stand_in_gpu.py": (),
}
"""Modules of some suites."""
_BUILDS_ON = {
    "clusters": ("faults",),
    "network": ("plan",),
    "museum": ("parity", "resume"),
    "crashes": ("faults", "resume"),
}
"""Suites that need the modules of others."""
_ONLY_READ_RECORDS = ("*_page.py", "records.py", "suites.py")
"""Modules of the suites that make pages and tables from an existing record, or that start the commands of records."""


def record_sources(name: str) -> list[str]:
    """Pathspecs of files whose change can change the record ``name``: of ``SUITES``, ``DEMO``, ``SWEEP`` or ``GPU``."""
    if name == DEMO:
        return [*training_sources(measured=("demo.py",)), "src/demo.py"]
    others = [suite for suite in (*SUITES, SWEEP) if suite not in {name, *_BUILDS_ON.get(name, ())} and name != GPU]
    shared = [path for path, suites in _SHARED.items() if name not in suites]
    left_out = [
        f":(exclude)src/dsgpt/benchmarks/{path}"
        for path in (*(f"{suite}*.py" for suite in others), *shared, *_ONLY_READ_RECORDS)
    ]
    own = [_FILES[name]] if name in _FILES else []
    return [*training_sources(measured=("benchmarks", *_ROOMS.get(name, ()))), "src/benchmark.py", *own, *left_out]


def record_changes(record: Mapping[str, Any], name: str, *, repository: Path) -> SourceChanges:
    """Changes of the sources of ``record``, the content of the record ``name``, since its oldest result was made."""
    return changes_since(blocks_of(record)[0].get("git_commit"), record_sources(name), repository=repository)


# Reads records and writes their pages.

Record = dict[str, Any]


def blocks_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What made a record, each with its commit and time: the commands of one that grows in blocks, else itself."""
    return record.get("blocks") or [record]


MAX_BYTES = 256 << 20
T = TypeVar("T")


def make_page(suite: "type[Suite[Any, Any]]", record_file: Path, page: Path, *, repository: Path) -> None:
    """Write ``page`` from a record that ``--table-from`` names.

    Raises:
        UserError: the file cannot be read as a record of the suite: a value is missing or of another type.
    """
    try:
        record = read_object(record_file, max_bytes=MAX_BYTES)
    except JsonError as error:
        raise UserError(
            f"--table-from {record_file}: cannot be read as a record of {suite.record_of}: {error}"
        ) from error
    try:
        write_page(suite, page, record, source=record_file, repository=repository)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = clipped_text(f"{type(error).__name__}: {error}")
        raise UserError(f"--table-from {record_file}: is not a record of {suite.record_of} ({what})") from error


def write_page(suite: "type[Suite[Any, Any]]", page: Path, record: Record, *, source: Path, repository: Path) -> None:
    """Write the page of ``record``; before its first ``##`` heading whether the machine was busy, and the sources.

    Args:
        suite: makes its text.
        page: the file.
        record: names the commit that it was made at.
        source: its path, for the reader.
        repository: holds the sources.
    """
    sources = record_changes(record, suite.name, repository=repository).paragraph()
    head, heading, rest = suite.page(record, source=source.as_posix()).rstrip("\n").partition("\n\n## ")
    busy = f"\n\n{BUSY}{words}.**" if (words := busy_words(record)) else ""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, f"{head}{busy}\n\n{sources}{heading}{rest}\n".encode())


def generated_by(
    source: str, name: str, *, page: str = "", measure: str = "", ends: str = "measures it on your machine"
) -> str:
    """The paragraph of a page that says how it is made.

    Args:
        source: the path of its record, for the reader.
        name: that of the suite.
        page: the name of its page, if that is another.
        measure: the suite with the flags that its measurement needs, if it needs some.
        ends: what that does.
    """
    return f"""Generated from `{source}` by
`.venv/bin/python src/benchmark.py {name} --table-from {source} --page docs/{page or name}.md`;
`.venv/bin/python src/benchmark.py {measure or name}` {ends}."""


def made_from(record: Mapping[str, Any], *, source: str, name: str, page: str = "") -> str:
    """The paragraphs of a page that say how it is made, and when and on which machine its record was.

    Args:
        record: with its head.
        source: its path, for the reader.
        name: that of the suite.
        page: the name of its page, if that is another.
    """
    hardware, env = record["hardware"], record["env"]
    commits = [*dict.fromkeys(str(block["git_commit"]) for block in blocks_of(record))]
    made = f"Commit `{commits[0]}`" if len(commits) == 1 else f"Commits {', '.join(f'`{one[:12]}`' for one in commits)}"
    return f"""{generated_by(source, name, page=page)}

Machine: {machine_words(hardware)}; {hardware["device"]}.
Python {env["python_version"]}, torch {env["torch_version"]}, DeepSpeed {env["deepspeed_version"]}.
{made}, {record["timestamp_utc"]}. It took {record["seconds"] / 60:.0f} minutes."""


def filled(name: str, fields: Mapping[str, Any], *, record_at: str = "", page: str = "", **more: object) -> str:
    """The prose of ``pages/NAME.md``, its fields filled as by ``str.format``.

    Args:
        name: of the file.
        fields: a record, or a part of one. ``machine`` is what it says about its machine.
        record_at: the path of that record, if ``made`` is among the fields: the words of ``made_from``.
        page: as in ``made_from``.
        more: further fields.
    """
    if record_at:
        more["made"] = made_from(fields, source=record_at, name=name, page=page)
    text = Path(__file__).with_name("pages").joinpath(f"{name}.md").read_text(encoding="utf-8")
    return text.rstrip("\n").format_map({"machine": machine_words(fields.get("hardware", {})), **fields, **more})


def section(title: str, header: Sequence[object], rows: Sequence[Sequence[object]], *, text: str = "") -> str:
    """The section of a page with a table below ``text``; empty if the table has no rows."""
    return "\n\n".join(filter(None, [f"## {title}", text, table(header, rows)])) if rows else ""


def listed(title: str, lines: Sequence[str]) -> str:
    """The section of a page with a list of ``lines``; empty if there are none."""
    return f"## {title}\n\n{bullets(lines)}" if lines else ""


def page_of(*parts: str) -> str:
    """A page of ``parts``, without those that are empty."""
    return "\n\n".join(filter(None, parts)) + "\n"


def troubles(results: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> str:
    """The section of a page about what did not pass; empty if all passed.

    Args:
        results: each with name, status and the reason: ``message``, or ``wrong`` or ``not_run``.
        words: for every status.
    """
    lines = [
        f"{one['name']}: {words[one['status']]}: {one.get('message') or one.get('wrong') or one.get('not_run')}"
        for one in results
        if one["status"] != "passed"
    ]
    return listed("Not passed", lines)


def judged(ratio: Mapping[str, Any] | None) -> str:
    """``, no difference`` if the ratios of several pairs say so, as a record has them."""
    return f", {NO_DIFFERENCE}" if ratio and no_difference(ratio["smallest"], ratio["largest"]) else ""


def span(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest and largest of ``values``, and all of them."""
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "values": [*values]}


def ratios(ones: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """The ``span`` of each of ``ones``, divided by the one beside it."""
    return span([one / other for one, other in zip(ones, others, strict=True)])


def percentiles(values: list[float]) -> dict[str, float]:
    """The 50th, 95th and 99th percentile of ``values``, which has at least one."""
    return {f"p{share}": percentile(values, share / 100) or 0.0 for share in (50, 95, 99)}


def span_words(figures: Mapping[str, Any], form: str, *, scale: float = 1.0) -> str:
    """``1.20 (1.18 to 1.23)``, from what ``span`` gave."""
    median, smallest, largest = (format(figures[key] * scale, form) for key in ("median", "smallest", "largest"))
    return f"{median} ({smallest} to {largest})"


def spread_words(figure: Spread, form: Callable[[float], str]) -> str:
    """``1,200 (1,180 to 1,230)``; the value alone if there is one."""
    text = form(figure.median)
    return text if len(figure.values) < 2 else f"{text} ({form(figure.smallest)} to {form(figure.largest)})"


def ratio_words(ratio: Mapping[str, Any], other: str) -> str:
    """``1.20 (1.18 to 1.23)x transformers``, and whether that is no difference."""
    return f"{span_words(ratio, '.2f')}x {other}{judged(ratio)}"


def turns(names: Sequence[str], *, rounds: int) -> Iterator[tuple[int, str]]:
    """Yields the number of the round, from 1, and the name of each turn.

    Another name is the first in each round: a machine that becomes slower favours none.
    """
    for number in range(rounds):
        first = number % len(names)
        yield from ((number + 1, name) for name in (*names[first:], *names[:first]))


def contest(entries: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """The results of every entry, one per round; the entries take turns."""
    results: dict[str, list[T]] = {name: [] for name in entries}
    for _, name in turns(list(entries), rounds=rounds):
        results[name].append(entries[name]())
    return results


# What a suite declares, and what its command does: run it, show its progress, write its record and its page.

EXIT_FAILED = 1
"""A result failed; the page says which."""


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """The flags of every suite, after its own."""

    output: Path = flag(Path, "RECORD", "the record to write (default: %(default)s)")
    page: Path | None = flag(Path, "MD", "the page to write (default: beside the record)")
    table_from: Path | None = flag(Path, "RECORD", name="--table-from")
    """run nothing; make the page from an earlier record"""
    keep: Path | None = flag(Path, "DIR", "leave recipes, logs and measurements of every training there")


O = TypeVar("O", bound=SuiteOptions)  # noqa: E741
"""Type of the options of a suite."""
R = TypeVar("R")
"""Type of a result of a suite."""


class Suite(ABC, Generic[O, R]):
    """A measurement of ``src/benchmark.py``: a class declares it, and an object is one run of it.

    Args:
        options: of the command line.
        repository: holds the scripts and recipes.
    """

    name: ClassVar[str]
    """Name of the command, and in ``record_sources``."""
    record_of: ClassVar[str]
    """Subject of the record, for messages."""
    schema_version: ClassVar[str] = "1.0"
    """Schema of the record."""
    unit: ClassVar[str]
    """Name of one result, in the progress bar."""
    failure_line: ClassVar[str] = ""
    """The form of a failure at the end of the console's output; empty for none."""
    flags: ClassVar[type[SuiteOptions]]
    """The dataclass of its options."""
    counted: ClassVar[str] = ""
    """The key of the results in a record that grows in blocks: each result is written as it comes, none begins after
    ``--minutes``, and a repeated command with the same ``--output`` continues. Empty if a record is made at once."""
    drains: ClassVar[bool] = False
    """Whether ``results`` begins nothing after ``--minutes`` by itself, and then waits for what it has begun."""
    names: ClassVar[str] = ""
    """The last line of its help: names that its flags take. The docstring of the class is the help."""
    page: ClassVar[Callable[..., str]]
    """Makes the text of the page from a record and ``source``, the record's path for the reader."""
    summary: ClassVar[Callable[..., list[str]]]
    """Makes the lines for the console at the end of a run."""

    def __init__(self, options: O, repository: Path) -> None:
        self.options, self.repository, self.console = options, repository, Console(speaks=True)
        self.folder = Path()
        """Folder to work in; ``run_suite`` sets it before ``begin``."""
        self.earlier: Record = {}
        """The record that a suite in blocks continues; empty if there is none."""
        if self.counted and options.output.exists():
            try:
                self.earlier = read_object(options.output, max_bytes=MAX_BYTES)
            except JsonError as error:
                cure = "it cannot be continued: remove it, or give another file"
                raise UserError(f"--output {options.output}: {error}: {cure}") from error

    def kept(self, results: Iterable[Record], planned: Collection[str]) -> dict[str, Record]:
        """Earlier ``results`` by name, which stay in the record.

        Raises:
            UserError: one is not in ``planned``: a command with other flags made it, and it would be lost.
        """
        by_name = {one["name"]: one for one in results}
        if lost := sorted(by_name.keys() - {*planned}):
            more = f"{counted(len(lost), 'result')} that this command does not plan, such as {lost[0]}"
            raise UserError(f"--output {self.options.output}: has {more}: give the same flags, or another file")
        return by_name

    @abstractmethod
    def plan(self) -> int:
        """Choose what to run; return the number of results. Nothing is written yet.

        Raises:
            UserError: there is nothing to run.
        """

    def work_folder(self, resources: ExitStack) -> Path:
        """The folder that ``--keep`` names; without it, a temporary one that ``resources`` removes.

        Raises:
            UserError: the folder to keep exists.
        """
        keep = self.options.keep
        if keep is None:
            return Path(resources.enter_context(tempfile.TemporaryDirectory(prefix=f"dsgpt-{self.name}-")))
        try:
            keep.mkdir(parents=True)
        except FileExistsError as error:
            raise UserError(f"--keep {keep}: exists already: give a new folder") from error
        return keep

    def begin(self) -> None:
        """Prepare the work in ``folder``, which exists.

        Raises:
            UserError: the text could not be prepared.
        """

    @abstractmethod
    def results(self) -> Iterator[R]:
        """The results, as they come."""

    @abstractmethod
    def line(self, result: R, *, count: str, left: str) -> str:
        """One result for the console; ``count`` is ``[ 7/40]`` and ``left`` ``; 3 min left``, empty after the last."""

    @abstractmethod
    def record(self, results: Sequence[R]) -> Record:
        """The record after its head and ``seconds``, the time of the run."""

    def failures(self, record: Record) -> list[str]:  # noqa: ARG002 - a suite may only measure
        """Failures; the exit code is 0 only if this is empty."""
        return []

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        """The last lines on the console."""
        return [self.failure_line.format(failure) for failure in failures if self.failure_line]

    def finish(self, record: Record) -> None:
        """Called when record and page are written and shown."""


def run_suite(suite: type[Suite[O, R]], options: O, *, repository: Path) -> int:
    """Run ``suite`` and write its record and page; with ``--table-from``, only make the page from that record.

    Returns:
        0 if nothing failed, else ``EXIT_FAILED``.

    Raises:
        UserError: the options are wrong, the work could not be prepared, or a file is not a record of the suite.
    """
    if options.table_from:
        page = options.page or options.table_from.with_suffix(".md")
        make_page(suite, options.table_from, page, repository=repository)
        print(page)
        return EXIT_DONE
    sources = record_sources(suite.name)
    commit = marked(git_commit(repository, mark=""), sources, repository=repository)
    run = suite(options, repository)
    console, output = run.console, run.options.output
    page = run.options.page or output.with_suffix(".md")
    total, started = run.plan(), time.perf_counter()
    load, results, minutes = LoadOfOthers(), list[R](), getattr(options, "minutes", math.inf)

    def write() -> Record:
        """Write what is there so far."""
        seconds = round(time.perf_counter() - started, 1)
        head = record_head(suite.schema_version, device=getattr(options, "device", "cpu"))
        head["git_commit"] = marked(commit, sources, repository=repository)  # marked if a source has changed meanwhile
        figures: Record = {**load.figures()}
        if suite.counted:
            block = {key: head[key] for key in ("git_commit", "timestamp_utc")} | {"seconds": seconds} | figures
            blocks = [*run.earlier.get("blocks", ()), *([block | {suite.counted: len(results)}] if results else ())]
            seconds = round(sum(one["seconds"] for one in blocks), 1)
            busiest = max([figures, *blocks], key=lambda one: one.get("cpu_share_of_others") or 0.0)
            head["blocks"], figures = blocks, {key: busiest.get(key) for key in figures}
        record: Record = finite(head | {"seconds": seconds} | figures | run.record(results))
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(output, record)
        return record

    with ExitStack() as resources:
        run.folder = run.work_folder(resources).resolve()
        run.begin()
        progress = console.progress(total=total, what=suite.name, unit=suite.unit)
        resources.callback(progress.close)
        for result in run.results():
            results.append(result)
            progress.advance()
            left = f"; {progress.time_left()} left" if len(results) < total else ""
            console.say(run.line(result, count=f"[{len(results):>{len(str(total))}}/{total}]", left=left))
            if suite.counted:
                write()
                if time.perf_counter() - started > 60 * minutes and not suite.drains:
                    break
        record = write()
    failures = run.failures(record)
    write_page(suite, page, record, source=output, repository=repository)
    written, shown = f"record {output}, page {page}", next_line(["less", page])
    for line in ["", *suite.summary(record), busy_words(record), written, *run.closing_lines(failures), shown]:
        console.say(line)
    run.finish(record)
    return EXIT_FAILED if failures else EXIT_DONE


def record_head(schema_version: str, *, device: str) -> Record:
    """The fields that every record begins with: when, from which code, on which machine."""
    from dsgpt.machine.device import describe_hardware, software_versions  # noqa: PLC0415 - torch takes seconds

    return {
        "schema_version": schema_version,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "env": software_versions(),
        "hardware": describe_hardware(device),
    }


def work_facts(device: str) -> Record:
    """The fields of ``work`` that suites on the small model share."""
    from dsgpt.benchmarks.cells import GLOBAL_BATCH, SEQUENCE, shape  # noqa: PLC0415

    return {"global_batch_size": GLOBAL_BATCH, "seq_len": SEQUENCE, "model": shape(device)}


# What several suites have: a part of their work that ``--only`` selects, and flags.

NANOGPT = "nanogpt"
"""The peer whose checkout ``--peer`` names."""


def selected(every: Mapping[str, T], only: Sequence[str]) -> dict[str, T]:
    """Members of ``every`` whose keys begin with a word of ``only``; all if ``only`` is empty.

    Raises:
        UserError: it selects nothing.
    """
    chosen = {key: each for key, each in every.items() if not only or key.startswith(tuple(only))}
    if not chosen:
        raise UserError(f"--only {' '.join(only)}: selects nothing; there are {', '.join(every)}")
    return chosen


def only_flag(metavar: str, what: str) -> Any:
    """``--only``, which selects a part of the suite: empty for all."""
    return flag(str, metavar, f"only these {what} (default: all)", default=(), nargs="+")


def peers_flag(text: str) -> Any:
    """``--peer``, the checkouts of other trainers: ``NAME=FOLDER``."""
    text = f"{text}: nanogpt=FOLDER, whose model.py is executed (default: Hugging Face only)"
    return flag(str, "NAME=FOLDER", text, default=(), nargs="+")


def read_peers(words: Sequence[str], *, form: str = f"NAME=FOLDER; names are {NANOGPT}") -> dict[str, Path]:
    """The checkouts that ``--peer`` names.

    Args:
        words: of the command line.
        form: what each must be, for the message.

    Raises:
        UserError: one is not ``NAME=FOLDER``, unknown, or not a checkout.
    """
    checkouts = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or name != NANOGPT:
            raise UserError(f"--peer {word}: must be {form}")
        if not (Path(folder) / "model.py").is_file():
            raise UserError(f"--peer {word}: {folder} has no model.py: name a checkout of {NANOGPT}")
        checkouts[name] = Path(folder).resolve()
    return checkouts


def counts(must_be: str) -> Callable[[str], tuple[int, ...]]:
    """A reader of whole numbers of at least 1 with commas between them, each once."""
    return value(
        lambda csv: tuple(dict.fromkeys(map(int, csv.split(",")))), accepts=lambda each: min(each) > 0, must_be=must_be
    )


def device_flag(text: str) -> Any:
    """``--device``."""
    return flag(choice(("cpu", "cuda")), "KIND", f"{text} (default: cpu)", default="cpu")
