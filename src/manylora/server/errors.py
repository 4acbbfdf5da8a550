"""Defines the one error body that clients see, and turns exceptions into it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from manylora.engine.client import EngineBusy, EngineDead, EngineSilent
from manylora.protocol.executor import AdapterError
from manylora.text.generate import GenerationFailed
from manylora.types import InvalidRequest, RequestError

TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 408: "RequestTimeoutError", 409: "ConflictError", 413: "ContentTooLargeError",
    415: "UnsupportedMediaTypeError", 429: "rate_limit_error", 431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError", 503: "ServiceUnavailableError",
}  # fmt: skip
# A message may quote a client's text; megabytes of it must not be sent back, or go to the log.
_MAX_MESSAGE_CHARS = 2000


class ErrorDetail(msgspec.Struct):
    """The content of an error body. ``param``: the field at fault; ``code``: the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or TYPES.get(status, TYPES[500 if status >= 500 else 400])
        self.headers = headers

    def body(self) -> bytes:
        """Encode the error as JSON."""
        message = self.message
        if len(message) > _MAX_MESSAGE_CHARS:
            message = message[:_MAX_MESSAGE_CHARS] + " ..."
        return msgspec.json.encode(ErrorBody(ErrorDetail(message, self.kind, self.param, self.status)))

    def response(self) -> Response:
        """Build the HTTP response of the error."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def unavailable(message: str) -> ApiError:
    """Build a 503: the server cannot take or finish requests any more."""
    return ApiError(503, message, headers={"Retry-After": "1", "Connection": "close"})


def try_later(status: int, message: str) -> ApiError:
    """Build a 429 or 503: the server is overloaded at the moment. The same request may succeed in a second."""
    return ApiError(status, message, headers={"Retry-After": "1"})


def as_api_error(error: Exception) -> ApiError | None:
    """Return the answer to the client for an exception. Returns None for an unexpected exception."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param)
        case GenerationFailed(error=RequestError(status=503, message=message)):
            return unavailable(message)
        case GenerationFailed(error=RequestError(status=429, message=message)):
            return try_later(429, message)
        case GenerationFailed(error=failed):
            return ApiError(failed.status, failed.message, param=failed.param)
        case AdapterError(status=429):
            return try_later(429, str(error))
        case AdapterError():
            kind = "InvalidUserInput" if error.status == 400 else None
            return ApiError(error.status, str(error), kind=kind)
        case EngineDead():
            return unavailable(f"the engine has died: {error}")
        case EngineBusy():
            return try_later(503, str(error))
        case EngineSilent():
            return unavailable(f"{error}; whether what was asked for is done is not known")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return None


def _no_such_route(request: Request, error: HTTPException) -> ApiError | None:
    """Return the answer for a path or a method that does not exist. Returns None for another error."""
    method, path = request.method, clipped(request.url.path)
    if error.status_code == 404 and error.detail == "Not Found":
        return ApiError(404, f"the route {path} is not offered by this server; /docs lists those that are")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        return ApiError(405, f"{path} does not take {method} but {allowed}", headers=error.headers)
    return None


async def answer(request: Request, error: Exception) -> Response:
    """Return the response for an exception of ``EXPECTED``."""
    known = _no_such_route(request, error) if isinstance(error, HTTPException) else None
    known = known or as_api_error(error)
    if known is None:
        raise error
    return known.response()


EXPECTED: tuple[type[Exception], ...] = (
    ApiError, InvalidRequest, GenerationFailed, AdapterError, EngineDead, EngineBusy, EngineSilent, HTTPException,
)  # fmt: skip
"""The exceptions of an endpoint that become an error body."""


def clipped(text: str, limit: int = 200) -> str:
    """Shorten a client's own words so that they can be quoted."""
    return text if len(text) <= limit else text[:limit] + "..."
