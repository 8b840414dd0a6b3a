"""The tokenizer service: routing, names, samples, aborts and ends."""

from __future__ import annotations

import asyncio

import pytest
from service_rig import ToyCodec, make_rig, until

from srt import errors
from srt.client import ChatMessage, SamplingParams
from srt.wire.convert import to_failure
from srt.wire.limits import Limits
from srt.wire.messages import Abort, Generate, Hello, Outputs, Refused, Work
from tokenizer_proc.intake import Intake


async def test_a_request_becomes_checked_work_and_comes_back() -> None:
    async with make_rig() as rig, await rig.client() as client:
        answer = await client.generate("hi", SamplingParams(stop=["x"]), cache_salt="s")
        [work] = rig.engine.works()
        assert work.token_ids == [1, ord("h"), ord("i")]
        assert work.params.max_tokens == 64 - 3
        assert work.params.seed is not None
        assert work.deadline == 600.0
        assert (work.leader, work.index, work.cache_salt) == (None, 0, "s")
        assert (work.text.stop, work.text.prompt_token_ids) == (["x"], work.token_ids)
        assert not work.text.stream
        assert (answer.text, answer.prompt_tokens) == ("ab", 3)
        assert answer.usage.prompt_tokens == 3


async def test_welcome_and_version() -> None:
    async with make_rig() as rig, await rig.client() as client:
        assert client.welcome.engine_id == "life-1"
        assert client.welcome.has_chat_template
        raw = rig.router.connect()
        raw.send(Hello(rid="h", version=9))
        [reply] = await raw.receive()
        assert isinstance(reply, Refused)
        assert (reply.rid, reply.failure.code) == ("h", "protocol_error")


async def test_samples_share_a_leader_and_have_seeds_in_a_row() -> None:
    async with make_rig() as rig, await rig.client() as client:
        answer = await client.generate("hi", SamplingParams(seed=2**63 - 2), n=3)
        works = rig.engine.works()
        assert [work.index for work in works] == [0, 1, 2]
        assert [work.leader for work in works] == [None, works[0].uid, works[0].uid]
        assert [work.params.seed for work in works] == [2**63 - 2, 2**63 - 1, -(2**63)]
        assert len({work.uid for work in works}) == 3
        assert [sample.text for sample in answer.samples] == ["ab"] * 3
        assert answer.usage.prompt_tokens == 3, "the prompt counts once"
        assert answer.usage.completion_tokens == 6
        assert answer.usage.cached_tokens == 1


async def test_one_message_per_client_and_step() -> None:
    async with make_rig() as rig:
        rig.engine.auto = None
        one, two = rig.router.connect(), rig.router.connect()
        one.send(Generate(rid="a", prompt="x"))
        one.send(Generate(rid="b", prompt="x"))
        two.send(Generate(rid="a", prompt="x"))
        await until(lambda: len(rig.engine.open) == 3)
        rig.engine.say(*(rig.engine.item(uid, "t", opened=True) for uid in rig.engine.open))
        for peer, rids in ((one, ["a", "b"]), (two, ["a"])):
            outputs: list[Outputs] = []
            while not outputs:  # a ping may come first
                outputs = [m for m in await peer.receive() if isinstance(m, Outputs)]
            [message] = outputs
            assert [item.rid for item in message.items] == rids
            assert all(item.accepted and item.prompt_tokens == 2 for item in message.items)


async def test_a_second_request_of_a_live_name_is_refused_and_hurts_nobody() -> None:
    async with make_rig() as rig:
        rig.engine.auto = None
        peer, other = rig.router.connect(), rig.router.connect()
        peer.send(Generate(rid="dup", prompt="one"))
        peer.send(Generate(rid="dup", prompt="two"))
        other.send(Generate(rid="dup", prompt="three"))
        await until(lambda: len(rig.engine.open) == 2)
        [refused] = [m for m in await peer.receive() if isinstance(m, Refused)]
        assert (refused.rid, refused.failure.code) == ("dup", "duplicate_request")
        assert [bytes(work.token_ids[1:]) for work in rig.engine.works()] == [b"one", b"three"]
        uid = rig.engine.works()[0].uid
        rig.engine.say(rig.engine.end(uid, "stop", "fine"))
        items = [i for m in await peer.receive() if isinstance(m, Outputs) for i in m.items]
        assert [item.text for item in items] == ["fine"]
        peer.send(Generate(rid="dup", prompt="again"))
        await until(lambda: len(rig.engine.works()) == 3)


async def test_abort_ends_every_sample_with_the_engines_counts() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = None
        pending = asyncio.create_task(client.generate("hi", n=3, rid="r"))
        await until(lambda: len(rig.engine.open) == 3)
        await client.abort("r")
        await client.abort("r")
        await client.abort("never heard of")
        answer = await pending
        assert [s.finish.reason for s in answer.samples if s.finish] == ["abort"] * 3
        assert answer.usage.completion_tokens == 6
        assert not rig.engine.open


async def test_abort_while_tokenizing_ends_without_work() -> None:
    async with make_rig() as rig:
        peer = rig.router.connect()
        peer.send(Generate(rid="r", prompt="x" * 10_000, n=2))
        peer.send(Abort())
        [message] = [m for m in await peer.receive() if isinstance(m, Outputs)]
        assert [(i.index, i.finish.reason) for i in message.items if i.finish] == [
            (0, "abort"),
            (1, "abort"),
        ]
        peer.send(Generate(rid="r", prompt="ok"))
        await until(lambda: len(rig.engine.works()) == 1)
        assert rig.engine.works()[0].token_ids == [1, ord("o"), ord("k")]


async def test_a_matched_stop_string_frees_the_scheduler() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = None
        pending = asyncio.create_task(client.generate("hi", SamplingParams(stop=["x"])))
        await until(lambda: rig.engine.open)
        [uid] = rig.engine.open
        rig.engine.say(
            rig.engine.item(uid, opened=True), rig.engine.end(uid, "stop", "text", stopped=True)
        )
        assert (await pending).text == "text"
        await until(rig.engine.aborts)
        [abort] = rig.engine.aborts()
        assert (abort.uid, abort.reason, abort.quiet) == (uid, "stop", True)
        rig.engine.say(rig.engine.item(uid, "late"))
        await until(lambda: rig.service.late_items == 1)


async def test_echo_brings_the_prompt() -> None:
    async with make_rig() as rig, await rig.client() as client:
        answer = await client.generate("hi", SamplingParams(max_tokens=0), echo=True)
        assert (answer.prompt_text, answer.prompt_token_ids) == ("hi", [1, 104, 105])
        answer = await client.generate([104, 105], echo=True, n=2)
        assert (answer.prompt_text, answer.prompt_token_ids) == ("hi", [104, 105])


async def test_chat_is_rendered_and_equals_tokenize() -> None:
    async with make_rig() as rig, await rig.client() as client:
        turns = [ChatMessage(role="user", content="yo")]
        await client.chat(turns)
        tokenized = await client.tokenize(messages=turns)
        assert rig.engine.works()[0].token_ids == tokenized.token_ids
        assert tokenized.prompt == "<user>yo"
        assert b"".join(tokenized.tokens) == b"<user>yo"
        assert (await client.detokenize([104, 105])).text == "hi"
    async with make_rig(templates=False) as rig, await rig.client() as client:
        with pytest.raises(errors.InvalidRequest, match="no chat template") as caught:
            await client.chat(turns)
        assert caught.value.param == "messages"


@pytest.mark.parametrize("prompt", ["", [], "x" * 64, [1] * 65, "x" * 20_000, "!boom!", [128]])
async def test_bad_prompts_are_refused_and_the_next_one_is_served(prompt: str | list[int]) -> None:
    async with (
        make_rig(limits=Limits(max_prompt_chars=30_000)) as rig,
        await rig.client() as client,
    ):
        with pytest.raises(errors.TandemError) as caught:
            await client.generate(prompt, add_special_tokens=False)
        assert caught.value.param is not None or prompt == "!boom!"
        assert "broke" not in caught.value.message
        with pytest.raises(errors.InvalidRequest):
            await client.detokenize([500])
        assert (await client.generate("ok")).text == "ab"
        assert len(rig.engine.works()) == 1


async def test_a_tokenizer_larger_than_the_model_does_not_reach_it() -> None:
    intake = Intake(ToyCodec(), Limits(), vocab_size=100, context_length=64)
    try:
        with pytest.raises(errors.InvalidRequest, match="token 122, .* ends at 99; .*--tokenizer"):
            await intake.read_prompt(Generate(rid="r", prompt="abz"))
        assert await intake.read_prompt(Generate(rid="r", prompt="abc")) == ("abc", [1, 97, 98, 99])
    finally:
        intake.close()


async def test_a_length_error_names_the_field_that_the_client_set() -> None:
    long = [ChatMessage(role="user", content="x" * 64)]
    async with make_rig() as rig, await rig.client() as client:
        for prompt, params, field in (
            (long, SamplingParams(), "messages"),
            ("x" * 64, SamplingParams(), "prompt"),
            ("x", SamplingParams(max_tokens=1000), "max_tokens"),
        ):
            with pytest.raises(errors.ContextLengthExceeded) as caught:
                await client.generate(prompt, params)
            assert caught.value.param == field


async def test_questions() -> None:
    async with make_rig(ask_seconds=0.05) as rig, await rig.client() as client:
        assert await client.metrics() == {"topic": "metrics"}
        assert await client.engine_config() == {"topic": "config"}
        assert await client.flush_cache(1.5) == {"topic": "flush_cache"}
        await until(lambda: rig.service.phase == "ready")
        health = await client.health()
        assert (health["phase"], health["live"]) == ("ready", 0)
        with pytest.raises(errors.EngineDead, match="no answer"):
            await client.ask("profile")
        with pytest.raises(errors.InvalidRequest, match="3600"):
            await client.ask("flush_cache", "for ever")


async def test_a_queue_that_is_full_says_when_to_come_back() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = None
        pending = asyncio.create_task(client.generate("hi", n=2))
        await until(lambda: len(rig.engine.open) == 2)
        for uid in list(rig.engine.open):
            item = rig.engine.end(uid, "error")
            assert item.finish is not None
            failure = errors.QueueFull("full", retry_after=2.0)
            item.finish = type(item.finish)(reason="error", failure=to_failure(failure))
            rig.engine.say(item)
        with pytest.raises(errors.QueueFull) as caught:
            await pending
        assert caught.value.retry_after == 2.0


async def test_order_of_short_prompts_is_kept_past_a_long_one() -> None:
    async with make_rig() as rig:
        peer = rig.router.connect()
        for number, size in enumerate((3, 50, 4, 5)):
            peer.send(Generate(rid=str(number), prompt="x" * size))
        await until(lambda: len(rig.engine.works()) == 4)
        assert [work.rid for work in rig.engine.works()] == ["0", "1", "2", "3"]
        assert all(isinstance(work, Work) for work in rig.engine.works())
