"""``benchmark.py decoding``: how fast a model generates, beside other implementations on the same work."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.common.command_line import POSITIVE, choice, flag, switch
from dsgpt.common.errors import UserError
from dsgpt.machine.console import Console
from dsgpt.model.config import PRESETS

OURS, HUGGING_FACE = "dsgpt", "transformers"
# The rows of the suite: what is generated, and the goals.

WEIGHTS = (("fp32", "none"), ("bf16", "none"), ("bf16", "int8"))
"""Precision and quantization."""
GOALS = {"ratio_goal": 1.3, "share_goal": 0.7}
"""Speed, as a multiple of that of transformers, and the time of reading the weights once as a share of a token's."""


@dataclass(frozen=True, kw_only=True)
class DecodingRow:
    """Prompts of equal length that are continued together."""

    model_size: str
    precision: str
    batch_size: int
    quantize: str = "none"
    """``int8`` for our weights in 8 bits; the peers keep theirs."""
    compiled: bool = False
    """Whether our step of a token is compiled: on a GPU into a CUDA graph. The peers run as they are."""
    prompt_tokens: int = 32
    new_tokens: int = 100

    @property
    def key(self) -> str:
        """Name for ``--only``."""
        return f"{self._weights}-{self.batch_size}"

    @property
    def title(self) -> str:
        """Title on the page."""
        return f"{self.model_size}, {self._weights}, batch {self.batch_size}{', compiled' * self.compiled}"

    @property
    def _weights(self) -> str:
        return self.precision if self.quantize == "none" else self.quantize


def rows(model_size: str, *, compiled: bool = False) -> list[DecodingRow]:
    """Every row: two precisions and 8 bits, one text and eight; of a compiled step sixteen."""
    return [
        DecodingRow(
            model_size=model_size, precision=precision, quantize=quantize, batch_size=batch_size, compiled=compiled
        )
        for precision, quantize in WEIGHTS
        for batch_size in (1, 16 if compiled else 8)
    ]


Figures = Mapping[str, Any]


def decoding_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.decoding`` makes it.
        source: the record's path, for the reader.
    """
    work, made = record["results"][0]["work"], frame.generated_by(source, "decoding")
    setting, huge_pages = record.get("huge_pages"), "Nothing here asks for huge pages, or the system gives none."
    if record["hardware"]["device"] == "cpu" and setting in ("always", "madvise"):
        huge_pages = (
            "The floor's matrix and our copies of weights in PyTorch's layout (fp32 with one text, int8) lie in huge\n"
            f"pages. This system gives them by its setting `{setting}`. The peers' weights lie where PyTorch puts them."
        )
    seconds, floors = [], []
    for result in record["results"]:
        title, ratio, token = result["title"], result["ratios"][HUGGING_FACE], result["token_sec"]
        times = "; ".join(f"{name} {frame.span_words(span, '.2f')}" for name, span in result["seconds"].items())
        made_sec = result["work"]["batch_size"] * result["work"]["new_tokens"] / result["seconds"][OURS]["median"]
        goal, same = _goal(result["ratio_goal"], ".2f", ratio["median"]), "yes" if result["same_ids"] else "no"
        seconds.append([title, times, "; ".join(_ratios(result)), goal, f"{made_sec:,.0f}", same])
        floor, size, share = result["floor_sec"]["median"], result["bytes_per_token"], result["share"]
        figures = [f"{size / 1e6:,.0f}", f"{size / floor / 1e9:.1f}", f"{floor * 1e3:.1f}"]
        figures += [frame.span_words(token, ".1f", scale=1e3), frame.span_words(share, ".0%")]
        floors.append([title, *figures, _goal(result["share_goal"], ".0%", share["median"])])
    losses, rounded = record["losses"], []
    for name, each in losses["weights"].items() if losses else ():
        more = each["perplexity"] / losses["weights"]["fp32"]["perplexity"] - 1
        rounded.append([name, f"{each['loss']:.5f}", f"{each['perplexity']:.3f}", f"{more:+.3%}"])
    of_seconds = ["work", "seconds", "ratio", "goal", "our tokens/s", "same ids"]
    of_floors = ["work", "MB per token", "GB/s", "floor, ms", "token, ms", "share", "goal"]
    of_losses = ["weights", "loss, nats per token", "perplexity", "against fp32"]
    lost = frame.filled("decoding-losses", losses) if losses else ""
    return frame.page_of(
        frame.filled("decoding", record, made=made, work=work, huge_pages=huge_pages),
        frame.section(f"Seconds of {work['new_tokens']} tokens", of_seconds, seconds),
        frame.section("Distance to the memory's floor", of_floors, floors),
        frame.section("What rounded weights lose", of_losses, rounded, text=lost),
    )


def summary_lines(record: frame.Record) -> list[str]:
    """One line for each result, for a console."""
    return [verdict(result) for result in record["results"]]


def missed(result: Figures) -> list[str]:
    """The goals that a result did not reach, and other ids than those of transformers in fp32."""
    misses = []
    if result["ratio_goal"] and result["ratios"][HUGGING_FACE]["median"] < result["ratio_goal"]:
        misses.append(f"{result['title']}: slower than {result['ratio_goal']:.1f} times as fast as {HUGGING_FACE}")
    if result["share_goal"] and result["share"]["median"] < result["share_goal"]:
        misses.append(f"{result['title']}: farther from the memory's floor than {result['share_goal']:.0%}")
    if result["work"]["precision"] == "fp32" and not result["same_ids"]:
        misses.append(f"{result['title']}: other ids than {HUGGING_FACE}")
    return misses


def verdict(result: Figures) -> str:
    """A result in one line."""
    ratios = ", ".join(_ratios(result))
    mark = ", NOT REACHED" if missed(result) else ""
    return f"{result['title']}: {ratios}; {frame.span_words(result['share'], '.0%')} of the memory's floor{mark}"


def _ratios(result: Figures) -> list[str]:
    """``1.20 (1.18 to 1.23)x transformers``, for every peer."""
    return [frame.ratio_words(ratio, name) for name, ratio in result["ratios"].items()]


def _goal(goal: float | None, form: str, reached: float) -> str:
    """``1.30``, and whether it was missed; a row of 8 bits has no goal."""
    if goal is None:
        return "none"
    return f"{goal:{form}}{'' if reached >= goal else ', **not reached**'}"


SIZES = tuple(PRESETS)

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(frame.SuiteOptions):
    """The command line."""

    model_size: str = flag(choice(SIZES), "SIZE", f"{', '.join(SIZES)} (default: %(default)s)", default="small")
    rounds: int = flag(POSITIVE, "N", "turns of every contender in a row (default: %(default)s)", default=5)
    checkpoint: Path | None = flag(Path, "DIR")
    """a trained model: measures what weights in bf16 and in 8 bits lose (needs --data)"""
    data: Path | None = flag(Path, "FILE", "the token file that it predicts, such as the val.bin of its run")
    peer: tuple[str, ...] = frame.peers_flag("a checkout to compare with")
    only: tuple[str, ...] = frame.only_flag("KEY", "rows, by the beginnings of their keys")
    device: str = frame.device_flag("cpu or cuda")
    compiled: bool = switch("compile our step of a token: on a GPU into CUDA graphs, for one text and sixteen")


class Decoding(frame.Suite[DecodingOptions, Result]):
    """Lets implementations continue the same prompts in turn.

    decoding: let this program, transformers and nanoGPT continue the same prompts in turn, with one text and with
    eight, in fp32 and bf16, and compare their seconds. Then measure how far the time of a token is from that of reading
    the weights. Exit code 0: every goal was reached, and in fp32 every id is that of transformers; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py decoding
      .venv/bin/python src/benchmark.py decoding --only fp32 --rounds 9
      .venv/bin/python src/benchmark.py decoding --checkpoint checkpoint/demo-zero1 --data data/python-transformers/val.bin
      .venv/bin/python src/benchmark.py decoding --model_size demo --peer nanogpt=/tmp/nanoGPT
    """  # noqa: E501

    name, record_of, unit = "decoding", "decoding", "row"
    flags, page, summary = DecodingOptions, staticmethod(decoding_page), staticmethod(summary_lines)

    def plan(self) -> int:
        self._checkout = frame.read_peers(self.options.peer, form=f"{frame.NANOGPT}=FOLDER").get(frame.NANOGPT)
        if (self.options.checkpoint is None) != (self.options.data is None):
            raise UserError("--checkpoint and --data belong together: a trained model, and the token file it predicts")
        every = {row.key: row for row in rows(self.options.model_size, compiled=self.options.compiled)}
        self._rows = list(frame.selected(every, self.options.only).values())
        return len(self._rows)

    def begin(self) -> None:
        """Choose the device, and measure what rounded weights lose, which does not depend on time.

        Raises:
            UserError: the model or the file cannot be used.
        """
        import torch  # noqa: PLC0415 - takes seconds

        from dsgpt.machine.device import bring_up  # noqa: PLC0415

        if self.options.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch sees no NVIDIA GPU here; use --device cpu")
        threads = len(os.sched_getaffinity(0)) if self.options.device == "cpu" else None
        self._device = bring_up(self.options.device, local_rank=0, threads=threads)
        self._losses: Result | None = None
        if (checkpoint := self.options.checkpoint) and (data := self.options.data):
            from dsgpt.inference.commands import EvaluateRequest  # noqa: PLC0415
            from dsgpt.inference.evaluate import evaluate  # noqa: PLC0415

            weights = {}
            for precision, quantize in WEIGHTS:
                how: dict[str, Any] = {"precision": precision, "quantize": quantize, "device": self.options.device}
                request = EvaluateRequest(checkpoint=checkpoint, data=data, **how)
                measured = evaluate(request, console=Console(speaks=False))
                losses = {key: measured[key] for key in ("loss", "perplexity", "bits_per_byte")}
                weights[precision if quantize == "none" else quantize] = losses
            self._losses = {"checkpoint": checkpoint.as_posix(), "tokens": measured["tokens"], "weights": weights}

    def results(self) -> Iterator[Result]:
        from dsgpt.benchmarks.contenders import measure_decoding  # noqa: PLC0415 - torch takes seconds

        for row in self._rows:
            yield measure_decoding(row, rounds=self.options.rounds, device=self._device, checkout=self._checkout)

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {verdict(result)}{left}"

    def record(self, results: Sequence[Result]) -> frame.Record:
        from dsgpt.machine.device import huge_page_setting  # noqa: PLC0415 - torch takes seconds

        work = {"rounds": self.options.rounds, "model_size": self.options.model_size, "huge_pages": huge_page_setting()}
        return work | {"losses": self._losses, "results": list(results)}

    def failures(self, record: frame.Record) -> list[str]:
        return [line for result in record["results"] for line in missed(result)]
