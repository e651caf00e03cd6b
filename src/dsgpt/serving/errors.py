"""Errors that a client sees: a status and a body in the form of OpenAI's."""

from typing import Any

NOT_FINITE = "its logits are not finite"


class ApiError(Exception):
    """A request that is refused or failed.

    Args:
        status: of HTTP.
        message: one line: what is wrong, and what to do.
        param: the field of the request at fault.
        code: a word that programs can compare.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return {"error": {"message": self.message, "type": self._kind(), "param": self.param, "code": self.code}}

    def _kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ClientGoneError(Exception):
    """The client hung up, so nobody reads an answer. Counted as status 499, as nginx does."""

    status = 499


class SlowReaderError(Exception):
    """The client did not take its answer in time. Counted as status 408; the connection is closed."""

    status = 408
