"""What the user typed. Frozen; nothing writes it, and only `resolve` and diagnostics read it.

One field, one line: its default, the bag it lands in, help. The flags and their help, the config file's
keys, the bags' leaves and the rows of `tandem explain` are made of these lines. `None` means "decide for me";
`resolve` decides and says why. No `None` of that kind is left in a bag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def typed(
    default: Any,
    bag: str,
    help: str,
    choices: tuple[str, ...] = (),
    *,
    least: float | None = None,
    most: float | None = None,
    at_load: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field with its bag and its help.

    bag: the namespace of its leaf; "runner": it may differ between target and draft, so it becomes part
    of the `RunnerSpec` and of no bag; "draft": the same, and only the draft's. choices: the words allowed. least, most: the smallest
    and the largest number allowed.
    at_load: the leaf may be changed by `declare_load_time_override`. secret: never shown.
    """
    metadata: dict[str, Any] = {"bag": bag, "help": help, "choices": choices}
    metadata |= {"least": least, "most": most, "at_load": at_load, "secret": secret}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Every setting, as typed: nothing is resolved, converted or checked against the machine. `leaf_table`
    reads the fields' metadata."""

    # fmt: off
    model: str = typed("smollm2-135m", "model", "a known name, a GGUF file, a Hugging Face directory or a hub id")
    served_model_name: str | None = typed(None, "model", "the name clients use")
    tokenizer: str | None = typed(None, "model", "where the tokenizer is, if not with the model")
    chat_template: str | None = typed(None, "model", "a Jinja file that replaces the model's own template")
    load_format: str = typed("auto", "model", "how the weights are stored", ("auto", "safetensors", "gguf", "sharded", "dummy", "script"))
    dtype: str = typed("auto", "runner", "type of weights and activations", ("auto", "bfloat16", "float16", "float32"))
    quantization: str | None = typed(None, "runner", "quantize the linears while loading (int4: the checkpoint already is)", ("none", "int8", "fp8", "int4"))
    context_length: int | None = typed(None, "runner", "longest prompt and output together, in tokens", least=1)
    kv_cache_dtype: str = typed("auto", "runner", "type of the KV cache", ("auto", "bfloat16", "float16", "float32", "fp8_e4m3"))
    max_running: int | None = typed(None, "schedule", "requests that run at once", least=1, at_load=True)
    max_queued: int = typed(1024, "schedule", "requests that may wait; the next one gets 429", least=0)
    max_queued_tokens: int | None = typed(None, "schedule", "prompt tokens that may wait; past them 429", least=1)
    max_step_tokens: int | None = typed(None, "schedule", "tokens in one step, decode and prefill together", least=1)
    chunked_prefill_size: int | None = typed(None, "schedule", "prompt tokens of one request in one step; 0: whole prompts", least=0)
    max_itl_ms: float | None = typed(None, "schedule", "largest gap between two tokens of a request, ms; beside running requests prompts come in only as fast as that allows", least=1)
    policy: str = typed("fcfs", "schedule", "who is admitted first", ("fcfs", "longest-prefix", "priority"))
    page_size: int | None = typed(None, "schedule", "tokens in one KV page", least=1)
    overlap: bool | None = typed(None, "schedule", "prepare the next step while the device runs this one")
    max_total_tokens: int | None = typed(None, "schedule", "KV tokens in all; default: from the memory budget", least=1, at_load=True)
    max_prefix_chunk_tokens: int | None = typed(None, "schedule", "tokens of MLA prefixes expanded to K and V at once; asked for, the model and its prefill backend must be able to", least=1)
    disable_chunked_prefix_cache: bool = typed(False, "schedule", "never read a long MLA prefix in chunks", at_load=True)
    disable_radix_cache: bool = typed(False, "memory", "share no prefixes")
    eviction_policy: str = typed("lru", "memory", "which cached page goes first", ("lru", "lfu"))
    kv_memory_gb: float | None = typed(None, "memory", "memory for the KV cache, GB", least=0, at_load=True)
    gpu_memory_fraction: float | None = typed(None, "memory", "share of the GPU's memory that the engine may fill, weights and all; default: 0.9", least=0.01, most=1)
    speculative_algorithm: str | None = typed(None, "spec", "who guesses tokens for the model to verify: what stood there before, a smaller model, a network that reads its features, or layers it brings", ("none", "ngram", "standalone", "eagle", "eagle3", "multi_layer", "dflash", "dspark"))
    speculative_draft_model: str | None = typed(None, "spec", "the smaller model that guesses; named like --model")
    speculative_num_draft_tokens: int | None = typed(None, "spec", "guesses verified with one token, at most", least=1)
    speculative_num_steps: int | None = typed(None, "spec", "how far ahead a draft guesses, in tokens", least=1)
    speculative_eagle_topk: int | None = typed(None, "spec", "branches of a tree of guesses at each step; 1: a chain", least=1)
    speculative_confidence: float | None = typed(None, "spec", "a chain of guesses ends when the draft thinks it less likely than this; 0: never", least=0)
    speculative_lookup: bool | None = typed(None, "spec", "before a draft is asked, look whether the last tokens stood there before")
    speculative_dspark_planner: str | None = typed(None, "spec", "which guesses of a confident draft are verified: all, those as likely as --speculative-confidence, or the likeliest of all requests", ("static", "capped", "ragged"))
    speculative_dspark_budget: int | None = typed(None, "spec", "guesses that the ragged planner verifies in one step, over all requests", least=1)
    speculative_batch_tokens: int | None = typed(None, "spec", "decode tokens in a step, guesses included, past which nobody guesses", least=1)
    speculative_force_accept: float | None = typed(None, "spec", "for measuring only: pretend that a step puts out so many tokens in the mean; answers are nonsense", least=1)
    speculative_draft_attention_backend: str | None = typed(None, "draft", "attention of the draft; default: the target's", ("sdpa", "native", "triton", "flashinfer"))
    speculative_draft_load_format: str | None = typed(None, "draft", "how the draft's weights are stored; default: as found", ("safetensors", "gguf", "sharded", "dummy"))
    speculative_draft_kv_cache_dtype: str | None = typed(None, "draft", "type of the draft's KV cache; default: what it computes in", ("bfloat16", "float16", "float32", "fp8_e4m3"))
    speculative_draft_quantization: str | None = typed(None, "draft", "quantize the draft's linears while loading: costs right guesses, never answers", ("none", "int8", "fp8"))
    attention_backend: str | None = typed(None, "runner", "attention for prefill and decode", ("sdpa", "native", "triton", "flashinfer"))
    prefill_attention_backend: str | None = typed(None, "runner", "attention for prefill only", ("sdpa", "native", "triton", "flashinfer"))
    decode_attention_backend: str | None = typed(None, "runner", "attention for decode only", ("sdpa", "native", "triton", "flashinfer"))
    native_kernels: bool | None = typed(None, "exec", "use the compiled CPU kernels; default: when a compiler or a cached build is there", at_load=True)
    deterministic: bool = typed(False, "exec", "a request's answer has the same bits whatever else is in the batch and however its prompt is cut")
    moe_force_even_routing: bool = typed(False, "exec", "for measuring weights of noise only: tokens go to the experts in turn, whatever the router says; answers are nonsense")
    cuda_graph_prefill_tokens: int | None = typed(None, "runner", "largest step with prompts that has a CUDA graph around its attention, in tokens; 0: none", least=0)
    cuda_graph_sizes: tuple[int, ...] | None = typed(None, "runner", "decode batch sizes with a CUDA graph, padded up to; 0 or none: run eagerly")
    tensor_parallel_size: int = typed(1, "parallel", "processes that have a share of the model's every layer each: one to a GPU, or to some of the CPU's cores", least=1)
    rank_sums: str | None = typed(None, "parallel", "who adds what ranks computed: NCCL (gloo on a CPU), or for small sums the GPUs themselves, reading each other's memory", ("library", "direct"))
    num_threads: int | None = typed(None, "exec", "threads of the model's forward on a CPU", least=1)
    host: str = typed("127.0.0.1", "serving", "address of the HTTP gateway")
    port: int = typed(8000, "serving", "port of the HTTP gateway; 0: any free one", least=0, most=65535)
    zmq_front: str | None = typed(None, "serving", "endpoint for ZMQ clients, ipc:// or tcp://; default: a private ipc file")
    zmq_keys: str | None = typed(None, "serving", "folder of keys (`tandem keys FOLDER`): only clients with a key get in at --zmq-front")
    gateway: bool = typed(True, "serving", "start the HTTP gateway")
    inline: bool = typed(False, "serving", "everything in one process, for the debugger")
    api_key: str | None = typed(None, "serving", "key that HTTP clients must send", secret=True)
    admin_key: str | None = typed(None, "serving", "key for admin calls; default: the api key", secret=True)
    cors_origins: tuple[str, ...] = typed((), "serving", "origins that browsers may call from")
    max_body_mb: float = typed(8.0, "serving", "largest HTTP body, MB", least=0)
    receive_seconds: float = typed(30.0, "serving", "time for a whole HTTP request to arrive; past it 408", least=0.001)
    stream_buffer_kb: int = typed(1024, "serving", "unread output of one stream, kB, past which it is aborted", least=1)
    max_prompts: int = typed(256, "serving", "most prompts of one completions request", least=1)
    max_messages: int = typed(4096, "serving", "most messages of one conversation", least=1)
    max_prompt_chars: int = typed(4_000_000, "serving", "longest prompt text, characters", least=1)
    max_n: int = typed(16, "serving", "most samples of one request", least=1)
    max_logprobs: int = typed(20, "serving", "most logprobs at one position", least=0)
    max_stop: int = typed(32, "serving", "most stop strings of one request", least=0)
    max_stop_chars: int = typed(1024, "serving", "longest stop string, characters", least=1)
    max_stop_token_ids: int = typed(1024, "serving", "most stop token ids of one request", least=0)
    max_logit_bias: int = typed(1024, "serving", "most biased tokens of one request", least=0)
    max_grammar_chars: int = typed(65_536, "serving", "longest JSON schema, regex, choice list or grammar of one request, characters", least=1)
    max_name_chars: int = typed(256, "serving", "longest request id, cache salt or tenant, characters", least=64)
    default_deadline: float = typed(600.0, "serving", "seconds a request may take if it sets no deadline", least=0)
    stall_seconds: float = typed(20.0, "serving", "silence after which the engine counts as stuck", least=0)
    drain_seconds: float = typed(30.0, "serving", "time for running requests after SIGTERM", least=0)
    generation_defaults: bool = typed(True, "serving", "absent sampling fields take the checkpoint's generation_config.json")
    strict_fields: bool = typed(False, "serving", "refuse unknown HTTP fields instead of naming them in a header")
    device: str = typed("auto", "device", "where the model runs", ("auto", "cpu", "cuda"))
    seed: int = typed(0, "device", "seed of dummy weights and of requests without one; 0: draw it at start", least=0)
    log_level: str = typed("info", "observability", "how much is logged", ("debug", "info", "warning", "error"))
    journal: str | None = typed(None, "observability", "record the scheduler's inputs into this file, for `tandem replay`")
    step_log: int = typed(4096, "observability", "steps kept for `/requests` and the profile", least=1)
    # fmt: on
