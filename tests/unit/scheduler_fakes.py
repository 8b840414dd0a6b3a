"""A scheduler in a box: a worker whose tokens depend on every KV slot it reads, a clock, an outbox."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from srt.protocols.forward_batch import ForwardBatch, SliceResult, StepResult, shorten
from srt.protocols.worker import WorkerFacts
from srt.scheduler.budget import Settings
from srt.scheduler.build import build_scheduler
from srt.wire.codec import encode, step
from srt.wire.messages import Message, Reply, TokenItem, Tokens, Turn, Work
from srt.wire.params import LogprobEntry, SamplingParams, TextOptions, TokenLogprobs

END = 7


def scored(token: int, position: int) -> TokenLogprobs:
    """A prompt logprob that says where it was computed."""
    return TokenLogprobs(chosen=LogprobEntry(token=token, logprob=float(-position)))


class HashTicket:
    def __init__(self, result: StepResult | None) -> None:
        self.result = result

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        if self.result is None:
            raise RuntimeError("the step failed")
        return self.result


class HashWorker:
    """Stores each token in its KV slot and draws the next one from a hash of all the slots it reads back
    through the page table. A page that is wrong, stale or owned by another changes the output."""

    is_short = True  # two of three steps come in short form, as far as that goes

    def __init__(
        self, *, num_pages: int = 64, page_size: int = 4, max_rows: int = 8, vocab: int = 64,
        context: int = 512, raise_at: int = -1, errors: dict[tuple[int, int], str] | None = None,
        token_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.facts = WorkerFacts(
            vocab_size=vocab, context_length=context, num_pages=num_pages, page_size=page_size,
            max_rows=max_rows, end_token_ids=[END], memory_bytes={"kv": 1},
        )  # fmt: skip
        self.kv = [-1] * (num_pages * page_size)
        self.table: dict[int, dict[int, int]] = {row: {} for row in range(max_rows)}
        self.last: dict[int, int] = {}
        self.setup: dict[int, Any] = {}
        self.batches: list[ForwardBatch] = []
        self.raise_at = raise_at
        self.errors = errors or {}
        self.token_seconds = token_seconds

    def launch(self, batch: ForwardBatch) -> HashTicket:
        self.batches.append(batch)
        if batch.step == self.raise_at:
            return HashTicket(None)
        for setup in batch.setups:
            self.setup[setup.row] = setup
            self.last.pop(setup.row, None)
            self.table[setup.row] = {}
        for write in batch.table_writes:
            for i, page in enumerate(write.pages):
                self.table[write.row][write.first + i] = page
        kinds = [piece.tokens is None for piece in batch.slices]
        assert kinds == sorted(kinds, reverse=True), "decode slices come first"
        rows = [piece.row for piece in batch.slices]
        assert len(set(rows)) == len(rows), "one slice a row"
        for piece in batch.slices:  # a layer's K and V are written for all before anything is read
            tokens = [self.last[piece.row]] if piece.tokens is None else piece.tokens
            assert len(tokens) == piece.length
            for i, token in enumerate(tokens):
                self.kv[self._slot(piece.row, piece.start + i)] = token
            for i in range(piece.draft):  # guesses, and what a wrong one leaves behind
                self.kv[self._slot(piece.row, piece.start + 1 + i)] = -99
        results = [self._result(batch.step, piece) for piece in batch.slices]
        plain = shorten(batch.slices, results) if self.is_short and batch.step % 3 else []
        return HashTicket(
            StepResult(
                slices=results[len(plain) :],
                plain=plain,
                forward_seconds=self.token_seconds * sum(piece.length for piece in batch.slices),
            )
        )

    def _slot(self, row: int, position: int) -> int:
        size = self.facts.page_size
        page = self.table[row][position // size]
        assert page > 0
        return page * size + position % size

    def _result(self, step_number: int, piece: Any) -> SliceResult:
        if (error := self.errors.get((step_number, piece.row))) is not None:
            self.last[piece.row] = 0  # the overlap loop may have launched the next slice
            return SliceResult(tokens=[], error=error)
        end = piece.start + piece.length
        read = [self.kv[self._slot(piece.row, p)] for p in range(end)]
        result = SliceResult(tokens=[])
        if piece.prompt_logprobs is not None:
            result.prompt_logprobs = [
                scored(t, piece.start + i) for i, t in enumerate(piece.targets)
            ]
        if piece.sample:
            setup = self.setup[piece.row]
            seed = setup.params.seed or 0
            position = end - setup.prompt_len
            result.num_drafted = crc32(b"%d %d" % (step_number, piece.row)) % (piece.draft + 1)
            num_right = crc32(b"%d" % step_number) % (result.num_drafted + 1)
            for place in range(num_right + 1):
                token = self.choose(read, seed, position + place, setup)
                while piece.allowed is not None and not piece.allowed[token // 8] >> token % 8 & 1:
                    token = (token + 1) % self.facts.vocab_size
                result.tokens.append(token)
                if place < num_right:  # the guess was this very token
                    self.kv[self._slot(piece.row, end + place)] = token
                    read.append(token)
            self.last[piece.row] = result.tokens[-1]
        return result

    def choose(self, read: list[int], seed: int, position: int, setup: Any) -> int:
        token = crc32(repr((read, seed, position)).encode()) % self.facts.vocab_size
        if position < setup.params.min_tokens:
            while token in setup.stop_ids:
                token = (token + 1) % self.facts.vocab_size
        return token

    def close(self) -> None:
        self.kv.clear()


class Box:
    """Runs a scheduler by hand and checks after every turn what must always hold."""

    def __init__(
        self, worker: Any = None, clock_step: float = 0.001, grammars: Any = None, **settings: Any
    ) -> None:
        self.worker = worker or HashWorker()
        merged: dict[str, Any] = {
            "max_running": 8, "max_step_tokens": 64, "chunked_prefill_size": 16, **settings,
        }  # fmt: skip
        self.settings = Settings(**merged)
        self.now = 0.0
        self.clock_step = clock_step
        self.items: dict[int, list[TokenItem]] = {}
        self.replies: dict[int, Reply] = {}
        self.turns: list[int] = []
        self.steps = 0
        self.decoder = step()
        self.scheduler = build_scheduler(
            self.worker, self.settings, self, self.clock, self.config, grammars=grammars
        )

    def clock(self) -> float:
        self.now += self.clock_step
        return self.now

    def config(self) -> dict[str, Any]:
        return {"policy": self.settings.policy}

    def send(self, message: Message) -> None:
        message = self.decoder.decode(encode(message))  # it must survive the wire
        if isinstance(message, Tokens):
            for item in message.all_items():
                earlier = self.items.setdefault(item.uid, [])
                assert not earlier or earlier[-1].finish is None, (
                    f"{item.uid} goes on after its end"
                )
                earlier.append(item)
        elif isinstance(message, Reply):
            assert message.ticket not in self.replies
            self.replies[message.ticket] = message
        elif isinstance(message, Turn):
            self.turns.append(message.number)

    def close(self) -> None:
        pass

    def turn(self, *messages: Any) -> bool:
        more = self.scheduler.turn(list(messages))
        assert self.scheduler.audit() == []
        self.steps += 1
        return more

    def run(self, *messages: Any, limit: int = 5000) -> None:
        more = self.turn(*messages)
        while more:
            more = self.turn()
            limit -= 1
            assert limit, "the scheduler does not come to an end"

    def tokens(self, uid: int) -> list[int]:
        return [token for item in self.items[uid] for token in item.tokens]

    def finish(self, uid: int) -> Any:
        ends = [item.finish for item in self.items[uid] if item.finish is not None]
        assert len(ends) == 1, f"{uid} has {len(ends)} ends"
        return ends[0]

    def ask(self, topic: Any, argument: str = "", ticket: int = 1) -> Any:
        from srt.wire.messages import Command

        self.replies.pop(ticket, None)
        self.turn(Command(ticket=ticket, topic=topic, argument=argument))
        return self.replies[ticket]

    def state(self, uid: int) -> dict[str, Any]:
        reply = self.ask("request", str(uid), ticket=999)
        assert reply.failure is None
        return reply.body["requests"][0]


def work(uid: int, prompt: list[int], max_tokens: int | None = 8, **more: Any) -> Work:
    """`more`: fields of Work, and of SamplingParams where Work has none."""
    fields = {k: more.pop(k) for k in list(more) if k in Work.__struct_fields__}
    params = {"max_tokens": max_tokens, "seed": 1, "ignore_eos": True, **more}
    return Work(
        uid=uid, rid=f"r{uid}", token_ids=prompt, text=TextOptions(),
        params=SamplingParams(**params), **fields,
    )  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    return [crc32(f"{seed},{i}".encode()) % 60 for i in range(length)]
