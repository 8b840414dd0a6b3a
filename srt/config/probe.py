"""Facts: the machine and the checkpoint, probed once, without torch and without reading weights."""

from __future__ import annotations

from pathlib import Path

from srt.config.facts import ModelFacts
from srt.config.probe_gguf import probe_gguf
from srt.config.probe_hf import probe_hf
from srt.config.probe_machine import probe_machine
from srt.config.probe_script import SCRIPT_FILE, probe_script
from srt.errors import ConfigError

__all__ = ["probe_machine", "probe_model"]


def probe_model(path: str | Path, name: str) -> ModelFacts:
    """Facts of a GGUF file, a Hugging Face folder or a script folder. Raises ConfigError naming the
    file and the key at fault."""
    path = Path(path).absolute()
    if path.is_file() and path.suffix == ".gguf":
        return probe_gguf(path, name)
    if (path / SCRIPT_FILE).is_file():
        return probe_script(path, name)
    if (path / "config.json").is_file():
        return probe_hf(path, name)
    if not path.exists():
        raise ConfigError(f"there is no model at {path}")
    raise ConfigError(
        f"{path} is not a model; a .gguf file, or a folder with config.json or {SCRIPT_FILE}, is"
    )
