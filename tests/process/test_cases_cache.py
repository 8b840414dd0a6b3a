"""KV memory under a real, tiny model: prompt logprobs beside a cache, twins that compute the same
prefix at once, prompts that do not fit. Pages of 1 and of 16 tokens; cold and warm must agree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from srt.client import AsyncClient, Generation, SamplingParams
from srt.errors import ConfigError, ContextLengthExceeded
from srt.wire.params import TokenLogprobs
from tests.process.case_rig import balance, metric
from tests.process.conftest import Running, boot_for, run_inline, run_processes, write_script
from tests.tiny_models import TINY

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTEXT = 256
CHUNK = 48
VOCAB = 97


def save_checkpoint(folder: Path) -> str:
    """Random weights, large enough that every token of the context moves the logits; and a byte-level
    tokenizer for its ids, which only the answers' text needs."""
    torch.manual_seed(5)
    shapes = {**TINY, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
    model = LlamaForCausalLM(LlamaConfig(**shapes, tie_word_embeddings=False))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" not in name:
                value.copy_(0.15 * torch.randn_like(value))
    model.save_pretrained(folder)
    names = ["<pad>", "<s>", "</s>", *(chr(33 + token) for token in range(VOCAB - 3))]
    bpe = models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[(1, "inline"), (16, "inline"), (16, "processes")],
    ids=lambda pair: f"page{pair[0]}-{pair[1]}",
)
async def running(request: pytest.FixtureRequest, checkpoint: str) -> AsyncIterator[Running]:
    page_size, mode = request.param
    run = run_processes if mode == "processes" else run_inline
    async with run(
        model=checkpoint,
        load_format="safetensors",
        dtype="float32",
        num_threads=1,
        page_size=page_size,
        max_total_tokens=CONTEXT + 64,
        chunked_prefill_size=CHUNK,
        max_step_tokens=512,
    ) as engine:
        yield engine


@pytest.fixture
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.node.callspec.params["running"][0])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens_of(generation: Generation) -> list[int]:
    return generation.samples[0].token_ids


async def alone(client: AsyncClient, prompt: list[int], max_tokens: int) -> list[int]:
    """Its tokens on an empty cache, with nobody beside it."""
    await client.flush_cache(5.0)
    answer = await client.generate(prompt, greedy(max_tokens))
    await client.flush_cache(5.0)
    return tokens_of(answer)


def same(one: list[TokenLogprobs | None] | None, other: list[TokenLogprobs | None] | None) -> bool:
    assert one is not None and other is not None and len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        if left is None or right is None:
            assert left is right
            continue
        assert left.chosen.token == right.chosen.token
        assert abs(left.chosen.logprob - right.chosen.logprob) < 1e-3
        assert [e.token for e in left.top] == [e.token for e in right.top]
    return True


# --- prompt logprobs beside a cache ------------------------------------------------------------------


async def test_prompt_logprobs_again_and_again(running: Running, page_size: int) -> None:
    """Cold, warm, after a request without them, and in another chunking: always the same."""
    p, c = page_size, CHUNK
    client = running.client
    for length in (1, p, p + 1, 2 * p + 3, c - 1, c, c + 1, 2 * c + 1):
        prompt = prompt_of(length)
        plain = await alone(client, prompt, 5)
        asked = greedy(5, prompt_logprobs=2, logprobs=1)
        found = []
        for turn in range(4):
            if turn == 2:
                assert tokens_of(await client.generate(prompt, greedy(5))) == plain
            answer = await client.generate(prompt, asked)
            assert tokens_of(answer) == plain
            assert answer.usage.cached_tokens == 0
            entries = answer.prompt_logprobs
            assert entries is not None and len(entries) == length and entries[0] is None
            assert [e.chosen.token for e in entries[1:] if e is not None] == prompt[1:]
            found.append(entries)
        assert all(same(found[0], entries) for entries in found[1:])
        stopped = await client.generate(prompt, greedy(0, prompt_logprobs=2))
        assert tokens_of(stopped) == [] and same(found[0], stopped.prompt_logprobs)
        others = [client.generate(prompt_of(70, seed), greedy(20)) for seed in (1, 2)]
        crowded, *_ = await asyncio.gather(client.generate(prompt, asked), *others)
        assert tokens_of(crowded) == plain and same(found[0], crowded.prompt_logprobs)
    await balance(running)


async def test_prompt_logprobs_over_http(running: Running) -> None:
    """n samples and streams carry them once per choice, whole."""
    prompt = prompt_of(CHUNK + 1)
    body = {"token_ids": prompt, "max_tokens": 3, "temperature": 0, "prompt_logprobs": 1}
    async with running.http() as http:
        first = None
        for n in (1, 2):
            for _ in range(2):
                answer = await http.post("/generate", json={**body, "n": n})
                assert answer.status_code == 200, answer.text
                entries = answer.json()["choices"][0]["prompt_logprobs"]
                assert len(entries) == len(prompt) and entries[0] is None
                assert [entry["id"] for entry in entries[1:]] == prompt[1:]
                values = [entry["logprob"] for entry in entries[1:]]
                first = first or values
                assert values == pytest.approx(first, abs=1e-3)
        echo = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
        echo["ignore_eos"] = True
        for _ in range(2):
            choice = (await http.post("/v1/completions", json=echo)).json()["choices"][0]
            assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 2
            assert choice["logprobs"]["token_logprobs"][0] is None
            shown = choice["logprobs"]["token_logprobs"][1 : len(prompt)]
            assert shown == pytest.approx(first, abs=1e-3)
    await balance(running)


async def test_warm_equals_cold(running: Running) -> None:
    """Tokens and logprobs after a cached prefix, of every length around a page."""
    client = running.client
    base = prompt_of(100)
    for keep in (1, 15, 16, 17, 31, 33, 64, 99, 100):
        prompt = base[:keep] + prompt_of(20, seed=keep)
        asked = greedy(6, logprobs=3)
        await client.flush_cache(5.0)
        cold = await client.generate(prompt, asked)
        await client.flush_cache(5.0)
        await client.generate(base, greedy(1))
        warm = await client.generate(prompt, asked)
        again = await client.generate(prompt, asked)
        for answer in (warm, again):
            assert tokens_of(answer) == tokens_of(cold), keep
            assert same(
                list(cold.samples[0].logprobs or []), list(answer.samples[0].logprobs or [])
            )
        assert (
            again.usage.cached_tokens >= warm.usage.cached_tokens >= (keep - 16 if keep > 31 else 0)
        )
        assert cold.usage.cached_tokens == 0
    await balance(running)


# --- twins -------------------------------------------------------------------------------------------


async def watch(client: AsyncClient, until: asyncio.Event) -> int:
    """Audits as fast as it can: among other rules, no page has two owners."""
    count = 0
    while not until.is_set():
        assert (await client.audit())["violations"] == []
        count += 1
        await asyncio.sleep(0)
    return count


async def test_twins_that_both_compute_their_prefix(running: Running) -> None:
    """Both insert it when done; the loser's pages are freed and soon hold somebody else's tokens. The
    twins go on decoding from what is still there."""
    client = running.client
    prompt = prompt_of(64, seed=3)
    lone = await alone(client, prompt, 50)
    fillers = [prompt_of(90, seed) for seed in (5, 6, 7)]
    lone_fillers = [await alone(client, filler, 8) for filler in fillers]
    done = asyncio.Event()
    watching = asyncio.create_task(watch(client, done))
    for count, size in ((2, 64), (2, 63), (3, 64), (2, 48)):  # not all of them multiples of a page
        await client.flush_cache(5.0)
        twin = prompt[:size]
        expected = lone if size == 64 else await alone(client, twin, 50)
        twins = [asyncio.create_task(client.generate(twin, greedy(50))) for _ in range(count)]
        early = asyncio.create_task(client.generate(twin, greedy(1)))  # frees its pages first
        await early
        later = [asyncio.create_task(client.generate(filler, greedy(8))) for filler in fillers]
        answers = await asyncio.gather(*twins)
        for answer in answers:
            assert tokens_of(answer) == expected
        if not running.pids:  # inline, they do arrive in one turn
            assert all(answer.usage.cached_tokens == 0 for answer in answers)
        for answer, own in zip(await asyncio.gather(*later), lone_fillers, strict=True):
            assert tokens_of(answer) == own
    done.set()
    assert await watching > 10
    await balance(running)


async def test_twins_of_one_request(running: Running) -> None:
    client = running.client
    prompt = prompt_of(64, seed=4)
    lone = await alone(client, prompt, 20)
    for n in (2, 5):
        answer = await client.generate(prompt, greedy(20), n=n)
        assert [sample.token_ids for sample in answer.samples] == [lone] * n
    await balance(running)


async def test_a_pool_that_is_too_small_for_all(running: Running) -> None:
    """Retraction and eviction in the middle of it all change no token."""
    client = running.client
    prompts = [prompt_of(30 + 5 * seed, seed) for seed in range(6)]
    lone = [await alone(client, prompt, 110) for prompt in prompts]
    before = await metric(running, "retractions_total")
    done = asyncio.Event()
    watching = asyncio.create_task(watch(client, done))
    asked = [client.generate(prompt, greedy(110)) for prompt in prompts]
    for answer, own in zip(await asyncio.gather(*asked), lone, strict=True):
        assert tokens_of(answer) == own
    done.set()
    await watching
    assert await metric(running, "retractions_total") > before
    await balance(running)


# --- what can never fit ------------------------------------------------------------------------------


async def test_what_never_fits_is_refused_and_blocks_nobody(
    engine: Any, script: Any, tmp_path: Path
) -> None:
    """Pool and context of 256: every request is refused at once, or ends; a small one behind it is
    answered."""
    for page_size in (1, 16):
        folder = write_script(tmp_path / f"{page_size}", ["a"], [256] * 600, context_length=CONTEXT)
        async with engine(
            model=folder, page_size=page_size, max_total_tokens=CONTEXT, max_running=4
        ) as running:
            client = running.client
            for length, limit in (
                (300, 1),
                (300, None),
                (250, 50),
                (256, 1),
                (257, 1),
                (256, None),
            ):
                prompt = [65] * length
                with pytest.raises(ContextLengthExceeded) as caught:
                    await client.generate(prompt, SamplingParams(max_tokens=limit))
                assert str(CONTEXT) in caught.value.message and str(length) in caught.value.message
            for length, limit, given in ((255, 1, 1), (250, None, 6), (250, 6, 6), (1, 255, 255)):
                params = SamplingParams(temperature=0.0, max_tokens=limit)
                answer = await client.generate([65] * length, params)
                finish = answer.samples[0].finish
                assert finish is not None and finish.reason == "length"
                assert len(tokens_of(answer)) == given
            full = await client.generate([65] * 256, SamplingParams(max_tokens=0))
            assert tokens_of(full) == []
            large = [
                asyncio.create_task(client.generate([66] * length, SamplingParams(temperature=0.0)))
                for length in (250, 200, 129, 255, 3)
            ]
            async with asyncio.timeout(10):
                small = await client.generate("hello", SamplingParams(max_tokens=2))
                assert len(tokens_of(small)) == 2
                for answer, length in zip(
                    await asyncio.gather(*large), (250, 200, 129, 255, 3), strict=True
                ):
                    assert len(tokens_of(answer)) == CONTEXT - length
            async with running.http() as http:
                body = {"prompt": "x" * 300, "max_tokens": 1}
                refused = await http.post("/v1/completions", json=body)
                assert refused.status_code == 400
                assert refused.json()["error"]["code"] == "context_length_exceeded"
            await balance(running)


async def test_a_pool_below_one_context_is_refused_at_start(script: Any) -> None:
    """With it there would be prompts that wait for ever."""
    model = script(["a"], context_length=4096)
    with pytest.raises(ConfigError, match="4096") as caught:
        boot_for("inline", model=model, max_total_tokens=256)
    assert "256" in str(caught.value)
    boot_for("inline", model=model, max_total_tokens=256, context_length=256)


async def test_a_queue_with_an_end(engine: Any, script: Any) -> None:
    """The wait for a place is bounded: the request after the last place is told to come again."""
    model = script(["a"], script=[256] * 400, step_seconds=0.005)
    async with engine(model=model, max_running=1, max_queued=2) as running, running.http() as http:
        body = {"prompt": "x", "max_tokens": 100, "temperature": 0}

        async def ask() -> int:
            answer = await http.post("/v1/completions", json=body)
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert json.loads(answer.text)["error"]["code"] == "queue_full"
            else:
                assert answer.json()["choices"][0]["text"] == "a" * 100
            return answer.status_code

        statuses = await asyncio.gather(*(ask() for _ in range(8)))
        assert set(statuses) == {200, 429} and 2 <= statuses.count(200) <= 4
        await balance(running)
