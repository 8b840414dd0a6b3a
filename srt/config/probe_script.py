"""Facts of a scripted fake model: a folder with `tandem_script.json`.

Token ids 0 to 255 are the single bytes, the script's own `tokens` follow from 256.
"""

from __future__ import annotations

from pathlib import Path

from srt.config.checkpoint_keys import read_count, read_json_object, read_token_ids
from srt.config.facts import ModelFacts
from srt.errors import ConfigError

SCRIPT_FILE = "tandem_script.json"
NUM_BYTES = 256
CONTEXT_LENGTH = 4096


def probe_script(folder: Path, name: str) -> ModelFacts:
    path = folder / SCRIPT_FILE
    script = read_json_object(path)
    tokens = script.get("tokens", [])
    if not isinstance(tokens, list):
        raise ConfigError(f"{path}: tokens must be a list, not {tokens!r}")
    vocab_size = NUM_BYTES + len(tokens)
    read_token_ids(path, script, "script", vocab_size)
    scripts = script.get("scripts", {})
    if not isinstance(scripts, dict):
        raise ConfigError(f"{path}: scripts must map prompts to token ids, not {scripts!r}")
    for prompt in scripts:
        read_token_ids(path, scripts, prompt, vocab_size)
    return ModelFacts(
        name=name,
        path=str(folder),
        format="script",
        architecture="Script",
        config={"architectures": ["Script"], "vocab_size": vocab_size},
        context_length=read_count(path, script, "context_length", CONTEXT_LENGTH),
        dtype="float32",
        num_layers=1,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=vocab_size,
        num_parameters=0,
        end_token_ids=read_token_ids(path, script, "end_token_ids", vocab_size),
    )
