"""Which guesses the host never sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from srt.spec import build

SPEC = {
    "speculative_algorithm": "eagle3",
    "speculative_eagle_topk": 1,
    "speculative_lookup": False,
    "speculative_confidence": 0.0,
}


@pytest.mark.parametrize(
    ("changes", "target", "draft", "stays"),
    [
        ({}, "triton", "triton", True),
        ({}, "flashinfer", "triton", False),
        ({}, "triton", "flashinfer", False),
        ({"speculative_eagle_topk": 2}, "triton", "triton", False),
        ({"speculative_algorithm": None}, "triton", "triton", False),
    ],
)
def test_no_guess_stays_on_the_device_whose_attention_is_planned(
    changes: dict[str, Any], target: str, draft: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain knows how long its rows are on the device only."""
    runners = [SimpleNamespace(decode_attention_backend=name) for name in (target, draft)]
    context = SimpleNamespace(target=runners[0], drafts=tuple(runners[1:]))
    monkeypatch.setattr(build, "get_spec", lambda: SimpleNamespace(**{**SPEC, **changes}))
    monkeypatch.setattr(build, "get_context", lambda: context)
    assert build.stays_on_device() is stays
