"""Makes ``docs/faults.md`` from a record of the campaign. Every figure on the page comes from the record."""

from typing import Any

from dsgpt.benchmarks.harness.pages import Record, table
from dsgpt.common.measured import machine_words

STATUS_WORDS = {"passed": "yes", "failed": "**NO**", "not run": "not run"}


def faults_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.faults.command`` makes it.
        source: the record's path, for the reader.
    """
    parts = [_head(record, source), _kills(record), _signals(record), _others(record), _troubles(record)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_lines(record: Record) -> list[str]:
    """The figures of the page's summary, for a console."""
    return [line.strip() for line in _summary(record).splitlines()]


def _of(record: Record, *kinds: str) -> list[dict[str, Any]]:
    return [fault for fault in record["faults"] if fault["kind"] in kinds]


def _summary(record: Record) -> str:
    ran = [fault for fault in record["faults"] if fault["status"] != "not run"]
    left_out = len(record["faults"]) - len(ran)
    rest = f" This machine could not run {left_out} more." if left_out else ""
    kills = _of(record, "kill")
    lines = [f"* **{_passed(ran)} of {len(ran)} faults** ended as they should.{rest}"]
    facts = [kill["measured"] for kill in kills if kill["measured"]]
    if facts:
        cut = sum(one["save_cut_off"] for one in facts)
        lost = max(one["steps_lost"] for one in facts)
        gone = max(one["gone_sec"] for one in facts)
        every = record["work"]["save_every"]
        lines += [
            f"* After **{_passed(kills)} of {len(kills)} kills**, `--resume` recovered the run; {cut} of them",
            f"  interrupted a save. At most {lost} steps had to be repeated, with a checkpoint every {every} steps.",
            f"  The last process ended at most {gone:.1f} s after the kill.",
        ]
        ended = [one["launcher_sec"] for one in facts if one["launcher_outlived_victim"]]
        if ended:
            lines.append(f"* A launcher whose rank was killed ended with an error, at most {max(ended):.1f} s later.")
    return "\n".join(lines)


def _passed(faults: list[dict[str, Any]]) -> int:
    return sum(fault["status"] == "passed" for fault in faults)


def _head(record: Record, source: str) -> str:
    hardware, env, work = record["hardware"], record["env"], record["work"]
    runs = "\n".join(
        f"* `{name}`: {run['executed_by']}, accumulation {run['accumulation']}" for name, run in work["runs"].items()
    )
    return f"""# A run that was stopped resumes to the same result

Generated from `{source}` by
`.venv/bin/python src/benchmark.py faults --table-from {source} --page docs/faults.md`; `make faults`
runs the campaign on your machine.

{_summary(record)}

Recovered means: `--resume` with the same command ended with exit code 0; every loss, gradient norm, learning rate and
validation loss of the run equals that of an undisturbed run to the last bit, with dropout {work["dropout"]}; no step is
missing or logged twice; and no process of the launch was left.

{runs}

Each takes {work["steps"]} steps of {work["global_batch_size"]} sequences of {work["seq_len"]} tokens and saves every
{work["save_every"]}. Machine: {machine_words(hardware)}; {hardware["device"]}. Python
{env["python_version"]}, torch {env["torch_version"]}, DeepSpeed {env["deepspeed_version"]}. Commit
`{record["git_commit"]}`, {record["timestamp_utc"]}. It took {record["seconds"] / 60:.0f} minutes."""


def _kills(record: Record) -> str:
    kills = _of(record, "kill")
    if not kills:
        return ""
    header = ["run", "`kill -9` of", "aimed at", "interrupted a save", "`--save_mode`", "steps taken", "resumed from"]
    header += ["lost", "allowed", "exit code", "launcher ended after", "all ended after", "recovered"]
    rows = [_kill_row(kill) for kill in kills if kill["measured"]]
    return f"""## Kills

Instants are drawn with seed {record["seed"]}. Half of them are aimed at steps, half at a save, for which the kill may
come too late. All kinds of victims take turns. Lost steps were done and had to be repeated. Allowed are the steps
between two saves, and those done while the last save was being written. If only the launcher is killed, the ranks
finish their step, save and exit. The exit code is what the launcher's parent sees: -9 if the launcher was killed.

{table(header, rows)}"""


def _kill_row(kill: dict[str, Any]) -> list[Any]:
    facts = kill["measured"]
    cut = "yes" if facts["save_cut_off"] else ""
    keys = ("save_mode", "steps_taken", "resumed_from", "steps_lost", "steps_allowed", "exit_code")
    times = [f"{facts[key]:.1f} s" for key in ("launcher_sec", "gone_sec")]
    where = [facts["run"], facts["victim"], facts["aimed_at"], cut]
    return [*where, *(facts[key] for key in keys), *times, STATUS_WORDS[kill["status"]]]


def _signals(record: Record) -> str:
    signals = _of(record, "request")
    if not signals:
        return ""
    header = ["signal", "exit code", "all ended after", "steps lost", "what the run printed", "passed"]
    rows = [
        [
            fault["name"],
            fault["measured"].get("exit_code"),
            f"{fault['measured']['gone_sec']:.1f} s" if fault["measured"] else None,
            fault["measured"].get("steps_lost"),
            _printed(fault),
            STATUS_WORDS[fault["status"]],
        ]
        for fault in signals
    ]
    return f"""## Signals

Each signal is sent after step 6, between two saves, and the run is then resumed. The signal that is sent twice goes to
a run with steps of more than a second, which is not resumed. The exit code is the launcher's; a `baseline` has no
launcher, so it is the run's.

{table(header, rows)}"""


def _others(record: Record) -> str:
    header = ["fault", "exit code", "resumed from step", "what the run printed", "recovered"]
    rows = [
        [
            fault["name"],
            fault["measured"].get("exit_code"),
            fault["measured"].get("resumed_from"),
            _printed(fault),
            STATUS_WORDS[fault["status"]],
        ]
        for fault in _of(record, "damage", "disk", "launch")
    ]
    if not rows:
        return ""
    return f"""## Damaged files, file systems that refuse writes, launches

Damage is done to the newest checkpoint, or beside it, of a run that is as a kill before its last step leaves it. The
command of the run whose worker `torchrun` restarts has `--resume`. Of the two runs on one folder, `--overwrite` is
refused and `--resume` waits.

{table(header, rows)}"""


def _printed(fault: dict[str, Any]) -> str:
    return "<br>".join(f"`{' '.join(line.split())}`" for line in fault["said"])


def _troubles(record: Record) -> str:
    bad = [fault for fault in record["faults"] if fault["status"] != "passed"]
    lines = [
        f"* {fault['name']}: {STATUS_WORDS[fault['status']]}: {fault['wrong'] or fault['not_run']}" for fault in bad
    ]
    return "## Failed or not run\n\n" + "\n".join(lines) if lines else ""
