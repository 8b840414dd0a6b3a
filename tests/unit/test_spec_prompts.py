"""The speculation benchmark: its prompts, and how it counts."""

from __future__ import annotations

from collections import Counter

import orjson
import pytest

from bench.speculation import PROMPTS, read_prompts
from bench.speculation_report import Tally, difference, render, summarize
from srt.errors import ConfigError

KINDS = ("chat", "code", "maths", "summary", "translation", "json", "story", "quotes")


def records() -> list[dict[str, object]]:
    return [orjson.loads(line) for line in PROMPTS.read_bytes().splitlines()]


def test_ten_of_each_kind() -> None:
    assert Counter(prompt["kind"] for prompt in records()) == dict.fromkeys(KINDS, 10)


def test_ids_and_texts_occur_once() -> None:
    prompts = records()
    for field in ("id", "prompt"):
        assert len({prompt[field] for prompt in prompts}) == len(prompts)


def test_every_record_has_the_fields_and_no_others() -> None:
    for prompt in records():
        assert prompt.keys() - {"system"} == {"id", "kind", "prompt", "max_tokens"}
        assert prompt["max_tokens"] == 128
        assert str(prompt["id"]).startswith(f"{prompt['kind']}-")


@pytest.mark.parametrize(("kind", "fewest", "most"), [("summary", 100, 300), ("quotes", 150, 400)])
def test_passages_have_the_promised_length(kind: str, fewest: int, most: int) -> None:
    for prompt in records():
        if prompt["kind"] == kind:
            passage = max(str(prompt["prompt"]).split("\n\n"), key=len)
            assert fewest <= len(passage.split()) <= most, prompt["id"]


def test_kinds_take_turns() -> None:
    chosen = read_prompts(PROMPTS, ["story", "code"], 2)
    assert [prompt.id for prompt in chosen] == ["story-00", "code-00", "story-01", "code-01"]
    assert len(read_prompts(PROMPTS, [], None)) == 80
    with pytest.raises(ConfigError, match="--kinds: no verse"):
        read_prompts(PROMPTS, ["verse"], None)


def tally(seconds: float, **more: int) -> Tally:
    return Tally(
        prompts=1, tokens=101, decoded=100, decode_seconds=seconds, seconds=2 * seconds, **more
    )


def test_rows_compare_the_two_engines() -> None:
    guessing = {"code": tally(1.0, drafted=80, accepted=50), "chat": tally(2.0)}
    guessing["code"].verify({"all": 5.0, "1": 3.0}, {"all": 45.0, "1": 33.0, "2": 20.0})
    rows = summarize({"code": tally(2.0), "chat": tally(2.0)}, guessing)
    code, chat, both = rows
    assert (code["ratio"], chat["ratio"], both["ratio"]) == (2.0, 1.0, 1.333)
    assert code["mean_accepted_length"] == both["mean_accepted_length"] == 1 + 50 / 40
    assert code["drafts_per_verification"] == 2.0
    assert code["right_by_position"] == [0.75, 0.5]
    assert chat["mean_accepted_length"] is None
    assert len(render("title", rows).splitlines()) == 5


def test_a_difference_is_told_with_its_place() -> None:
    plain = {("a", 0): [1, 2, 3], ("b", 0): [4, 5]}
    assert difference(plain, dict(plain)) == []
    [line] = difference(plain, {("a", 0): [1, 9, 3], ("b", 0): [4, 5]})
    assert line.startswith("a, round 0: ") and "from token 1: [2, 3] and [9, 3]" in line
    [line] = difference(plain, {("a", 0): [1, 2, 3], ("b", 0): [4]})
    assert "from token 1: [5] and []" in line
