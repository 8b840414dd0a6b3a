"""From a client's `Generate` to the scheduler's `Work`: check, tokenize, fan out. No sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from srt.errors import InvalidRequest, InvalidSchema
from srt.structured.service import Compiler
from srt.wire.limits import Limits, check, check_length, check_prompt, check_rid, check_tokens
from srt.wire.messages import Detokenize, Generate, Tokenize, Work
from srt.wire.params import ChatMessage, ChatOptions, Grammar, TextOptions
from tokenizer_proc.codec import Codec
from tokenizer_proc.patterns import PatternFault
from tokenizer_proc.stop_patterns import MAX_EDGES, StopPattern

T = TypeVar("T")

LONG_CHARS = 8192  # texts from here on are encoded off the event loop
LONG_TOKENS = 4096
GRAMMAR_SECONDS = 5.0  # for compiling one, waiting for those before it included
CONTEXT_TOKENS = 16  # prompt ids the detokenizer gets, so that the first piece joins well
INT64_SPAN = 2**64


class Intake:
    """`vocab_size` and `context_length` are the model's. `seed` 0 draws differently at every start.
    `compiler` None: requests with a grammar are refused."""

    def __init__(
        self,
        codec: Codec,
        limits: Limits,
        *,
        vocab_size: int,
        context_length: int,
        seed: int = 0,
        compiler: Compiler | None = None,
    ) -> None:
        self._codec = codec
        self._limits = limits
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._compiler = compiler
        self._seeds = random.Random(seed or None)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def check(self, message: Generate) -> None:
        """All that can be said without tokenizing. Raises RequestError."""
        check(message, self._limits, self._vocab_size, self._context_length)
        self._check_template(message.messages)
        _check_patterns(message.params.stop_regex)

    async def check_grammar(self, grammar: Grammar | None) -> None:
        """Off the event loop, so nobody waits but who sent it. Raises InvalidSchema with the reason."""
        if grammar is None:
            return
        field = grammar.field
        if self._compiler is None:
            raise InvalidRequest(f"{field}: this engine serves no grammars", param=field)
        try:
            checked = asyncio.wrap_future(self._compiler.check(grammar))
            await asyncio.wait_for(checked, GRAMMAR_SECONDS)
        except TimeoutError:
            raise InvalidSchema(
                f"{field}: it could not be compiled within {GRAMMAR_SECONDS:g} s", param=field
            ) from None

    async def read_prompt(self, message: Generate) -> tuple[str | None, list[int]]:
        """The prompt's text (None if ids were given and nobody asked for it) and ids."""
        if message.token_ids is None:
            words, found = await self._encode(
                message.prompt, message.messages, message.chat, message.add_special_tokens
            )
            self._check_found(found)
            return words, found
        ids, text = message.token_ids, None
        if message.echo:
            text = await self._run(
                len(ids) >= LONG_TOKENS, lambda: self._codec.decode(ids, skip_special_tokens=False)
            )
        return text, ids

    def fan_out(self, message: Generate, ids: list[int], uids: list[int]) -> list[Work]:
        """One `Work` for each uid."""
        params = message.params
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        budget = check_length(params, len(ids), self._context_length)
        text = TextOptions(
            stop=params.stop,
            stop_regex=params.stop_regex,
            min_tokens=params.min_tokens,
            include_stop=message.include_stop,
            skip_special_tokens=message.skip_special_tokens,
            detokenize=message.detokenize,
            stream=message.stream,
            prompt_token_ids=ids[-CONTEXT_TOKENS:],
        )
        return [
            Work(
                uid=uid,
                rid=message.rid,
                token_ids=ids,
                params=msgspec.structs.replace(
                    params, max_tokens=budget, seed=_wrap_int64(seed + index)
                ),
                text=text,
                index=index,
                leader=None if index == 0 else uids[0],
                priority=message.priority,
                deadline=message.deadline or self._limits.default_deadline,
                cache_salt=message.cache_salt,
                tenant=message.tenant,
                is_probe=message.is_probe,
            )
            for index, uid in enumerate(uids)
        ]

    def check_length(self, message: Generate, prompt_len: int) -> None:
        field = "prompt" if message.messages is None else "messages"
        check_length(message.params, prompt_len, self._context_length, field)

    async def tokenize(self, message: Tokenize) -> tuple[str, list[int], list[bytes]]:
        """Text, ids and the bytes of each id."""
        check_rid(message.rid, self._limits)
        check_prompt(message.prompt, message.messages, self._limits)
        self._check_template(message.messages)
        text, ids = await self._encode(
            message.prompt, message.messages, message.chat, message.add_special_tokens
        )
        return text, ids, [self._codec.token_bytes(token) for token in ids]

    async def detokenize(self, message: Detokenize) -> str:
        check_rid(message.rid, self._limits)
        ids = message.token_ids
        check_tokens("token_ids", ids, min(self._vocab_size, self._codec.vocab_size))
        return await self._run(
            len(ids) >= LONG_TOKENS, lambda: self._codec.decode(ids, message.skip_special_tokens)
        )

    async def _encode(
        self,
        prompt: str | None,
        messages: list[ChatMessage] | None,
        options: ChatOptions,
        add_special_tokens: bool,
    ) -> tuple[str, list[int]]:
        def encode() -> tuple[str, list[int]]:
            if messages is None:
                assert prompt is not None, "checked: one of the two is there"
                return prompt, self._codec.encode(prompt, add_special_tokens)
            # A template writes the start token itself.
            text = self._codec.render(messages, options)
            return text, self._codec.encode(text, False)

        chars = len(prompt or "") + sum(len(m.content or "") for m in messages or ())
        return await self._run(chars >= LONG_CHARS, encode)

    async def _run(self, is_long: bool, work: Callable[[], T]) -> T:
        if is_long:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return work()

    def _check_found(self, ids: list[int]) -> None:
        """A tokenizer may be larger than the model, which then has no row for what it finds."""
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise InvalidRequest(
                f"the prompt has token {highest}, and the model's vocabulary ends at "
                f"{self._vocab_size - 1}; the engine's tokenizer (--tokenizer) is a larger model's",
                param="prompt",
            )

    def _check_template(self, messages: list[ChatMessage] | None) -> None:
        if messages is not None and not self._codec.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; send a prompt, or start the engine with one",
                param="messages",
            )


def _check_patterns(texts: list[str]) -> None:
    """Raises InvalidRequest for stop patterns that cannot be served, or cost too much together."""
    num_edges = 0
    for position, text in enumerate(texts):
        try:
            num_edges += StopPattern(text).num_edges
        except PatternFault as fault:
            raise InvalidRequest(f"stop_regex[{position}]: {fault}", param="stop_regex") from None
    if num_edges > MAX_EDGES:
        raise InvalidRequest(
            f"stop_regex: the patterns have {num_edges} connections, written out; at most {MAX_EDGES} "
            "are served",
            param="stop_regex",
        )


def _wrap_int64(number: int) -> int:
    return (number + 2**63) % INT64_SPAN - 2**63
