"""Models for tests: random ones, published ones, and a hub that serves them; and ``src/convert.py``."""

import contextlib
import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import Quiet, running
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from dsgpt.common.command_line import exit_code_of
from dsgpt.inference.commands import convert
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

# A small model with random weights, large enough that logits differ by far more than rounding.


VOCABULARY = 101


def drawn(model: Any) -> Any:
    """``model`` in evaluation mode with every parameter random, biases and LayerNorms too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def random_model(block_size: int = 24) -> GPT2:
    config = GPT2Config(n_layer=3, n_head=4, n_embd=32, block_size=block_size, vocab_size=VOCABULARY, dropout=0.5)
    return drawn(GPT2(config))


def random_prompts(count: int, *, longest: int) -> list[list[int]]:
    """Prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


# Small random models as Hugging Face's own library publishes them, and a pickle that no model may be.


SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}


def published(*, vocab_size: int, **changes: Any) -> GPT2LMHeadModel:
    """As ``drawn`` makes it."""
    settings = SHAPE | {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0} | changes
    return drawn(GPT2LMHeadModel(TheirConfig(**settings)))


def publish(folder: Path, *, vocab_size: int, **changes: Any) -> GPT2LMHeadModel:
    """The same, written into ``folder``."""
    model = published(vocab_size=vocab_size, **changes)
    model.save_pretrained(folder)
    return model


class RunsCode:
    """Unpickled without restriction, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def our_model(weights: dict[str, torch.Tensor], config: GPT2Config) -> GPT2:
    """Our model with the given canonical weights, in evaluation mode."""
    model = GPT2(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


@torch.no_grad()
def largest_difference(ours: GPT2, theirs: GPT2LMHeadModel) -> float:
    """Of the logits, over random ids in every position."""
    config = ours.config
    ids = torch.randint(config.vocab_size, (3, config.block_size), generator=torch.Generator().manual_seed(1))
    a, b = ours(ids), theirs(ids).logits
    assert a.shape == b.shape == (3, config.block_size, config.vocab_size)
    return (a - b).abs().max().item()


# Stands for the Hugging Face hub, which tests must not need: the few answers that fetching single files takes.


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(models: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders under the names of models; the address, and the requests so far, come back."""
    asked: list[str] = []

    class Answers(Quiet):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            asked.append(f"{self.command} {self.path}")
            match = re.fullmatch(r"/(.+)/resolve/(main|[0-9a-f]{40})/(.+)", self.path)
            if match is None:
                self._end(200)
            elif match[1] not in models:
                self._end(404, {"X-Error-Code": "RepoNotFound"})
            elif not (models[match[1]] / match[3]).is_file():
                self._end(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                data = (models[match[1]] / match[3]).read_bytes()
                etag = f'"{hashlib.sha256(data).hexdigest()}"'
                headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}
                self._end(200, headers, data if body else b"")

        def _end(self, code: int, headers: dict[str, str] | None = None, data: bytes = b"") -> None:
            self.send_response(code)
            for name, value in ({"Content-Length": "0"} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as address:
        yield address, asked


# Commands, called in this process because torch takes seconds to import, and what tests do to their input.


def called(command: Callable[[], int | None], *words: object, stdin: str | bytes = b"") -> tuple[int, str, str]:
    """The exit code, the output and the error output."""
    source = io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), encoding="utf-8")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["the script", *map(str, words)])
        patch.setattr(sys, "stdin", source)
        code = exit_code_of(command, kept="")
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return code, out.getvalue(), err.getvalue()


def converted(*words: object) -> str:
    """The output of a conversion that works."""
    code, out, err = called(convert, *words)
    assert (code, err) == (0, "")
    return out


def refusal(*words: object) -> list[str]:
    """The mistakes that it reports."""
    code, _, err = called(convert, *words)
    assert code == 2, err
    assert all(line.startswith("error: ") for line in err.splitlines())
    return [line.removeprefix("error: ") for line in err.splitlines()]


def config_of(checkpoint: Path) -> GPT2Config:
    """The shape in ``model.json``."""
    return GPT2Config(**json.loads((checkpoint / "model.json").read_text()))
