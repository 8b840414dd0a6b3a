"""The requests that every setting of the engine must answer alike.

Prompt lengths lie on both sides of every boundary the settings have: pages of 16, chunks of 3, 16, 64.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgspec

from srt.wire.messages import Work
from srt.wire.params import SamplingParams, TextOptions

VOCAB = 97
END = 2


def words(seed: int, length: int) -> list[int]:
    """A prompt of ordinary tokens that shares nothing with those of other seeds."""
    return [3 + crc32(f"{seed},{i}".encode()) % (VOCAB - 3) for i in range(length)]


def ask(uid: int, prompt: list[int], max_tokens: int | None = 12, **more: Any) -> Work:
    """Greedy and deaf to the end token unless told otherwise. `more`: fields of Work, and of
    SamplingParams where Work has none."""
    fields = {name: more.pop(name) for name in list(more) if name in Work.__struct_fields__}
    params = {
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "seed": 1000 + uid,
        "ignore_eos": True,
        "logprobs": 2,
        **more,
    }
    return Work(
        uid=uid,
        rid=f"r{uid}",
        token_ids=prompt,
        text=TextOptions(),
        params=SamplingParams(**params),
        **fields,
    )


SHARED = words(0, 40)


def long_requests() -> list[Work]:
    """Long enough to outgrow what admission reserves for them, so that a small pool must retract. What
    the sampler remembers of them differs, and must survive that."""
    return [
        ask(1, words(1, 10), 100),
        ask(
            2, words(2, 11), 100, temperature=0.9, top_p=0.9, repetition_penalty=1.2,
            frequency_penalty=0.2, presence_penalty=0.3,
        ),
        ask(3, words(3, 12), 100, repetition_penalty=1.5, logprobs=5),
        ask(
            4, words(4, 13), 110, temperature=1.0, ignore_eos=False, min_tokens=95,
            stop_token_ids=list(range(60, 97)),
        ),
    ]  # fmt: skip


def all_requests() -> list[Work]:
    return [
        *long_requests(),
        ask(5, words(5, 1), 24),
        ask(6, words(6, 15), logprobs=5),
        ask(7, words(7, 16)),
        ask(8, words(8, 17), logprobs=0),
        ask(9, words(9, 65), prompt_logprobs=2),
        ask(10, SHARED + words(10, 5)),
        ask(11, SHARED + words(11, 9), temperature=0.8, priority=3),
        ask(12, SHARED, tenant="other"),
        ask(13, SHARED[:32], tenant="other"),
        ask(14, SHARED + words(10, 5)),  # the same as 10, at the same time
        ask(15, words(15, 30), temperature=1.0, priority=1, logprobs=None),
        ask(16, words(16, 4), temperature=1.5, top_k=5),
        ask(17, words(17, 64), temperature=1.3, top_p=0.8, tenant="other"),
        ask(18, words(18, 63), temperature=2.0, min_p=0.1),
        ask(19, words(19, 33), temperature=1.2, top_k=20, top_p=0.9, min_p=0.05, priority=-1),
        ask(20, SHARED + words(20, 2), 30, repetition_penalty=1.4, priority=9),
        ask(
            21, words(21, 20), 30, temperature=1.0, presence_penalty=0.9, frequency_penalty=0.5,
            repetition_penalty=1.1, logprobs=None,
        ),
        ask(22, words(22, 6), logit_bias={5: 3.0, 9: -100.0, 60: -5.0}, priority=2),
        ask(
            23, words(23, 8), 30, temperature=1.0, ignore_eos=False, min_tokens=9,
            stop_token_ids=list(range(30, 60)),
        ),
        ask(24, words(24, 18), 40, temperature=1.0, stop_token_ids=list(range(90, 97))),
        ask(25, words(25, 33), 0, prompt_logprobs=3),
        ask(26, SHARED + words(26, 1), 0),
        ask(27, SHARED + words(27, 7), prompt_logprobs=0, temperature=0.9),
        ask(28, words(28, 48), 1),
        # three samples of one prompt
        ask(29, SHARED + words(29, 3), temperature=1.0),
        ask(30, SHARED + words(29, 3), temperature=1.0, leader=29, index=1),
        ask(31, SHARED + words(29, 3), temperature=1.0, leader=29, index=2),
    ]  # fmt: skip


def again(requests: list[Work], shift: int) -> list[Work]:
    """The same requests under new names; each still draws with the seed it had."""
    return [
        msgspec.structs.replace(
            work,
            uid=work.uid + shift,
            rid=f"r{work.uid + shift}",
            leader=None if work.leader is None else work.leader + shift,
        )
        for work in requests
    ]
