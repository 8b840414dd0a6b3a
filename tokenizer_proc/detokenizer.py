"""The detokenizer process: token deltas in, text deltas out, one live state per sample."""

from __future__ import annotations

import asyncio
import functools
import logging

from srt.wire.channels import ChannelClosed, Receiver, Sender
from srt.wire.convert import to_failure
from srt.wire.messages import StepMessage, TextItem, TextMessage, Texts, TokenItem, Tokens
from srt.wire.params import Finish
from tokenizer_proc.stop_patterns import StopPattern
from tokenizer_proc.stop_strings import StopStrings
from tokenizer_proc.text_stream import TextStream, TokenBytes

logger = logging.getLogger(__name__)

_NUM_STOP_SETS = 64  # compiled sets of stop strings that are remembered: requests repeat them
_NUM_STOPPED = 16_384  # samples ended here that the scheduler may still be working on


class DetokenizerService:
    """Owns the text state of every live sample, from `opened` to `finish`.

    A sample that a stop string ends here gets its terminal item (`stopped`) and is forgotten; what
    the scheduler still sends for it is dropped. A lone `finish` of an unknown uid is a refusal. Tokens
    of an unknown uid are an error of the engine, logged and counted. A `finish` passes in any case:
    somebody may wait for it.
    """

    def __init__(self, step: Receiver[StepMessage], text: Sender, vocabulary: TokenBytes) -> None:
        self._step = step
        self._text = text
        self._vocabulary = vocabulary
        self._live: dict[int, TextStream] = {}
        self._stopped: dict[int, None] = {}  # oldest first
        self._compile = functools.lru_cache(_NUM_STOP_SETS)(StopStrings)
        self._compile_pattern = functools.lru_cache(_NUM_STOP_SETS)(StopPattern)
        self.unknown_items = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set or the receiving channel is closed."""
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
        finally:
            serving.cancel()
            stopping.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)

    async def _serve(self) -> None:
        try:
            while True:
                for message in await self._step.receive():
                    answer = self.translate(message)
                    if answer is not None:
                        self._text.send(answer)
        except ChannelClosed:
            return

    def translate(self, message: StepMessage) -> TextMessage | None:
        """What goes on for `message`, in order: `Reply` and `Turn` as they are, `Tokens` as `Texts`;
        None if nothing of it can be sent yet."""
        if not isinstance(message, Tokens):
            return message
        made = Texts(step=message.step)
        for item in message.items:
            self._add(made, item)
        self._add_plain(made, message)
        return made if made.items or made.uids else None

    def _add(self, made: Texts, item: TokenItem) -> None:
        text = self._take(item)
        if text is not None:
            made.items.append(text)

    def _add_plain(self, made: Texts, message: Tokens) -> None:
        """The short form goes on in short form, but for streams that their text may end."""
        uids, plain, texts = made.uids, made.plain, made.texts
        for uid, token in zip(message.uids, message.plain, strict=True):
            stream = self._live.get(uid)
            if stream is None or stream.may_stop:
                self._add(made, TokenItem(uid=uid, tokens=[token]))
                continue
            try:
                text = stream.take_token(token)
            except Exception as error:
                made.items.append(self._fail(uid, error))
                self._forget(uid)
                continue
            if text is not None:
                uids.append(uid)
                plain.append(token)
                texts.append(text)

    def _take(self, item: TokenItem) -> TextItem | None:
        if item.opened is not None:
            self._open(item)
        stream = self._live.get(item.uid)
        if stream is None:
            return self._take_unknown(item)
        made = self._advance(stream, item)
        if item.opened is not None:
            made = made or TextItem(uid=item.uid)
            made.opened = True
        if made is not None and made.finish is not None:
            if made.stopped:
                self._forget(item.uid)
            else:
                del self._live[item.uid]
        return made

    def _advance(self, stream: TextStream, item: TokenItem) -> TextItem | None:
        try:
            return stream.take(item)
        except Exception as error:
            made = self._fail(item.uid, error)
            made.stopped = item.finish is None
            return made

    def _fail(self, uid: int, error: Exception) -> TextItem:
        """An error of ours ends this sample, never everybody's engine."""
        logger.error("uid %d: its text could not be made", uid, exc_info=error)
        finish = Finish(reason="error", failure=to_failure(error))
        return TextItem(uid=uid, finish=finish, stopped=True)

    def _open(self, item: TokenItem) -> None:
        options = item.opened
        assert options is not None
        if item.uid in self._live:
            logger.error("uid %d was opened twice; the first one goes on", item.uid)
            return
        stops = self._compile(tuple(options.stop)) if options.stop else None
        patterns = [self._compile_pattern(text) for text in options.stop_regex]
        self._live[item.uid] = TextStream(options, self._vocabulary, stops, patterns=patterns)

    def _forget(self, uid: int) -> None:
        """It was ended here, and the scheduler does not know that yet."""
        del self._live[uid]
        self._stopped[uid] = None
        if len(self._stopped) > _NUM_STOPPED:
            del self._stopped[next(iter(self._stopped))]

    def _take_unknown(self, item: TokenItem) -> TextItem | None:
        if item.uid in self._stopped:
            if item.finish is not None:
                del self._stopped[item.uid]
            return None
        if item.tokens or item.finish is None:
            self.unknown_items += 1
            logger.error("an item came for uid %d, which is not live; it is dropped", item.uid)
        return None if item.finish is None else TextItem(uid=item.uid, finish=item.finish)
