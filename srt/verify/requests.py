"""The requests that are answered in every variant: short and long prompts, some with a common
beginning, greedy and drawn, and a few that go on long enough to be put off when memory is short."""

from __future__ import annotations

from typing import Any, Protocol

from srt.wire.messages import Work
from srt.wire.params import SamplingParams, TextOptions

SHORT = 24  # tokens of an answer
LONG = 96
TOP = 2  # logprobs, to know how near a choice was

HANDBOOK = (
    "Handbook of the harbour office. Ships report on channel twelve before they pass the pier. The "
    "pilot comes aboard at the outer buoy. Berths one to four are for cargo, berth five is for the "
    "ferry, and nobody moors at berth six in winter. Fees are paid on Fridays. In fog the horn sounds "
    "every two minutes, and the crane stands still when the wind is stronger than force seven.\n"
)
LOGBOOK = "".join(
    f"Day {day}: wind from the {wind}, {miles} miles, {state}.\n"
    for day, (wind, miles, state) in enumerate(
        (
            ("north", 112, "the sails were mended"),
            ("east", 87, "we saw two whales"),
            ("south-west", 140, "rain filled the barrels"),
            ("west", 31, "the cook was ill"),
            ("north-east", 96, "an island lay ahead"),
            ("south", 150, "all were in good spirits"),
            ("north-west", 64, "the map was wrong again"),
            ("south-east", 120, "we anchored after dark"),
        )
        * 2,
        start=1,
    )
)


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


def prompts() -> list[tuple[str, dict[str, Any]]]:
    """Text and how it is sampled. The first four are the long ones."""
    return [
        ("One, two, three, four, one, two, three, four, one, two,", {"max_tokens": LONG}),
        ("The lighthouse keeper had not spoken to anybody for", {"max_tokens": LONG}),
        ("List ten animals that live in the sea:\n1.", {"max_tokens": LONG, "temperature": 0.8}),
        ("def area(width, height):\n", {"max_tokens": LONG, "temperature": 1.0, "top_p": 0.9}),
        ("A", {}),
        ("The capital of France is", {}),
        ("2 + 2 = 4, 2 + 3 = 5, 2 + 4 =", {"temperature": 0.7}),
        ("Water boils at", {"temperature": 1.2, "top_k": 40, "min_p": 0.02}),
        (HANDBOOK + "Question: where does the ferry moor?\nAnswer:", {}),
        (HANDBOOK + "Question: when are fees paid?\nAnswer:", {"temperature": 0.6}),
        (
            HANDBOOK + "Question: who comes aboard at the buoy?\nAnswer:",
            {"repetition_penalty": 1.2},
        ),
        (HANDBOOK, {"temperature": 1.0, "frequency_penalty": 0.4, "presence_penalty": 0.2}),
        (LOGBOOK + "Day 17: wind from the", {}),
        (LOGBOOK, {"temperature": 0.9, "max_tokens": 2 * SHORT}),
    ]


def build_requests(encoder: Encoder, context_length: int, *, stream: bool = False) -> list[Work]:
    """With uids from 1. In a small context prompts keep their ends and answers are shorter."""
    made = []
    for uid, (text, more) in enumerate(prompts(), start=1):
        wanted = min(more.get("max_tokens", SHORT), context_length // 2)
        tokens = encoder.encode(text, True)[-(context_length - wanted) :]
        params = {"temperature": 0.0, "ignore_eos": uid <= 4, **more, "max_tokens": wanted}
        made.append(
            Work(
                uid=uid,
                rid=f"verify-{uid}",
                token_ids=tokens,
                text=TextOptions(stream=stream, prompt_token_ids=tokens[-8:]),
                params=SamplingParams(seed=100 + uid, logprobs=TOP, **params),
            )
        )
    return made
