"""One sample's way from tokens to text: characters, special tokens, stop strings, logprobs.

What comes out, by definition:
- `tokens`: the ids as generated, the stop token or the tokens of a stop string included, nothing after
  them. Usage counts them all. They are sent at once, also while their text is held back.
- `text`: the decode of those tokens up to the stop. A stop token is not in it unless `include_stop`;
  special tokens are not in it if `skip_special_tokens`, a special stop token included.
- `logprobs`: one entry per token, in order, sent with the text that the token begins. The entry of a
  stop token, or of a token that begins inside a stop string, is left out unless `include_stop`: joining
  the bytes of the entries rebuilds the text (a token that begins before a stop string and ends in it
  keeps its whole bytes).
- A stop string may end the sample with a token that `min_tokens` others come before, as a stop token
  may: the same rule for both.
- What a stop string ends here has the scheduler's counts and times of the prompt; its tokens are
  counted here, and the seconds since the prompt was computed are measured here.
- A half character at the end of the prompt is completed by the tokens, if they do complete it.
- Without `detokenize` there is no text, and tokens and logprobs pass unchanged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from srt.wire.messages import TextItem, TokenItem
from srt.wire.params import Finish, LogprobEntry, TextOptions, TokenLogprobs
from tokenizer_proc.incremental import Utf8Stream
from tokenizer_proc.stop_patterns import StopPattern
from tokenizer_proc.stop_strings import StopMatcher, StopStrings


class TokenBytes(Protocol):
    """What detokenising needs of a vocabulary; every codec of `load_codec` has it."""

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class TextStream:
    """State of one live sample. A token costs the same however long the text is."""

    def __init__(
        self,
        options: TextOptions,
        vocabulary: TokenBytes,
        stops: StopStrings | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        patterns: Sequence[StopPattern] = (),
    ) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._utf8 = Utf8Stream()
        self._matcher: StopMatcher | None = None
        if stops is not None or patterns:
            self._matcher = StopMatcher(
                stops or StopStrings(()), patterns, include=options.include_stop
            )
        self._clock = clock
        self._begun = Finish(reason="stop")  # what the scheduler said when the prompt was computed
        self._begun_at = 0.0
        self._has_bytes = False
        self._num_tokens = 0
        self._num_decoded = 0  # characters that tokens made
        self._num_sent = 0  # of those, characters that may be sent
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()  # and where its token begins
        self._kept = TextItem(uid=0, tokens=[])  # without `stream`: all so far
        self._kept_text: list[str] = []

    @property
    def may_stop(self) -> bool:
        """Whether its text may end it."""
        return self._matcher is not None

    def take_token(self, token: int) -> str | None:
        """`take` for an item with one token and nothing else, of a stream that its text cannot end. The
        text that goes with the token; None if both are kept until the end."""
        text = self._push(token, None) if self._options.detokenize else ""
        if self._options.stream:
            return text
        self._kept_text.append(text)
        self._kept.tokens.append(token)
        return None

    def take(self, item: TokenItem) -> TextItem | None:
        """The next text; None if there is nothing to send yet. After an item with `finish` the sample
        is over and must not be fed again."""
        if item.usage is not None:
            self._begun_at = self._clock()
            self._begun = Finish(
                reason="stop", usage=item.usage, timing=item.timing, cache=item.cache
            )
        made = TextItem(uid=item.uid)
        if item.prompt_logprobs is not None:
            made.prompt_logprobs = [
                None if entry is None else self._with_bytes(entry) for entry in item.prompt_logprobs
            ]
        if self._options.detokenize:
            self._add_text(item, made)
        else:
            self._pass_tokens(item, made)
        if not self._options.stream:
            return self._keep(made)
        return made if _has_content(made) else None

    def _pass_tokens(self, item: TokenItem, made: TextItem) -> None:
        made.tokens = item.tokens
        if item.logprobs is not None:
            made.logprobs = [self._with_bytes(entry) for entry in item.logprobs]
        made.finish = item.finish

    def _add_text(self, item: TokenItem, made: TextItem) -> None:
        hides_last = self._ends_in_stop_token(item) and not self._options.include_stop
        num_shown = len(item.tokens) - hides_last
        logprobs, text = item.logprobs, []
        if logprobs is not None:
            made.logprobs = []
        for position, token in enumerate(item.tokens[:num_shown]):
            text.append(self._push(token, None if logprobs is None else logprobs[position]))
            if self._matcher is not None and self._matcher.matched is not None:
                made.text = "".join(text)
                made.tokens = item.tokens[: position + 1]
                self._release(made, everything=False)
                made.finish = self._stop_at(self._matcher.matched, item.finish)
                made.stopped = item.finish is None
                return
        self._num_tokens += hides_last
        made.tokens = item.tokens
        made.finish = item.finish
        if item.finish is not None:
            text.append(self._flush())
        made.text = "".join(text)
        self._release(made, everything=item.finish is not None)

    def _ends_in_stop_token(self, item: TokenItem) -> bool:
        finish = item.finish
        if finish is None or finish.reason != "stop" or not item.tokens:
            return False
        return finish.matched == item.tokens[-1]

    def _push(self, token: int, logprobs: TokenLogprobs | None) -> str:
        self._num_tokens += 1
        if logprobs is not None:
            self._waiting.append((self._num_decoded, self._with_bytes(logprobs)))
        if self._options.skip_special_tokens and self._vocabulary.is_special(token):
            return ""
        data = self._vocabulary.token_bytes(token)
        if not self._has_bytes and data:
            self._has_bytes = True
            if 0x80 <= data[0] < 0xC0:  # a byte that no character begins with
                self._push_prompt()
        piece = self._utf8.push(data)
        self._num_decoded += len(piece)
        if self._matcher is not None:
            piece = self._matcher.push(piece, self._num_tokens > self._options.min_tokens)
        self._num_sent += len(piece)
        return piece

    def _push_prompt(self) -> None:
        """Leaves the decoder in the middle of the character that the prompt ends in, if it does."""
        read, specials = self._vocabulary.token_bytes, self._vocabulary.is_special
        ids = self._options.prompt_token_ids
        self._utf8.push(b"".join(read(token) for token in ids if not specials(token)))

    def _flush(self) -> str:
        """Held text, then a half character as U+FFFD; too late for either to be a stop string."""
        held = self._matcher.flush() if self._matcher is not None else ""
        return held + self._utf8.flush()

    def _release(self, made: TextItem, *, everything: bool) -> None:
        """Moves the logprobs whose text is out; drops the others if a stop string took it."""
        waiting = self._waiting
        if not waiting:
            return
        is_stopped = self._matcher is not None and self._matcher.matched is not None
        if not is_stopped and self._num_sent == self._num_decoded and self._utf8.is_clean:
            everything = True
        released = made.logprobs or []
        while waiting and (everything or waiting[0][0] < self._num_sent):
            released.append(waiting.popleft()[1])
        made.logprobs = released

    def _stop_at(self, matched: str, finish: Finish | None) -> Finish:
        """The terminal record; the scheduler's own one, if it came in the same item, knows more."""
        known = finish or self._end_now()
        usage = replace(known.usage, completion_tokens=self._num_tokens)
        return replace(known, reason="stop", matched=matched, failure=None, usage=usage)

    def _end_now(self) -> Finish:
        timing = self._begun.timing
        if timing is None:
            return self._begun
        decode = timing.decode + self._clock() - self._begun_at
        return replace(self._begun, timing=replace(timing, decode=decode))

    def _with_bytes(self, entry: TokenLogprobs) -> TokenLogprobs:
        read = self._vocabulary.token_bytes
        chosen, *top = (
            LogprobEntry(token=one.token, logprob=one.logprob, bytes=read(one.token))
            for one in (entry.chosen, *entry.top)
        )
        return TokenLogprobs(chosen=chosen, top=top)

    def _keep(self, made: TextItem) -> TextItem | None:
        """Without `stream`: gathers, and gives all of it with the end."""
        kept = self._kept
        self._kept_text.append(made.text)
        kept.tokens.extend(made.tokens)
        if made.logprobs is not None:
            kept.logprobs = kept.logprobs or []
            kept.logprobs.extend(made.logprobs)
        if made.prompt_logprobs is not None:
            kept.prompt_logprobs = made.prompt_logprobs
        if made.finish is None:
            return None
        kept.uid, kept.text = made.uid, "".join(self._kept_text)
        kept.finish, kept.stopped = made.finish, made.stopped
        return kept


def _has_content(item: TextItem) -> bool:
    return bool(
        item.text or item.tokens or item.logprobs or item.prompt_logprobs or item.finish is not None
    )
