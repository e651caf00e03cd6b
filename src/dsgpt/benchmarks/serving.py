"""``benchmark.py serving``: a server under several times the requests that it can answer.

First as many clients as the server has places measure its capacity. Then requests arrive at random, several times as
many per second, in rounds. Refused clients ask again when the server says. Every request must get one answer, with the
text that it gets from a server that has nothing else to do, and the memory must not grow from round to round.
"""

import asyncio
import itertools
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dsgpt.benchmarks import frame
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import clipped_text
from dsgpt.common.text import table

if TYPE_CHECKING:
    import httpx2

# A server in a process of its own, and its memory.

MODEL = "served"
BATCH, QUEUE = 8, 16
"""Sequences that are decoded together, and requests that may wait."""
START_SEC, STOP_SEC = 120, 60


class ServerProcess:
    """Starts ``src/serve.py`` and waits until it accepts requests; a context manager, which stops it at its end.

    Args:
        repository: has the script.
        checkpoint: what to serve.
        device: as ``--device``.
        log: gets what it prints to standard error.

    Raises:
        UserError: it does not start.
    """

    def __init__(self, repository: Path, checkpoint: Path, *, device: str, log: Path) -> None:
        words = ["--checkpoint", checkpoint, "--model_name", MODEL, "--port", 0, "--device", device]
        words += ["--max_batch", BATCH, "--max_queue", QUEUE]
        command = [sys.executable, str(repository / "src" / "serve.py"), *map(str, words)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], START_SEC)[0]
        address = re.search(r"http://\S+:\d+", self._process.stdout.readline()) if ready else None
        if address is None:
            self._process.kill()
            self._process.communicate()
            printed = log.read_text(encoding="utf-8", errors="replace").strip() or "it printed nothing"
            raise UserError(f"src/serve.py did not start: {clipped_text(printed.splitlines()[-1], width=300)}")
        self.url = address[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> int | None:
        """End it with SIGTERM; returns its exit code, None if it does not end within ``STOP_SEC``."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=STOP_SEC)
        except subprocess.TimeoutExpired:
            return None

    def peak_bytes(self) -> int:
        """The most resident memory since the last call; 0 if the system does not say it."""
        folder = Path(f"/proc/{self._process.pid}")
        try:
            peak = re.search(r"^VmHWM:\s+(\d+) kB$", (folder / "status").read_text(encoding="utf-8"), re.MULTILINE)
            (folder / "clear_refs").write_text("5", encoding="ascii")  # begins VmHWM anew: see proc(5)
        except OSError:
            return 0
        return int(peak[1]) << 10 if peak else 0

    def metric(self, line: str) -> float:
        """A figure of ``/metrics``; 0 if it has none yet, or if the server does not answer."""
        import httpx2  # noqa: PLC0415 - no --help needs it

        try:
            text = httpx2.get(f"{self.url}/metrics").text
        except httpx2.HTTPError:
            return 0.0
        value = re.search(rf"^{re.escape(line)} (\S+)$", text, flags=re.MULTILINE)
        return float(value[1]) if value else 0.0


# Clients that ask a server for completions: at random instants, and again when it refuses them.

TIMEOUT_SEC = 300
MOST_ATTEMPTS = 200


@dataclass(frozen=True, kw_only=True)
class Served:
    """Result of one request."""

    prompt: int
    """Index of its prompt."""
    answers: int
    """Answers that it got: 1, unless something is wrong."""
    name: str
    """The server's name of the answer; empty without one."""
    text: str
    refusals: int
    """Number of refusals with 429."""
    accepted_sec: float
    """Seconds from the attempt that was accepted to its answer."""
    whole_sec: float
    """Seconds from the first attempt to the answer."""
    failure: str | None = None
    """Why there is no answer, one line."""


WAITS = ("accepted_sec", "whole_sec")
"""The times of a request that a round has percentiles of."""


class Load:
    """Requests to one server.

    Args:
        url: of the server.
        model: its name in requests.
        prompts: request i asks for a completion of the prompt ``i % len(prompts)``.
        max_tokens: of a completion.
        seed: draws arrivals, and how much longer than asked a refused client waits.
    """

    def __init__(self, url: str, model: str, prompts: Sequence[str], *, max_tokens: int, seed: int) -> None:
        self._url, self._prompts, self._random = url, prompts, random.Random(seed)
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0}

    def steady(self, requests: int, *, clients: int) -> tuple[list[Served], float]:
        """``clients`` at a time, each as soon as an earlier one is answered; also returns the seconds of all.

        Raises:
            UserError: a request is not answered.
        """
        served, seconds = self.poisson([0.0] * requests, clients=clients)
        if lost := [one.failure for one in served if one.failure]:
            raise UserError(f"src/serve.py does not answer {len(lost)} of {requests} requests: {lost[0]}")
        return served, seconds

    def poisson(self, instants: Sequence[float], *, clients: int = 0) -> tuple[list[Served], float]:
        """A request at each instant, if one of ``clients`` is free; also returns the seconds until all are answered."""
        return asyncio.run(self._all(instants, clients=clients or len(instants)))

    def instants(self, requests: int, *, per_sec: float) -> list[float]:
        """Random instants, ``per_sec`` a second in the mean, in seconds."""
        return list(itertools.accumulate(self._random.expovariate(per_sec) for _ in range(requests)))

    async def _all(self, instants: Sequence[float], *, clients: int) -> tuple[list[Served], float]:
        import httpx2  # noqa: PLC0415

        places, started = asyncio.Semaphore(clients), time.perf_counter()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx2.AsyncClient(base_url=self._url, timeout=TIMEOUT_SEC, limits=limits) as client:

            async def one(number: int, instant: float) -> Served:
                await asyncio.sleep(instant)
                async with places:
                    return await self._until_answered(client, number, begun=started + instant)

            served = await asyncio.gather(*(one(number, instant) for number, instant in enumerate(instants)))
        return list(served), time.perf_counter() - started

    async def _until_answered(self, client: "httpx2.AsyncClient", number: int, *, begun: float) -> Served:
        """Ask, and as often as the server refuses, wait as long as it says and ask again."""
        import httpx2  # noqa: PLC0415

        prompt, asked = number % len(self._prompts), begun
        choices: list[dict[str, str]] = []
        name, failure, refusals = "", f"refused {MOST_ATTEMPTS} times", 0
        while refusals < MOST_ATTEMPTS:
            asked = time.perf_counter()
            try:
                answer = await client.post("/v1/completions", json={**self._body, "prompt": self._prompts[prompt]})
            except httpx2.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
                break
            if answer.status_code != 429:
                if answer.status_code == 200:
                    completion = answer.json()
                    choices, name = completion["choices"], completion["id"]
                failure = f"answered {answer.status_code}: {clipped_text(answer.text)}"
                break
            refusals += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) * self._random.uniform(1, 2))
        ended, text = time.perf_counter(), choices[0]["text"] if choices else ""
        facts: dict[str, Any] = {"name": name, "text": text, "failure": None if choices else failure}
        facts |= {"accepted_sec": ended - asked, "whole_sec": ended - begun}
        return Served(prompt=prompt, answers=len(choices), refusals=refusals, **facts)


def serving_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.serving`` makes it.
        source: the record's path, for the reader.
    """
    of_rounds = [_wrong(record, one) for one in record["rounds"]]
    lost, *others = (sum(one[what] for one in of_rounds) for what in ("lost", "answered twice", "wrong texts"))
    verdict = "Every request was answered once, with the text that it gets from an idle server."
    if lost or any(others):
        verdict = f"{lost} requests were lost; {sum(others)} were answered twice or with another text."
    grown = "unknown" if record["growth"] is None else f"{record['growth']:.3f} of the first one's"
    made, lines = frame.generated_by(source, "serving", page="serving-load"), "\n".join(summary_lines(record))
    count = len(record["rounds"])
    text = frame.filled("serving", record, made=made, count=count, verdict=verdict, grown=grown, table=lines)
    return frame.page_of(text)


def _wrong(record: frame.Record, one: frame.Record) -> dict[str, int]:
    """Requests of a round without an answer, with several, of which the clients may not have seen all, and wrong."""
    answered, seen = one["answered"], one["answered_by_the_servers_count"]
    lost, twice = record["requests"] - min(answered, seen), one["answered_twice"] + max(0, seen - answered)
    return {"lost": lost, "answered twice": twice, "wrong texts": one["wrong_texts"]}


def summary_lines(record: frame.Record) -> list[str]:
    """The table of the rounds, for a console."""
    header = ["round", "answered", "lost", "twice", "wrong texts", "refused", "seconds"]
    header += ["latency when accepted, p50 / p95 / p99", "with refusals, p50 / p95 / p99", "peak memory"]
    rows = []
    for one in record["rounds"]:
        lost, *counts = _wrong(record, one)["lost"], one["answered_twice"], one["wrong_texts"], one["refusals"]
        waits = [_percentiles(one[key]) for key in WAITS]
        peak = f"{one['peak_rss_bytes'] / 1e6:,.0f} MB"
        rows.append([one["round"], one["answered"], lost, *counts, f"{one['seconds']:.1f}", *waits, peak])
    return table(header, rows).splitlines()


def _percentiles(values: dict[str, float] | None) -> str:
    if values is None:
        return "unknown"
    return " / ".join(f"{values[key]:.2f}" for key in ("p50", "p95", "p99")) + " s"


SEED = 1
MAX_TOKENS = 32
"""Most tokens of a completion."""
GROWTH_BOUND = 1.02
"""Bound on the peak memory of the last round, divided by that of the first."""
_STARTS, _NAMES = ("def ", "class ", "import ", "    return ", "for "), ("main", "read", "Error", "value", "items")
PROMPTS = tuple(map("".join, itertools.product(_STARTS, _NAMES)))

ANSWERED = 'dsgpt_requests_total{status="200"}'
Round = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(frame.SuiteOptions):
    """The command line."""

    checkpoint: Path = flag(Path, "DIR", default=frame.TRAINED)
    """what to serve, as for src/serve.py (default: %(default)s)"""
    requests: int = flag(POSITIVE, "N", "requests of a round (default: %(default)s)", default=500)
    times: int = flag(POSITIVE, "N", default=4)
    """arrivals per second, in multiples of what the server can answer (default: %(default)s)"""
    rounds: int = flag(POSITIVE, "N", "rounds on the same server (default: %(default)s)", default=3)
    device: str = frame.device_flag("cpu or cuda")


class Serving(frame.Suite[ServingOptions, Round]):
    """Measures the capacity of a server, then asks for several times as much.

    serving: ask a server of src/serve.py for several times the completions that it can give, and ask again when it
    refuses. Exit code 0: every request got one answer, the right text, and the memory did not grow; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py serving --checkpoint checkpoint/demo-zero1
      .venv/bin/python src/benchmark.py serving --requests 100 --times 8 --rounds 1
    """

    name, record_of, unit = "serving", "a load test", "round"
    failure_line = "FAILED: {}"
    flags, page, summary = ServingOptions, staticmethod(serving_page), staticmethod(summary_lines)

    def plan(self) -> int:
        return self.options.rounds

    def results(self) -> Iterator[Round]:
        options, log = self.options, self.folder / "server.txt"
        with ServerProcess(self.repository, options.checkpoint, device=options.device, log=log) as server:
            load = Load(server.url, MODEL, PROMPTS, max_tokens=MAX_TOKENS, seed=SEED)
            alone = [one.text for one in load.steady(len(PROMPTS), clients=1)[0]]
            steady, places = max(10 * BATCH, options.requests // 4), BATCH + QUEUE  # so that the batch is always full
            load.steady(steady, clients=places)  # reaches the memory of a full batch
            self._capacity = steady / load.steady(steady, clients=places)[1]
            earlier: set[str] = set()
            for number in range(options.rounds):
                before, _ = int(server.metric(ANSWERED)), server.peak_bytes()
                instants = load.instants(options.requests, per_sec=options.times * self._capacity)
                requests, seconds = load.poisson(instants)
                counted, left = (int(server.metric(line)) for line in (ANSWERED, "dsgpt_open_sequences"))
                served = {"answered_by_the_servers_count": max(0, counted - before), "open_sequences": left}
                times = {"round": number + 1, "seconds": seconds, "offered_per_sec": len(instants) / instants[-1]}
                own = served | times | {"peak_rss_bytes": server.peak_bytes()}
                yield round_of(requests, alone=alone, earlier=earlier) | own
                earlier |= {one.name for one in requests}
            self._exit_code = server.stop()

    def line(self, result: Round, *, count: str, left: str) -> str:
        return f"{count} {result['answered']} requests answered in {result['seconds']:.1f} s{left}"

    def record(self, results: Sequence[Round]) -> frame.Record:
        options, first, last = self.options, *(results[place]["peak_rss_bytes"] for place in (0, -1))
        answered = max(self._capacity, *(result["answered"] / result["seconds"] for result in results))
        asked = {"checkpoint": options.checkpoint.as_posix(), "requests": options.requests, "times": options.times}
        asked |= {"batch": BATCH, "queue": QUEUE, "max_tokens": MAX_TOKENS, "seed": SEED}
        return asked | {
            "capacity_per_sec": self._capacity,
            "rounds": list(results),
            "load": min(result["offered_per_sec"] for result in results) / answered,
            "growth": last / first if first else None,
            "growth_bound": GROWTH_BOUND,
            "exit_code": self._exit_code,
        }

    def failures(self, record: frame.Record) -> list[str]:
        lines = []
        for result in record["rounds"]:
            wrong = _wrong(record, result) | {"sequences left": result["open_sequences"]} | result["failures"]
            lines += [f"round {result['round']}: {number} {what}" for what, number in wrong.items() if number]
        if record["load"] < self.options.times / 2:
            lines.append(f"the load was only {record['load']:.1f} times what the server answers: repeat it, idle")
        if record["growth"] is None or record["growth"] > GROWTH_BOUND:
            lines.append("the memory grew from the first round to the last, or is unknown")
        if record["exit_code"] != 0:
            lines.append(f"the server ended with {record['exit_code']}; None: it did not end")
        return lines


def round_of(requests: Sequence["Served"], *, alone: Sequence[str], earlier: Set[str]) -> Round:
    """Figures of the requests of a round.

    Args:
        requests: all of them.
        alone: the right text of each prompt.
        earlier: the names of answers of earlier rounds.
    """
    served = [one for one in requests if one.answers]
    return {
        "answered": len(served),
        "answered_twice": sum(one.answers for one in served) - len({one.name for one in served} - earlier),
        "wrong_texts": sum(one.text != alone[one.prompt] for one in served),
        "failures": Counter(one.failure for one in requests if one.failure),
        "refusals": sum(one.refusals for one in requests),
        **{key: frame.percentiles([getattr(one, key) for one in served]) if served else None for key in WAITS},
    }
