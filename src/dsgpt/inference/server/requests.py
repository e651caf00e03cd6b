"""Requests for completions, checked field by field, and the errors that they get.

Errors have a status and a body in the form of OpenAI's.
"""

import asyncio
import random
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from dsgpt.common.errors import did_you_mean
from dsgpt.common.json_files import JsonError, clipped, parse_json
from dsgpt.formats.tokenizer_files import reason_of
from dsgpt.inference.commands import Limits, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


# Errors that a client sees: a status and a body in the form of OpenAI's.

NOT_FINITE = "its logits are not finite"


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is refused or failed."""

    status: int
    """Status of HTTP."""
    message: str
    """One line: what is wrong, and what to do."""
    _: KW_ONLY
    param: str | None = None
    """The field of the request at fault."""
    code: str | None = None
    """A word that programs can compare."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the response."""

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body(), self.status, self.headers)


@dataclass(eq=False)
class GoneError(Exception):
    """Nobody reads the answer; the connection is closed."""

    status: int
    """Status that is counted: 499 if the client hung up, as in nginx, 408 if it took nothing in time."""


async def read_body(request: Request, *, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is not JSON by its type, too large, or does not arrive in time.
        GoneError: the client hung up before its end.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of another site can send other types to this machine without asking
        raise ApiError(415, "the body must have the content type application/json", code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.stall_sec):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    message = f"the body has more than {limits.body_bytes:,} bytes: send a shorter prompt"
                    raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
    except TimeoutError as error:
        message = f"the body did not arrive within {limits.stall_sec:g} s"
        raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from error
    except ClientDisconnect as error:
        raise GoneError(499) from error
    return bytes(body)


# How a sequence draws its tokens.


@dataclass(frozen=True, kw_only=True)
class Drawing(Sampling):
    """Settings with which a sequence draws its tokens; nothing is penalized."""

    seed: str | None = None
    """Sequences of one seed draw the same numbers; None for numbers that nobody can repeat."""

    def number(self, position: int) -> float:
        """The random number for the token at ``position`` of the sequence, in [0, 1)."""
        return random.random() if self.seed is None else random.Random(f"{self.seed}/{position}").random()


# Requests for completions: what OpenAI's interface allows, checked field by field.

DEFAULT_NEW_TOKENS = 16
"""OpenAI's default of ``max_tokens``."""
MOST_STOPS, LONGEST_STOP = 4, 256
MOST_STOP_IDS = 64
LONG_TOKEN = 16
"""Characters of a long token. A text may have longer ones, but hardly many."""
COLDEST = 1e-4
"""A lower temperature counts as 0: dividing the logits by it could overflow."""

Ids = Annotated[list[int], Field(fail_fast=True)]
"""One fault of a list is reported: 256 KB have room for 100,000, which take seconds in which no other thread runs."""
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionRequest(BaseModel):
    """The body of ``POST /v1/completions``, in which a field that is null was left out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    prompt: str | Annotated[list[str], Field(fail_fast=True)] | Ids | Annotated[list[Ids], Field(fail_fast=True)] = ""
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Whole | None = None
    n: Annotated[Whole, Field(ge=1)] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] = []
    stop_token_ids: Annotated[Ids, Field(max_length=MOST_STOP_IDS)] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    best_of: Whole | None = None
    suffix: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None

    @property
    def prompts(self) -> list[Any]:
        """Prompts of the request, as texts or lists of ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given

    def drawing(self, index: int) -> Drawing:
        """Settings with which the choice ``index`` draws its tokens."""
        if self.temperature < COLDEST or self.top_p == 0:
            return Drawing()
        how = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}
        return Drawing(**how, top_k=max(self.top_k, 0), seed=None if self.seed is None else f"{self.seed}/{index}")

    def ends(self, end_of_text: frozenset[int]) -> frozenset[int]:
        """Tokens that end a completion and are no part of its text."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else end_of_text)


SHAPES = {
    "prompt": "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": f"stop must be a text of 1 to {LONGEST_STOP} characters, or a list of at most {MOST_STOPS} of them",
}
"""Messages for fields of several types, for which pydantic has a message for each type."""
UNSUPPORTED = ("suffix", "frequency_penalty", "presence_penalty", "logit_bias")
"""Fields that would silently be ignored otherwise, as would a ``best_of`` that is not ``n``."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the model reads it."""

    ids: Ids
    """A list of at least one id."""
    text: str


def _wrong(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def read_request(data: bytes) -> CompletionRequest:
    """The request in a body.

    Raises:
        ApiError: it is not JSON, or a field has a wrong name, type or value.
    """
    try:
        values = parse_json(data)
    except JsonError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    nested = values.get("stream_options")
    for fields, kind, within in ((values, CompletionRequest, ""), (nested, StreamOptions, "stream_options.")):
        # pydantic would collect all unknown keys, of which a body has room for thousands
        names = fields if isinstance(fields, dict) else {}
        for unknown in (key for key in names if key not in kind.model_fields):
            name = f"{within}{unknown[:80]}"
            message = f"{name} is not a known field{did_you_mean(unknown, kind.model_fields)}"
            raise _wrong(within.rstrip(".") or name, message, "unknown_parameter")
    try:
        request = CompletionRequest.model_validate({key: each for key, each in values.items() if each is not None})
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        first = min(faults, key=lambda fault: fault["type"].endswith("_type"))  # a value of the right type says more
        param = str(first["loc"][0])
        if first["type"] == "missing":
            raise _wrong(param, f"{param} is missing", "missing_required_parameter") from error
        message = SHAPES.get(param) or f"{param}: {first['msg']}, not {clipped(first['input'])}"
        raise _wrong(param, message, "invalid_type" if first["type"].endswith("_type") else "invalid_value") from error
    unsupported = [name for name in UNSUPPORTED if getattr(request, name)]
    for name in ["best_of"] * (request.best_of not in (None, request.n)) + unsupported:
        raise _wrong(name, f"{name} is not supported here: leave it out", "unsupported_parameter")
    if request.stream_options is not None and not request.stream:
        raise _wrong("stream_options", "stream_options needs stream")
    if request.max_tokens == 0 and not request.echo:
        raise _wrong("max_tokens", "max_tokens must be at least 1, or 0 with echo")
    return request


def read_prompts(
    request: CompletionRequest, tokenizer: "Tokenizer", *, vocabulary: int, positions: int
) -> list[Prompt]:
    """The prompts of a request, encoded.

    Args:
        request: names them.
        tokenizer: of the model.
        vocabulary: ids that the model knows.
        positions: the model's context length in tokens; a longer prompt of ids is not decoded.

    Raises:
        ApiError: one is empty where it must not be, or it or ``stop_token_ids`` has ids that the model does not know.
    """
    _check_ids(request.stop_token_ids, "stop_token_ids", vocabulary)
    if not request.prompts:
        raise _wrong("prompt", "prompt is an empty list")
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            text, head = prompt, prompt[: LONG_TOKEN * positions]
            ids = _encoded(head, tokenizer)
            if len(head) < len(text):
                if len(ids) > 2 * positions:  # the whole may take a second
                    message = f"This model's maximum context length is {positions} tokens, and the prompt is far longer"
                    raise _wrong("prompt", f"{message}: shorten it", "context_length_exceeded")
                ids = _encoded(text, tokenizer)
        else:
            ids = prompt
            _check_ids(ids, "prompt", vocabulary)
            text = str(tokenizer.decode(ids)) if len(ids) <= positions else ""
        if not ids and tokenizer.eos_token_id is None:
            raise _wrong("prompt", "prompt is empty, and this tokenizer has no end-of-text token to start from")
        ids = ids or [tokenizer.eos_token_id]
        _check_ids(ids, "prompt", vocabulary)
        prompts.append(Prompt(ids=ids, text=text))
    return prompts


def _encoded(text: str, tokenizer: "Tokenizer") -> Ids:
    try:
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise _wrong("prompt", f"the tokenizer cannot encode the prompt ({reason_of(error)})") from error


def _check_ids(ids: Ids, param: str, vocabulary: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        wrong = clipped(min(ids) if min(ids) < 0 else max(ids))
        raise _wrong(param, f"{param} has the token id {wrong}, and the model knows 0 to {vocabulary - 1}")


def new_tokens_of(request: CompletionRequest, prompts: list[Prompt], *, positions: int, limits: Limits) -> int:
    """Most tokens that a completion of the request may have.

    Raises:
        ApiError: prompt and completion do not fit into the model's positions, or the limit is lower.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    asked = request.max_tokens
    wanted = DEFAULT_NEW_TOKENS if asked is None else asked
    if longest + (wanted if asked is not None else 1) > positions:
        asks = f"the request has {longest} tokens in its prompt and {wanted} for the completion"
        message = f"This model's maximum context length is {positions} tokens, and {asks}"
        raise _wrong("prompt", f"{message}: shorten the prompt or lower max_tokens", "context_length_exceeded")
    most = positions if limits.new_tokens is None else limits.new_tokens
    if asked is not None and asked > most:
        raise _wrong("max_tokens", f"max_tokens must be at most {most} here")
    return min(wanted, positions - longest, most)
