"""`resolve`: every rule, every refusal, and a trail that leaves nothing out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srt.config.args import ServerArgs
from srt.config.bags import BAGS
from srt.config.dummy import dummy_facts
from srt.config.explain import explain, render_table
from srt.config.facts import Facts
from srt.config.leaves import leaf_table
from srt.config.resolve import Resolution, resolve
from srt.config.runner_spec import RunnerSpec
from srt.config.trail import InputSource
from srt.errors import ConfigError
from srt.runner.memory import PoolNeed, size_pools

SHORTHANDS = {
    "attention_backend",  # stands for both halves and has no value of its own
    "cuda_graph_sizes",  # becomes graph_sizes
    "cuda_graph_prefill_tokens",  # becomes prefill_graph_sizes
}
DRAFT_ONLY = ("attention_backend", "load_format", "kv_cache_dtype", "quantization")


def make_facts(machine: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> Facts:
    facts = dummy_facts()
    return Facts(
        machine=dataclasses.replace(facts.machine, **machine or {}),
        model=dataclasses.replace(facts.model, **model or {}),
    )


def decide(facts: Facts | None = None, **fields: Any) -> Resolution:
    return resolve(ServerArgs(**fields), facts or make_facts(), entropy=11)


def by_field(resolution: Resolution) -> dict[str, tuple[Any, str, str]]:
    return {entry.field: (entry.value, entry.source, entry.reason) for entry in resolution.trail}


SMOLLM2 = {
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "context_length": 8192,
    "num_parameters": 134_515_008,
}


def test_every_field_has_a_leaf_and_every_leaf_a_field() -> None:
    leaves = {(bag.namespace, name) for bag in BAGS for name in bag.leaf_types}
    leaves |= {("runner", field.name) for field in dataclasses.fields(RunnerSpec)}
    fields = {(leaf.bag, leaf.name) for leaf in leaf_table().values()}
    only_typed = {("runner", name) for name in SHORTHANDS}
    only_typed |= {("draft", f"speculative_draft_{name}") for name in DRAFT_ONLY}
    assert fields - leaves == only_typed
    assert leaves - fields == {
        ("runner", name)
        for name in (
            "role",
            "model_path",
            "graph_sizes",
            "prefill_graph_sizes",
            "load_format",
            "draft_attention_backend",
            "step",
        )  # fmt: skip
    }
    assert all(leaf.help for leaf in leaf_table().values())


def test_leaf_type_is_the_field_type_or_stricter() -> None:
    for bag in BAGS:
        for name, hint in bag.leaf_types.items():
            leaf = leaf_table()[name]
            assert hint in (leaf.type, leaf.kind), (bag, name)


def test_one_trail_entry_for_each_value_and_no_other() -> None:
    resolution = decide()
    expected = {f"{bag.namespace}.{name}": None for bag in BAGS for name in bag.leaf_types}
    expected |= {f"target.{field.name}": None for field in dataclasses.fields(RunnerSpec)}
    assert sorted(entry.field for entry in resolution.trail) == sorted(expected)
    for entry in resolution.trail:
        group, name = entry.field.split(".")
        if group == "target":
            assert entry.value == getattr(resolution.runners[0], name)
        else:
            assert entry.value == resolution.values[group][name]
        assert entry.source in ("typed", "file", "model", "rule") and entry.reason


def test_nothing_is_left_open() -> None:
    resolution = decide()
    spec = dataclasses.asdict(resolution.runners[0])
    flat = spec | {k: v for leaves in resolution.values.values() for k, v in leaves.items()}
    assert "auto" not in flat.values()
    off = {name for name, value in flat.items() if value is None}
    assert off == {
        "quantization", "chat_template", "speculative_algorithm", "speculative_draft_model",
        "draft_attention_backend", "step", "zmq_front", "zmq_keys", "api_key", "admin_key",
        "journal", "max_itl_ms",
    }  # fmt: skip


def test_resolve_is_pure() -> None:
    args, facts = ServerArgs(page_size=4), make_facts()
    before = dataclasses.asdict(args), dataclasses.asdict(facts)
    assert resolve(args, facts, entropy=1) == resolve(args, facts, entropy=1)
    assert (dataclasses.asdict(args), dataclasses.asdict(facts)) == before


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"port": 1}, {"serving.port"}),
        ({"api_key": "k"}, {"serving.api_key", "serving.admin_key"}),
        ({"chunked_prefill_size": 64}, {"schedule.chunked_prefill_size", "schedule.max_step_tokens"}),
        ({"max_running": 2}, {"schedule.max_running", "schedule.max_step_tokens"}),
        ({"max_queued": 3}, {"schedule.max_queued", "schedule.max_queued_tokens"}),
        ({"quantization": "int8"}, {"target.quantization"}),
        ({"attention_backend": "sdpa"},
         {"target.prefill_attention_backend", "target.decode_attention_backend"}),
        ({"dtype": "float32"},
         {"target.dtype", "target.kv_cache_dtype", "exec.native_kernels",
          "target.prefill_attention_backend", "target.decode_attention_backend",
          "memory.kv_memory_gb", "schedule.max_total_tokens"}),
    ],
)  # fmt: skip
def test_one_change_moves_only_what_depends_on_it(change: dict[str, Any], moves: set[str]) -> None:
    facts = make_facts(model=SMOLLM2)
    before, after = by_field(decide(facts)), by_field(decide(facts, **change))
    assert {name for name in before if before[name] != after[name]} == moves


def test_entropy_moves_the_seed_only() -> None:
    args, facts = ServerArgs(), make_facts()
    before = by_field(resolve(args, facts, entropy=1))
    after = by_field(resolve(args, facts, entropy=2))
    assert {name for name in before if before[name] != after[name]} == {"device.seed"}
    typed = resolve(ServerArgs(seed=9), facts, entropy=1)
    assert typed.values["device"]["seed"] == 9


def test_sources_tell_typed_from_file() -> None:
    args = ServerArgs(page_size=8, port=8000)
    trail = by_field(
        resolve(args, make_facts(), entropy=1, sources={"page_size": "file", "port": "typed"})
    )
    assert trail["schedule.page_size"][1:] == ("file", "page_size in the config file")
    assert trail["serving.port"][1:] == ("typed", "asked for with --port")
    assert trail["schedule.max_queued"][1] == "rule"


def test_a_switch_turned_off_is_named_as_it_was_typed() -> None:
    args = ServerArgs(gateway=False, native_kernels=False)
    sources: dict[str, InputSource] = dict.fromkeys(("gateway", "native_kernels"), "typed")
    trail = {
        entry.field.partition(".")[2]: entry.reason
        for entry in resolve(args, make_facts(), entropy=1, sources=sources).trail
    }
    assert trail["gateway"] == "asked for with --no-gateway"
    assert trail["native_kernels"] == "asked for with --no-native-kernels"


def test_value_without_a_source_is_not_called_a_default() -> None:
    trail = by_field(resolve(ServerArgs(max_n=3), make_facts(), entropy=1, sources={}))
    assert trail["serving.max_n"] == (3, "typed", "asked for with --max-n")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [(["avx512_bf16"], "bfloat16"), (["amx_bf16"], "bfloat16"), (["avx2", "avx512f"], "float32")],
)
def test_dtype_follows_the_cpu(flags: list[str], dtype: str) -> None:
    target = decide(make_facts({"cpu_flags": flags})).runners[0]
    assert (target.dtype, target.kv_cache_dtype) == (dtype, dtype)


def test_dtype_typed_wins_and_the_cache_follows() -> None:
    target = decide(dtype="float32", kv_cache_dtype="bfloat16").runners[0]
    assert (target.dtype, target.kv_cache_dtype) == ("float32", "bfloat16")
    assert decide(dtype="float16").runners[0].kv_cache_dtype == "float16"


@pytest.mark.parametrize(
    ("machine", "fields", "pair"),
    [
        ({"compiler": "cc"}, {}, ("native", "native")),
        ({"compiler": "cc"}, {"native_kernels": False}, ("sdpa", "sdpa")),
        ({"compiler": "cc"}, {"attention_backend": "sdpa"}, ("sdpa", "sdpa")),
        ({"compiler": "cc"}, {"prefill_attention_backend": "sdpa"}, ("sdpa", "native")),
        ({"compiler": "cc"},
         {"attention_backend": "sdpa", "decode_attention_backend": "native"}, ("sdpa", "native")),
        ({"compiler": "cc"}, {"dtype": "float32"}, ("sdpa", "sdpa")),
        ({"compiler": "cc"}, {"kv_cache_dtype": "float32"}, ("sdpa", "sdpa")),
        ({"compiler": None}, {}, ("sdpa", "sdpa")),
        ({"compiler": None}, {"native_kernels": True}, ("native", "native")),
        ({"compiler": "cc", "cpu_flags": ["avx512_bf16"]}, {}, ("sdpa", "sdpa")),
    ],
)  # fmt: skip
def test_attention_pair(
    machine: dict[str, Any], fields: dict[str, Any], pair: tuple[str, str]
) -> None:
    target = decide(make_facts(machine), **fields).runners[0]
    assert (target.prefill_attention_backend, target.decode_attention_backend) == pair


def test_memory_of_the_default_model() -> None:
    values = decide(make_facts(model=SMOLLM2)).values
    assert values["memory"]["kv_memory_gb"] == 0.256
    assert values["schedule"]["max_total_tokens"] == (256_000_000 // 23_040 // 16 - 1) * 16


def test_a_quarter_of_little_memory() -> None:
    facts = make_facts({"memory_available": 900_000_000}, SMOLLM2)
    resolution = decide(facts)
    assert resolution.values["memory"]["kv_memory_gb"] == 0.225
    assert (
        resolution.values["schedule"]["max_total_tokens"] == (225_000_000 // 23_040 // 16 - 1) * 16
    )


def test_room_for_one_context_comes_first() -> None:
    facts = make_facts(model=SMOLLM2 | {"context_length": 32768})
    resolution = decide(facts)
    assert resolution.values["schedule"]["max_total_tokens"] == 32768
    assert by_field(resolution)["memory.kv_memory_gb"][2] == "room for one whole context"


def test_untyped_context_shrinks_to_what_free_memory_holds_and_says_so() -> None:
    facts = make_facts({"memory_available": 400_000_000}, SMOLLM2)
    context, source, reason = by_field(decide(facts))["target.context_length"]
    room = int((400_000_000 - 134_515_008 * 2) * 0.75)
    assert context == (room // 23_040 // 16 - 1) * 16
    assert source == "rule" and "made for 8192" in reason


def test_tiny_models_get_no_millions_of_pages() -> None:
    schedule = decide().values["schedule"]
    assert schedule["max_total_tokens"] == 256_000_000 // 256 - 16
    assert decide(page_size=1, dtype="float32").values["schedule"]["max_total_tokens"] == 499_999
    assert (
        decide(make_facts(model={"num_layers": 1})).values["schedule"]["max_total_tokens"]
        == 1 << 20
    )


def test_max_running_is_bounded_by_pages_and_by_the_step() -> None:
    few = decide(max_total_tokens=2048, context_length=512, page_size=256).values["schedule"]
    assert few["max_running"] == 4
    assert decide(max_step_tokens=32).values["schedule"]["max_running"] == 32


def test_total_tokens_are_whole_pages() -> None:
    resolution = decide(max_total_tokens=2063)
    entry = next(e for e in resolution.trail if e.field == "schedule.max_total_tokens")
    assert (entry.value, entry.replaced) == (2048, 2063)


def test_a_named_budget_may_take_all_that_the_weights_leave() -> None:
    """The largest that the refusal of a larger one names."""
    assert decide(kv_memory_gb=7.999).values["memory"]["kv_memory_gb"] == 7.999
    assert decide(max_total_tokens=31248416).values["schedule"]["max_total_tokens"] == 31248416
    full = make_facts({"memory_available": 100_000})
    with pytest.raises(ConfigError, match="the most that fits: nothing"):
        decide(full, kv_memory_gb=0.1, context_length=16)


def test_whole_prompts_in_one_step() -> None:
    schedule = decide(chunked_prefill_size=0).values["schedule"]
    assert schedule["max_step_tokens"] == 2048 + 64


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"context_length": 4096}, ("4096", "2048", "--context-length")),
        ({"attention_backend": "flash"}, ("--attention-backend", "flash", "sdpa, native")),
        ({"attention_backend": "native"}, ("native", "compiled kernels, which are off", "sdpa")),
        ({"native_kernels": True, "dtype": "float32"}, ("float32", "--no-native-kernels")),
        ({"chunked_prefill_size": 8}, ("8", "16", "--page-size")),
        ({"chunked_prefill_size": 512, "max_step_tokens": 256}, ("512", "256")),
        ({"chunked_prefill_size": 0, "max_itl_ms": 60}, ("60", "whole prompts", "16")),
        ({"max_itl_ms": 0.5}, ("--max-itl-ms", "1")),
        ({"max_step_tokens": 8}, ("--max-step-tokens 8", "16")),
        ({"max_step_tokens": 32, "max_running": 33}, ("32", "33")),
        ({"max_step_tokens": 99, "chunked_prefill_size": 0}, ("99", "2048")),
        ({"max_total_tokens": 1000}, ("2048 tokens need", "--context-length to 992")),
        ({"kv_memory_gb": 0.0001}, ("0.5 MB", "0.1 MB", "--context-length to 368")),
        ({"kv_memory_gb": 0}, ("--kv-memory-gb 0 gives", "raise it to 0.001 or more")),
        ({"max_total_tokens": 10}, ("--max-total-tokens 10 gives", "raise it to 2048 or more")),
        (
            {"kv_memory_gb": 9999},
            (
                "--kv-memory-gb 9999 needs 9,999,000.0 MB",
                "8,000.0 MB are available",
                "weights take 0.4 MB",
                "--kv-memory-gb 7.999 or --max-total-tokens 31248416",
            ),
        ),
        ({"max_total_tokens": 31248432}, ("--max-total-tokens 31248432", "tokens 31248416")),
        ({"kv_memory_gb": 0.001, "max_total_tokens": 4096}, ("1.0 MB", "up to 3888")),
        ({"max_running": 999, "max_total_tokens": 2048}, ("999", "128 pages")),
        ({"load_format": "gguf"}, ("gguf", "safetensors")),
        ({"load_format": "script"}, ("script", "safetensors")),
        ({"port": 70000}, ("70000", "65535")),
        ({"zmq_front": "localhost:1"}, ("localhost:1", "tcp://HOST:PORT")),
        ({"zmq_front": "tcp://0.0.0.0:1"}, ("tcp://0.0.0.0:1", "--zmq-keys", "127.0.0.1")),
        ({"zmq_front": "tcp://*:1"}, ("tcp://*:1", "--zmq-keys")),
        ({"zmq_front": "tcp://[::]:1"}, ("--zmq-keys",)),
        ({"zmq_front": "tcp://eth0:1"}, ("--zmq-keys",)),
        ({"zmq_keys": "keys"}, ("--zmq-keys keys", "--zmq-front")),
        ({"policy": "fastest"}, ("--policy", "fcfs")),
        ({"max_n": "many"}, ("--max-n", "int")),
        ({"page_size": 0}, ("--page-size", "1")),
        ({"quantization": "int3"}, ("--quantization", "int8")),
    ],
)
def test_wish_that_cannot_be_met(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        decide(**fields)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "front",
    [
        "ipc:///tmp/f",
        "tcp://127.0.0.1:1",
        "tcp://127.9.9.9:*",
        "tcp://[::1]:1",
        "tcp://localhost:1",
    ],
)
def test_a_front_that_only_this_machine_reaches_needs_no_keys(front: str) -> None:
    assert decide(zmq_front=front).values["serving"]["zmq_front"] == front
    assert decide(zmq_front="tcp://10.0.0.7:1", zmq_keys="keys").values["serving"]["zmq_keys"]


def test_typed_context_that_memory_cannot_hold() -> None:
    facts = make_facts({"memory_available": 400_000_000}, SMOLLM2)
    with pytest.raises(ConfigError, match="one context of 8192 tokens needs 189.1 MB"):
        decide(facts, context_length=8192)
    with pytest.raises(ConfigError, match="free memory or take a smaller model"):
        decide(make_facts({"memory_available": 1000}, SMOLLM2))


def test_largest_usable_context_of_the_message_is_usable() -> None:
    assert decide(kv_memory_gb=0.0001, context_length=368).runners[0].context_length == 368
    assert decide(max_total_tokens=1000, context_length=992).runners[0].context_length == 992


def test_script_model_computes_nothing() -> None:
    facts = make_facts({"compiler": "cc"}, {"format": "script", "architecture": "Script"})
    resolution = decide(facts)
    assert resolution.runners[0].load_format == "script"
    assert resolution.values["exec"]["native_kernels"] is False
    for fields in ({"quantization": "int8"}, {"load_format": "dummy"}):
        with pytest.raises(ConfigError):
            decide(facts, **fields)


@given(
    page=st.integers(1, 600) | st.none(),
    running=st.integers(1, 300) | st.none(),
    step=st.integers(1, 4000) | st.none(),
    chunk=st.integers(0, 2000) | st.none(),
    total=st.integers(1, 20_000) | st.none(),
    context=st.integers(1, 2048) | st.none(),
    memory=st.floats(0, 0.01) | st.none(),
)
def test_whatever_is_accepted_can_be_scheduled(
    page: int | None,
    running: int | None,
    step: int | None,
    chunk: int | None,
    total: int | None,
    context: int | None,
    memory: float | None,
) -> None:
    try:
        resolution = decide(
            page_size=page,
            max_running=running,
            max_step_tokens=step,
            chunked_prefill_size=chunk,
            max_total_tokens=total,
            context_length=context,
            kv_memory_gb=memory,
        )
    except ConfigError:
        return
    schedule, target = resolution.values["schedule"], resolution.runners[0]
    assert schedule["max_total_tokens"] % schedule["page_size"] == 0
    assert schedule["max_total_tokens"] >= target.context_length
    assert 1 <= schedule["max_running"] <= schedule["max_step_tokens"]
    assert schedule["max_running"] * schedule["page_size"] <= schedule["max_total_tokens"]
    assert schedule["max_step_tokens"] >= (
        schedule["chunked_prefill_size"] or target.context_length
    )
    pools = size_pools(
        [PoolNeed(owner="target", bytes_per_token=256)],
        budget_bytes=round(resolution.values["memory"]["kv_memory_gb"] * 1e9),
        max_total_tokens=schedule["max_total_tokens"],
        page_size=schedule["page_size"],
        context_length=target.context_length,
    )
    assert (pools.num_pages - 1) * schedule["page_size"] == schedule["max_total_tokens"]


def test_explain_shows_every_value_once() -> None:
    resolution = decide(page_size=8, api_key="hush")
    rows = explain(resolution)
    assert sorted((row.group, row.name) for row in rows) == sorted(
        tuple(entry.field.split(".")) for entry in resolution.trail
    )
    text = render_table(rows)
    assert "hush" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["schedule.page_size", "8", "typed", "asked", "for", "with", "--page-size"] in lines
    assert ["runner", "target"] in lines
    assert ["context_length", "2048"] in lines


def test_runners_stand_side_by_side() -> None:
    rows = explain(decide())
    draft = [
        dataclasses.replace(row, group="draft", value="other")
        for row in rows
        if row.group == "target"
    ]
    lines = [line.split() for line in render_table([*rows, *draft]).splitlines()]
    assert ["runner", "target", "draft"] in lines
    assert ["dtype", "bfloat16", "other"] in lines
