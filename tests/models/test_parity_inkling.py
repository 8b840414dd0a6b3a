"""Inkling against transformers: whole, chunked and decoded; rows beside each other; rows that go on
behind pages which others filled. And the scale of its experts, by what is being loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import CHUNKINGS, make_prompt

from srt.config.context import get_context, get_model
from srt.config.probe import probe_model
from srt.errors import ConfigError
from srt.models.inkling import one_scale
from srt.protocols.forward_batch import TableWrite
from srt.runner.draft import load_scope
from srt.runner.model_runner import ModelRunner
from srt.runner.shard import write_shards
from tests.inkling_models import save
from tests.tiny_models import Driver, make_runner

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    """What the model asks while it is built: how it is loaded."""
    with get_context().override_server_args(load_format="safetensors"):
        yield


def expect(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("page_size", "changes"),
    [
        (16, {}),
        (1, {}),
        (2, {"conv_kernel_size": 5, "log_scaling_n_floor": None}),
        (16, {"conv_kernel_size": 2, "n_shared_experts": 1, "mlp_layer_types": ["sparse"] * 4}),
    ],
)
def test_inkling(page_size: int, changes: dict[str, Any], tmp_path: Path) -> None:
    model, facts = save(tmp_path, **changes)
    assert facts.vocab_size == 97
    prompt = make_prompt(97)
    expected = expect(model, prompt)
    for chunks in CHUNKINGS if page_size == 1 else CHUNKINGS[1:3]:
        found = Driver(make_runner(facts, page_size=page_size)).run(prompt, chunks)
        torch.testing.assert_close(found, expected, **CLOSE)


def test_rows_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Prompts and decodes in one step; then a row in pages that another has left."""
    model, facts = save(tmp_path)
    first, second = make_prompt(97, 50), make_prompt(97, 61)[::-1]
    wanted, other = expect(model, first), expect(model, second)
    driver = Driver(make_runner(facts, num_pages=9))
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def step(**work: Any) -> None:
        for row, logits in driver.step(
            {int(name[1:]): given for name, given in work.items()}
        ).items():
            found[row].append(logits)

    step(r0=first[:20])
    step(r0=first[20], r1=second[:7])
    step(r0=first[21], r1=second[7:8])
    step(r1=second[8:40], r0=first[22:48])
    step(r0=first[48], r1=second[40])
    step(r0=first[49], r1=second[41:61])
    torch.testing.assert_close(torch.cat(found[0]), wanted, **CLOSE)
    torch.testing.assert_close(torch.cat(found[1]), other, **CLOSE)
    driver.release(0)
    torch.testing.assert_close(driver.run(first, [30], row=2), wanted, **CLOSE)


@pytest.mark.parametrize("shared", [1, 2])
def test_a_row_goes_on_behind_the_pages_of_another(shared: int, tmp_path: Path) -> None:
    """As with a prefix that is cached, while the one who filled it goes on too."""
    model, facts = save(tmp_path)
    first = make_prompt(97, 60)
    cut = 16 * shared
    second = first[:cut] + make_prompt(97, 40)[::-1]
    driver = Driver(make_runner(facts))
    driver.step({0: first[:cut]})
    driver.step({0: first[cut : cut + 5]})
    pages = driver.pages[0][:shared]
    driver.runner.write_table([TableWrite(row=1, first=0, pages=pages)])
    driver.pages[1], driver.starts[1] = list(pages), cut
    mine, theirs = [], []
    for at in range(4):
        step = driver.step({0: first[cut + 5 + at], 1: second[cut + at : cut + at + 1]})
        theirs.append(step[0])
        mine.append(step[1])
    mine.append(driver.step({1: second[cut + 4 :]})[1])
    torch.testing.assert_close(torch.cat(mine), expect(model, second)[cut:], **CLOSE)
    torch.testing.assert_close(torch.cat(theirs), expect(model, first)[cut + 5 : cut + 9], **CLOSE)


def test_shards_are_the_checkpoint(tmp_path: Path) -> None:
    _, facts = save(tmp_path / "whole")
    write_shards(facts, 1, tmp_path / "cut", None, lambda phase, fraction: None)
    prompt = make_prompt(97, 20)
    found, expected = (
        Driver(make_runner(each)).run(prompt, [12])
        for each in (probe_model(tmp_path / "cut", "cut"), facts)
    )
    assert torch.equal(found, expected)
    with pytest.raises(ConfigError, match="short convolutions, which ranks cannot divide"):
        write_shards(facts, 2, tmp_path / "two", None, lambda phase, fraction: None)


def test_one_scale_for_all_experts() -> None:
    """A real one must be constant; noise in its place is not used."""
    noise = torch.randn(4)
    assert one_scale(torch.full((3, 1), 0.5), "x").tolist() == [0.5]
    with pytest.raises(ConfigError, match="x is not one number but several .* reshard"):
        one_scale(noise, "x")
    with get_model().override(load_format="dummy"):
        assert one_scale(noise, "x").tolist() == [1.0]
    with pytest.raises(ConfigError, match="reshard"):
        one_scale(noise, "x")


def scale_of(runner: ModelRunner) -> float:
    model: Any = runner._model
    scale: torch.Tensor = model._layers[1]._mlp._route._scale
    return float(scale)


@pytest.mark.parametrize("target", ["safetensors", "dummy"])
def test_a_draft_is_loaded_by_its_own_format(target: str, tmp_path: Path) -> None:
    """Noise beside a real target, and the other way round; afterwards the target's is back."""
    model, facts = save(tmp_path)
    stored = float(model.model.layers[1].mlp.gate.global_scale.detach())
    assert abs(stored - 1) > 0.1
    other = "dummy" if target == "safetensors" else "safetensors"
    scales = {"dummy": 1.0, "safetensors": stored}
    with get_context().override_server_args(load_format=target):
        runner = make_runner(facts, load_format=target)
        draft = make_runner(facts, load_format=other)
        draft.role = "draft"
        with load_scope(draft):
            draft.load()
            assert get_model().load_format == other
        assert get_model().load_format == target
        assert scale_of(runner) == pytest.approx(scales[target])
        assert scale_of(draft) == pytest.approx(scales[other])


def test_noise_computes(tmp_path: Path) -> None:
    _, facts = save(tmp_path)
    with get_context().override_server_args(load_format="dummy"):
        logits = Driver(make_runner(facts, load_format="dummy")).run(make_prompt(97, 20), [15])
    assert logits.shape == (20, 97) and bool(logits.isfinite().all()) and float(logits.std()) > 1e-4
