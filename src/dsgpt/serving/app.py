"""The server's paths, and who may use them."""

import hmac
import re
import uuid
from collections import Counter
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsgpt.serving.completions import Completions
from dsgpt.serving.errors import ApiError
from dsgpt.serving.http import send_error
from dsgpt.serving.options import Key

LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
ONCE = (b"authorization", b"content-length", b"content-type", b"host", b"transfer-encoding")
"""Headers of which two would mean that two programs on the way may read different ones."""
REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def make_app(completions: Completions, *, keys: Sequence[Key], loopback: str | None) -> Starlette:
    """The application.

    Args:
        completions: answers completions.
        keys: requests must bring one of them, except those for ``/health``; empty for none.
        loopback: the name or address of this machine that the server is bound to, which requests must name; None if
            it is bound to more than loopback.
    """
    served = completions.served
    model = {"id": served.name, "object": "model", "created": served.created, "owned_by": "dsgpt"}
    model["max_model_len"] = served.positions

    async def models(request: Request) -> Response:  # noqa: ARG001 - Starlette calls it so
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise HTTPException(404, f"the model does not exist here: use {served.name!r}")
        return JSONResponse(model)

    async def chat(request: Request) -> Response:  # noqa: ARG001
        raise HTTPException(404, "a base model without a chat template: use /v1/completions")

    async def health(request: Request) -> Response:  # noqa: ARG001
        failed = completions.engine.failed
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    async def metrics(request: Request) -> Response:  # noqa: ARG001
        return Response(generate_latest(completions.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["GET", "POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(Guard, keys=keys, loopback=loopback)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )
    app.router.redirect_slashes = False  # the address would be the client's own Host; the guard drops the slash
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    fault = ApiError(
        error.status_code, message, code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    )
    return JSONResponse(fault.body(), status_code=error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return JSONResponse(ApiError(500, "an error of the server", code="internal_error").body(), status_code=500)


class Guard:
    """Refuses requests without a key, requests of web pages that reach loopback under another name, and unclear heads.

    Every answer gets the request's ``x-request-id``, or a new one. A slash at the end of a path counts for nothing.

    Args:
        app: gets the other requests, with the name of their key in the scope.
        keys: as in ``make_app``.
        loopback: as in ``make_app``.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[Key], loopback: str | None) -> None:
        self._app, self._keys, self._names = app, keys, None
        if loopback is not None:
            self._names = LOCAL_NAMES | {f"[{loopback}]" if ":" in loopback else loopback.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 or 401."""
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name)]
            await send(message)

        path = scope["path"].removesuffix("/") or "/"
        key = self._key_of(headers.get(b"authorization", b""))
        if fault := self._fault_of(scope["headers"]):
            await send_error(send_named, fault)
        elif self._keys and path != "/health" and key is None:
            message = "the request needs the server's API key: Authorization: Bearer KEY"
            fault = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            await send_error(send_named, fault)
        else:
            await self._app({**scope, "path": path, "key": key}, receive, send_named)

    def _fault_of(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        counts = Counter(name for name, _ in headers)
        twice = [name.decode() for name in ONCE if counts[name] > 1]
        if counts[b"transfer-encoding"] and counts[b"content-length"]:
            twice = ["length of the body (Content-Length with Transfer-Encoding)"]
        if twice:  # what another program on the way took for the next request may lie behind it
            message = f"the request has more than one {twice[0]}: send one"
            return ApiError(400, message, code="invalid_header", headers={"connection": "close"})
        host = HOST.fullmatch(dict(headers).get(b"host", b"").decode("latin-1").lower())
        if self._names is not None and (host is None or host[1] not in self._names):
            message = "this server is only for this machine: call it 127.0.0.1 or localhost"
            return ApiError(400, message, code="invalid_host")
        return None

    def _key_of(self, authorization: bytes) -> Key | None:
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        known = [key for key in self._keys if hmac.compare_digest(given.strip(b" "), key.secret.encode())]
        return known[0] if known else None
