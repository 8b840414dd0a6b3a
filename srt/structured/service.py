"""Grammars compiled away from whoever waits for them: in the tokenizer process to refuse what cannot be
served, in the scheduler's to follow what was accepted."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from typing import Generic, TypeVar

from llguidance import LLTokenizer

from srt.errors import InternalError, TandemError
from srt.protocols.grammar import Opened
from srt.structured.compile import compile_grammar
from srt.structured.matcher import LazyMatcher
from srt.structured.tokens import LoadTokens, build_tokenizer
from srt.wire.params import Grammar

VERDICTS = 1024  # grammars whose verdict is remembered
STARTS = 16  # grammars whose automata are kept for the next request that has the same
logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """The last few values, by key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)


class Compiler:
    """One thread that compiles. The vocabulary is read there too, when the first grammar comes: who
    never sends one does not pay for it. Everything below is touched by that thread only."""

    def __init__(self, load: LoadTokens, name: str) -> None:
        self._load = load
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._tokenizer: LLTokenizer | None = None
        self._verdicts: _Recent[bytes, TandemError | bool] = _Recent(VERDICTS)
        self._starts: _Recent[bytes, LazyMatcher] = _Recent(STARTS)

    def check(self, grammar: Grammar) -> Future[None]:
        """Done when the grammar is known to be good; its exception is InvalidSchema if it is not."""
        return self._thread.submit(self._check, grammar)

    def start(self, grammar: Grammar) -> Future[tuple[LazyMatcher, bytes]]:
        """A matcher of its own, and its first mask."""
        return self._thread.submit(self._start, grammar)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, grammar: Grammar) -> None:
        key = _digest(grammar)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = True
            try:
                compile_grammar(grammar, self._vocabulary())
            except TandemError as error:
                verdict = error
            self._verdicts.put(key, verdict)
        if isinstance(verdict, TandemError):
            raise type(verdict)(verdict.message, param=verdict.param)

    def _start(self, grammar: Grammar) -> tuple[LazyMatcher, bytes]:
        key = _digest(grammar)
        first = self._starts.get(key)
        if first is None:
            first = compile_grammar(grammar, self._vocabulary())
            self._starts.put(key, first)
        matcher = first.copy()
        return matcher, matcher.mask()

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            began = time.perf_counter()
            self._tokenizer = build_tokenizer(self._load())
            logger.info("the first grammar: vocabulary read in %.2f s", time.perf_counter() - began)
        return self._tokenizer


def _digest(grammar: Grammar) -> bytes:
    return blake2b(f"{grammar.kind} {grammar.text}".encode(), digest_size=16).digest()


class ThreadedGrammars:
    """The scheduler's `Grammars`."""

    def __init__(self, load: LoadTokens) -> None:
        self._compiler = Compiler(load, "grammar")
        self._asked: dict[int, Future[tuple[LazyMatcher, bytes]]] = {}
        self._live: dict[int, LazyMatcher] = {}

    def open(self, uid: int, grammar: Grammar) -> None:
        self._asked[uid] = self._compiler.start(grammar)

    def ready(self, seconds: float) -> list[Opened]:
        if self._asked and seconds > 0:
            wait(self._asked.values(), seconds, FIRST_COMPLETED)
        done = [(uid, future) for uid, future in self._asked.items() if future.done()]
        for uid, _ in done:
            del self._asked[uid]
        return [self._opened(uid, future.result) for uid, future in done]

    def _opened(self, uid: int, result: Callable[[], tuple[LazyMatcher, bytes]]) -> Opened:
        try:
            matcher, mask = result()
        except TandemError as error:
            return Opened(uid=uid, error=error)
        except Exception:
            logger.exception("uid %d: its grammar could not be compiled", uid)
            return Opened(uid=uid, error=InternalError("the grammar could not be compiled"))
        self._live[uid] = matcher
        return Opened(uid=uid, mask=mask)

    def follow(self, uid: int, tokens: list[int]) -> bytes | None:
        matcher = self._live[uid]
        for token in tokens:
            matcher.accept(token)
        return None if matcher.is_finished else matcher.mask()

    def forget(self, uid: int) -> None:
        self._live.pop(uid, None)
        future = self._asked.pop(uid, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        self._compiler.close()
