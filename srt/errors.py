"""The exception tree. Each leaf has a wire code and an HTTP status.

    TandemError
    |-- RequestError                 the request is at fault; nothing else is touched
    |   |-- InvalidRequest           400  invalid_value             names the field
    |   |-- InvalidSchema            400  invalid_schema            a grammar that cannot be served
    |   |-- ContextLengthExceeded    400  context_length_exceeded   names both numbers
    |   |-- RequestTooLarge          413  request_too_large
    |   |-- UnsupportedMediaType     415  unsupported_media_type
    |   |-- Unauthorized             401  invalid_api_key
    |   |-- Forbidden                403  forbidden
    |   |-- ModelNotFound            404  model_not_found
    |   |-- NotFound                 404  not_found
    |   |-- MethodNotAllowed         405  method_not_allowed
    |   |-- DuplicateRequest         409  duplicate_request
    |   |-- QueueFull                429  queue_full                carries retry_after
    |   |-- DeadlineExceeded         408  timeout
    |   `-- RequestAborted           499  aborted
    `-- EngineError                  the engine is at fault or not there
        |-- NotReady                 503  not_ready
        |-- ShuttingDown             503  shutting_down
        |-- EngineDead               503  engine_dead
        |-- ProtocolError            500  protocol_error            bytes that are not our vocabulary
        `-- InternalError            500  internal

    ConfigError (ValueError)         a start-up wish that cannot be met; never crosses the wire

`Failure` in `srt.wire.params` is what travels; `srt.wire.convert` converts.
"""

from __future__ import annotations

from typing import ClassVar


class TandemError(Exception):
    """Root of everything this package raises on purpose.

    `code` and `status` belong to the class; `param` names the request field at fault, if one is;
    `retry_after` is in seconds.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class RequestError(TandemError):
    """The request is at fault, or the load at that moment; no other request is touched."""

    code = "invalid_value"
    status = 400
    kind = "invalid_request_error"


class InvalidRequest(RequestError, ValueError):
    """A value that is not allowed, or not together with another; `param` names it."""


class InvalidSchema(InvalidRequest):
    """A grammar that is malformed, or past the limits on compiling it; says where."""

    code = "invalid_schema"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output are more tokens than the context or the whole KV pool has."""

    code = "context_length_exceeded"


class RequestTooLarge(RequestError):
    """More bytes or characters than a limit allows; the message names its flag."""

    code = "request_too_large"
    status = 413


class UnsupportedMediaType(RequestError):
    """An HTTP body that is not JSON by its content type."""

    code = "unsupported_media_type"
    status = 415


class Unauthorized(RequestError):
    """No API key, or an unknown one."""

    code = "invalid_api_key"
    status = 401
    kind = "authentication_error"


class Forbidden(RequestError):
    """A caller's key where the admin key is needed."""

    code = "forbidden"
    status = 403
    kind = "permission_error"


class ModelNotFound(RequestError):
    """Another model than the one that is served."""

    code = "model_not_found"
    status = 404


class NotFound(RequestError):
    """A path or a live request that is not there."""

    code = "not_found"
    status = 404


class MethodNotAllowed(RequestError):
    """The path exists and takes other HTTP methods."""

    code = "method_not_allowed"
    status = 405


class DuplicateRequest(RequestError):
    """The name belongs to a live request, which goes on undisturbed."""

    code = "duplicate_request"
    status = 409


class QueueFull(RequestError):
    """As many requests or prompt tokens wait as may; `retry_after` estimates when there is room."""

    code = "queue_full"
    status = 429
    kind = "rate_limit_error"


class DeadlineExceeded(RequestError):
    """Not finished (or, over HTTP, not arrived) within its seconds."""

    code = "timeout"
    status = 408
    kind = "server_error"


class RequestAborted(RequestError):
    """Somebody ended it: its caller, an administrator, or a limit on unread output."""

    code = "aborted"
    status = 499


class EngineError(TandemError):
    """Not the request's fault; the same one may succeed later or elsewhere."""


class NotReady(EngineError):
    """Not yet, or not now: starting, or busy where idle is needed."""

    code = "not_ready"
    status = 503


class ShuttingDown(EngineError):
    """Draining: what runs may end, nothing new is taken."""

    code = "shutting_down"
    status = 503


class EngineDead(EngineError):
    """A process of the engine ended, or fell silent for longer than the stall limit."""

    code = "engine_dead"
    status = 503


class ProtocolError(EngineError):
    code = "protocol_error"


class InternalError(EngineError):
    """A bug, or a failure of the model on this request; the log has the details."""


class ConfigError(ValueError):
    """A start-up setting that cannot be honoured. The message says what was asked, what was
    found, what is allowed and what to change."""
