"""A worker without a model: its greedy output is written down in `tandem_script.json`.

    {"tokens": ["Hello", {"bytes": [240, 159]}, ...],   ids from 256 on; 0..255 are the single bytes
     "end_token_ids": [..], "script": [ids of the output, by output position],
     "scripts": {"<prompt text>": [ids]},               optional, for this very prompt
     "context_length": 4096, "step_seconds": 0.0}

After its end a script goes on with the first end token. A token that is forbidden at its position
(by the grammar, by a logit_bias of -100 or less, or as a stop id before `min_tokens`) gives way to the
next permitted one of the script, then to the lowest permitted id. Sampling parameters change nothing
else. Logprobs are those of a model whose scripted token has logit 10 and every other one 0; over the
prompt all logits are 0. Where a slice may have guesses, it is answered as if there were so many and
all were right. Everything the scheduler hands over is checked as a real runner would rely on it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srt.protocols.forward_batch import (
    NOTHING_LEFT,
    ForwardBatch,
    RowSetup,
    Slice,
    SliceResult,
    StepResult,
    shorten,
)
from srt.protocols.worker import WorkerFacts
from srt.wire.params import LogprobEntry, TokenLogprobs

SCRIPT_FILE = "tandem_script.json"
NUM_BYTE_TOKENS = 256
PEAK = 10.0  # logit of the scripted token


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The file's contents. `pieces[i]` are the bytes of token 256 + i."""

    pieces: list[bytes]
    end_token_ids: list[int]
    script: list[int]
    scripts: dict[str, list[int]] = field(default_factory=dict)
    context_length: int = 4096
    step_seconds: float = 0.0

    @property
    def vocab_size(self) -> int:
        return NUM_BYTE_TOKENS + len(self.pieces)

    def text(self, tokens: list[int]) -> str:
        parts = [
            bytes([t]) if t < NUM_BYTE_TOKENS else self.pieces[t - NUM_BYTE_TOKENS] for t in tokens
        ]
        return b"".join(parts).decode("utf-8", "replace")


def load_script(path: Path) -> Script:
    """Reads the file, or the one of that name in a folder. Raises ValueError naming what is wrong."""
    file = path / SCRIPT_FILE if path.is_dir() else path
    data: dict[str, Any] = json.loads(file.read_text())
    pieces = [
        token.encode() if isinstance(token, str) else bytes(token["bytes"])
        for token in data.get("tokens", [])
    ]
    script = Script(
        pieces=pieces,
        end_token_ids=data["end_token_ids"],
        script=data.get("script", []),
        scripts=data.get("scripts", {}),
        context_length=data.get("context_length", 4096),
        step_seconds=data.get("step_seconds", 0.0),
    )
    outputs = [script.script, script.end_token_ids, *script.scripts.values()]
    bad = [t for ids in outputs for t in ids if not 0 <= t < script.vocab_size]
    if bad or not script.end_token_ids:
        raise ValueError(f"{file}: token ids {bad} of {script.vocab_size}, or no end_token_ids")
    return script


@dataclass(slots=True, kw_only=True)
class _Row:
    """What a runner keeps of a row."""

    setup: RowSetup
    tokens: list[int]
    script: list[int]


@dataclass(slots=True)
class ScriptedTicket:
    """A step that is ready at a point in time."""

    result: StepResult | None
    error: Exception | None
    ready: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def done(self) -> bool:
        return self.clock() >= self.ready

    def wait(self) -> StepResult:
        left = self.ready - self.clock()
        if left > 0:
            self.sleep(left)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class ScriptedWorker:
    """Keeps launch order and takes `step_seconds` a step, one after the other.

    For tests of failure: the step numbered `raise_at` raises when it is waited for, and `errors`
    ({(step, row): text}) fails single slices.
    """

    def __init__(
        self,
        script: Script,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        step_seconds: float | None = None,
        raise_at: int | None = None,
        errors: Mapping[tuple[int, int], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._script = script
        self._step_seconds = script.step_seconds if step_seconds is None else step_seconds
        self._raise_at = raise_at
        self._errors = dict(errors or {})
        self._clock = clock
        self._sleep = sleep
        self._rows: dict[int, _Row] = {}
        self._table: dict[int, list[int]] = {row: [] for row in range(max_rows)}
        self._ready = clock()
        self._facts = WorkerFacts(
            vocab_size=script.vocab_size,
            context_length=script.context_length,
            num_pages=num_pages,
            page_size=page_size,
            max_rows=max_rows,
            end_token_ids=list(script.end_token_ids),
            memory_bytes={"kv": 0, "weights": 0},
        )

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    def launch(self, batch: ForwardBatch) -> ScriptedTicket:
        self._ready = max(self._ready, self._clock()) + self._step_seconds
        error = RuntimeError("scripted failure") if batch.step == self._raise_at else None
        result = None if error else self._run(batch)
        return ScriptedTicket(result, error, self._ready, self._clock, self._sleep)

    def close(self) -> None:
        self._rows.clear()

    def _run(self, batch: ForwardBatch) -> StepResult:
        for setup in batch.setups:
            text = self._script.text(setup.tokens[: setup.prompt_len])
            script = self._script.scripts.get(text, self._script.script)
            self._rows[setup.row] = _Row(setup=setup, tokens=list(setup.tokens), script=script)
        for write in batch.table_writes:
            table = self._table[write.row]
            assert write.first <= len(table), "a page table has no holes"
            table[write.first :] = write.pages
        results = [self._compute(batch.step, piece) for piece in batch.slices]
        plain = shorten(batch.slices, results)
        return StepResult(
            slices=results[len(plain) :], plain=plain, forward_seconds=self._step_seconds
        )

    def _compute(self, step: int, piece: Slice) -> SliceResult:
        row = self._rows[piece.row]
        end = piece.start + piece.length
        given = row.tokens[-1:] if piece.tokens is None else piece.tokens
        assert given == row.tokens[piece.start : end], "the slice has other tokens than the row"
        assert piece.tokens is not None or end == len(row.tokens), "the relay holds the last token"
        assert end <= len(self._table[piece.row]) * self._facts.page_size, "no pages to write to"
        error = self._errors.get((step, piece.row))
        if error is not None:
            if piece.sample:  # the next slice of this row may be on its way already
                row.tokens.append(self._script.end_token_ids[0])
            return SliceResult(tokens=[], error=error)
        result = SliceResult(tokens=[])
        if piece.prompt_logprobs is not None:
            result.prompt_logprobs = [
                self._logprobs(None, target, piece.prompt_logprobs) for target in piece.targets
            ]
        if piece.sample:
            assert end == len(row.tokens), "only the last position is followed by a sample"
            room = len(self._table[piece.row]) * self._facts.page_size
            assert end + piece.draft <= room, "no pages for the guesses"
            result.num_drafted = result.num_deep = piece.draft
            for _ in range(1 + piece.draft):
                self._draw(row, piece.allowed, result)
        return result

    def _draw(self, row: _Row, allowed: bytes | None, result: SliceResult) -> None:
        favourite, chosen = self._choose(row, allowed)
        row.tokens.append(self._script.end_token_ids[0] if chosen is None else chosen)
        if chosen is None:
            result.error = NOTHING_LEFT
            return
        result.tokens.append(chosen)
        params = row.setup.params
        if params.logprobs is not None:
            if params.logprobs_mode == "processed":
                scores = _certain(chosen, params.logprobs)
            else:
                scores = self._logprobs(favourite, chosen, params.logprobs)
            result.logprobs = [*(result.logprobs or []), scores]

    def _choose(self, row: _Row, allowed: bytes | None) -> tuple[int, int | None]:
        """The token the model favours, and the one it may give, if there is any."""
        position = len(row.tokens) - row.setup.prompt_len
        params = row.setup.params
        banned = {token for token, bias in params.logit_bias.items() if bias <= -100}
        if position < params.min_tokens:
            banned.update(row.setup.stop_ids)
        wanted = [*row.script[position:], self._script.end_token_ids[0]]
        for token in (*wanted, *range(self._script.vocab_size)):
            if token in banned:
                continue
            if allowed is None or allowed[token // 8] >> token % 8 & 1:
                return wanted[0], token
        return wanted[0], None

    def _logprobs(self, favourite: int | None, token: int, num_top: int) -> TokenLogprobs:
        """Of a distribution with one peak, or none."""
        size = self._script.vocab_size
        norm = math.log(size if favourite is None else size - 1 + math.exp(PEAK))
        order = [] if favourite is None else [favourite]
        order += [t for t in range(min(num_top + 1, size)) if t != favourite]

        def entry(t: int) -> LogprobEntry:
            return LogprobEntry(token=t, logprob=(PEAK if t == favourite else 0.0) - norm)

        return TokenLogprobs(chosen=entry(token), top=[entry(t) for t in order[:num_top]])


def _certain(token: int, num_top: int) -> TokenLogprobs:
    """A script draws its token for sure; the others are the lowest ids."""
    others = [other for other in range(num_top + 1) if other != token]
    ranked = [LogprobEntry(token=token, logprob=0.0)]
    ranked += [LogprobEntry(token=other, logprob=-math.inf) for other in others]
    return TokenLogprobs(chosen=ranked[0], top=ranked[:num_top])
