"""The pieces of `python -m bench.gpu` that need neither an engine nor torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu.figures import compare, gap_figures, step_sums
from bench.gpu.folder import read_shape, shape_names, write_folder
from bench.gpu.peers import PEERS
from bench.gpu.sets import FULL, Prompts, at_poisson_times, offline_set, online_mix
from bench.gpu.table import headline, render_table
from srt.config.probe import probe_model
from srt.errors import ConfigError
from tokenizer_proc.load import load_codec

PARAMETERS = {"qwen3-0.6b": 0.596e9, "llama-8b": 8.03e9, "qwen3-14b": 14.77e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_is_the_public_model(tmp_path: Path, name: str) -> None:
    shape = read_shape(name)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    facts = probe_model(tmp_path, name)
    assert facts.num_parameters == pytest.approx(PARAMETERS[name], rel=0.005)
    assert facts.dtype == "bfloat16" and facts.end_token_ids == [shape["eos_token_id"]]


def test_every_figure_of_others_has_a_shape() -> None:
    assert set(PEERS) < set(shape_names())
    with pytest.raises(ConfigError, match="known: .*llama-8b"):
        read_shape("llama")


def test_a_folder_has_a_tokenizer_of_its_size(tmp_path: Path) -> None:
    """Every id has its own text, words are merged letter by letter, and text comes back."""
    shape = read_shape("tiny")
    folder = write_folder(tmp_path / "tiny", shape)
    codec = load_codec(probe_model(folder, "tiny"))
    size = shape["vocab_size"]
    assert len({codec.token_bytes(token) for token in range(size)}) == size
    assert codec.is_special(shape["eos_token_id"]) and not codec.is_special(300)
    text = "the zebra: é\n"
    ids = codec.encode(text, add_special_tokens=False)
    assert b"".join(codec.token_bytes(token) for token in ids).decode() == text
    assert len(ids) < len(text.encode())


def test_the_offline_set_is_the_same_every_time() -> None:
    asks = offline_set(FULL, 128256)
    assert asks == offline_set(FULL, 128256)
    assert len(asks) == 256
    lengths = [len(ask.token_ids) for ask in asks]
    answers = [ask.max_tokens for ask in asks]
    assert (sum(lengths), sum(answers)) == (144_831, 144_160)
    assert min(lengths + answers) >= 100 and max(lengths + answers) <= 1024
    assert max(max(ask.token_ids) for ask in asks) < 40_000


def test_online_requests_come_at_their_rate_with_long_ones_among_them() -> None:
    asks = at_poisson_times(online_mix(FULL, 128256, 800, seed=1), rate=40.0, seed=2)
    assert [len(ask.token_ids) for ask in asks[7::8]] == [2048] * 100
    times = [ask.at for ask in asks]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20.0, rel=0.1)


def test_prompts_differ_and_stay_below_special_tokens() -> None:
    prompts = Prompts(1000, 3)
    one, other = prompts.ids(200), prompts.ids(200)
    assert one != other and max(one + other) < 1000 - 512
    assert one == Prompts(1000, 3).ids(200)


def test_where_answers_part() -> None:
    assert compare([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == "yes"
    assert compare([[1, 2]], [[1]]).startswith("NO: request 0 parts at token 1;")
    assert compare([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == (
        "NO: request 1 parts at token 1; 1 of 2 do; 75.0% of the tokens come before"
    )


def test_gaps() -> None:
    figures = gap_figures([0.010] * 98 + [0.020, 0.040])
    assert figures["itl_ms_p50"] == pytest.approx(10.0)
    assert figures["itl_ms_max"] == pytest.approx(40.0)
    assert 1.0 < figures["p99_by_p50"] < 3.0
    assert gap_figures([])["p99_by_p50"] == 0.0


def test_steps_add_up() -> None:
    def group(steps: int, wait: float) -> dict[str, object]:
        stages = {"launch": 0.001, "wait": wait}
        return {
            "steps": steps,
            "step_seconds": 0.01,
            "stages": stages,
            "phases": {"forward": 0.008},
        }

    sums = step_sums({"prefill": group(2, 0.5), "decode 1": group(3, 0.5), "decode 8": group(5, 9)})
    assert sums["prefill"]["steps"] == 2 and sums["decode"]["steps"] == 8
    assert sums["decode"]["wall_s"] == pytest.approx(0.08)
    assert sums["decode"]["host_s"] == pytest.approx(0.008)
    assert sums["decode"]["device_s"] == pytest.approx(0.064)


def test_the_table_says_what_is_met() -> None:
    results = {
        "offline": {"tok_s": [12_000.0, 11_000.0]},
        "batch1": {"ms_per_token": 4.0},
        "ttft": {"1024_ms": 30.0, "1024_all": [1.0]},
        "decode": {"256": 26_000.0, "256_with_prefill": 1.0},
        "gateway": {"tok_s": [11_800.0, 11_900.0]},
        "start": {"error": "it did not"},
    }
    assert headline(results) == {
        "offline": 11_000.0,  # the slower of two runs
        "batch1": 4.0,
        "ttft 1024": 30.0,
        "decode 256": 26_000.0,
        "gateway": pytest.approx(11_900 / 12_000),
    }
    lines = {line[:32].strip(): line[32:] for line in render_table("llama-8b", results).split("\n")}
    assert lines["offline set, out tok/s"].split()[-1] == "NO"
    assert lines["batch 1, ms per token"].split() == ["4.00", "4.10", "5.09", "4.90", "yes"]
    assert lines["TTFT 1,024 tokens, ms"].split()[-1] == "NO"
    assert lines["batch 256 decode, tok/s"].split()[-1] == "yes"
    assert lines["start to ready, s"].split()[0] == "-"


@pytest.mark.parametrize(("shape", "is_comparable"), [("tiny", True), ("llama-8b", False)])
def test_what_is_nobodys_goal_has_no_targets(shape: str, is_comparable: bool) -> None:
    """A shape to try it out with, and any shape on a CPU or in small."""
    results = {"offline": {"tok_s": [100.0]}, "gateway": {"tok_s": [50.0]}}
    lines = render_table(shape, results, is_comparable).split("\n")
    assert [line[:32].strip() for line in lines[1:]] == [
        "offline set, out tok/s",
        "gateway, share of in-process",
    ]
    assert [line[32:].split() for line in lines[1:]] == [
        ["100.00", "-", "-", "-"],
        ["0.50", "-", "-", "-"],
    ]


def test_the_gateway_is_a_goal_of_dense_models() -> None:
    goals = {shape for shape, rows in PEERS.items() if rows["gateway"].target is not None}
    assert goals == {"qwen3-0.6b", "llama-8b", "qwen3-14b"}
