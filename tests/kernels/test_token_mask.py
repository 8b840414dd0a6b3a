from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from kernels.token_mask import forbid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("implementation", ["reference", "torch", "triton"])
@pytest.mark.parametrize("vocab", [5, 64, 4099])
@pytest.mark.parametrize("places", [[0, 1, 2], [2, 0], []])
def test_only_what_has_a_bit_is_left(implementation: str, vocab: int, places: list[int]) -> None:
    if implementation == "triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    device = DEVICE if implementation == "triton" else "cpu"
    torch.manual_seed(vocab)
    logits = torch.randn(3, vocab)
    allowed = torch.rand(len(places), vocab) < 0.4
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    masks = torch.from_numpy(packed).view(len(places), -(-vocab // 8))
    expected = logits.clone()
    for place, line in zip(places, allowed, strict=True):
        expected[place, ~line] = float("-inf")
    found = logits.to(device)
    index = torch.tensor(places, dtype=torch.int64, device=device)
    forbid(found, index, masks.to(device), implementation=implementation)
    assert torch.equal(found.cpu(), expected)


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="masks must have shape"):
        forbid(torch.zeros(1, 64), torch.tensor([0]), torch.zeros(1, 9, dtype=torch.uint8))
