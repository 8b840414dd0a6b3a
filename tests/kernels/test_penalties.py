from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from kernels.penalties import PROMPT, penalize, remember

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, SLOTS, WIDTH = 5000, 6, 40


def device_of(implementation: str) -> str:
    if implementation == "triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return DEVICE if implementation == "triton" else "cpu"


def histories() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each slot has ten ids of a prompt and a few of an output, some of them twice or in both."""
    torch.manual_seed(1)
    history = torch.zeros(SLOTS, WIDTH, dtype=torch.int64)
    seen = torch.zeros(SLOTS, V, dtype=torch.int32)
    lengths = torch.zeros(SLOTS, dtype=torch.int64)
    for slot in range(SLOTS):
        prompt = torch.randperm(V)[:10]
        output = torch.cat([torch.randint(0, V, (slot,)), prompt[:2], prompt[:1]])
        ids = torch.cat([prompt, output])
        history[slot] = ids[0]
        history[slot, : len(ids)] = ids
        lengths[slot] = len(ids)
        seen[slot, prompt] = PROMPT
        for token in output:
            seen[slot, token] += 1
    return history, seen, lengths


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_penalties_are_the_formulas(implementation: str) -> None:
    device = device_of(implementation)
    history, seen, _ = histories()
    logits = torch.randn(5, V) * 3
    places, slots = torch.tensor([3, 0, 4]), torch.tensor([5, 2, 0])
    rates = torch.tensor([[1.3, 0.7, 0.5], [0.8, 0.0, -0.4], [1.0, 1.5, 0.0]])
    expected = logits.clone()
    for place, slot, (repetition, presence, frequency) in zip(
        places.tolist(), slots.tolist(), rates.tolist(), strict=True
    ):
        for token in set(history[slot].tolist()):
            count = int(seen[slot, token]) % PROMPT
            value = float(logits[place, token])
            value = value / repetition if value > 0 else value * repetition
            expected[place, token] = value - frequency * count - presence * (count > 0)
    found = logits.to(device)
    given = (each.to(device) for each in (places, slots, rates, history, seen))
    penalize(found, *given, implementation=implementation)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    untouched = expected == logits
    assert torch.equal(found.cpu()[untouched], logits[untouched])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_tokens_are_remembered(implementation: str) -> None:
    device = device_of(implementation)
    history, seen, lengths = (each.to(device) for each in histories())
    places, slots = (torch.tensor(each, device=device) for each in ([2, 0], [4, 1]))
    before = lengths.tolist()
    for tokens in ([7, 0, 9], [7, 0, 11]):
        given = (torch.tensor(tokens, device=device), places, slots, history, lengths, seen)
        remember(*given, implementation=implementation)
    assert history[4, before[4] : before[4] + 2].tolist() == [9, 11]
    assert history[1, before[1] : before[1] + 2].tolist() == [7, 7]
    assert [b - a for a, b in zip(before, lengths.tolist(), strict=True)] == [0, 2, 0, 0, 2, 0]
    fresh = histories()[1]
    fresh[4, 9] += 1
    fresh[4, 11] += 1
    fresh[1, 7] += 2
    assert torch.equal(seen.cpu(), fresh)


def test_what_is_refused() -> None:
    history, seen, _ = histories()
    index = torch.tensor([0])
    with pytest.raises(ValueError, match="rates must have shape"):
        penalize(torch.zeros(1, V), index, index, torch.ones(1, 2), history, seen)
    with pytest.raises(ValueError, match=r"logits must be torch\.float32"):
        penalize(torch.zeros(1, V).half(), index, index, torch.ones(1, 3), history, seen)
