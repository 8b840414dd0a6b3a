"""The message vocabulary, sorted by hop. Closed, typed, versioned.

    client  ==FRONT==>  tokenizer  --WORK-->  scheduler  --STEP-->  detokenizer  --TEXT-->  tokenizer
            <==========             (the way back)

A message is one frame: the version byte, then a msgpack map. The map's key `t` names the message;
the other keys are its fields. An unknown tag, field or version is a `ProtocolError`. Who binds,
socket types and high-water marks: `srt.wire.topology`. Encoding: `srt.wire.codec`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from srt.wire.params import (
    CacheReport,
    ChatMessage,
    ChatOptions,
    Failure,
    Finish,
    SamplingParams,
    TextOptions,
    Timing,
    TokenLogprobs,
    Usage,
)

VERSION = 1

Topic = Literal[
    "audit", "config", "flush_cache", "health", "metrics", "profile", "request", "requests"
]


class Message(
    msgspec.Struct, tag_field="t", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Base of everything that travels on a socket."""


class Item(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Base of the parts of a batch message."""


# --- FRONT, client to tokenizer ------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """First message of every client. Answered by `Welcome` or, on a version mismatch, `Refused`."""

    rid: str
    version: int = VERSION
    client: str = ""  # free text for the log


class Generate(Message, tag="generate"):
    """Ask for tokens. Exactly one of `prompt`, `token_ids`, `messages` is set.

    `rid` is the client's own name for the request, unique among its live ones. Answered by
    `Outputs` items: one `accepted`, then text and tokens, then one `finish` for each of the
    `params`' `n` samples; or by one `Refused`.
    """

    rid: str
    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    chat: ChatOptions = ChatOptions()
    params: SamplingParams = SamplingParams()
    n: int = 1
    stream: bool = True
    detokenize: bool = True
    include_stop: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True  # put the model's start token before a text prompt
    echo: bool = False  # the accepted item carries the prompt's text and ids
    priority: int = 0  # larger goes first under the priority policy
    deadline: float | None = None  # seconds from arrival; past it the request ends in `timeout`
    cache_salt: str = ""  # requests share cached prefixes only with the same salt
    tenant: str = ""  # whose share it counts against
    is_probe: bool = False  # a check of health: in no count or time of the users' requests


class Abort(Message, tag="abort"):
    """End a live request of this client; `rid` None ends all of them. Idempotent. Every sample still
    open gets its terminal item with reason "abort"."""

    rid: str | None = None


class Tokenize(Message, tag="tokenize"):
    """Text or messages in, `Tokenized` out. The ids equal those `Generate` would use."""

    rid: str
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat: ChatOptions = ChatOptions()
    add_special_tokens: bool = True


class Detokenize(Message, tag="detokenize"):
    """Ids in, `Detokenized` out; an unknown id is refused."""

    rid: str
    token_ids: list[int]
    skip_special_tokens: bool = False


class Ask(Message, tag="ask"):
    """A question to the engine; answered by `Answer` or `Refused`. `argument`: a request id for
    "request", seconds to wait for "flush_cache". "health" is answered by the tokenizer itself, the
    others by the scheduler."""

    rid: str
    topic: Topic
    argument: str = ""


# --- FRONT, tokenizer to client ------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """Facts a client needs before its first request."""

    rid: str
    version: int
    model: str
    context_length: int
    vocab_size: int
    has_chat_template: bool
    engine_id: str  # changes with every start
    config_hash: str


class Output(Item):
    """What one step gave one sample of one request. The first item of a request has `accepted`, the
    last one of each sample has `finish`."""

    rid: str
    index: int = 0
    accepted: bool = False  # admitted to the queue: prompt_tokens is known
    prompt_tokens: int = 0
    prompt_text: str | None = None  # with echo
    prompt_token_ids: list[int] | None = None  # with echo
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per prompt token, first None
    finish: Finish | None = None


class Outputs(Message, tag="outputs"):
    """All items that one step made for one client."""

    items: list[Output]


class Refused(Message, tag="refused"):
    """The terminal answer to anything that was not accepted."""

    rid: str
    failure: Failure


class Tokenized(Message, tag="tokenized"):
    """`tokens` is as long as `token_ids`."""

    rid: str
    token_ids: list[int]
    tokens: list[bytes]  # the bytes of each token
    prompt: str  # the text that was tokenized, template applied


class Detokenized(Message, tag="detokenized"):
    """All ids decoded at once; bytes that are no UTF-8 became U+FFFD."""

    rid: str
    text: str


class Answer(Message, tag="answer"):
    """To an `Ask`; what is in `body` depends on the topic."""

    rid: str
    body: dict[str, Any]


class Ping(Message, tag="ping"):
    """Tokenizer to a client with open requests, about twice a second. A client need not answer: an
    unroutable ping tells the tokenizer that the client is gone. A client that hears nothing for the
    stall limit knows that the tokenizer is."""

    engine_age: float  # seconds since the ring below was last seen to turn


# --- WORK, tokenizer to scheduler ----------------------------------------------------------------


class Work(Message, tag="work"):
    """One sample of one request, checked and tokenized. `uid` is unique in this engine's life."""

    uid: int
    rid: str  # for logs and `/requests`
    token_ids: list[int]
    params: SamplingParams  # seed is set
    text: TextOptions
    index: int = 0
    leader: int | None = None  # uid of sample 0: wait for its prefill, then share it
    priority: int = 0
    deadline: float | None = None  # seconds from arrival
    cache_salt: str = ""
    tenant: str = ""
    is_probe: bool = False  # see `Generate`


class AbortWork(Message, tag="abort_work"):
    """`quiet`: the request already has its terminal item (a stop string matched); free it."""

    uid: int
    reason: str = "client"
    quiet: bool = False


class Command(Message, tag="command"):
    """A question that only the scheduler can answer. Comes back as `Reply` over STEP and TEXT."""

    ticket: int
    topic: Topic
    argument: str = ""


class Turn(Message, tag="turn"):
    """The heartbeat. It travels WORK, STEP, TEXT, so its return proves that all three processes and
    their sockets are alive."""

    number: int


class Drain(Message, tag="drain"):
    """Take nothing new; end what runs within `seconds`, then abort the rest."""

    seconds: float


# --- STEP, scheduler to detokenizer --------------------------------------------------------------


class TokenItem(Item, gc=False):
    """What one step gave one uid. `opened` comes first and once, `finish` last and once. A stop token
    and the `finish` it causes share an item. `usage`, `timing` and `cache` come when the prompt is
    computed, for the terminal item that a stop string may need later; again after a retraction."""

    uid: int
    opened: TextOptions | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    cache: CacheReport | None = None
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None


class Tokens(Message, tag="tokens"):
    """All that one step gave. Most uids get one token and nothing else, so these have a short form:
    `uids[i]` got `plain[i]`. No uid is in it twice, nor in `items` too."""

    step: int
    items: list[TokenItem] = []
    uids: list[int] = []
    plain: list[int] = []

    def all_items(self) -> list[TokenItem]:
        """The same, with an item for each uid."""
        pairs = zip(self.uids, self.plain, strict=True)
        return self.items + [TokenItem(uid=uid, tokens=[token]) for uid, token in pairs]


class Reply(Message, tag="reply"):
    """To the `Command` with this ticket: `body`, or `failure` if it is refused."""

    ticket: int
    body: dict[str, Any] = {}
    failure: Failure | None = None


# --- TEXT, detokenizer to tokenizer --------------------------------------------------------------


class TextItem(Item, gc=False):
    """`TokenItem` with text. `stopped`: the detokenizer ended it (a stop string), so the scheduler must
    be told."""

    uid: int
    opened: bool = False
    text: str = ""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None
    stopped: bool = False


class Texts(Message, tag="texts"):
    """What became of one step's `Tokens`. It has the same short form: `uids[i]` got the token
    `plain[i]`, and with it `texts[i]`, which may be empty."""

    step: int
    items: list[TextItem] = []
    uids: list[int] = []
    plain: list[int] = []
    texts: list[str] = []


FrontRequest = Hello | Generate | Abort | Tokenize | Detokenize | Ask
FrontReply = Welcome | Outputs | Refused | Tokenized | Detokenized | Answer | Ping
WorkMessage = Work | AbortWork | Command | Turn | Drain
StepMessage = Tokens | Reply | Turn
TextMessage = Texts | Reply | Turn
