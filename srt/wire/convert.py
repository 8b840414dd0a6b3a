"""Errors to `Failure` records and back. The only place that pairs codes with exceptions."""

from __future__ import annotations

from srt import errors as e
from srt.wire.params import Failure

LEAVES: tuple[type[e.TandemError], ...] = (
    e.InvalidRequest,
    e.InvalidSchema,
    e.ContextLengthExceeded,
    e.RequestTooLarge,
    e.UnsupportedMediaType,
    e.Unauthorized,
    e.Forbidden,
    e.ModelNotFound,
    e.NotFound,
    e.MethodNotAllowed,
    e.DuplicateRequest,
    e.QueueFull,
    e.DeadlineExceeded,
    e.RequestAborted,
    e.NotReady,
    e.ShuttingDown,
    e.EngineDead,
    e.ProtocolError,
    e.InternalError,
)
_BY_CODE = {leaf.code: leaf for leaf in LEAVES}


def to_failure(error: BaseException) -> Failure:
    """An error as it travels. What is not ours travels as `internal` without its text: that may
    hold parts of somebody's prompt, and the log has it."""
    if isinstance(error, e.TandemError):
        return Failure(
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after=error.retry_after,
        )
    return Failure(
        code=e.InternalError.code, message="the engine met an error of its own; see its log"
    )


def from_failure(failure: Failure) -> e.TandemError:
    """The exception to raise for a failure. A code we do not know becomes InternalError."""
    leaf = _BY_CODE.get(failure.code)
    if leaf is None:
        return e.InternalError(f"{failure.code}: {failure.message}", param=failure.param)
    return leaf(failure.message, param=failure.param, retry_after=failure.retry_after)
