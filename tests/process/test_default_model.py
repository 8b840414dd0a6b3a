"""The model that users meet first, through the whole engine, as they meet it."""

from __future__ import annotations

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


@pytest.mark.parametrize("more", [{}, {"speculative_algorithm": "ngram"}], ids=["plain", "ngram"])
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
