"""``.venv/bin/python src/benchmark.py serving``: a server under several times the requests that it can answer.

First as many clients as the server has places measure its capacity. Then requests arrive at random, several times
as many per second, in rounds. Refused clients ask again when the server says. Every request must get one answer, with
the text that it gets from a server that has nothing else to do, and the memory must not grow from round to round.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.benchmarks.serving.page import serving_page, summary_lines
from dsgpt.telemetry.console import Console

if TYPE_CHECKING:
    from dsgpt.benchmarks.serving.load import Served

PAGE = SuitePage(name="serving", of="a load test", text=serving_page, summary=summary_lines)
SCHEMA_VERSION = "1.0"
CHECKPOINT = Path("checkpoint/demo-zero1")
REQUESTS, TIMES, ROUNDS = 500, 4, 3
BATCH, QUEUE = 8, 16
SEED = 1
MAX_TOKENS = 32
"""Of a completion."""
GROWTH_BOUND = 1.02
"""Bound on the peak memory of the last round, divided by that of the first."""
PROMPTS = tuple(
    f"{start}{name}"
    for start in ("def ", "class ", "import ", "    return ", "for ")
    for name in ("main", "read", "Error", "value", "items")
)

ANSWERED = 'dsgpt_requests_total{status="200"}'
Round = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(SuiteOptions):
    """The options of the command line."""

    checkpoint: Path
    requests: int
    """Of a round."""
    times: int
    """Arrivals per second, in multiples of the capacity."""
    rounds: int
    device: str

    @property
    def whole(self) -> bool:
        """See ``SuiteOptions``."""
        return self.requests >= REQUESTS and self.times >= TIMES and self.rounds >= ROUNDS


def run_serving(options: ServingOptions, *, repository: Path) -> int:
    """Measure; return 0 if nothing was lost or answered wrongly and the memory did not grow.

    Raises:
        UserError: the server does not start.
    """
    return run_suite(_ServingCommand(options, repository), options, repository=repository)


class _ServingCommand(SuiteCommand[Round]):
    page: ClassVar[SuitePage] = PAGE
    unit: ClassVar[str] = "round"

    def __init__(self, options: ServingOptions, repository: Path) -> None:
        self._options, self._repository = options, repository
        self._capacity = 0.0
        self._exit_code: int | None = None

    def plan(self, console: Console) -> int:  # noqa: ARG002
        return self._options.rounds

    def begin(self, folder: Path, console: Console) -> None:  # noqa: ARG002 - of the interface
        self._log = folder / "server.txt"

    def results(self) -> Iterator[Round]:
        from dsgpt.benchmarks.serving.load import Load  # noqa: PLC0415 - the client takes its time
        from dsgpt.benchmarks.serving.process import MODEL, ServerProcess  # noqa: PLC0415

        options = self._options
        with ExitStack() as held:
            repository, device = self._repository, options.device
            server = held.enter_context(
                ServerProcess(repository, options.checkpoint, batch=BATCH, queue=QUEUE, device=device, log=self._log)
            )
            load = Load(server.url, MODEL, PROMPTS, max_tokens=MAX_TOKENS, seed=SEED)
            alone = [one.text for one in load.steady(len(PROMPTS), clients=1)[0]]
            steady, places = max(10 * BATCH, options.requests // 4), BATCH + QUEUE  # so that the batch is always full
            load.steady(steady, clients=places)  # reaches the memory of a full batch
            self._capacity = steady / load.steady(steady, clients=places)[1]
            known: set[str] = set()
            for number in range(options.rounds):
                before, _ = server.metric(ANSWERED), server.peak_bytes()
                instants = load.instants(options.requests, per_sec=options.times * self._capacity)
                requests, seconds = load.poisson(instants)
                counted = max(0, int(server.metric(ANSWERED) - before))
                yield round_of(requests, alone=alone, known=known) | {
                    "round": number + 1,
                    "answered_by_the_servers_count": counted,
                    "seconds": seconds,
                    "offered_per_sec": len(instants) / instants[-1],
                    "peak_rss_bytes": server.peak_bytes(),
                    "open_sequences": int(server.metric("dsgpt_open_sequences")),
                }
                known |= {one.name for one in requests}
            self._exit_code = server.stop()

    def line(self, result: Round, *, count: str, left: str) -> str:
        return f"{count} {result['answered']} requests answered in {result['seconds']:.1f} s{left}"

    def record(self, results: Sequence[Round], *, seconds: float) -> Record:
        """The record of ``results``, which took ``seconds``."""
        options, last = self._options, results[-1]["peak_rss_bytes"]
        return record_head(SCHEMA_VERSION, device=options.device) | {
            "checkpoint": options.checkpoint.as_posix(),
            "batch": BATCH,
            "queue": QUEUE,
            "requests": options.requests,
            "times": options.times,
            "max_tokens": MAX_TOKENS,
            "seed": SEED,
            "seconds": round(seconds, 1),
            "capacity_per_sec": self._capacity,
            "rounds": [_round(result) for result in results],
            "load": min(result["offered_per_sec"] for result in results) / self._most_per_sec(results),
            "growth": last / first if (first := results[0]["peak_rss_bytes"]) else None,
            "growth_bound": GROWTH_BOUND,
            "exit_code": self._exit_code,
        }

    def _most_per_sec(self, results: Sequence[Round]) -> float:
        """The most requests a second that the server answered, in the rounds or before."""
        rates: list[float] = [result["answered"] / result["seconds"] for result in results]
        return max(self._capacity, *rates)

    def failures(self, results: Sequence[Round], record: Record) -> list[str]:
        found = []
        for result in results:
            lost = self._options.requests - min(result["answered"], result["answered_by_the_servers_count"])
            more = result["answered_by_the_servers_count"] - result["answered"]
            wrong = {"lost": lost, "answered twice": result["answered_twice"] + max(more, 0)}
            wrong |= {"wrong texts": result["wrong_texts"], "sequences left": result["open_sequences"]}
            found += [f"round {result['round']}: {number} {what}" for what, number in wrong.items() if number]
            found += [f"round {result['round']}: {number} {what}" for what, number in result["failures"].items()]
        if record["load"] < self._options.times / 2:
            found.append(f"the load was only {record['load']:.1f} times what the server answers: repeat it, idle")
        if record["growth"] is None or record["growth"] > GROWTH_BOUND:
            found.append("the memory grew from the first round to the last, or is unknown")
        if record["exit_code"] != 0:
            found.append(f"the server ended with {record['exit_code']}; None: it did not end")
        return found

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return [f"FAILED: {line}" for line in failures]


def round_of(requests: Sequence["Served"], *, alone: Sequence[str], known: Set[str]) -> Round:
    """What became of the requests of a round.

    Args:
        requests: all of them.
        alone: the right text of each prompt.
        known: the names of answers of earlier rounds.
    """
    served = [one for one in requests if one.answers]
    return {
        "answered": len(served),
        "answered_twice": sum(one.answers for one in served) - len({one.name for one in served} - known),
        "wrong_texts": sum(one.text != alone[one.prompt] for one in served),
        "failures": Counter(one.failure for one in requests if one.failure),
        "requests": [asdict(one) for one in requests],
    }


def _round(result: Round) -> Round:
    """A round with percentiles of the answered requests in place of all requests."""
    requests = [one for one in result["requests"] if one["answers"]]
    kept = {key: value for key, value in result.items() if key != "requests"}
    for key in ("accepted_sec", "whole_sec"):
        values = [one[key] for one in requests]
        kept[key] = {f"p{share}": _percentile(values, share) for share in (50, 95, 99)} if values else None
    return kept | {"refusals": sum(one["refusals"] for one in result["requests"])}


def _percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that at least ``share`` percent of ``values`` do not exceed."""
    return sorted(values)[max(0, -(-share * len(values) // 100) - 1)]
