"""What is asked, drawn from one seed; and what a scripted engine must answer. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

Cut = Literal["", "abort", "hang up", "leave"]

NUM_WORDS = 60
WORDS = [f"w{number} " for number in range(NUM_WORDS)]
FIRST, END = 256, 256 + NUM_WORDS  # ids of the first word and of the end token
CONTEXT = 1024
LONGEST = 260  # tokens of a script
BAD: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"temperature": 3.0},
    {"top_p": 0.0},
    {"max_tokens": -5},
    {"max_tokens": 10_000_000},
    {"min_tokens": 20, "max_tokens": 10},
    {"n": 0},
    {"n": 10_000},
    {"stop": [""]},
    {"stop": ["x"] * 1000},
    {"logit_bias": {"99999999": 1.0}},
    {"logit_bias": {"5": 1e9}},
    {"frequency_penalty": 99.0},
    {"repetition_penalty": 0.0},
    {"prompt": ""},
    {"prompt": "w1 " * 20_000},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """One request and its fate. `fields` are named as over HTTP. `cut` says how the caller ends it,
    `cut_after` seconds after it was sent: abort (a message, and it reads on), hang up (it is gone, its
    connection with it over HTTP), leave (its whole ZMQ connection closes)."""

    number: int
    way: Literal["http", "zmq"]
    is_chat: bool
    prompt: str
    fields: dict[str, Any] = field(default_factory=dict)
    stream: bool = True
    is_bad: bool = False
    cut: Cut = ""
    cut_after: float = 0.0
    tries: int = 0  # how often the queue was full for it

    @property
    def n(self) -> int:
        return int(self.fields.get("n", 1))

    @property
    def name(self) -> str:
        """Another one for each try: samples of the last one may still be on their way out."""
        return f"soak-{self.number}-{self.tries}"


class Library:
    """Prompts in groups with common beginnings, each with an output of its own, so that text which
    goes to the wrong request is noticed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        heads = [self._words(draw, draw.randint(8, 60)) for _ in range(12)]
        tails = [self._words(draw, draw.randint(1, 50)) for _ in range(150)]
        self.prompts = [draw.choice(heads) + tail for tail in tails]
        self._outputs = {
            prompt: [FIRST + draw.randrange(NUM_WORDS) for _ in range(draw.randint(10, LONGEST))]
            for prompt in self.prompts
        }

    @staticmethod
    def _words(draw: random.Random, count: int) -> str:
        return "".join(draw.choice(WORDS) for _ in range(count))

    def script(self) -> dict[str, Any]:
        """The contents of `tandem_script.json`."""
        scripts = {}
        for prompt, output in self._outputs.items():
            scripts[prompt] = scripts[f"user: {prompt}\nassistant: "] = output
        return {
            "tokens": [*WORDS, "<end>"],
            "end_token_ids": [END],
            "script": [FIRST],
            "scripts": scripts,
            "context_length": CONTEXT,
        }

    def answer(self, errand: Errand) -> tuple[str, str]:
        """Text and finish reason that a scripted engine gives."""
        output, asked = self._outputs[errand.prompt], errand.fields
        limit = asked["max_tokens"]
        text = "".join(WORDS[token - FIRST] for token in output[:limit])
        ends = [
            (text.index(stop) + len(stop), -len(stop))
            for stop in asked.get("stop", ())
            if stop in text
        ]
        if ends:
            end, minus_length = min(ends)
            return text[: end + minus_length], "stop"
        has_ended = limit > len(output) and not asked.get("ignore_eos", False)
        return text, "stop" if has_ended else "length"


def draw_settings(seed: int) -> dict[str, Any]:
    """Flags of a scripted engine of our own: every seed soaks another mixture. Memory is little, so that
    requests are put back for want of it."""
    draw = random.Random(seed + 2)
    chunk = draw.choice((0, 16, 64))
    return {
        "page_size": draw.choice((1, 4, 16)),
        "max_total_tokens": CONTEXT + 16 * draw.randrange(64),
        "max_running": draw.choice((5, 24, 40)),
        "max_queued": draw.choice((20, 1024, 1024)),
        "chunked_prefill_size": chunk,
        "max_step_tokens": draw.choice((64, 256)) if chunk else CONTEXT,
        "policy": draw.choice(("fcfs", "longest-prefix", "priority")),
        "eviction_policy": draw.choice(("lru", "lfu")),
        "disable_radix_cache": draw.random() < 0.2,
        "overlap": draw.random() < 0.5,
    }


def draw_errands(
    count: int, seed: int, library: Library, *, ways: tuple[str, ...], max_tokens: int, cut: float
) -> list[Errand]:
    """`ways`: http, zmq or both. `cut`: seconds after which a caller goes away, on average."""
    draw = random.Random(seed + 1)
    return [_draw(number, draw, library, ways, max_tokens, cut) for number in range(count)]


def _draw(
    number: int,
    draw: random.Random,
    library: Library,
    ways: tuple[str, ...],
    max_tokens: int,
    cut: float,
) -> Errand:
    way = draw.choice(ways)
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, max_tokens)}
    fields["temperature"] = draw.choice((0.0, 0.0, 0.7, 1.0))
    if draw.random() < 0.15:
        fields["n"] = draw.randint(2, 4)
    if draw.random() < 0.3:
        fields["stop"] = [
            draw.choice(WORDS)[: draw.randint(2, 4)] for _ in range(draw.randint(1, 3))
        ]
    elif draw.random() < 0.2:
        fields["min_tokens"] = draw.randint(0, min(8, fields["max_tokens"]))
    if draw.random() < 0.2:
        fields |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1}
    if draw.random() < 0.1:
        fields |= {"logit_bias": {"3": 1.0, "7": -5.0}, "seed": draw.randrange(2**40)}
    if draw.random() < 0.1:
        fields["ignore_eos"] = True
    if draw.random() < 0.1:
        fields["cache_salt"] = draw.choice(("red", "blue"))
    if draw.random() < 0.1:
        fields["priority"] = draw.randint(-5, 5)
    is_bad = draw.random() < 0.08
    prompt = draw.choice(library.prompts)
    if is_bad:
        fields |= draw.choice(BAD)
        prompt = fields.pop("prompt", prompt)
    fate = draw.random()
    kind: Cut = ""
    if not is_bad and fate < 0.24:
        kind = "abort" if fate < 0.08 else "hang up"
        if way == "zmq" and fate > 0.22:
            kind = "leave"
    return Errand(
        number=number,
        way="http" if way == "http" else "zmq",
        is_chat=not is_bad and draw.random() < 0.3,
        prompt=prompt,
        fields=fields,
        stream=draw.random() < 0.6,
        is_bad=is_bad,
        cut=kind,
        cut_after=draw.expovariate(1 / cut),
    )
