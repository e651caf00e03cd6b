"""``python src/benchmark.py serving``: a server under several times the requests that it can answer.

First as many clients as the server decodes together measure its capacity. Then requests arrive at random, several times
as many per second, in rounds. Refused clients ask again when the server says. Every request must get one answer, with
the text that it gets from a server that has nothing else to do, and the memory must not grow from round to round.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from dsgpt.benchmarks.harness.command import SuiteCommand, SuiteOptions, record_head, run_suite
from dsgpt.benchmarks.harness.pages import Record, SuitePage
from dsgpt.benchmarks.serving.page import serving_page, summary_lines
from dsgpt.telemetry.console import Console

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

    def begin(self, folder: Path, console: Console) -> None:
        pass

    def results(self) -> Iterator[Round]:
        from dsgpt.benchmarks.serving.load import Load  # noqa: PLC0415 - the client takes its time
        from dsgpt.benchmarks.serving.process import MODEL, ServerProcess  # noqa: PLC0415

        options = self._options
        with ExitStack() as held:
            server = held.enter_context(
                ServerProcess(self._repository, options.checkpoint, batch=BATCH, queue=QUEUE, device=options.device)
            )
            load = Load(server.url, MODEL, PROMPTS, max_tokens=MAX_TOKENS, seed=SEED)
            alone = [served.text for served in load.steady(len(PROMPTS), clients=1)[0]]
            steady = max(10 * BATCH, options.requests // 4)
            load.steady(steady, clients=BATCH)  # reaches the memory of a full batch
            self._capacity = steady / load.steady(steady, clients=BATCH)[1]
            known: set[str] = set()
            for number in range(options.rounds):
                before, _ = server.metric('dsgpt_requests_total{status="200"}'), server.peak_bytes()
                served, seconds = load.poisson(options.requests, per_sec=options.times * self._capacity)
                counted = server.metric('dsgpt_requests_total{status="200"}') - before
                names = {one.name for one in served}
                yield {
                    "round": number + 1,
                    "answered": len(served),
                    "answered_by_the_servers_count": int(counted),
                    "answered_twice": sum(one.answers - 1 for one in served) + len(served) - len(names - known),
                    "wrong_texts": sum(one.text != alone[one.prompt] for one in served),
                    "seconds": seconds,
                    "peak_rss_bytes": server.peak_bytes(),
                    "open_sequences": int(server.metric("dsgpt_open_sequences")),
                    "requests": [asdict(one) for one in served],
                }
                known |= names
            self._exit_code = server.stop()

    def line(self, result: Round, *, count: str, left: str) -> str:
        return f"{count} {result['answered']} requests answered in {result['seconds']:.1f} s{left}"

    def record(self, results: Sequence[Round], *, seconds: float) -> Record:
        """The record of ``results``, which took ``seconds``."""
        options = self._options
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
            "growth": results[-1]["peak_rss_bytes"] / results[0]["peak_rss_bytes"],
            "growth_bound": GROWTH_BOUND,
            "exit_code": self._exit_code,
        }

    def failures(self, results: Sequence[Round], record: Record) -> list[str]:
        found = []
        for result in results:
            lost = self._options.requests - min(result["answered"], result["answered_by_the_servers_count"])
            more = result["answered_by_the_servers_count"] - result["answered"]
            wrong = {"lost": lost, "answered twice": result["answered_twice"] + max(more, 0)}
            wrong |= {"wrong texts": result["wrong_texts"], "sequences left": result["open_sequences"]}
            found += [f"round {result['round']}: {number} {what}" for what, number in wrong.items() if number]
        if record["growth"] > GROWTH_BOUND:
            found.append("the memory grew from the first round to the last")
        if record["exit_code"] != 0:
            found.append(f"the server ended with {record['exit_code']}")
        return found

    def closing_lines(self, failures: Sequence[str]) -> list[str]:
        return [f"FAILED: {line}" for line in failures]


def _round(result: Round) -> Round:
    """A round with percentiles in place of its requests."""
    requests = result["requests"]
    kept = {key: value for key, value in result.items() if key != "requests"}
    for key in ("accepted_sec", "whole_sec"):
        kept[key] = {f"p{share}": _percentile([one[key] for one in requests], share) for share in (50, 95, 99)}
    return kept | {"refusals": sum(one["refusals"] for one in requests)}


def _percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that at least ``share`` percent of ``values`` do not exceed."""
    return sorted(values)[max(0, -(-share * len(values) // 100) - 1)]
