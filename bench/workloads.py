"""What is asked: lists of items, the same for the same seed. Pure; no engine, no clock.

Prompts are text of common English words and numbers, drawn fresh for each item, so that no two share a
prefix unless the workload is about sharing. With a GPT-2-type tokenizer a word is about one token.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from srt.errors import ConfigError

WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education river stone light".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request. `session` items with the same value run one after the other, each with the answers of
    the earlier ones in its messages (multi-turn). `at` is a trace's arrival in seconds. `token_ids`, if
    given, are sent instead of the text."""

    prompt: str
    max_tokens: int
    at: float | None = None
    session: int | None = None
    prefix: str = ""
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    items: list[Item]
    settings: dict[str, object] = field(default_factory=dict)


def write_text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=max(1, num_words)))


def with_token_ids(workload: Workload, ids_of: dict[str, list[int]]) -> Workload:
    """Every prompt as exactly as many token ids as it has words: a text of n words has n tokens or
    more, of which the first n are kept. `ids_of` has the ids of every item's prompt and prefix. Items of
    sessions stay text: a template and earlier answers stand in their prompts. Raises ConfigError."""

    def first_ids(text: str) -> list[int]:
        ids, length = ids_of[text] if text else [], len(text.split())
        if len(ids) < length:
            raise ConfigError(f"{length} words are only {len(ids)} tokens here; leave out --exact")
        return ids[:length]

    items = [
        item
        if item.session is not None
        else replace(item, token_ids=(*first_ids(item.prefix), *first_ids(item.prompt)))
        for item in workload.items
    ]
    return replace(workload, items=items)


def random_prompts(
    *, count: int, words: int, max_tokens: int, spread: float = 0.0, seed: int = 0
) -> Workload:
    """`spread` 0.2 draws lengths from 80 % to 120 % of `words` and of `max_tokens`."""
    draw = random.Random(seed)

    def length(middle: int) -> int:
        return round(middle * draw.uniform(1 - spread, 1 + spread))

    items = [
        Item(prompt=write_text(draw, length(words)), max_tokens=max(1, length(max_tokens)))
        for _ in range(count)
    ]
    return Workload(
        name="random",
        items=items,
        settings={
            "count": count,
            "words": words,
            "max_tokens": max_tokens,
            "spread": spread,
            "seed": seed,
        },
    )


def shared_prefix(
    *, groups: int, per_group: int, prefix_words: int, words: int, max_tokens: int, seed: int = 0
) -> Workload:
    """`groups` long prefixes, each followed by `per_group` different questions; order shuffled."""
    draw = random.Random(seed)
    prefixes = [write_text(draw, prefix_words) for _ in range(groups)]
    items = [
        Item(prompt=write_text(draw, words), prefix=prefix + "\n\n", max_tokens=max_tokens)
        for prefix in prefixes
        for _ in range(per_group)
    ]
    draw.shuffle(items)
    return Workload(
        name="shared-prefix",
        items=items,
        settings={
            "groups": groups,
            "per_group": per_group,
            "prefix_words": prefix_words,
            "words": words,
            "max_tokens": max_tokens,
            "seed": seed,
        },
    )


def multi_turn(
    *, sessions: int, turns: int, words: int, max_tokens: int, seed: int = 0
) -> Workload:
    """Chats: every turn of a session repeats what was said before it."""
    draw = random.Random(seed)
    items = [
        Item(prompt=write_text(draw, words), max_tokens=max_tokens, session=session)
        for _ in range(turns)
        for session in range(sessions)
    ]
    return Workload(
        name="multi-turn",
        items=items,
        settings={
            "sessions": sessions,
            "turns": turns,
            "words": words,
            "max_tokens": max_tokens,
            "seed": seed,
        },
    )


def replay_trace(path: Path, *, limit: int | None = None, seed: int = 0) -> Workload:
    """JSON lines with `timestamp` (ms), `input_length`, `output_length` and, optionally, `hash_ids`:
    equal ids stand for equal blocks of 512 tokens (the Mooncake form), so shared prefixes are kept."""
    blocks: dict[int, str] = {}
    items = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            row = json.loads(line)
            ids = row.get("hash_ids", [])
            for block in ids:
                blocks.setdefault(block, write_text(random.Random(f"{seed}:{block}"), 512))
            rest = max(1, row["input_length"] - 512 * len(ids))
            items.append(
                Item(
                    prompt=write_text(random.Random(f"{seed}/{number}"), rest),
                    prefix="".join(blocks[block] + " " for block in ids),
                    max_tokens=row["output_length"],
                    at=row["timestamp"] / 1000,
                )
            )
    return Workload(
        name="trace", items=items, settings={"path": path.name, "limit": limit, "seed": seed}
    )
