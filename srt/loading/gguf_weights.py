"""A GGUF file's tensors under Hugging Face names and in Hugging Face's order of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.loading.gguf_blocks import decode
from srt.loading.gguf_index import GGUFFile, GGUFTensor

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_DIVISORS = "rope_freqs.weight"
_INTERLEAVED = ("LlamaForCausalLM", "MistralForCausalLM")  # families whose q and k are permuted


def gguf_tensors(
    file: GGUFFile, facts: ModelFacts, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Decoded one by one, straight into `dtype`. Raises ConfigError naming an unknown tensor."""
    is_interleaved = facts.architecture in _INTERLEAVED
    for entry in file.tensors:
        if entry.name == ROPE_DIVISORS:
            continue
        value = read_tensor(file, entry, dtype)
        if is_interleaved and ".attn_q." in entry.name:
            value = unpermute(value, facts.num_heads)
        elif is_interleaved and ".attn_k." in entry.name:
            value = unpermute(value, facts.num_kv_heads)
        yield translate(entry.name, file), value


def rope_divisors(file: GGUFFile) -> torch.Tensor | None:
    """[head_dim / 2] float32 by which Llama 3.1 and later divide each rope frequency, if stored."""
    for entry in file.tensors:
        if entry.name == ROPE_DIVISORS:
            return read_tensor(file, entry, torch.float32)
    return None


def read_tensor(file: GGUFFile, entry: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.frombuffer(file.data, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset)
    return decode(raw, entry.kind, entry.shape, dtype)


def translate(name: str, file: GGUFFile) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name in _WHOLE:
        return _WHOLE[name]
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _PER_LAYER:
        return f"model.layers.{pieces[1]}.{_PER_LAYER[pieces[2]]}.{pieces[3]}"
    raise ConfigError(f"{file.path}: tensor {name!r} belongs to no parameter of this model")


def unpermute(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring channels, this engine channel i with i + head_dim/2: within each
    head, row 2i + j goes back to row j * head_dim/2 + i. value: [rows, ...]."""
    rows = value.shape[0]
    if rows % (2 * num_heads):
        return value  # misshapen; the load fails by its shape
    paired = value.view(num_heads, rows // num_heads // 2, 2, *value.shape[1:])
    return paired.transpose(1, 2).reshape(value.shape)
