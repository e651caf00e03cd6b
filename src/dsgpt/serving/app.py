"""The server's paths, and who may use them."""

import hmac

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dsgpt.serving.completions import Completions
from dsgpt.serving.errors import ApiError
from dsgpt.serving.http import send_error

LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}


def make_app(completions: Completions, *, api_key: str | None, loopback: str | None) -> Starlette:
    """The application.

    Args:
        completions: answers completions.
        api_key: what requests must bring, except those for ``/health``; None for nothing.
        loopback: the name or address of this machine that the server is bound to, which requests must name; None if
            it is bound to more than loopback.
    """
    served = completions.served
    model = {"id": served.name, "object": "model", "created": served.created, "owned_by": "dsgpt"}

    async def models(request: Request) -> Response:  # noqa: ARG001 - Starlette calls it so
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise HTTPException(404, f"the model does not exist here: use {served.name!r}")
        return JSONResponse(model)

    async def health(request: Request) -> Response:  # noqa: ARG001
        failed = completions.engine.failed
        return JSONResponse({"status": "failed" if failed else "ok"}, status_code=503 if failed else 200)

    async def metrics(request: Request) -> Response:  # noqa: ARG001
        return Response(generate_latest(completions.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[Middleware(Guard, api_key=api_key, loopback=loopback)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )


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
    """Refuses requests without the key, and requests of web pages that reach loopback under another name.

    Args:
        app: gets the other requests.
        api_key: as in ``make_app``.
        loopback: as in ``make_app``.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, loopback: str | None) -> None:
        self._app, self._names = app, None
        if loopback is not None:
            self._names = LOCAL_NAMES | {f"[{loopback}]" if ":" in loopback else loopback.lower()}
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400 or 401."""
        headers = dict(scope["headers"])
        if self._names is not None and _host_of(headers.get(b"host", b"")) not in self._names:
            message = "this server is only for this machine: call it 127.0.0.1 or localhost"
            await send_error(send, ApiError(400, message, code="invalid_host"))
        elif self._expected is not None and scope["path"] != "/health" and not self._knows(headers):
            message = "the request needs the server's API key: Authorization: Bearer KEY"
            fault = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            await send_error(send, fault)
        else:
            await self._app(scope, receive, send)

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        return hmac.compare_digest(headers.get(b"authorization", b""), self._expected or b"")


def _host_of(host: bytes) -> str:
    """The name in a ``Host`` field, without its port."""
    text = host.decode("latin-1").lower()
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]
