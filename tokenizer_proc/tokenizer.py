"""The tokenizer process: the engine's front door and the only one that knows clients.

It checks and tokenizes what they ask, gives every sample its uid, sends it to the scheduler, and
brings the text back. It also watches: clients (with pings) and the three processes (with the ring).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine

from srt import errors as e
from srt.structured.service import Compiler
from srt.wire.channels import PeerGone, PeerSlow, Receiver, RouterEnd, Sender
from srt.wire.convert import to_failure
from srt.wire.limits import Limits
from srt.wire.messages import (
    Abort,
    AbortWork,
    Answer,
    Ask,
    Detokenize,
    Detokenized,
    Drain,
    FrontReply,
    FrontRequest,
    Generate,
    Hello,
    Output,
    Outputs,
    Ping,
    Refused,
    Reply,
    TextMessage,
    Texts,
    Tokenize,
    Tokenized,
    Turn,
)
from srt.wire.params import Finish, FinishReason
from tokenizer_proc.card import EngineCard
from tokenizer_proc.codec import Codec
from tokenizer_proc.intake import Intake
from tokenizer_proc.questions import Questions
from tokenizer_proc.replies import Replies
from tokenizer_proc.requests import LiveRequest, RequestTable
from tokenizer_proc.ring import Ring

TICK = 0.5  # seconds between pings
ASK_SECONDS = 10.0
logger = logging.getLogger(__name__)


class TokenizerService:
    """Runs in one event loop; owns its three channels only while it runs, the caller closes them.

    `tick` is the rhythm of pings and of every check below, in seconds. `compiler` None: no grammars.
    """

    def __init__(
        self,
        front: RouterEnd,
        work: Sender,
        text: Receiver[TextMessage],
        codec: Codec,
        limits: Limits,
        card: EngineCard,
        *,
        stall_seconds: float = 20.0,
        drain_seconds: float = 30.0,
        ask_seconds: float = ASK_SECONDS,
        seed: int = 0,
        tick: float = TICK,
        compiler: Compiler | None = None,
    ) -> None:
        self._front = front
        self._work = work
        self._text = text
        self._card = card
        self._has_template = codec.has_chat_template
        self._intake = Intake(
            codec,
            limits,
            vocab_size=card.vocab_size,
            context_length=card.context_length,
            seed=seed,
            compiler=compiler,
        )
        self._stall_seconds = stall_seconds
        self._drain_seconds = drain_seconds
        self._tick = tick
        self._replies = Replies(front)
        self._requests = RequestTable()
        self._questions = Questions(ask_seconds)
        self._ring = Ring(stall_seconds, tick, 0.0)
        self._jobs: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._cause: str | None = None  # of the engine's death, once that is known
        self.late_items = 0  # for uids that were over

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains: takes nothing new, returns when nothing is live or the drain
        time is over; whatever is open then ends with ShuttingDown."""
        self._ring = Ring(self._stall_seconds, self._tick, self._now())
        loops = [
            asyncio.create_task(loop, name=name)
            for name, loop in (
                ("front", self._read_front()),
                ("text", self._read_text()),
                ("beat", self._beat()),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *loops], return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                drain = asyncio.create_task(self._drain())
                await asyncio.wait([drain, *loops], return_when=asyncio.FIRST_COMPLETED)
                drain.cancel()
            for loop in loops:
                if loop.done():
                    loop.result()  # raises what broke it
        finally:
            self._end_all(e.ShuttingDown("the engine is shutting down"))
            self._refuse_questions(math.inf, e.ShuttingDown("the engine is shutting down"))
            tasks = [stopping, *loops, *self._jobs]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._intake.close()

    @property
    def phase(self) -> str:
        if self._is_draining:
            return "draining"
        if self._ring.is_stalled:
            return "stalled"
        return "ready" if self._ring.has_turned else "starting"

    def declare_dead(self, role: str) -> None:
        """Whoever watches the processes says that one of them died: everything open ends with
        EngineDead, and nothing new is taken."""
        logger.error("the %s process died", role)
        self._ring.cut()
        self._cause = f"the engine's {role} process died"
        self._end_all(self._dead())

    def hurry(self) -> None:
        """Cuts a drain short: what is open ends now."""
        self._end_all(e.ShuttingDown("the engine is shutting down"))

    # --- from the clients ----------------------------------------------------------------------

    async def _read_front(self) -> None:
        while True:
            for peer, message in await self._front.receive():
                try:
                    self._take(peer, message)
                except Exception as error:  # one client's message, never everybody's engine
                    self._refuse(peer, message.rid or "", error)

    def _take(self, peer: bytes, message: FrontRequest) -> None:
        """What may take long becomes a job. Jobs start in the order of their messages."""
        if isinstance(message, Abort):
            self._abort(peer, message.rid)
        elif isinstance(message, Generate):
            self._admit(peer, message)
        elif isinstance(message, Hello):
            self._reply(peer, self._card.greet(message, self._has_template))
        elif isinstance(message, Tokenize):
            self._start(self._guard(peer, message.rid, self._tokenize(peer, message)))
        elif isinstance(message, Detokenize):
            self._start(self._guard(peer, message.rid, self._detokenize(peer, message)))
        else:
            self._answer(peer, message)

    def _admit(self, peer: bytes, message: Generate) -> None:
        try:
            self._check_open()
            self._intake.check(message)
            request = self._requests.add(peer, message.rid, message.n)
        except e.TandemError as error:
            self._refuse(peer, message.rid, error)
            return
        self._start(self._generate(request, message))

    async def _generate(self, request: LiveRequest, message: Generate) -> None:
        """Anything may have happened to the request when its tokens are there: aborted, client gone,
        engine stalled. Then it is over and has had its end."""
        if request.is_over:
            return
        try:
            await self._intake.check_grammar(message.params.grammar)
            text, ids = await self._intake.read_prompt(message)
            self._intake.check_length(message, len(ids))
        except Exception as error:
            if not request.is_over:
                self._requests.close(request)
                self._refuse(request.peer, request.rid, error)
            return
        if request.is_over:
            return
        request.prompt_tokens = len(ids)
        if message.echo:
            request.prompt_text, request.prompt_token_ids = text, ids
        for work in self._intake.fan_out(message, ids, self._requests.send(request)):
            self._work.send(work)

    async def _tokenize(self, peer: bytes, message: Tokenize) -> None:
        prompt, ids, tokens = await self._intake.tokenize(message)
        self._reply(peer, Tokenized(rid=message.rid, token_ids=ids, tokens=tokens, prompt=prompt))

    async def _detokenize(self, peer: bytes, message: Detokenize) -> None:
        text = await self._intake.detokenize(message)
        self._reply(peer, Detokenized(rid=message.rid, text=text))

    def _answer(self, peer: bytes, ask: Ask) -> None:
        if ask.topic == "health":
            body: dict[str, object] = {
                "engine_age": self._ring.age,
                "phase": self.phase,
                "live": len(self._requests),
                "late_items": self.late_items,
            }
            if self._ring.is_stalled:
                body["cause"] = self._dead().message
            return self._reply(peer, Answer(rid=ask.rid, body=body))
        if self._ring.is_stalled:
            return self._refuse(peer, ask.rid, self._dead())
        try:
            self._work.send(self._questions.add(peer, ask, self._now()))
        except e.TandemError as error:
            self._refuse(peer, ask.rid, error)

    def _abort(self, peer: bytes, rid: str | None) -> None:
        """The scheduler ends what it has, with the true counts; what it has not, ends here."""
        if rid is None:
            requests = self._requests.of_peer(peer)
        else:
            found = self._requests.find(peer, rid)
            requests = [] if found is None else [found]
        for request in requests:
            if request.is_sent:
                for uid in request.open:
                    self._work.send(AbortWork(uid=uid))
            else:
                self._end(request, e.RequestAborted("aborted by the client"))

    # --- from the engine -----------------------------------------------------------------------

    async def _read_text(self) -> None:
        while True:
            for message in await self._text.receive():
                if isinstance(message, Texts):
                    self._route(message)
                elif isinstance(message, Turn):
                    self._ring.returned(message)
                else:
                    self._close_question(message)

    def _route(self, texts: Texts) -> None:
        outputs: dict[bytes, list[Output]] = {}
        for item in texts.items:
            request = self._requests.find_uid(item.uid)
            if request is None:
                self.late_items += 1
                continue
            outputs.setdefault(request.peer, []).append(
                request.output(request.open[item.uid], item)
            )
            if item.finish is not None:
                self._requests.close_sample(request, item.uid)
                if item.stopped:
                    self._work.send(AbortWork(uid=item.uid, reason="stop", quiet=True))
        self.late_items += self._requests.add_plain(texts, outputs)
        for peer, items in outputs.items():
            self._reply(peer, Outputs(items=items))

    def _close_question(self, reply: Reply) -> None:
        question = self._questions.close(reply.ticket)
        if question is None:
            return
        if reply.failure is not None:
            answer: FrontReply = Refused(rid=question.rid, failure=reply.failure)
        else:
            answer = Answer(rid=question.rid, body=reply.body)
        self._reply(question.peer, answer)

    # --- watching ------------------------------------------------------------------------------

    async def _beat(self) -> None:
        was_stalled = False
        while True:
            now = self._now()
            turn = self._ring.beat(now)
            if turn is not None:
                self._work.send(turn)
            if self._ring.is_stalled:
                if not was_stalled:
                    logger.error("the engine has not moved for %.1f s", self._ring.age)
                self._end_all(self._dead())
            elif was_stalled:
                logger.warning("the engine moves again")
            was_stalled = self._ring.is_stalled
            self._refuse_questions(now, e.EngineDead("the engine gave no answer in time"))
            for peer in self._requests.peers():
                self._reply(peer, Ping(engine_age=self._ring.age))
            self._replies.retry()
            await asyncio.sleep(self._tick)

    def _check_open(self) -> None:
        if self._is_draining:
            raise e.ShuttingDown("the engine is shutting down", retry_after=self._drain_seconds)
        if self._ring.is_stalled:
            raise self._dead()

    def _dead(self) -> e.EngineDead:
        return e.EngineDead(self._cause or f"the engine has not moved for {self._ring.age:.1f} s")

    def _refuse_questions(self, now: float, error: e.TandemError) -> None:
        for question in self._questions.expired(now):
            self._refuse(question.peer, question.rid, error)

    async def _drain(self) -> None:
        self._is_draining = True
        self._work.send(Drain(seconds=self._drain_seconds))
        logger.info("draining %d requests", len(self._requests))
        until = (
            self._now() + self._drain_seconds + 2 * self._tick
        )  # the scheduler's aborts come back
        while len(self._requests) and self._now() < until:
            await asyncio.sleep(min(0.05, self._tick))

    # --- ends and replies ----------------------------------------------------------------------

    def _end_all(self, error: e.TandemError) -> None:
        for request in self._requests:
            self._end(request, error)

    def _end(self, request: LiveRequest, error: e.TandemError) -> None:
        """The last word on a request from here. Whatever the engine says of it later is dropped."""
        reason: FinishReason = "abort" if isinstance(error, e.RequestAborted) else "error"
        ends = request.ends(Finish(reason=reason, failure=to_failure(error)))
        self._free(request)
        self._replies.owe(request.peer, Outputs(items=ends))

    def _free(self, request: LiveRequest) -> None:
        # Not quiet: the terminal item frees the detokenizer's state on its way, and is dropped here.
        for uid in self._requests.close(request):
            self._work.send(AbortWork(uid=uid))

    def _refuse(self, peer: bytes, rid: str, error: BaseException) -> None:
        if not isinstance(error, e.TandemError):
            logger.error("request %s: an error of ours", rid, exc_info=error)
        else:
            logger.debug("request %s refused: %s", rid, error.message)
        self._replies.owe(peer, Refused(rid=rid, failure=to_failure(error)))

    def _reply(self, peer: bytes, message: FrontReply) -> None:
        try:
            self._replies.send(peer, message)
        except PeerGone:
            for request in self._requests.of_peer(peer):
                logger.info("request %s: its client is gone", request.rid)
                self._free(request)
        except PeerSlow:
            self._cut(peer, message)

    def _cut(self, peer: bytes, unsent: FrontReply) -> None:
        """The client does not read. What ended in the unsent message ends all the same."""
        error = e.RequestAborted("the client did not read what it asked for")
        logger.warning("client %s does not read; its requests are aborted", peer.hex())
        if isinstance(unsent, Outputs):
            ends = [
                Output(rid=item.rid, index=item.index, finish=item.finish)
                for item in unsent.items
                if item.finish is not None
            ]
            if ends:
                self._replies.owe(peer, Outputs(items=ends))
        elif not isinstance(unsent, Ping):
            self._replies.owe(peer, unsent)
        for request in self._requests.of_peer(peer):
            self._end(request, error)

    async def _guard(self, peer: bytes, rid: str, job: Coroutine[None, None, None]) -> None:
        try:
            await job
        except Exception as error:
            self._refuse(peer, rid, error)

    def _start(self, job: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
