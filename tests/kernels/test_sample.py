"""The Triton kernels against the reference: the same tokens, peaks, floors and counts."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

from kernels.sample import sample
from kernels.sample.table import GENERATED, Drawn, table_row
from tests.triton_loops import mend_loop_bounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 10**6, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1.0, "top_p": 0.95},
]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if DEVICE == "cpu":
        mend_loop_bounds(monkeypatch)


def row(rng: random.Random, **rules: float) -> list[int]:
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **rules}
    return table_row(generated=rng.randrange(1000), seed=rng.getrandbits(64), **chosen)


def both(
    logits: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    offsets: torch.Tensor | None = None,
    num: int | None = None,
) -> Drawn:
    """What the kernels draw, which is what the reference draws."""
    num = len(logits) if num is None else num
    counted = table.clone()
    expected = Drawn.empty(num, torch.device("cpu"))
    sample(logits, rows, counted, expected, offsets)
    given = (logits, rows, table.clone(), offsets)
    there = [None if each is None else each.to(DEVICE) for each in given]
    found = Drawn.empty(num, torch.device(DEVICE))
    sample(*there[:3], found, there[3], implementation="triton")
    assert found.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found.peaks.cpu(), expected.peaks, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.floors.cpu(), expected.floors)
    assert torch.equal(there[2].cpu(), counted)
    return found


@pytest.mark.parametrize(("vocab", "scale"), [(3, 2.0), (64, 7.0), (1000, 0.3), (9001, 2.0)])
def test_every_rule_draws_what_the_reference_draws(vocab: int, scale: float) -> None:
    rng = random.Random(vocab)
    torch.manual_seed(vocab)
    table = torch.tensor([row(rng, **rules) for rules in RULES])
    logits = torch.randn(len(RULES), vocab) * scale
    rows = torch.randperm(len(RULES)).int()
    both(logits, rows, table)
    both((logits * 2).round(), rows, table)  # full of ties


def test_flat_lines_whose_candidates_do_not_fit_the_list() -> None:
    rng = random.Random(12)
    torch.manual_seed(13)
    rules = [{"top_p": 0.9}, {"top_k": 9000, "top_p": 0.5}, {"top_k": 19000}]
    table = torch.tensor([row(rng, **each) for each in rules])
    logits = torch.randn(3, 20001) * 0.3
    both(logits, torch.arange(3).int(), table)
    both((logits * 2).round(), torch.arange(3).int(), table)  # more of one weight than fit


@pytest.mark.parametrize("temperature", [0.01, 3.0])
def test_temperatures_and_bfloat16(temperature: float) -> None:
    rng = random.Random(1)
    torch.manual_seed(2)
    table = torch.tensor([row(rng, **{**rules, "temperature": temperature}) for rules in RULES])
    both((torch.randn(len(RULES), 5000) * 3).bfloat16(), torch.arange(len(RULES)).int(), table)


def test_padding_and_wide_lines() -> None:
    """More logits and rows than lines asked for, and lines that do not follow each other."""
    rng = random.Random(3)
    torch.manual_seed(4)
    table = torch.tensor([row(rng, **rules) for rules in RULES[:5]])
    logits = torch.randn(5, 5000)[:, 100:4500]
    found = both(logits, torch.tensor([4, 2, 1, 0, 3]).int(), table, num=3)
    assert found.tokens.shape == (3,)


def test_logits_that_are_not_numbers() -> None:
    rng = random.Random(5)
    torch.manual_seed(6)
    for rules in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}):
        logits = torch.randn(5, 9000)
        logits[0, 5000] = float("nan")
        logits[1] = float("-inf")
        logits[2, 8999] = float("inf")
        logits[3, :8998] = float("-inf")  # whole tiles
        table = torch.tensor([row(rng, **rules) for _ in range(5)])
        found = both(logits, torch.arange(5).int(), table)
        assert found.tokens[:3].tolist() == [0, 0, 0]
        assert int(found.tokens[3]) >= 8998


def test_an_offset_draws_what_comes_later() -> None:
    rng = random.Random(7)
    torch.manual_seed(8)
    table = torch.tensor([row(rng, **rules) for rules in RULES[:3]])
    logits = torch.randn(1, 2000).expand(12, -1).contiguous()
    rows = torch.arange(3).repeat_interleave(4).int()
    offsets = torch.arange(4).repeat(3)
    ahead = both(logits, rows, table, offsets).tokens.view(3, 4)
    for place in range(4):
        now = both(logits[:3], torch.arange(3).int(), table)
        assert now.tokens.tolist() == ahead[:, place].tolist()
        table[:, GENERATED] += 1


def test_a_line_does_not_depend_on_its_company() -> None:
    rng = random.Random(9)
    torch.manual_seed(10)
    table = torch.tensor([row(rng, **rules) for rules in RULES], device=DEVICE)
    logits = torch.randn(len(RULES), 5000, device=DEVICE)

    def draw(lines: list[int]) -> list[int]:
        drawn = Drawn.empty(len(lines), torch.device(DEVICE))
        rows = torch.tensor(lines, device=DEVICE).int()
        sample(logits[lines], rows, table.clone(), drawn, implementation="triton")
        return drawn.memory.tolist()

    whole = Drawn(torch.tensor(draw(list(range(len(RULES))))))
    for line in (0, 1, 4, 8):
        alone = Drawn(torch.tensor(draw([line])))
        assert (alone.tokens[0], alone.floors[0]) == (whole.tokens[line], whole.floors[line])


def test_what_is_refused() -> None:
    table, rows = torch.tensor([row(random.Random(0))]), torch.zeros(1, dtype=torch.int32)
    drawn = Drawn.empty(1, torch.device("cpu"))
    for logits, wanted in (
        (torch.zeros(1, 0), "at least one column"),
        (torch.zeros(1, 8, dtype=torch.float64), "float32 or bfloat16"),
        (torch.zeros(0, 8), "1 lines need"),
        (torch.zeros(8), "shape"),
    ):
        with pytest.raises(ValueError, match=wanted):
            sample(logits, rows, table, drawn)
    with pytest.raises(ValueError, match="implementation"):
        sample(torch.zeros(1, 8), rows, table, drawn, implementation="native")
