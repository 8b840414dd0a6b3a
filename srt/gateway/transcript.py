"""The `messages` of a request: turns of a conversation, text only."""

from __future__ import annotations

from typing import Any

from srt.gateway.checks import as_text, refuse, show
from srt.wire.params import ChatMessage

# Templates know `system`; OpenAI's newer name for the same turn is `developer`.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_WITHOUT_EFFECT = frozenset({"refusal", "annotations", "reasoning_content", "reasoning"})
_KNOWN = frozenset({"role", "content", "name", "tool_calls", "function_call", "audio"})


def read_messages(value: Any, ignored: list[str], strict: bool) -> list[ChatMessage]:
    """Raises InvalidRequest naming the message. Names of keys without effect go into `ignored`.
    How long they may be is the engine's to say."""
    if not isinstance(value, list):
        refuse("messages", f"must be a list of messages, not {show(value)}")
    if not value:
        refuse("messages", "must not be empty")
    return [
        _read_message(f"messages[{index}]", item, ignored, strict)
        for index, item in enumerate(value)
    ]


def _read_message(where: str, item: Any, ignored: list[str], strict: bool) -> ChatMessage:
    if not isinstance(item, dict):
        refuse(where, f"must be an object with role and content, not {show(item)}")
    if "role" not in item:
        refuse(f"{where}.role", "is missing")
    role = as_text(f"{where}.role", item["role"])
    if role in ("tool", "function"):
        refuse(
            f"{where}.role",
            f"a {role} message answers a call of the assistant, and calls are not supported yet",
        )
    if role not in _ROLES:
        refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {show(role)}")
    if "content" not in item and role != "assistant":
        refuse(f"{where}.content", "is missing")
    for key in ("tool_calls", "function_call", "audio"):
        if item.get(key):
            refuse(f"{where}.{key}", "only text is supported in messages yet")
    for key, extra in item.items():
        if key not in _KNOWN and extra is not None:
            if strict and key not in _WITHOUT_EFFECT:
                refuse(f"{where}.{key[:60]}", "unknown field")
            if f"messages.{key}" not in ignored:
                ignored.append(f"messages.{key}")
    name = item.get("name")
    return ChatMessage(
        role=_ROLES[role],
        content=_read_content(f"{where}.content", item.get("content"), role),
        name=None if name is None else as_text(f"{where}.name", name),
    )


def _read_content(where: str, value: Any, role: str) -> str | None:
    """A string, or text parts, which are joined as they are."""
    if value is None and role == "assistant":
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(where, f"must be a string or a list of text parts, not {show(value)}")
    texts: list[str] = []
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            refuse(place, f"must be an object with type and text, not {show(part)}")
        kind = part.get("type")
        if kind != "text":
            refuse(f"{place}.type", f"{show(kind)} is not supported: this model reads text only")
        if "text" not in part:
            refuse(f"{place}.text", "is missing")
        texts.append(as_text(f"{place}.text", part.get("text")))
    return "".join(texts)
