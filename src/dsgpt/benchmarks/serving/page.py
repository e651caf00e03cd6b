"""Makes ``docs/serving-load.md`` from a record of the suite. Every figure on the page comes from the record."""

from dsgpt.benchmarks.harness.pages import Record, table
from dsgpt.common.measured import machine_words


def serving_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.serving.command`` makes it.
        source: the record's path, for the reader.
    """
    hardware, rounds = record["hardware"], record["rounds"]
    lost, wrong = (sum(of(record, one) for one in rounds) for of in (_lost, _wrong))
    grown = "unknown" if record["growth"] is None else f"{record['growth']:.3f} of the first one's"
    head = f"""# A server under {record["times"]} times its capacity

Generated from `{source}` by
`.venv/bin/python src/benchmark.py serving --table-from {source} --page docs/serving-load.md`;
`.venv/bin/python src/benchmark.py serving` measures it on your machine.

`src/serve.py` serves `{record["checkpoint"]}` and decodes {record["batch"]} sequences at a time; {record["queue"]} may
wait. With a client for each of these places it answers {record["capacity_per_sec"]:.1f} requests a second, each a
completion of {record["max_tokens"]} tokens at most. Then requests arrive at random, {record["times"]} times as many a
second: {record["requests"]} in each of {len(rounds)} rounds on the same server. That is at least {record["load"]:.1f}
times what it answered a second in any round. A refused client waits once to twice as long as `Retry-After`
says, and asks again.

**{_verdict(lost, wrong)}**
The peak memory of the last round is {grown}. After SIGTERM the server ended with {record["exit_code"]}. The clients
share the machine with the server.

Machine: {machine_words(hardware)}; {hardware["device"]}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    return "\n".join([head, "", "## Rounds", "", *summary_lines(record), "", _NOTES, ""])


_NOTES = """\
*Latency when accepted* is from the attempt that was accepted to its answer. *With refusals* is from the arrival, so it
has the waits of a queue outside of the server: at several times the capacity it grows with the number of
requests, whatever the server does. The texts are compared with those that the server gave to one client alone."""


def _lost(record: Record, one: Record) -> int:
    """Requests of a round without an answer."""
    lost: int = record["requests"] - min(one["answered"], one["answered_by_the_servers_count"])
    return lost


def _wrong(_: Record, one: Record) -> int:
    """Requests of a round with a second answer or a wrong text, and answers that nobody got."""
    more = max(0, one["answered_by_the_servers_count"] - one["answered"])
    wrong: int = one["answered_twice"] + one["wrong_texts"] + more
    return wrong


def _verdict(lost: int, wrong: int) -> str:
    if lost or wrong:
        return f"{lost} requests were lost; {wrong} were answered twice or with another text."
    return "Every request was answered once, with the text that it gets from an idle server."


def summary_lines(record: Record) -> list[str]:
    """The table of the rounds, for a console."""
    header = ["round", "answered", "lost", "twice", "wrong texts", "refused", "seconds"]
    header += ["latency when accepted, p50 / p95 / p99", "with refusals, p50 / p95 / p99", "peak memory"]
    rows = [
        [
            *(one["round"], one["answered"], _lost(record, one)),
            *(one[key] for key in ("answered_twice", "wrong_texts", "refusals")),
            f"{one['seconds']:.1f}",
            _percentiles(one["accepted_sec"]),
            _percentiles(one["whole_sec"]),
            f"{one['peak_rss_bytes'] / 1e6:,.0f} MB",
        ]
        for one in record["rounds"]
    ]
    return table(header, rows).splitlines()


def _percentiles(values: dict[str, float] | None) -> str:
    if values is None:
        return "unknown"
    return " / ".join(f"{values[key]:.2f}" for key in ("p50", "p95", "p99")) + " s"
