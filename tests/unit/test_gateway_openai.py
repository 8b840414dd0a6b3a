"""What OpenAI's own client makes of the gateway's answers."""

from __future__ import annotations

import httpx
import openai
import pytest
from gateway_engine import Api, ScriptedEngine, hello
from openai.types.chat import ChatCompletionMessageParam

from srt.errors import DeadlineExceeded, InternalError, QueueFull

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def client_of(api: Api, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key=key,
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app)),
    )


async def test_chat_whole_and_streamed() -> None:
    async with client_of(Api()) as client:
        whole = await client.chat.completions.create(
            model="org/tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=1
        )
        assert [choice.message.content for choice in whole.choices] == ["Hello", "Hello"]
        assert whole.usage and whole.usage.prompt_tokens_details
        assert whole.usage.prompt_tokens_details.cached_tokens == 4
        assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
        assert whole.choices[0].logprobs.content[0].top_logprobs[1].logprob == -9999.0
        stream = await client.chat.completions.create(
            model="org/tiny",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "tandem": {"timings": True}},
        )
        text, usages = "", []
        async for chunk in stream:
            usages.append(chunk.usage)
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "Hello" and usages[-1] is not None and not any(usages[:-1])


async def test_completions_models_and_streams() -> None:
    async with client_of(Api()) as client:
        whole = await client.completions.create(
            model="org/tiny", prompt=["a", "b"], logprobs=1, extra_headers={"x-request-id": "t1"}
        )
        assert [choice.text for choice in whole.choices] == ["Hello", "Hello"]
        assert whole.choices[0].logprobs and whole.choices[0].logprobs.tokens == ["Hel", "lo"]
        assert whole._request_id == "t1"
        stream = await client.completions.create(model="org/tiny", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
        assert [model.id async for model in client.models.list()] == ["org/tiny"]
        assert (await client.models.retrieve("org/tiny")).object == "model"


async def test_errors_are_the_clients_own_kinds() -> None:
    api = Api(api_keys=("good",))
    async with client_of(api, "bad") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with client_of(api, "good") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found" and missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model="org/tiny", messages=MESSAGES, temperature=9.0
            )
        assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"


async def test_an_error_in_mid_stream_is_raised() -> None:
    engine = ScriptedEngine(lambda ask: [*hello(ask)[:2], DeadlineExceeded("too late")])
    async with client_of(Api(engine)) as client:
        stream = await client.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True
        )
        with pytest.raises(openai.APIError, match="too late"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (InternalError("broken"), 1),
        (DeadlineExceeded("too late"), 1),
        (QueueFull("full", retry_after=0.0), 2),
    ],
)
async def test_only_what_may_pass_is_tried_again(error: Exception, asked: int) -> None:
    engine = ScriptedEngine(lambda ask: [error] if len(engine.asked) == 1 else hello(ask))
    async with client_of(Api(engine)) as client:
        creating = client.with_options(max_retries=1).chat.completions.create(
            model="org/tiny", messages=MESSAGES
        )
        if asked == 1:
            with pytest.raises(openai.APIStatusError):
                await creating
        else:
            assert (await creating).choices[0].message.content == "Hello"
    assert len(engine.asked) == asked
