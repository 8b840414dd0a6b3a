"""What is true before anything is decided: the machine and the checkpoint. Plain data, probed once by
the supervisor and handed to every process, so that all of them resolve the same configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

CheckpointFormat = Literal["safetensors", "gguf", "sharded", "script"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A checkpoint, read without its weights.

    `config` has the keys of a Hugging Face config.json; for a GGUF file they are translated, so that
    whoever builds a model reads one vocabulary. `path` is a local folder or file.
    """

    name: str
    path: str
    format: CheckpointFormat
    architecture: str  # e.g. LlamaForCausalLM
    config: dict[str, Any]
    context_length: int
    dtype: str  # the type the weights were trained or stored in: bfloat16, float16, float32
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    end_token_ids: list[int]
    generation_defaults: dict[str, Any] = field(default_factory=dict)  # generation_config.json
    stored: str = ""  # block formats of the file, if it is not simply in `dtype`
    stored_bytes: int = 0  # of all weights as they are stored, if that is known
    shards: int = 0  # ranks that the weights are stored for, of format "sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One usable GPU. Memory in bytes, when it was probed."""

    index: int  # as CUDA counts the visible ones
    name: str
    capability: int  # 90 for sm_90
    memory_total: int
    memory_free: int
    driver: str  # its version, e.g. 580.65.06


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """`cpu_flags` are the kernel's names, e.g. avx512_bf16. Memory in bytes, of the host."""

    num_cores: int
    memory_total: int
    memory_available: int
    cpu_flags: list[str]
    has_cuda: bool
    compiler: str | None  # a C compiler's path, if there is one
    versions: dict[str, str]  # python, torch, tandem, ...
    gpus: list[GpuFacts] = field(default_factory=list)
    gpu_trouble: str = ""  # why there is none that can be used
    torch_cuda: str = ""  # the CUDA that torch is built for, e.g. 13.0; "": a build for CPUs
    triton_trouble: str = ""  # why Triton could not run here although it is installed
    flashinfer_trouble: str = ""  # the same of FlashInfer
    flashinfer_latent_trouble: str = ""  # the same of its operator for MLA expanded
    flashinfer_absorbed_trouble: str = ""  # and for MLA absorbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that `resolve` knows besides the args. The supervisor probes it, once for all processes."""

    machine: MachineFacts
    model: ModelFacts
    draft: ModelFacts | None = None
