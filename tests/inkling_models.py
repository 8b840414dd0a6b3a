"""A tiny Inkling of random weights: both kinds of layer, both kinds of MLP, heads that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import InklingForCausalLM, InklingTextConfig

from srt.config.facts import ModelFacts
from srt.config.probe import probe_model
from tests.models.parity import save_tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "unpadded_vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "sliding_window_size": 20,
    "d_rel": 4,
    "rel_extent": 30,
    "log_scaling_n_floor": 16,
    "local_layer_ids": [0, 2],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 3.0,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def save(folder: Path, **changes: Any) -> tuple[Any, ModelFacts]:
    config = InklingTextConfig(**SHAPE | changes, attn_implementation="eager")
    model = InklingForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_buffers():
            if "correction" in name:
                value.copy_(torch.linspace(-0.5, 0.5, len(value)))
    save_tiny(model, folder)
    return model, probe_model(folder, "tiny")
