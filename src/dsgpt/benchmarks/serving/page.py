"""Makes ``docs/serving-load.md`` from a record of the suite. Every figure on the page comes from the record."""

from dsgpt.benchmarks.harness.pages import Record, table


def serving_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.serving.command`` makes it.
        source: the record's path, for the reader.
    """
    hardware, rounds = record["hardware"], record["rounds"]
    machine = hardware["gpu_name"] or f"{hardware['cpu_name']}, {hardware['cpu_count']} cores"
    wrong = sum(
        one["answered_twice"] + one["wrong_texts"] + abs(record["requests"] - one["answered_by_the_servers_count"])
        for one in rounds
    )
    head = f"""# A server under {record["times"]} times its capacity

Generated from `{source}` by
`python src/benchmark.py serving --table-from {source} --page docs/serving-load.md`;
`python src/benchmark.py serving` measures it on your machine.

`src/serve.py` serves `{record["checkpoint"]}` and decodes {record["batch"]} sequences at a time; {record["queue"]} may
wait. With {record["batch"]} clients it answers {record["capacity_per_sec"]:.1f} requests a second, each a completion of
{record["max_tokens"]} tokens at most. Then requests arrive at random, {record["times"]} times as many a second:
{record["requests"]} in each of {len(rounds)} rounds on the same server. A refused client waits once to twice as long as
`Retry-After` says, and asks again.

**{_verdict(wrong)}**
The peak memory of the last round is {record["growth"]:.3f} of the first one's. After SIGTERM the server ended with
{record["exit_code"]}. The clients share the machine with the server.

Machine: {machine}; {hardware["device"]}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    return "\n".join([head, "", "## Rounds", "", *summary_lines(record), "", _NOTES, ""])


_NOTES = """\
*Latency when accepted* is from the attempt that was accepted to its answer. *With refusals* is from the first attempt,
so it has the waits of a queue outside of the server: at several times the capacity it grows with the number of
requests, whatever the server does. The texts are compared with those that the server gave to one client alone."""


def _verdict(wrong: int) -> str:
    if wrong:
        return f"{wrong} requests were lost, answered twice or answered with another text."
    return "Every request was answered once, with the text that it gets from an idle server."


def summary_lines(record: Record) -> list[str]:
    """The table of the rounds, for a console."""
    header = ["round", "answered", "twice", "wrong texts", "refused", "seconds"]
    header += ["latency when accepted, p50 / p95 / p99", "with refusals, p50 / p95 / p99", "peak memory"]
    rows = [
        [
            *(one[key] for key in ("round", "answered", "answered_twice", "wrong_texts", "refusals")),
            f"{one['seconds']:.1f}",
            _percentiles(one["accepted_sec"]),
            _percentiles(one["whole_sec"]),
            f"{one['peak_rss_bytes'] / 1e6:,.0f} MB",
        ]
        for one in record["rounds"]
    ]
    return table(header, rows).splitlines()


def _percentiles(values: dict[str, float]) -> str:
    return " / ".join(f"{values[key]:.2f}" for key in ("p50", "p95", "p99")) + " s"
