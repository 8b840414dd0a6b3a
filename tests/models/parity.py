"""The comparison every family's parity test makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import Driver, make_runner, read_facts

LENGTH = 75  # several pages of 16, and past the windows and original contexts the tests use
CHUNKINGS = ([75], [16, 16, 43], [7, 1, 30], [1])  # what is left is decoded


def save_tiny(model: Any, folder: Path) -> Any:
    """Random weights far from their tiny initial spread, so that every one of them matters."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    model.eval()
    model.save_pretrained(folder)
    return model


def make_prompt(vocab_size: int, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def expect_parity(model: Any, folder: Path) -> None:
    """Logits of every position within 1e-4 (relative to their size), whole, chunked and decoded,
    with pages of 1 and 16 tokens."""
    save_tiny(model, folder)
    facts = read_facts(folder)
    prompt = make_prompt(facts.vocab_size)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    for page_size in (1, 16):
        for chunks in CHUNKINGS:
            driver = Driver(make_runner(facts, page_size=page_size))
            torch.testing.assert_close(driver.run(prompt, chunks), expected, rtol=1e-4, atol=1e-4)
