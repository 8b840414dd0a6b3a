"""The prompts of the speculation benchmark: how many of each kind, how long their passages are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import orjson
import pytest

PROMPTS = Path(__file__).parents[2] / "bench" / "spec_prompts.jsonl"
KINDS = ("chat", "code", "maths", "summary", "translation", "json", "story", "quotes")


def read_prompts() -> list[dict[str, object]]:
    return [orjson.loads(line) for line in PROMPTS.read_bytes().splitlines()]


def test_ten_of_each_kind() -> None:
    assert Counter(prompt["kind"] for prompt in read_prompts()) == dict.fromkeys(KINDS, 10)


def test_ids_and_texts_occur_once() -> None:
    prompts = read_prompts()
    for field in ("id", "prompt"):
        assert len({prompt[field] for prompt in prompts}) == len(prompts)


def test_every_record_has_the_fields_and_no_others() -> None:
    for prompt in read_prompts():
        assert prompt.keys() - {"system"} == {"id", "kind", "prompt", "max_tokens"}
        assert prompt["max_tokens"] == 128
        assert str(prompt["id"]).startswith(f"{prompt['kind']}-")


@pytest.mark.parametrize(("kind", "fewest", "most"), [("summary", 100, 300), ("quotes", 150, 400)])
def test_passages_have_the_promised_length(kind: str, fewest: int, most: int) -> None:
    for prompt in read_prompts():
        if prompt["kind"] == kind:
            passage = max(str(prompt["prompt"]).split("\n\n"), key=len)
            assert fewest <= len(passage.split()) <= most, prompt["id"]
