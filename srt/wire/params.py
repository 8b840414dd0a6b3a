"""What a request may ask for, as it travels. Plain data: no torch, no zmq, no engine state.

Every struct here is a msgpack map whose keys are the field names. A field left at its default may
be omitted; an unknown field is an error.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Bytes = bytes  # a field of that name hides the type where annotations are read
FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]
LogprobsMode = Literal["raw", "processed"]


class Record(
    msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, frozen=True
):
    """Base of every untagged value on the wire."""


class Grammar(Record, frozen=True):
    """What the output must look like.

    `text`: of "json_schema" the schema; of "regex" the pattern, which must match the whole output; of
    "choice" a JSON list of strings, one of which is the output; of "lark" a grammar in llguidance's
    dialect of Lark; of "json_object" nothing.
    """

    kind: GrammarKind
    text: str = ""

    @property
    def field(self) -> str:
        """The request field it is asked with, for errors."""
        match self.kind:
            case "json_object" | "json_schema":
                return "response_format"
            case "lark":
                return "grammar"
        return self.kind


class SamplingParams(Record, frozen=True):
    """How the next tokens are chosen and when to stop. Checked by `srt.wire.limits.check`.

    The order of the rules is fixed: grammar, logit_bias and bans, penalties, temperature, top_k,
    top_p, min_p, draw. `temperature == 0` is greedy: the arg max after all that comes before it.
    No bias lifts a token that the grammar forbids; if bans take away the last one that it permits,
    the request ends in an error. A request whose grammar permits nothing further has finished
    ("stop"), whatever `min_tokens` and `ignore_eos` say.
    """

    max_tokens: int | None = None  # None: up to the context length; 0: score the prompt only
    min_tokens: int = 0  # end tokens, stop ids and stop strings cannot end it before that
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: the tokenizer process draws one, so every request has one
    stop: list[str] = []
    stop_regex: list[str] = []  # patterns; the syntax is that of `tokenizer_proc.patterns`
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    grammar: Grammar | None = None
    logprobs: int | None = None  # None: off; k: the chosen token and the k most likely ones
    logprobs_mode: LogprobsMode = "raw"  # see `TokenLogprobs`; prompt_logprobs are always raw
    prompt_logprobs: int | None = None  # same, for every prompt token but the first


class TextOptions(Record, frozen=True):
    """What the detokenizer must know of a request."""

    stop: list[str] = []
    stop_regex: list[str] = []
    min_tokens: int = 0
    include_stop: bool = False  # leave the matched stop string, or stop token, in the text
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: token ids only, no text is made
    stream: bool = True  # False: everything comes with the terminal item
    prompt_token_ids: list[int] = []  # context for the first piece of text; the last few ids


class ChatMessage(Record, frozen=True):
    """One turn, in the shape chat templates read. `content` None is allowed for assistants."""

    role: str
    content: str | None = None
    name: str | None = None


class ChatOptions(Record, frozen=True):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, str | int | float | bool | None] = {}


class LogprobEntry(Record, frozen=True):
    """One token and the natural logarithm of its probability. `bytes` is filled by the
    detokenizer; joining them rebuilds the text, half characters included."""

    token: int
    logprob: float
    bytes: Bytes = b""


class TokenLogprobs(Record, frozen=True):
    """The chosen (or given) token and the most likely ones at that position, best first.

    "raw" values are log-softmax of the target's raw logits, before grammar, bias, penalties and
    temperature. "processed" ones are of the distribution that the token was drawn from: log-softmax
    after all of these, temperature and truncation included, so a token that could not be drawn has
    minus infinity. A greedy request has neither temperature nor truncation: its values are those of
    the logits whose arg max it took.
    """

    chosen: LogprobEntry
    top: list[LogprobEntry] = []


class Failure(Record, frozen=True):
    """An error as it travels: `code` is a leaf of `srt.errors`."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None


class Usage(Record, frozen=True):
    """Tokens, counted by the engine. 0 <= cached_tokens <= prompt_tokens. `drafted_tokens` were guessed
    by speculation and verified; the `accepted_tokens` of these were right."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Timing(Record, frozen=True):
    """Seconds, measured in the scheduler on its monotonic clock."""

    queue: float = 0.0  # arrival to first admission
    prefill: float = 0.0  # first admission to first token
    decode: float = 0.0  # first token to last token
    retractions: int = 0


class CacheReport(Record, frozen=True):
    """Where the prefix match ended and why.

    `reason`: disabled, empty (no cached prompt under this salt), diverged, end_of_cache (the cached
    prompt went no further), end_of_prompt, page_rounding (less than a page is left), prompt_logprobs.
    `position` is the first prompt token that had to be computed, a page boundary; the token at the
    point of divergence may stand up to a page later.
    """

    matched_tokens: int = 0
    position: int = 0
    reason: str = "empty"
    ours: int | None = None  # the prompt's token at the point of divergence
    theirs: list[int] = []  # the cached tokens that stood there instead


class Finish(Record, frozen=True):
    """The end of one sample of one request. Exactly one is sent for each."""

    reason: FinishReason
    matched: str | int | None = None  # the stop string, pattern or token id
    failure: Failure | None = None  # set when reason is "error" or "abort"
    usage: Usage = Usage()
    timing: Timing | None = None
    cache: CacheReport | None = None
