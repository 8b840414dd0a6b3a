"""Grammars compiled away from whoever waits for them: in the tokenizer process to refuse what cannot be
served, in the scheduler's to follow what was accepted."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from hashlib import blake2b

from llguidance import LLTokenizer

from srt.errors import InternalError, TandemError
from srt.protocols.grammar import Opened
from srt.structured.compile import compile_grammar
from srt.structured.matcher import LazyMatcher
from srt.structured.tokens import LoadTokens, build_tokenizer
from srt.wire.params import Grammar

VERDICTS = 1024  # grammars whose verdict is remembered
logger = logging.getLogger(__name__)


class Compiler:
    """One thread that compiles. The vocabulary is read there too, at the latest when the first grammar
    comes. Compiling lets other threads run; reading the vocabulary does not (0.2 s for 50,000 tokens,
    0.8 s for 150,000), so a process that has time while it starts calls `warm`. Everything below is
    touched by the one thread only."""

    def __init__(self, load: LoadTokens, name: str) -> None:
        self._load = load
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._tokenizer: LLTokenizer | None = None
        self._verdicts: OrderedDict[bytes, TandemError | None] = OrderedDict()

    def warm(self) -> None:
        """Reads the vocabulary now. Returns at once; an error shows with the first grammar."""
        self._thread.submit(self._vocabulary)

    def check(self, grammar: Grammar) -> Future[None]:
        """Done when the grammar is known to be good; its exception is InvalidSchema if it is not."""
        return self._thread.submit(self._check, grammar)

    def start(self, grammar: Grammar) -> Future[tuple[LazyMatcher, bytes]]:
        """A matcher of its own, and its first mask."""
        return self._thread.submit(self._start, grammar)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, grammar: Grammar) -> None:
        key = blake2b(f"{grammar.kind} {grammar.text}".encode(), digest_size=16).digest()
        if key not in self._verdicts:
            verdict: TandemError | None = None
            try:
                compile_grammar(grammar, self._vocabulary())
            except TandemError as error:
                verdict = error
            self._verdicts[key] = verdict
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        found = self._verdicts[key]
        if found is not None:
            raise type(found)(found.message, param=found.param)

    def _start(self, grammar: Grammar) -> tuple[LazyMatcher, bytes]:
        """Compiled anew for every request: copies would share their automata and the limit on these,
        so one request could use up what the next one needs."""
        matcher = compile_grammar(grammar, self._vocabulary())
        return matcher, matcher.mask()

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            began = time.perf_counter()
            self._tokenizer = build_tokenizer(self._load())
            logger.info("vocabulary for grammars read in %.2f s", time.perf_counter() - began)
        return self._tokenizer


class ThreadedGrammars:
    """The scheduler's `Grammars`."""

    def __init__(self, load: LoadTokens) -> None:
        self._compiler = Compiler(load, "grammar")
        self._asked: dict[int, Future[tuple[LazyMatcher, bytes]]] = {}
        self._live: dict[int, LazyMatcher] = {}

    def warm(self) -> None:
        """See `Compiler.warm`."""
        self._compiler.warm()

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

    def peek(self, uid: int, tokens: list[int]) -> bytes | None:
        matcher = self._live.get(uid)
        if matcher is None:
            return None
        num_taken = 0
        try:
            for token in tokens:
                matcher.accept(token)
                num_taken += 1
            return None if matcher.is_finished else matcher.mask()
        except TandemError:
            return None  # the same awaits `follow`, which tells the user
        finally:
            matcher.rollback(num_taken)

    def forget(self, uid: int) -> None:
        self._live.pop(uid, None)
        future = self._asked.pop(uid, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        self._compiler.close()
