"""How many ranks: what each has, what is refused with which numbers, what they share of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from srt.config.args import ServerArgs
from srt.config.dummy import dummy_facts
from srt.config.explain import explain, render_table
from srt.config.facts import Facts, GpuFacts
from srt.config.resolve import Resolution, resolve
from srt.config.rules_parallel import bytes_of_rank, check_int4
from srt.errors import ConfigError


def facts_with(**model: Any) -> Facts:
    facts = dummy_facts()
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "config": {"intermediate_size": 96}}
    return replace(
        facts,
        machine=replace(facts.machine, num_cores=8),
        model=replace(facts.model, **{**shape, **model}),
    )


def decide(size: int, facts: Facts | None = None, **fields: Any) -> Resolution:
    args = ServerArgs(tensor_parallel_size=size, **fields)
    return resolve(args, facts or facts_with(), entropy=0)


def reason_of(resolution: Resolution, field: str) -> str:
    [entry] = [entry for entry in resolution.trail if entry.field == field]
    return entry.reason


def test_one_rank_is_the_default() -> None:
    one = decide(1)
    assert one.values["parallel"]["tensor_parallel_size"] == 1
    assert "default" in reason_of(one, "parallel.tensor_parallel_size")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, "each rank has 4 of 8 heads and 1 of 2 KV heads"),
        (4, "each rank has 2 of 8 heads and 1 of 2 KV heads, which 2 ranks share"),
        (8, "each rank has 1 of 8 heads and 1 of 2 KV heads, which 4 ranks share"),
    ],
)
def test_explain_says_who_has_what(size: int, words: str) -> None:
    resolution = decide(size)
    assert reason_of(resolution, "parallel.tensor_parallel_size").endswith(words)
    assert words in render_table(explain(resolution))


def test_ranks_share_threads_and_memory() -> None:
    """A token costs a rank its own heads' KV; the free memory is that of all of them."""
    one, two = decide(1), decide(2)
    assert one.values["exec"]["num_threads"] == 8 and two.values["exec"]["num_threads"] == 4
    assert "divided among 2 ranks" in reason_of(two, "exec.num_threads")
    budget = {"kv_memory_gb": 0.05, "context_length": 64}
    few = decide(1, **budget).values["schedule"]["max_total_tokens"]
    many = decide(2, **budget).values["schedule"]["max_total_tokens"]
    assert abs(many - 2 * few) <= 32
    shared = decide(4, **budget).values["schedule"]["max_total_tokens"]
    assert shared == many  # one KV head each


@pytest.mark.parametrize(
    ("size", "model", "words"),
    [
        (3, {}, "8 attention heads, which 3 ranks cannot divide; allowed: 1, 2, 4, 8"),
        (6, {"num_heads": 12, "num_kv_heads": 4}, "4 KV heads, which 6 ranks can neither divide"),
        (
            2,
            {"config": {"intermediate_size": 95}},
            "intermediate_size 95, which 2 ranks cannot divide; allowed: 1",
        ),
        (
            2,
            {"config": {"num_experts": 5}},
            "num_experts 5, which 2 ranks cannot divide; allowed: 1$",
        ),
        (2, {"format": "script", "architecture": "Script"}, "is a script"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(
    size: int, model: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}.*{words}"):
        decide(size, facts_with(**model))


def test_what_cannot_be_had_with_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--deterministic.*allowed with it: 1, 2"):
        decide(4, deterministic=True, native_kernels=True, dtype="bfloat16")
    with pytest.raises(ConfigError, match="--rank-sums direct is for several GPUs"):
        decide(2, rank_sums="direct")


def test_int4_weights_are_cut_by_whole_units() -> None:
    """Heads of 128 inputs in all, groups of 32 in units of 64."""
    config = {"intermediate_size": 256, "quantization_config": {"group_size": 32}}
    model = facts_with(config=config).model
    check_int4(model, 1)
    check_int4(model, 2)
    with pytest.raises(ConfigError, match="units of 64 inputs, and heads of 128 give a rank 32"):
        check_int4(model, 4)


def test_every_rank_has_the_embedding() -> None:
    assert bytes_of_rank(1000, 200, 4) == 400
    assert bytes_of_rank(1000, 200, 1) == 1000


def test_each_rank_wants_a_gpu() -> None:
    facts = facts_with()
    card = GpuFacts(
        index=0,
        name="H200",
        capability=90,
        memory_total=1 << 37,
        memory_free=1 << 37,
        driver="580.1",
    )
    machine = replace(
        facts.machine,
        gpus=[card],
        torch_cuda="13.0",
        versions={"torch": "2.11.0", "triton": "3.6.0"},
    )
    with pytest.raises(ConfigError, match="needs 2 GPUs, one for each rank; this machine has 1"):
        decide(2, replace(facts, machine=machine))


def test_one_process_cannot_be_two() -> None:
    with pytest.raises(ConfigError, match="--inline means one"):
        decide(2, inline=True)
    with pytest.raises(ConfigError, match="smallest allowed is 1"):
        decide(0)


def test_a_sharded_folder_wants_its_own_number_of_ranks() -> None:
    facts = facts_with(format="sharded", shards=2)
    resolution = decide(2, facts)
    assert resolution.values["model"]["load_format"] == "sharded"
    assert reason_of(resolution, "model.load_format").endswith("is sharded for 2 ranks")
    with pytest.raises(ConfigError, match="was sharded for 2 ranks; allowed: 2, or divide"):
        decide(1, facts)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 5: .* 2 ranks; allowed: 2, or"):
        decide(5, facts)
    assert decide(1, facts, load_format="dummy").values["model"]["load_format"] == "dummy"
    with pytest.raises(ConfigError, match="safetensors was asked for, but .* is sharded"):
        decide(2, facts, load_format="safetensors")


def test_a_sharded_draft_is_a_whole_model() -> None:
    """The target may be stored in another way."""
    draft = replace(facts_with(format="sharded", shards=1).model, name="small", path="/small")
    facts = replace(facts_with(), draft=draft)
    words: dict[str, Any] = {"speculative_algorithm": "standalone"}
    words["speculative_draft_model"] = "/small"
    resolution = decide(2, facts, **words)
    _, found = resolution.runners
    assert found.load_format == "sharded"
    assert resolution.values["model"]["load_format"] == "safetensors"
    split = replace(facts, draft=replace(draft, shards=2))
    with pytest.raises(ConfigError, match="sharded for 2 ranks, but every rank has a whole draft"):
        decide(2, split, **words)
    _, found = decide(2, split, **words, speculative_draft_load_format="dummy").runners
    assert found.load_format == "dummy"
