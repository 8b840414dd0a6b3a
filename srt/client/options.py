"""What a caller may say about one request, and the message it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

import msgspec

from srt.errors import InvalidRequest
from srt.wire.messages import Generate
from srt.wire.params import ChatMessage, ChatOptions, SamplingParams

Turn = ChatMessage | Mapping[str, str | None]
Prompt = str | Sequence[int] | Sequence[Turn]


class Options(TypedDict, total=False):
    """Keywords of `generate` and `stream`; their meaning is that of `Generate`'s fields."""

    rid: str  # default: a fresh one
    n: int
    chat: ChatOptions
    detokenize: bool
    include_stop: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    echo: bool
    priority: int
    deadline: float | None
    cache_salt: str
    tenant: str


def build_request(
    rid: str, prompt: Prompt, params: SamplingParams, stream: bool, options: Options
) -> Generate:
    """A list of ints is token ids, a list of anything else a conversation. `rid` is used if the
    options name none."""
    named: Options = {"rid": rid, **options}
    request = Generate(**named, params=params, stream=stream)
    if isinstance(prompt, str):
        request.prompt = prompt
    elif all(isinstance(entry, int) for entry in prompt):
        request.token_ids = list(prompt)  # type: ignore[arg-type]
    else:
        request.messages = read_messages(prompt)  # type: ignore[arg-type]
    return _check_types(request)


def _check_types(request: Generate) -> Generate:
    """Python lets anything into a field; the wire does not. Found here, the field can be named."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Generate)
    except msgspec.ValidationError as error:
        place = str(error).rpartition("`$.")[2].rstrip("`").removeprefix("params.")
        field = re.split(r"[.\[]", place)[0] or None
        raise InvalidRequest(f"{field or 'request'}: {error}", param=field) from None
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"this request cannot be sent: {error}") from None


def read_messages(turns: Sequence[Turn]) -> list[ChatMessage]:
    """Checked and typed. Raises InvalidRequest with param "messages"."""
    try:
        return [
            turn if isinstance(turn, ChatMessage) else msgspec.convert(turn, ChatMessage)
            for turn in turns
        ]
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a message is not one: {error}", param="messages") from None
