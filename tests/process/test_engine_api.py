"""The whole engine through its client library and its gateway, as processes and inline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import openai
import pytest

from srt.client import SamplingParams
from srt.errors import DuplicateRequest, InvalidRequest
from tests.process.conftest import RunEngine

GREEDY = SamplingParams(temperature=0.0)


async def test_the_script_comes_out_whole_and_streamed(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    async with engine(model=script(["Hello", ", ", "world", "!"])) as running:
        whole = await running.client.generate("say it", GREEDY)
        pieces = [piece async for piece in running.client.stream("say it", GREEDY)]
        assert whole.text == "Hello, world!"
        assert "".join(piece.text for piece in pieces) == whole.text
        assert pieces[0].accepted and pieces[0].prompt_tokens == 6
        finish = pieces[-1].finish
        assert finish is not None and finish.reason == "stop"
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (6, 5)
        await running.settle()


async def test_official_client_streams_chat_and_text(
    engine: RunEngine, script: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    async with engine(
        model=script(["Hi", " there"]), served_model_name="fake", chat_template=str(template)
    ) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            models = await client.models.list()
            assert [model.id for model in models.data] == ["fake"]
            stream = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "x"}],
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "Hi there"
            assert chunks[-1].choices == [] and chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 3
            whole = await client.completions.create(
                model="fake", prompt=["a", "b"], n=2, temperature=0, max_tokens=2
            )
            assert [choice.text for choice in whole.choices] == ["Hi there"] * 4
            assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
            assert {choice.finish_reason for choice in whole.choices} == {"length"}
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="a")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="fake", prompt="a", temperature=9)
            assert caught.value.body is not None and "temperature" in str(caught.value.body)
        await running.settle()


async def test_many_clients_at_once_get_their_own_text(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    words = [f"w{number} " for number in range(20)]
    scripts = {f"p{n}": [256 + (n + i) % 20 for i in range(12)] for n in range(20)}
    async with engine(model=script(words, scripts=scripts), max_running=8) as running:

        async def ask(number: int) -> str:
            params = SamplingParams(temperature=0.0, max_tokens=12)
            return (await running.client.generate(f"p{number}", params)).text

        texts = await asyncio.gather(*(ask(number % 20) for number in range(60)))
        for number, text in enumerate(texts):
            n = number % 20
            assert text == "".join(f"w{(n + i) % 20} " for i in range(12))
        await running.settle()


async def test_abort_ends_a_stream_once(engine: RunEngine, script: Callable[..., str]) -> None:
    model = script(["x"], script=[256] * 400, step_seconds=0.01)
    async with engine(model=model) as running:
        finishes = []
        async for piece in running.client.stream("go", GREEDY, rid="one"):
            if piece.token_ids and not finishes:
                await running.client.abort("one")
            if piece.finish is not None:
                finishes.append(piece.finish.reason)
        assert finishes == ["abort"]
        await running.settle()


async def test_leaving_a_stream_frees_everything(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    model = script(["x"], script=[256] * 400, step_seconds=0.01)
    async with engine(model=model) as running:
        stream = running.client.stream("go", GREEDY)
        async for piece in stream:
            if piece.token_ids:
                break
        await stream.aclose()
        await running.settle()


async def test_duplicate_name_is_refused_and_hurts_nobody(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    model = script(["a", "b", "c"], script=[256, 257, 258] * 20, step_seconds=0.005)
    async with engine(model=model) as running:
        first = asyncio.create_task(running.client.generate("one", GREEDY, rid="same"))
        await asyncio.sleep(0.1)
        with pytest.raises(DuplicateRequest):
            await running.client.generate("two", GREEDY, rid="same")
        assert (await first).text == "abc" * 20
        await running.settle()


async def test_refused_requests_leave_others_alone(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    model = script(["a", "b"], script=[256, 257] * 30, step_seconds=0.005)
    bad = [
        SamplingParams(temperature=-1),
        SamplingParams(logit_bias={99999: 1.0}),
        SamplingParams(max_tokens=3, min_tokens=4),
        SamplingParams(stop=[""]),
        SamplingParams(logprobs=1000),
    ]
    async with engine(model=model) as running:
        good = asyncio.create_task(running.client.generate("fine", GREEDY))
        for params in bad:
            with pytest.raises(InvalidRequest) as caught:
                await running.client.generate("bad", params)
            assert caught.value.param
        with pytest.raises(InvalidRequest):
            await running.client.generate("", GREEDY)
        assert (await good).text == "ab" * 30
        await running.settle()
