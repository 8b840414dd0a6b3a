"""The model that users meet first, through the whole engine, as they meet it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import openai
import pytest

from srt.loading.fetch import cached_path, find_known
from tests.process.conftest import RunEngine, cache_folder

MODEL = "smollm2-135m"


@pytest.fixture(autouse=True)
def fetched() -> None:
    known = find_known(MODEL)
    assert known is not None
    if cached_path(known, str(Path(cache_folder()))) is None:
        pytest.skip(f"{MODEL} is not in the cache: tandem model fetch {MODEL}")


TREE = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 7}
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "ngram": {"speculative_algorithm": "ngram"},
    "eagle3": {"speculative_algorithm": "eagle3", "speculative_lookup": False},
    "tree": {"speculative_algorithm": "eagle3", **TREE},
}


@pytest.mark.parametrize("more", [WAYS["plain"], WAYS["ngram"]], ids=["plain", "ngram"])
async def test_it_knows_the_capital_of_france(
    processes: RunEngine, more: dict[str, object]
) -> None:
    """With the default sampling fields and greedy, with and without speculation."""
    async with processes(model=MODEL, **more) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            ask = [{"role": "user", "content": "What is the capital of France?"}]
            answers = [
                await client.chat.completions.create(model=MODEL, messages=ask, seed=seed)  # type: ignore[arg-type]
                for seed in range(5)
            ]
            texts = [answer.choices[0].message.content or "" for answer in answers]
            # most, not all: its first token is nearly a tie, and roundings differ between machines
            assert sum("Paris" in text for text in texts) >= 3, texts
            greedy = await client.chat.completions.create(
                model=MODEL,
                messages=ask,
                temperature=0,  # type: ignore[arg-type]
            )
            assert "Paris" in (greedy.choices[0].message.content or "")
        await running.settle()


STORIES = ("Tell me about the sea.", "Write a function that adds two numbers.", "Count to ten.")


async def test_the_draft_that_comes_with_it_changes_no_answer(processes: RunEngine) -> None:
    """The real draft, as a chain and as a tree: greedy and drawn, the answers of the plain engine, and
    many guesses are right. Only the compiled kernels promise the bits that this needs."""
    answers: dict[str, list[str]] = {}
    for way in ("plain", "eagle3", "tree"):
        async with processes(model=MODEL, **WAYS[way]) as running:
            async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
                found, right, tokens = [], 0, 0
                for prompt, heat in product(STORIES, (0.0, 0.8)):
                    done = await client.chat.completions.create(
                        model=MODEL,
                        messages=[{"role": "user", "content": prompt}],
                        temperature=heat,
                        seed=5,
                        max_tokens=48,
                    )
                    assert done.usage is not None
                    details = done.usage.completion_tokens_details
                    found.append(done.choices[0].message.content or "")
                    right += (details.accepted_prediction_tokens or 0) if details else 0
                    tokens += done.usage.completion_tokens
                answers[way] = found
                assert way == "plain" or right > 0.3 * tokens, (way, right, tokens)
                config = await running.client.engine_config()
                is_native = config["bags"]["exec"]["native_kernels"]
            await running.settle()
    if is_native:
        assert answers["eagle3"] == answers["plain"] == answers["tree"]
