"""Bodies in, bodies out."""

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Send

from dsgpt.serving.errors import ApiError, ClientGoneError
from dsgpt.serving.options import Limits


async def read_body(request: Request, *, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is not JSON by its type, too large, or does not arrive in time.
        ClientGoneError: the client hung up before its end.
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
        raise ClientGoneError from error
    return bytes(body)


async def send_json(send: Send, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
    """Send a whole response."""
    data = json.dumps(body, ensure_ascii=False).encode()
    fields = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error in OpenAI's form."""
    await send_json(send, error.status, error.body(), error.headers)
