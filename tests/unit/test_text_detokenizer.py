"""The detokenizer service, fed by hand and over memory channels."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_fakes import Box, prompt, work

from srt.wire import codec as wire
from srt.wire.memory import memory_pipe
from srt.wire.messages import Reply, TextItem, TextMessage, Texts, TokenItem, Tokens, Turn
from srt.wire.params import (
    CacheReport,
    Finish,
    LogprobEntry,
    TextOptions,
    Timing,
    TokenLogprobs,
    Usage,
)
from tokenizer_proc.detokenizer import DetokenizerService
from tokenizer_proc.script_vocab import ScriptCodec
from tokenizer_proc.stop_strings import StopStrings
from tokenizer_proc.text_stream import TextStream

EOS = "<eos>"
COMPASS = list("\U0001f9ed".encode())


class Discard:
    def send(self, message: object) -> None: ...

    def close(self) -> None: ...


def rig(*tokens: str) -> tuple[DetokenizerService, list[int]]:
    """A service whose vocabulary is bytes, `<eos>` (id 256) and `tokens`; and the ids of these."""
    codec = ScriptCodec([EOS.encode(), *(t.encode() for t in tokens)], [256], None)
    _, step = memory_pipe(wire.step())
    return DetokenizerService(step, Discard(), codec), list(range(257, 257 + len(tokens)))


def logprob(token: int) -> TokenLogprobs:
    entry = LogprobEntry(token=token, logprob=-1.0)
    return TokenLogprobs(chosen=entry, top=[entry])


def feed(
    service: DetokenizerService,
    ids: list[int],
    options: TextOptions,
    finish: Finish | None = None,
    per_step: int = 1,
    with_logprobs: bool = True,
    is_short: bool = False,
) -> list[TextItem]:
    """All items of one sample: opened, `ids` in steps, `finish` with the last ones. `is_short`: single
    tokens come in short form."""
    items = [TokenItem(uid=1, opened=options)]
    for at in range(0, len(ids), per_step):
        some = ids[at : at + per_step]
        items.append(TokenItem(uid=1, tokens=some))
        if with_logprobs:
            items[-1].logprobs = [logprob(t) for t in some]
        if at == 0:
            items[-1].usage = Usage(prompt_tokens=7, cached_tokens=4)
    if finish is not None:
        items[-1].finish = finish
    made: list[TextItem] = []
    for number, item in enumerate(items):
        if is_short and item == TokenItem(uid=1, tokens=item.tokens[:1]) and item.tokens:
            message = Tokens(step=number, uids=[1], plain=item.tokens)
        else:
            message = Tokens(step=number, items=[item])
        out = service.translate(message)
        if out is not None:
            made += all_items(out)
    return made


def all_items(message: TextMessage) -> list[TextItem]:
    """Those in short form too."""
    assert isinstance(message, Texts)
    short = zip(message.uids, message.plain, message.texts, strict=True)
    return message.items + [TextItem(uid=u, tokens=[t], text=text) for u, t, text in short]


def text_of(made: list[TextItem]) -> str:
    return "".join(item.text for item in made)


def end_of(made: list[TextItem]) -> Finish:
    ends = [item.finish for item in made if item.finish is not None]
    assert len(ends) == 1 and made[-1].finish is ends[0]
    return ends[0]


def bytes_of(made: list[TextItem]) -> bytes:
    return b"".join(entry.chosen.bytes for item in made for entry in item.logprobs or [])


LENGTH = Finish(reason="length", usage=Usage(prompt_tokens=7, completion_tokens=99))


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_never_leaks(stream: bool) -> None:
    service, ids = rig("go", " <", "<E", "ND>", ">more", "after")
    made = feed(service, ids, TextOptions(stop=["<<END>>"], stream=stream))
    assert made[0].opened
    assert text_of(made) == "go "
    finish = end_of(made)
    assert (finish.reason, finish.matched) == ("stop", "<<END>>")
    assert finish.usage == Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
    assert made[-1].stopped
    assert [t for item in made for t in item.tokens] == ids[:5]
    assert bytes_of(made) == b"go <"  # the token that begins before the stop string is whole
    assert service.num_live == 0 and service.unknown_items == 0  # "after" came too late, quietly


@pytest.mark.parametrize("stream", [True, False])
def test_a_near_miss_is_text(stream: bool) -> None:
    service, ids = rig("go", " <", "<E", "NT>")
    made = feed(service, ids, TextOptions(stop=["<<END>>"], stream=stream), LENGTH)
    assert text_of(made) == "go <<ENT>"
    assert bytes_of(made) == b"go <<ENT>"
    assert end_of(made) == LENGTH and not made[-1].stopped


def test_a_beginning_of_a_stop_at_the_end_comes_out() -> None:
    service, ids = rig("go", " <<E")
    made = feed(service, ids, TextOptions(stop=["<<END>>"]), LENGTH)
    assert text_of(made) == "go <<E" and bytes_of(made) == b"go <<E"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_at_the_last_allowed_token_is_a_stop(stream: bool) -> None:
    service, ids = rig("go", "<<", "END>>")
    made = feed(service, ids, TextOptions(stop=["<<END>>"], stream=stream), LENGTH)
    finish = end_of(made)
    assert (text_of(made), finish.reason, finish.matched) == ("go", "stop", "<<END>>")
    assert finish.usage.completion_tokens == 3 and finish.usage.prompt_tokens == 7
    assert not made[-1].stopped  # the scheduler has ended it already


@pytest.mark.parametrize("script", [["a\n", "\n", "b"], ["a", "\n\n"], ["a\n\nb"]])
@pytest.mark.parametrize("per_step", [1, 5])
def test_a_double_newline_stops_wherever_it_is_cut(script: list[str], per_step: int) -> None:
    service, ids = rig(*script)
    made = feed(service, ids, TextOptions(stop=["\n\n"]), LENGTH, per_step)
    assert text_of(made) == "a" and end_of(made).reason == "stop"


def test_an_emoji_stop_split_over_byte_tokens() -> None:
    service, ids = rig("hi")
    made = feed(service, [*ids, *COMPASS, *ids], TextOptions(stop=["\U0001f9ed"]))
    assert text_of(made) == "hi" and end_of(made).usage.completion_tokens == 5
    assert bytes_of(made) == b"hi"


@pytest.mark.parametrize("stop", [[], ["zz"], ["\U0001f9ed!"]])
@pytest.mark.parametrize("reason", ["length", "abort"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_half_a_character_is_one_mark_in_both_modes(
    count: int, reason: str, stop: list[str]
) -> None:
    finish = Finish(reason=reason)  # type: ignore[arg-type]
    texts = set()
    for stream in (True, False):
        service, _ = rig()
        made = feed(service, COMPASS[:count], TextOptions(stop=stop, stream=stream), finish)
        texts.add(text_of(made))
        assert all("\ufffd" not in item.text for item in made[:-1])
        assert bytes_of(made) == bytes(COMPASS[:count])
    assert texts == {"\U0001f9ed" if count == 4 else "\ufffd"}


@pytest.mark.parametrize(("least", "ends_at"), [(0, 2), (1, 2), (2, 4), (3, 4), (4, None)])
def test_min_tokens_and_stop_strings(least: int, ends_at: int | None) -> None:
    """As with stop tokens: `min_tokens` others come before the token that ends the request."""
    service, ids = rig("a", "\n", "b", "c")
    a, newline, b, c = ids
    finish = Finish(reason="stop", matched=256)
    options = TextOptions(stop=["\n"], min_tokens=least)
    made = feed(service, [a, newline, b, newline, c, 256], options, finish)
    assert text_of(made) == {2: "a", 4: "a\nb", None: "a\nb\nc"}[ends_at]
    assert end_of(made).matched == ("\n" if ends_at else 256)
    if ends_at:
        assert end_of(made).usage.completion_tokens == ends_at


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_stop_token(include: bool, skip: bool) -> None:
    """Its id is always there; its text with include_stop, unless special tokens are skipped; its
    logprobs with include_stop."""
    service, ids = rig("a")
    finish = Finish(reason="stop", matched=256, usage=Usage(completion_tokens=2))
    options = TextOptions(include_stop=include, skip_special_tokens=skip)
    made = feed(service, [*ids, 256], options, finish)
    assert text_of(made) == ("a<eos>" if include and not skip else "a")
    assert [t for item in made for t in item.tokens] == [*ids, 256]
    assert bytes_of(made) == (b"a<eos>" if include else b"a")
    assert end_of(made) == finish


def test_an_ordinary_stop_id_and_an_included_stop_string() -> None:
    service, (a, bang) = rig("a", "!")
    assert (
        text_of(feed(service, [a, bang], TextOptions(), Finish(reason="stop", matched=bang))) == "a"
    )
    options = TextOptions(stop=["a!"], include_stop=True)
    service, (a, bang, more) = rig("a", "!?", "more")
    made = feed(service, [a, bang, more], options)
    assert text_of(made) == "a!" and bytes_of(made) == b"a!?"


def test_special_tokens_in_the_middle() -> None:
    service, (a,) = rig("a")
    ids = [a, 256, a]  # ignore_eos
    assert text_of(feed(service, ids, TextOptions(), LENGTH)) == "aa"
    service, _ = rig("a")
    options = TextOptions(skip_special_tokens=False)
    assert text_of(feed(service, ids, options, LENGTH)) == "a<eos>a"


def test_without_detokenizing_ids_and_logprobs_pass() -> None:
    service, ids = rig("a")
    finish = Finish(reason="stop", matched=256)
    made = feed(service, [*ids, 256], TextOptions(detokenize=False), finish)
    assert text_of(made) == "" and bytes_of(made) == b"a<eos>"
    assert [t for item in made for t in item.tokens] == [*ids, 256]


def test_prompt_logprobs_get_bytes_and_only_the_end_comes_without_stream() -> None:
    service, ids = rig("a", "b")
    service.translate(Tokens(step=0, items=[TokenItem(uid=1, opened=TextOptions(stream=False))]))
    first = TokenItem(uid=1, prompt_logprobs=[None, logprob(ids[0])], tokens=ids)
    assert service.translate(Tokens(step=1, items=[first])) is None
    last = service.translate(Tokens(step=2, items=[TokenItem(uid=1, finish=LENGTH)]))
    assert last is not None
    (item,) = last.items
    assert item.text == "ab" and item.prompt_logprobs is not None
    assert item.prompt_logprobs[0] is None and item.prompt_logprobs[1].chosen.bytes == b"a"


@pytest.mark.parametrize(
    ("before", "ids", "text"),
    [
        ([65, *COMPASS[:3]], COMPASS[3:], "\U0001f9ed"),
        ([65, *COMPASS[:2], 256], COMPASS[2:], "\U0001f9ed"),  # special tokens are no text
        ([65, *COMPASS[:2]], [66], "B"),  # the prompt's own loss is not the answer's
        ([65, *COMPASS[:2]], [], ""),
        ([65], COMPASS[3:], "\ufffd"),
        ([*COMPASS], [66, COMPASS[3]], "B\ufffd"),
    ],
)
def test_half_a_character_at_the_end_of_the_prompt(
    before: list[int], ids: list[int], text: str
) -> None:
    service, _ = rig()
    assert text_of(feed(service, ids, TextOptions(prompt_token_ids=before), LENGTH)) == text


def test_a_stop_string_knows_what_the_scheduler_knew() -> None:
    """Counts, times and cache report of the prompt; the tokens and seconds since are its own."""
    now = [10.0]
    codec = ScriptCodec([], [], None)
    stream = TextStream(TextOptions(stop=["c"]), codec, StopStrings(["c"]), lambda: now[0])
    cache = CacheReport(matched_tokens=4, position=4, reason="diverged")
    for since, decode, retractions in ((10.0, 0.0, 0), (20.0, 6.0, 1)):  # the second: retracted
        now[0] = since
        stream.take(
            TokenItem(
                uid=1,
                tokens=[97],
                usage=Usage(prompt_tokens=7, cached_tokens=4),
                timing=Timing(queue=1.0, prefill=2.0, decode=decode, retractions=retractions),
                cache=cache,
            )
        )
    now[0] = 21.5
    last = stream.take(TokenItem(uid=1, tokens=[98, 99, 100]))
    assert last is not None and last.stopped
    assert last.finish == Finish(
        reason="stop",
        matched="c",
        usage=Usage(prompt_tokens=7, completion_tokens=4, cached_tokens=4),
        timing=Timing(queue=1.0, prefill=2.0, decode=7.5, retractions=1),
        cache=cache,
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_string_over_a_real_scheduler(depth: int) -> None:
    """The scheduler's own end of the same request says the same of its prompt."""
    box = Box(depth=depth)
    box.run(work(1, prompt(3, 21), 12))
    usage = box.finish(1).usage
    service = DetokenizerService(memory_pipe(wire.step())[1], Discard(), ScriptCodec([], [], None))
    made: list[TextItem] = []
    tokens = box.tokens(1)
    stop = bytes(tokens[5:7]).decode()  # tokens of this worker are ASCII
    for number, item in enumerate(box.items[1]):
        if item.opened is not None:
            item.opened = TextOptions(stop=[stop])
        out = service.translate(Tokens(step=number, items=[item]))
        made += out.items if out is not None else []
    finish = end_of(made)
    assert finish.matched == stop
    assert text_of(made) + stop == bytes(tokens[: finish.usage.completion_tokens]).decode()
    assert finish.usage.prompt_tokens == usage.prompt_tokens == 21
    assert finish.usage.cached_tokens == usage.cached_tokens
    assert finish.cache == box.finish(1).cache and finish.cache is not None
    assert finish.timing is not None and finish.timing.queue == box.finish(1).timing.queue


@given(
    st.lists(st.integers(0, 259), max_size=30),
    st.integers(1, 5),
    st.lists(st.sampled_from(["ab", "b", "\U0001f9ed", "<e", "aba"]), max_size=3),
    st.booleans(),
)
def test_streamed_equals_gathered_equals_one_shot(
    ids: list[int], per_step: int, stop: list[str], skip: bool
) -> None:
    results = []
    for stream, steps in ((True, 1), (True, per_step), (False, per_step)):
        service, _ = rig("a", "ab", "\U0001f9ed")
        options = TextOptions(stop=stop, stream=stream, skip_special_tokens=skip)
        made = feed(service, ids, options, LENGTH, steps)
        finish = end_of(made)
        tokens = [t for item in made for t in item.tokens]
        results.append((text_of(made), finish.matched, tokens, bytes_of(made)))
    assert results[0] == results[1] == results[2]
    if results[0][1] is None:
        codec = ScriptCodec([EOS.encode(), b"a", b"ab", "\U0001f9ed".encode()], [256], None)
        assert results[0][0] == codec.decode(ids, skip)


@given(
    st.lists(st.integers(0, 259), max_size=30),
    st.sampled_from([[], ["ab", "\U0001f9ed"]]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_short_form_means_the_same(
    ids: list[int], stop: list[str], skip: bool, stream: bool, detokenize: bool
) -> None:
    options = TextOptions(stop=stop, stream=stream, skip_special_tokens=skip, detokenize=detokenize)
    results = []
    for is_short in (False, True):
        service, _ = rig("a", "ab", "\U0001f9ed")
        results.append(feed(service, ids, options, LENGTH, 1, False, is_short))
        assert service.num_live == service.unknown_items == 0
    assert results[0] == results[1]


def test_faults_in_short_form(caplog: pytest.LogCaptureFixture) -> None:
    service, (a,) = rig("a")
    opened = [TokenItem(uid=uid, opened=TextOptions()) for uid in (1, 2)]
    service.translate(Tokens(step=0, items=opened))
    broken = Tokens(step=1, uids=[1, 9, 2], plain=[None, a, a])  # type: ignore[list-item]
    made = service.translate(broken)
    assert made is not None
    first, second = all_items(made)
    assert first.finish is not None and first.finish.reason == "error" and first.stopped
    assert second == TextItem(uid=2, tokens=[a], text="a")
    assert service.unknown_items == 1 and "uid 9" in caplog.text and "uid 1" in caplog.text
    assert service.translate(Tokens(step=2, uids=[1], plain=[a])) is None
    assert service.unknown_items == 1 and service.num_live == 1


def test_unknown_uids(caplog: pytest.LogCaptureFixture) -> None:
    service, ids = rig("a")
    with caplog.at_level(logging.ERROR):
        assert service.translate(Tokens(step=0, items=[TokenItem(uid=9, tokens=ids)])) is None
    assert service.unknown_items == 1 and "uid 9" in caplog.text
    refusal = service.translate(Tokens(step=1, items=[TokenItem(uid=9, finish=LENGTH)]))
    assert refusal is not None and refusal.items == [TextItem(uid=9, finish=LENGTH)]
    opened = TokenItem(uid=9, opened=TextOptions(), tokens=ids)
    service.translate(Tokens(step=2, items=[opened]))
    with caplog.at_level(logging.ERROR):
        again = service.translate(Tokens(step=3, items=[opened]))
    assert "opened twice" in caplog.text and again is not None
    service.translate(Tokens(step=4, items=[TokenItem(uid=9, finish=LENGTH)]))
    assert service.num_live == 0
    lost = TokenItem(uid=8, tokens=ids, finish=LENGTH)  # somebody may wait for its end
    answer = service.translate(Tokens(step=5, items=[lost]))
    assert answer is not None and answer.items == [TextItem(uid=8, finish=LENGTH)]
    assert service.unknown_items == 2


def test_an_error_of_ours_ends_one_sample_only(caplog: pytest.LogCaptureFixture) -> None:
    service, (a,) = rig("a")
    opened = [TokenItem(uid=uid, opened=TextOptions()) for uid in (1, 2)]
    service.translate(Tokens(step=0, items=opened))
    broken = TokenItem(uid=1, tokens=[a, a], logprobs=[logprob(a)])  # one is missing
    made = service.translate(Tokens(step=1, items=[broken, TokenItem(uid=2, tokens=[a])]))
    assert made is not None
    first, second = made.items
    assert first.finish is not None and first.finish.failure is not None and first.stopped
    assert (first.finish.reason, first.finish.failure.code) == ("error", "internal")
    assert second.text == "a" and service.num_live == 1
    assert "uid 1" in caplog.text
    assert service.translate(Tokens(step=2, items=[TokenItem(uid=1, tokens=[a])])) is None
    assert service.unknown_items == 0


async def test_over_channels_in_order_until_told_to_stop() -> None:
    step_out, step_in = memory_pipe(wire.step())
    text_out, text_in = memory_pipe(wire.text())
    service = DetokenizerService(step_in, text_out, ScriptCodec([b"hi"], [], None))
    stop = asyncio.Event()
    task = asyncio.create_task(service.run(stop))
    step_out.send(Turn(number=4))
    step_out.send(Tokens(step=1, items=[TokenItem(uid=1, opened=TextOptions(), tokens=[256])]))
    step_out.send(Reply(ticket=2, body={"a": 1}))
    got = []
    while len(got) < 3:
        got += await text_in.receive()
    assert got[0] == Turn(number=4) and got[2] == Reply(ticket=2, body={"a": 1})
    assert got[1].items == [TextItem(uid=1, opened=True, text="hi", tokens=[256])]
    stop.set()
    await asyncio.wait_for(task, 5)
    step_in.close()
    await asyncio.wait_for(service.run(asyncio.Event()), 5)  # a closed channel is an end too


async def test_an_error_of_the_channel_is_not_swallowed() -> None:
    class Broken:
        async def receive(self) -> list[Turn]:
            raise RuntimeError("broken")

        def close(self) -> None: ...

    service = DetokenizerService(Broken(), Discard(), ScriptCodec([], [], None))
    with pytest.raises(RuntimeError, match="broken"):
        await service.run(asyncio.Event())
