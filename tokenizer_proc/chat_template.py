"""A conversation to a prompt, by the model's own template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateSyntaxError

from srt.errors import ConfigError, InvalidRequest
from srt.wire.params import ChatMessage, ChatOptions
from tokenizer_proc.sandbox import Sandbox

# Stands for the end of the last message while a conversation to be continued is rendered: private
# use characters, so that no template trims them away.
_MARK = "\ue0f0\ue0f1"


class ChatTemplate:
    """One compiled template. Templates see the variables that Hugging Face's do: `messages` (role,
    content, name if given), `add_generation_prompt`, `tools` and `documents` (none), the texts of
    the special tokens (`bos_token`, `eos_token`, ...), and the request's `template_kwargs`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        origin: str = "the chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`origin` says in errors where `source` comes from. Raises ConfigError on bad syntax."""
        self.source = source
        self._fixed: dict[str, Any] = {"tools": None, "documents": None, "bos_token": ""}
        self._fixed |= {"eos_token": "", **(special_tokens or {})}
        self._sandbox = Sandbox(now)
        try:
            self._template = self._sandbox.build(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin} is not a valid Jinja template: {error.message} (line {error.lineno}); "
                "give another one with --chat-template"
            ) from None

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        """The prompt. Encode it without further special tokens: the template writes its own.

        With `continue_final_message` the prompt ends where the last message's content ends, so that
        the model goes on writing it; no generation prompt is added then.
        Raises InvalidRequest: "messages" if the template refuses them or cannot digest them,
        "chat_template_kwargs" if those would replace what the engine provides.
        """
        reserved = options.template_kwargs.keys() & {
            *self._fixed,
            "messages",
            "add_generation_prompt",
        }
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set by a request",
                param="chat_template_kwargs",
            )
        turns = [_as_turn(message) for message in messages]
        if options.continue_final_message:
            return self._render_open(turns, options)
        return self._run(turns, options, options.add_generation_prompt)

    def _render_open(self, turns: list[dict[str, str | None]], options: ChatOptions) -> str:
        content = turns[-1]["content"] if turns else None
        if not content:
            raise _refusal("continue_final_message needs a last message with content to continue")
        mark = _MARK
        while any(mark in (turn["content"] or "") for turn in turns):
            mark += _MARK
        turns[-1]["content"] = content + mark
        text, found, _ = self._run(turns, options, False).rpartition(mark)
        if not found:
            raise _refusal(
                "the chat template does not show the last message: it cannot continue it"
            )
        return text.replace(mark, "")

    def _run(
        self, turns: list[dict[str, str | None]], options: ChatOptions, add_generation_prompt: bool
    ) -> str:
        variables = {
            **self._fixed,
            **options.template_kwargs,
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._sandbox.render(self._template, variables)
        except Exception as error:  # a template is a stranger's program: it can raise anything
            raise _refusal(f"the chat template refused them: {error}") from error


def _as_turn(message: ChatMessage) -> dict[str, str | None]:
    """A turn without content said nothing; many templates cannot add a null to a text."""
    turn: dict[str, str | None] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"messages: {why}", param="messages")
