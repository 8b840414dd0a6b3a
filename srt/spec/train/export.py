"""The folder a draft is served from: model.safetensors, config.json, report.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.spec.train.hot import HotMap
from srt.spec.train.network import DraftNetwork

ARCHITECTURE = "LlamaForCausalLMEagle3"
REPORT_FILE = "report.json"
READ_BYTES = 1 << 22


def draft_config(
    facts: ModelFacts, network: DraftNetwork, hot: HotMap, taps: tuple[int, ...]
) -> dict[str, Any]:
    """Keys that public EAGLE-3 drafts have, and the target's identity."""
    shape = network.shape
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.target_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": facts.config.get("rope_theta", 10000.0),
        "rope_scaling": facts.config.get("rope_scaling"),
        **{key: facts.config[key] for key in ("rope_parameters",) if key in facts.config},
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": len(hot.tokens),
        "max_position_embeddings": facts.context_length,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "target": facts.name,
        "target_sha256": weights_sha256(Path(facts.path)),
    }


def draft_tensors(
    network: DraftNetwork, hot: HotMap, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    tensors = {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in network.state_dict().items()
    }
    tensors["d2t"] = torch.tensor(hot.offsets, dtype=torch.int64)
    return tensors


def write_draft(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], report: dict[str, Any]
) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors leaves it to its owner alone
        for name, content in (("config.json", config), (REPORT_FILE, report)):
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error}") from error


def weights_sha256(path: Path) -> str:
    """Of the weight file's bytes, or of all weight files' bytes one after the other, by name."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as source:
            while block := source.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
