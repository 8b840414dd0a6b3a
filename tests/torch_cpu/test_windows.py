"""What a window lets a slice's tokens see: a tree's branches, or a block that sees all of itself; and
what taps hear of a forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from srt.config.dummy import dummy_facts
from srt.config.facts import ModelFacts
from srt.protocols.forward_batch import ForwardBatch, Slice, Window
from srt.runner.model_runner import ModelRunner
from srt.spec.worker import tree_window
from tests.tiny_models import Driver, make_runner

PROMPT = [5, 9, 3, 7, 11, 2, 8, 6, 4, 21, 22, 23, 24, 25, 26, 27, 28]
TREE, PARENTS = [31, 32, 33, 34, 35, 36], [-1, -1, 0, 0, 1, 2]


def facts() -> ModelFacts:
    return replace(dummy_facts().model, config={"intermediate_size": 96, "rms_norm_eps": 1e-5})


def runner_of(page_size: int, **changes: Any) -> ModelRunner:
    return make_runner(facts(), page_size=page_size, load_format="dummy", **changes)


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(PARENTS[node]), TREE[node]]


def forward(driver: Driver, slices: list[Slice]) -> torch.Tensor:
    """Logits of every token of the slices."""
    runner = driver.runner
    writes = [driver.reserve(piece.row, piece.start + piece.length) for piece in slices]
    with torch.inference_mode():
        inputs = runner.prepare(ForwardBatch(step=0, slices=slices, table_writes=writes))
        inputs.keep = None
        return runner.logits(runner.forward(inputs))


def silent(row: int, start: int, tokens: list[int], window: Window | None = None) -> Slice:
    return Slice(
        row=row, start=start, length=len(tokens), tokens=tokens, sample=False, window=window
    )


@pytest.mark.parametrize("page_size", (1, 16))
@pytest.mark.parametrize("prefill", ("sdpa",))
def test_a_tree_is_its_paths(page_size: int, prefill: str) -> None:
    """Every guess sees what it would see at the end of its own branch, beside a causal neighbour."""
    driver = Driver(runner_of(page_size, prefill_attention_backend=prefill))
    forward(driver, [silent(0, 0, PROMPT[:-1])])
    start = len(PROMPT) - 1
    tree = silent(0, start, [PROMPT[-1], *TREE], tree_window(start, PARENTS))
    beside = silent(1, 0, PROMPT[:9])
    found = forward(driver, [tree, beside])
    for node in range(-1, len(TREE)):
        alone = Driver(driver.runner)
        alone.free = driver.free[::-1]
        expected = forward(alone, [silent(2, 0, [*PROMPT, *path_to(node)])])[-1]
        torch.testing.assert_close(found[node + 1], expected, rtol=1e-4, atol=1e-5)
    causal = Driver(driver.runner)
    causal.free = driver.free[::-1]
    expected = forward(causal, [silent(3, 0, PROMPT[:9])])
    torch.testing.assert_close(found[1 + len(TREE) :], expected, rtol=1e-4, atol=1e-5)


def test_a_block_sees_itself_in_both_directions() -> None:
    """Changing the last token of a block changes what its first token gives; of a causal slice not."""
    runner = runner_of(16)
    for sees_all, changes in ((True, True), (False, False)):
        got = []
        for last in (41, 42):
            driver = Driver(runner)
            forward(driver, [silent(0, 0, PROMPT)])
            start = len(PROMPT)
            block = Window(base=start, visible=[0b111] * 3, positions=[start, start + 1, start + 2])
            got.append(
                forward(driver, [silent(0, start, [40, 43, last], block if sees_all else None)])[0]
            )
        assert bool((got[0] != got[1]).any()) is changes


def test_taps_hear_the_stream_and_change_nothing() -> None:
    runner = runner_of(16)
    plain = forward(Driver(runner), [silent(0, 0, PROMPT)])
    assert runner.features is None
    layers = runner.arch.num_layers
    runner.capture((0, 1, layers))
    tapped = forward(Driver(runner), [silent(0, 0, PROMPT)])
    assert torch.equal(plain, tapped)
    features = runner.features
    assert features is not None
    size = runner.arch.hidden_size
    assert features.shape == (len(PROMPT), 3 * size)
    model = runner._model
    assert model is not None
    embedded = model.embedding[torch.tensor(PROMPT)]
    assert torch.equal(features[:, :size], embedded)
    assert torch.equal(runner.logits(features[:, 2 * size :]), plain)


def test_taps_hear_all_tokens_though_few_are_kept() -> None:
    runner = runner_of(16)
    runner.capture((1, runner.arch.num_layers))
    driver = Driver(runner)
    last = Slice(row=0, start=0, length=len(PROMPT), tokens=PROMPT, sample=True)
    inputs = runner.prepare(
        ForwardBatch(step=0, slices=[last], table_writes=[driver.reserve(0, len(PROMPT))])
    )
    with torch.inference_mode():
        hidden = runner.forward(inputs)
    assert hidden.shape[0] == 1 and runner.features is not None
    assert torch.equal(hidden[0], runner.features[-1, runner.arch.hidden_size :])


def test_moved_keys_are_as_if_computed_there() -> None:
    runner = runner_of(1)
    driver = Driver(runner)
    forward(driver, [silent(0, 0, PROMPT)])
    pool, table = runner.pool, runner.table.host[0]
    slots = torch.tensor([int(table[place]) for place in range(6)])
    before = [pool.keys(0)[slots].clone(), pool.values(1)[slots].clone()]
    pool.move(slots[[2, 3, 5]], slots[[1, 2, 3]])
    for plane, old in zip((pool.keys(0), pool.values(1)), before, strict=True):
        assert torch.equal(plane[slots], old[[0, 2, 3, 5, 4, 5]])
