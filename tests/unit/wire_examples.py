"""One example and one hypothesis strategy for every message of every hop."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from srt.wire import messages as m
from srt.wire import params as p

HOPS: dict[str, object] = {
    "front_requests": m.FrontRequest,
    "front_replies": m.FrontReply,
    "work": m.WorkMessage,
    "step": m.StepMessage,
    "text": m.TextMessage,
}

PARAMS = p.SamplingParams(
    max_tokens=16,
    min_tokens=2,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    logit_bias={7: -100.0},
    seed=42,
    stop=["\n\n"],
    stop_token_ids=[2],
    ignore_eos=True,
    logprobs=1,
    prompt_logprobs=0,
)
LOGPROBS = p.TokenLogprobs(
    chosen=p.LogprobEntry(token=5, logprob=-0.5, bytes=b"\xf0\x9f"),
    top=[p.LogprobEntry(token=6, logprob=-1.0)],
)
FAILURE = p.Failure(code="queue_full", message="full", param="n", retry_after=1.5)
FINISH = p.Finish(
    reason="stop",
    matched="\n\n",
    usage=p.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
    timing=p.Timing(queue=0.25, prefill=0.5, decode=1.0, retractions=1),
    cache=p.CacheReport(matched_tokens=1, position=1, reason="diverged", ours=9, theirs=[8]),
)
TEXT = p.TextOptions(stop=["x"], min_tokens=1, include_stop=True, prompt_token_ids=[1, 2])
CHAT = p.ChatOptions(continue_final_message=True, template_kwargs={"tools": False, "depth": 2})
MESSAGES = [p.ChatMessage(role="user", content="héllo"), p.ChatMessage(role="assistant", name="a")]

EXAMPLES: dict[str, m.Message] = {
    "hello": m.Hello(rid="h", client="example"),
    "generate": m.Generate(rid="r1", prompt="Once", params=PARAMS, n=2, deadline=10.0),
    "generate_chat": m.Generate(rid="r2", messages=MESSAGES, chat=CHAT, stream=False, echo=True),
    "generate_ids": m.Generate(rid="r3", token_ids=[1, 2, 3], priority=-1, cache_salt="s"),
    "generate_grammar": m.Generate(
        rid="r4", prompt="a", params=p.SamplingParams(grammar=p.Grammar(kind="regex", text="a+"))
    ),
    "abort": m.Abort(rid="r1"),
    "abort_all": m.Abort(),
    "tokenize": m.Tokenize(rid="t", prompt="a", add_special_tokens=False),
    "detokenize": m.Detokenize(rid="d", token_ids=[1], skip_special_tokens=True),
    "ask": m.Ask(rid="q", topic="flush_cache", argument="1.5"),
    "welcome": m.Welcome(
        rid="h",
        version=1,
        model="m",
        context_length=2048,
        vocab_size=100,
        has_chat_template=True,
        engine_id="e",
        config_hash="c",
    ),
    "outputs": m.Outputs(
        items=[
            m.Output(
                rid="r1", accepted=True, prompt_tokens=3, prompt_text="Once", prompt_token_ids=[1]
            ),
            m.Output(rid="r1", index=1, text="a", token_ids=[5], logprobs=[LOGPROBS]),
            m.Output(rid="r1", prompt_logprobs=[None, LOGPROBS], finish=FINISH),
        ]
    ),
    "refused": m.Refused(rid="r1", failure=FAILURE),
    "tokenized": m.Tokenized(rid="t", token_ids=[1, 2], tokens=[b"a", b"\xff"], prompt="a"),
    "detokenized": m.Detokenized(rid="d", text="a"),
    "answer": m.Answer(rid="q", body={"a": [1, 2.5, None, True, "x"]}),
    "ping": m.Ping(engine_age=0.25),
    "work": m.Work(
        uid=1, rid="r1", token_ids=[1, 2], params=PARAMS, text=TEXT, index=1, leader=7, deadline=9.0
    ),
    "abort_work": m.AbortWork(uid=1, reason="stop", quiet=True),
    "command": m.Command(ticket=1, topic="metrics"),
    "turn": m.Turn(number=1),
    "drain": m.Drain(seconds=30.0),
    "tokens": m.Tokens(
        step=1, items=[m.TokenItem(uid=1, opened=TEXT, tokens=[5, 6], finish=FINISH)]
    ),
    "tokens_short": m.Tokens(step=2, uids=[1, 2], plain=[5, 7]),
    "texts_short": m.Texts(step=2, uids=[1, 2], plain=[5, 7], texts=["a", ""]),
    "reply": m.Reply(ticket=1, body={"freed": 3}),
    "reply_failure": m.Reply(ticket=2, failure=FAILURE),
    "texts": m.Texts(
        step=1,
        items=[m.TextItem(uid=1, opened=True, text="a", tokens=[5], finish=FINISH, stopped=True)],
    ),
}

_characters = st.characters(exclude_categories=["Cs"])
_leaves: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(_characters, max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    NoneType: st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may have."""
    if kind in _leaves:
        return _leaves[kind]
    if kind is Any:
        leaf = st.one_of(_leaves[int], _leaves[str], st.booleans(), st.none())
        return st.one_of(leaf, st.lists(leaf, max_size=2), st.dictionaries(_leaves[str], leaf))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=2)
    assert issubclass(kind, msgspec.Struct), kind
    fields = {field.name: values(field.type) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda given: kind(**given))
