"""What is decided where there is a GPU, and what is refused in one readable paragraph."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from config_gpu import gpu_facts

from srt.config.args import ServerArgs
from srt.config.capability import FP8, TABLE, Need, can_record
from srt.config.capability import lacks as table_lacks
from srt.config.dummy import dummy_facts
from srt.config.explain import explain, render_table
from srt.config.facts import Facts
from srt.config.flags import build_parser, read_namespace
from srt.config.resolve import Resolution, resolve
from srt.config.rules_graphs import default_sizes, prefill_sizes
from srt.errors import ConfigError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
OLD = {"capability": 86, "name": "NVIDIA A10"}


def decide(facts: Facts | None = None, **fields: Any) -> Resolution:
    return resolve(ServerArgs(**fields), facts or gpu_facts(), entropy=11)


def reasons(resolution: Resolution) -> dict[str, tuple[Any, str, str]]:
    return {entry.field: (entry.value, entry.source, entry.reason) for entry in resolution.trail}


def quantized(**config: Any) -> Facts:
    facts = gpu_facts()
    model = replace(
        facts.model,
        config={**facts.model.config, "quantization_config": config},
        stored_bytes=5_000_000_000,
    )
    return replace(facts, model=model)


def test_a_gpu_is_used_where_it_can_be() -> None:
    resolution = decide()
    device, source, reason = reasons(resolution)["device.device"]
    assert (device, source, reason) == ("cuda", "rule", "NVIDIA H200, sm_90, 149.5 GB free")
    (target,) = resolution.runners
    assert (target.dtype, target.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert target.prefill_attention_backend == "flashinfer"
    assert target.decode_attention_backend == "triton"
    schedule, executing = resolution.values["schedule"], resolution.values["exec"]
    assert (schedule["max_running"], schedule["max_step_tokens"]) == (256, 8192)
    assert (schedule["chunked_prefill_size"], schedule["page_size"]) == (8192, 16)
    assert schedule["overlap"] is True
    assert executing["native_kernels"] is False and executing["deterministic"] is False


def test_without_one_the_trail_says_why() -> None:
    for facts, words in (
        (dummy_facts(), "this machine has no GPU"),
        (gpu_facts(machine={"gpus": [], "gpu_trouble": "driver is not loaded"}), "not loaded"),
        (gpu_facts(machine={"torch_cuda": ""}), "is a build for CPUs"),
        (gpu_facts(without=("triton",)), "triton is not installed"),
        (gpu_facts(machine={"triton_trouble": "triton needs gcc"}), "triton needs gcc"),
        (gpu_facts(card={"capability": 75}), "is sm_75"),
        (gpu_facts(card={"driver": "570.86"}), "570.86 is too old"),
        (gpu_facts(model={"format": "script", "architecture": "Script"}), "nothing to compute"),
    ):  # fmt: skip
        resolution = decide(facts)
        device, _, reason = reasons(resolution)["device.device"]
        assert device == "cpu" and words in reason
        assert resolution.runners[0].graph_sizes == ()
        assert resolution.values["memory"]["gpu_memory_fraction"] == 0.0
    assert decide(device="cpu").values["device"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("facts", "fields", "words"),
    [
        (dummy_facts(), {}, ("this machine has no GPU", "--device cpu")),
        (gpu_facts(machine={"gpus": [], "gpu_trouble": "there is no NVIDIA driver"}), {},
         ("there is no NVIDIA driver", "--device cpu")),
        (gpu_facts(card={"driver": "570.86.10"}), {},
         ("570.86.10 is too old", "CUDA 13.0", "driver 580", "torch for CUDA 12")),
        (gpu_facts(card={"driver": "535.1"}, machine={"torch_cuda": "12.8"},
                   without=("triton",)), {}, ("triton is not installed", "tandem-serve[gpu]")),
        (gpu_facts(machine={"versions": {"torch": "2.13.0", "triton": "3.7.1"}}), {},
         ("triton is 3.7.1", "3.6.x")),
        (gpu_facts(machine={"torch_cuda": "", "versions": {"torch": "2.13.0+cpu"}}), {},
         ("torch 2.13.0+cpu is a build for CPUs", "NVIDIA H200")),
        (gpu_facts(card={"capability": 70}), {}, ("sm_70", "sm_80")),
        (gpu_facts(model={"format": "script", "architecture": "Script"}), {}, ("script",)),
        (gpu_facts(without=("flashinfer-python",)), {"prefill_attention_backend": "flashinfer"},
         ("--prefill-attention-backend flashinfer", "not installed", "triton, sdpa")),
        (gpu_facts(machine={"flashinfer_trouble": "no nvcc"}), {"attention_backend": "flashinfer"},
         ("--attention-backend flashinfer", "no nvcc", "triton, sdpa")),
        (None, {"attention_backend": "native"}, ("runs on CPUs", "flashinfer, triton, sdpa")),
        (None, {"native_kernels": True}, ("they are for CPUs", "--no-native-kernels")),
        (gpu_facts(model={"head_dim": 320}), {}, ("320", "up to 256", "64, 128, 256", "sdpa")),
        (gpu_facts(model={"head_dim": 320}), {"attention_backend": "triton"}, ("320", "sdpa")),
        (gpu_facts(model={"head_dim": 320}), {"deterministic": True},
         ("320", "depends on the batch", "--no-deterministic")),
        (gpu_facts(model={"head_dim": 96}), {"attention_backend": "flashinfer"},
         ("64, 128, 256, not 96", "triton, sdpa")),
        (None, {"dtype": "float32"}, ("not float32", "--attention-backend sdpa")),
        (gpu_facts(card=OLD), {"quantization": "fp8"}, ("NVIDIA A10 is sm_86", "sm_89")),
        (gpu_facts(card=OLD), {"kv_cache_dtype": "fp8_e4m3"}, ("NVIDIA A10 is sm_86", "sm_89")),
        (None, {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashinfer"},
         ("not fp8_e4m3", "triton, sdpa")),
        (None, {"quantization": "int8"}, ("for CPUs", "fp8")),
        (None, {"quantization": "int4"}, ("not stored so", "AWQ or GPTQ", "fp8")),
        (quantized(quant_method="bitsandbytes"), {}, ("'bitsandbytes'", "awq, gptq, fp8")),
        (quantized(bits=4), {}, ("None", "awq, gptq, fp8")),
        (quantized(**AWQ | {"bits": 8}), {}, ("awq with 8 bits", "4 bits")),
        (quantized(**AWQ), {"quantization": "fp8"}, ("is stored as int4", "leave it out")),
        (quantized(**AWQ), {"quantization": "none"}, ("is stored as int4",)),
        (quantized(**AWQ), {"device": "cpu"}, ("is stored as int4", "a CPU has kernels for int8")),
        (None, {"deterministic": True, "prefill_attention_backend": "flashinfer"},
         ("--deterministic forbids", "triton")),
        (None, {"deterministic": True, "attention_backend": "sdpa"}, ("--deterministic", "triton")),
        (None, {"cuda_graph_sizes": (8, 300)}, ("8 300", "1 to 256", "--max-running")),
        (None, {"cuda_graph_sizes": (-1,)}, ("-1", "1 to 256")),
        (None, {"cuda_graph_sizes": (8,), "decode_attention_backend": "sdpa"},
         ("sdpa cannot be captured", "allowed: 0")),
        (None, {"kv_memory_gb": 140.0}, ("--kv-memory-gb 140", "0.9 of 150.00 GB", "weights",
                                         "the most that fits: --kv-memory-gb 11")),
        (None, {"gpu_memory_fraction": 0.1},
         ("needs 18.83", "16.06 GB weights", "14.50 GB can be had", "0.1 of 150.00 GB",
          "--gpu-memory-fraction 0.13 or more", "--quantization fp8 (8.56 GB of weights)")),
        (None, {"gpu_memory_fraction": 0.124}, ("--max-step-tokens up to",)),
        (gpu_facts(card={"memory_total": 12_000_000_000, "memory_free": 11_900_000_000}), {},
         ("10.70 GB can be had", "of 12.00 GB", "larger GPU")),
        (None, {"gpu_memory_fraction": 1.5}, ("1.5", "the largest allowed is 1")),
        (gpu_facts(card={"memory_free": 20_000_000_000}), {"context_length": 131_072},
         ("130.00 GB that others use", "--gpu-memory-fraction 1 or more")),
    ],
)  # fmt: skip
def test_wish_that_a_gpu_cannot_meet(
    facts: Facts | None, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        decide(facts, **{"device": "cuda"} | fields)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_backend": "triton"}, ("triton", "runs on GPUs", "allowed here: sdpa")),
        ({"decode_attention_backend": "flashinfer"}, ("runs on GPUs", "allowed here: sdpa")),
        ({"quantization": "fp8"}, ("a CPU has kernels for int8 only", "int8 or none")),
        ({"cuda_graph_sizes": (8,)}, ("a CPU runs eagerly", "allowed: 0")),
        ({"gpu_memory_fraction": 0.5}, ("runs on the CPU", "--kv-memory-gb")),
        ({"deterministic": True}, ("without the native kernels", "--device cuda")),
        ({"deterministic": True, "native_kernels": True, "attention_backend": "sdpa"},
         ("depends on the batch", "allowed here: native")),
    ],
)  # fmt: skip
def test_wish_that_a_cpu_cannot_meet(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        decide(dummy_facts(), **fields)
    for word in words:
        assert word in str(raised.value)


def test_determinism_on_a_cpu_is_what_native_kernels_are() -> None:
    facts = dummy_facts()
    facts = replace(facts, machine=replace(facts.machine, compiler="cc"))
    value, source, reason = reasons(decide(facts, deterministic=True))["exec.deterministic"]
    assert (value, source) == (True, "typed") and "native kernels are so already" in reason
    assert decide(dummy_facts(), cuda_graph_sizes=(0,)).runners[0].graph_sizes == ()


def test_determinism_on_a_gpu_takes_triton_for_both_halves_and_keeps_the_graphs() -> None:
    (target,) = decide(deterministic=True).runners
    assert target.prefill_attention_backend == target.decode_attention_backend == "triton"
    assert target.graph_sizes == decide().runners[0].graph_sizes


@pytest.mark.parametrize(
    ("facts", "fields", "prefill"),
    [
        (gpu_facts(without=("flashinfer-python",)), {}, "triton"),
        (gpu_facts(machine={"flashinfer_trouble": "no nvcc"}), {}, "triton"),
        (gpu_facts(card={"capability": 89}), {}, "triton"),
        (gpu_facts(model={"head_dim": 96}), {}, "triton"),
        (gpu_facts(model={"head_dim": 64}), {}, "triton"),  # it would compile for a minute first
        (gpu_facts(model={"head_dim": 64}), {"attention_backend": "flashinfer"}, "flashinfer"),
        (gpu_facts(card={"capability": 89}), {"attention_backend": "flashinfer"}, "flashinfer"),
        (gpu_facts(model={"config": {"sliding_window": 4096}}), {}, "triton"),
        (gpu_facts(model={"config": {"sliding_window": 4096, "use_sliding_window": False}}), {},
         "flashinfer"),
        (None, {"kv_cache_dtype": "fp8_e4m3"}, "flashinfer"),  # by way of copies
        (None, {"attention_backend": "triton"}, "triton"),
        (None, {"decode_attention_backend": "flashinfer"}, "flashinfer"),
    ],
)  # fmt: skip
def test_prefill_goes_to_flashinfer_where_it_is_ready(
    facts: Facts | None, fields: dict[str, Any], prefill: str
) -> None:
    assert decide(facts, **fields).runners[0].prefill_attention_backend == prefill


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_what_is_decided_stands_when_the_table_is_asked(
    capability: int, deterministic: bool
) -> None:
    rows = {row.name: row for row in TABLE}
    dtypes, kv_dtypes = ("bfloat16", "float16", "float32"), ("auto", "fp8_e4m3", "float32")
    wishes = (None, "triton", "flashinfer", "sdpa")
    num_decided = 0
    for dtype, kv_dtype, head_dim, window, wish in itertools.product(
        dtypes, kv_dtypes, (64, 80, 128, 256, 320), (None, 512), wishes
    ):
        facts = gpu_facts(
            card={"capability": capability},
            model={"head_dim": head_dim, "config": {"sliding_window": window}},
        )
        try:
            (target,) = decide(
                facts, dtype=dtype, kv_cache_dtype=kv_dtype, attention_backend=wish,
                deterministic=deterministic,
            ).runners  # fmt: skip
        except ConfigError:
            continue
        num_decided += 1
        kept = target.kv_cache_dtype
        need = Need(
            device="cuda",
            dtype=FP8 if kept == "fp8_e4m3" else kept,
            query_dtype=target.dtype,
            head_dim=head_dim,
            window=window is not None,
            has_library=False,
            capability=capability,
            has_flashinfer=True,
            has_triton=True,
            deterministic=deterministic,
        )
        assert not table_lacks(rows[target.prefill_attention_backend], need, "prefill")
        assert not table_lacks(rows[target.decode_attention_backend], need, "decode")
        assert bool(target.graph_sizes) == can_record(target.decode_attention_backend)
    assert num_decided > 20


def test_checkpoint_says_how_it_is_quantized() -> None:
    resolution = decide(quantized(**AWQ))
    value = reasons(resolution)["target.quantization"]
    assert value == ("int4", "model", "quantization_config: awq")
    assert resolution.runners[0].quantization == "int4"
    plain = decide().values["memory"]["kv_memory_gb"]
    saved = 8_030_000_000 * 2 - 5_000_000_000
    assert resolution.values["memory"]["kv_memory_gb"] == pytest.approx(plain + saved / 1e9)
    assert decide(quantized(**AWQ), quantization="int4").runners[0].quantization == "int4"
    assert decide(quantized(quant_method="GPTQ", bits=4)).runners[0].quantization == "int4"
    assert decide(quantized(quant_method="fp8")).runners[0].quantization == "fp8"


def test_memory_is_fraction_less_others_weights_activations_and_graphs() -> None:
    resolution = decide()
    schedule, memory = resolution.values["schedule"], resolution.values["memory"]
    # T=8192: 2 B * (2*4096 + 3*14336 + 4096) a token; 256 rows of logits: 2 + 4*4 B * 128256
    activations = 8192 * 2 * (3 * 4096 + 3 * 14_336) + 256 * 128_256 * 18
    sizes = resolution.runners[0].graph_sizes
    graphs = 256 * 2 * (3 * 4096 + 3 * 14_336) + 256 * 128_256 * 2 + len(sizes) * 4_000_000
    cuda = 400_000_000 + 700_000_000
    budget = 135_000_000_000 - 500_000_000 - 16_060_000_000 - activations - graphs - cuda
    assert round(memory["kv_memory_gb"] * 1e9) == budget
    tokens = (budget // 131_072 // 16 - 1) * 16
    assert schedule["max_total_tokens"] == tokens
    reason = reasons(resolution)["memory.kv_memory_gb"][2]
    assert reason.startswith(
        "estimated before loading: 0.9 of 150.00 GB less 0.50 GB used by others"
    )
    half = decide(gpu_memory_fraction=0.5).values["memory"]["kv_memory_gb"]
    assert half == pytest.approx(memory["kv_memory_gb"] - 60)
    fp8 = decide(kv_cache_dtype="fp8_e4m3").values["schedule"]["max_total_tokens"]
    assert abs(fp8 - 2 * tokens) <= 48
    smaller = decide(max_step_tokens=2048).values["memory"]["kv_memory_gb"]
    assert smaller == pytest.approx(memory["kv_memory_gb"] + 6144 * 2 * 55_296 / 1e9)


def test_largest_values_of_the_message_are_usable() -> None:
    with pytest.raises(ConfigError) as raised:
        decide(gpu_memory_fraction=0.124, context_length=16)
    message = str(raised.value)
    step = int(message.partition("--max-step-tokens up to ")[2].split(",")[0])
    fields: dict[str, Any] = {"context_length": 16, "gpu_memory_fraction": 0.124}
    assert decide(max_step_tokens=step - 100, **fields).values["schedule"]["max_total_tokens"] >= 16


def test_context_is_cut_to_what_the_gpu_holds() -> None:
    facts = gpu_facts(card={"memory_total": 24_000_000_000, "memory_free": 23_500_000_000})
    length, source, reason = reasons(decide(facts))["target.context_length"]
    assert 0 < length < 131_072 and source == "rule"
    assert "made for 131072" in reason and "the GPU holds" in reason


def test_graph_sizes_reach_from_one_to_all_requests() -> None:
    assert default_sizes(256) == (
        1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256,
    )  # fmt: skip
    assert default_sizes(100)[-3:] == (80, 96, 100)
    assert default_sizes(1) == (1,) and default_sizes(3) == (1, 2, 3)
    assert default_sizes(4096)[-2:] == (480, 512)
    assert decide(max_running=24).runners[0].graph_sizes == (1, 2, 4, 8, 16, 24)
    assert decide(cuda_graph_sizes=(8, 1, 8)).runners[0].graph_sizes == (1, 8)
    for off in ((), (0,)):
        resolution = decide(cuda_graph_sizes=off)
        assert resolution.runners[0].graph_sizes == ()
        assert reasons(resolution)["target.graph_sizes"][1] == "typed"


def test_prompts_have_graphs_up_to_where_launches_matter() -> None:
    sizes = prefill_sizes(1024)
    assert sizes[:3] == (16, 32, 48) and sizes[-2:] == (896, 1024)
    assert all(high <= low * 2 for low, high in zip(sizes, sizes[1:], strict=False))
    assert prefill_sizes(100)[-1] == 96 and prefill_sizes(8) == ()
    assert decide().runners[0].prefill_graph_sizes == prefill_sizes(400)  # of 8 billion parameters
    small = gpu_facts(model={"num_parameters": 1_500_000_000})
    assert decide(small).runners[0].prefill_graph_sizes == prefill_sizes(2048)
    config = {**gpu_facts().model.config, "num_experts": 128, "moe_intermediate_size": 768}
    experts = gpu_facts(model={"config": config})
    assert decide(experts).runners[0].prefill_graph_sizes == prefill_sizes(2048)
    assert decide(max_step_tokens=300).runners[0].prefill_graph_sizes[-1] == 256
    assert decide(cuda_graph_prefill_tokens=0).runners[0].prefill_graph_sizes == ()
    assert decide(cuda_graph_prefill_tokens=2048).runners[0].prefill_graph_sizes[-1] == 2048
    assert decide(cuda_graph_sizes=(0,)).runners[0].prefill_graph_sizes == ()
    with pytest.raises(ConfigError, match="decode steps have no CUDA"):
        decide(cuda_graph_sizes=(0,), cuda_graph_prefill_tokens=64)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [(["4", "16"], (4, 16)), (["0"], (0,)), (["none"], (0,)), ([], None)],
)
def test_graph_sizes_on_the_command_line(words: list[str], sizes: tuple[int, ...] | None) -> None:
    line = ["--cuda-graph-sizes", *words] if words else []
    args, _ = read_namespace(build_parser().parse_args(line))
    assert args.cuda_graph_sizes == sizes


def test_a_draft_has_the_targets_graphs_and_its_own_attention() -> None:
    facts = gpu_facts()
    small = replace(facts.model, name="small", path="small", num_layers=2, head_dim=64)
    resolution = decide(
        replace(facts, draft=small),
        speculative_algorithm="standalone",
        speculative_draft_model="small",
    )
    target, draft = resolution.runners
    assert draft.graph_sizes == target.graph_sizes
    assert target.prefill_attention_backend == "flashinfer"
    assert draft.prefill_attention_backend == "triton"  # flashinfer would compile for it first
    assert draft.quantization is None
    assert resolution.values["spec"]["speculative_batch_tokens"] == 128
    _, other = decide(
        replace(facts, draft=small),
        speculative_algorithm="standalone",
        speculative_draft_model="small",
        prefill_attention_backend="flashinfer",
    ).runners
    assert other.prefill_attention_backend == "flashinfer"  # the target's was asked for


def test_steps_on_a_gpu() -> None:
    assert decide(chunked_prefill_size=16_384).values["schedule"]["max_step_tokens"] == 16_384
    assert decide(max_step_tokens=2048).values["schedule"]["chunked_prefill_size"] == 2048
    whole = decide(chunked_prefill_size=0, context_length=4096).values["schedule"]
    assert whole["max_step_tokens"] == 4096 + 256
    many = decide(max_running=512).values["schedule"]
    assert (many["max_running"], many["max_step_tokens"]) == (512, 8192)


def test_explain_shows_it() -> None:
    text = render_table(explain(decide()))
    assert "NVIDIA H200, sm_90" in text and "estimated before loading" in text
