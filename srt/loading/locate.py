"""From what the user calls a model to where it lies on this disk. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from srt.errors import ConfigError
from srt.loading.fetch import (
    KNOWN_MODELS,
    Progress,
    cached_path,
    fetch,
    find_known,
    models_folder,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DRAFTS = Path(__file__).parent.parent / "spec" / "drafts"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A row of `tandem model list`. `path` None: known, but not fetched. `bytes` on the disk."""

    name: str
    path: str | None
    bytes: int
    about: str


def show_nothing(phase: str, fraction: float | None) -> None:
    """The progress callback of those who do not look."""


def locate(
    model: str, cache_folder: str, progress: Progress = show_nothing, flag: str = "--model"
) -> str:
    """A GGUF file or a model directory, as an absolute path. What is there is used as it is; a known
    name or a hub id is fetched first if it must be. Raises ConfigError, which names `flag`."""
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"{flag} {model} is a file, but no .gguf; give its directory")
        return str(path.resolve())
    if path.is_dir():
        return str(path.resolve())
    known = find_known(model)
    if known is not None:
        return str(fetch(known, cache_folder, progress).resolve())
    if HUB_ID.fullmatch(model):
        return _from_hub(model, cache_folder, progress, flag)
    names = ", ".join(each.name for each in KNOWN_MODELS)
    raise ConfigError(
        f"{flag} {model} is no file, no directory, no hub id (owner/name) and no known name; "
        f"known: {names}"
    )


def shipped_draft(model: str, algorithm: str | None) -> str | None:
    """The folder of the draft that comes with Tandem for a known model and a way of speculating."""
    known = find_known(model)
    if known is None or algorithm is None:
        return None
    folder = DRAFTS / f"{known.name}-{algorithm}"
    return str(folder) if folder.is_dir() else None


def list_models(cache_folder: str) -> list[ListedModel]:
    """Known models first, then what the hub has left in the cache."""
    return [*_known(cache_folder), *_hub_snapshots(cache_folder)]


def _known(cache_folder: str) -> Iterator[ListedModel]:
    for model in KNOWN_MODELS:
        path = cached_path(model, cache_folder)
        yield ListedModel(
            name=model.name,
            path=None if path is None else str(path),
            bytes=0 if path is None else path.stat().st_size,
            about=model.about,
        )


def _hub_snapshots(cache_folder: str) -> Iterator[ListedModel]:
    for folder in sorted(_hub_folder(cache_folder).glob("models--*--*")):
        for snapshot in sorted(folder.glob("snapshots/*")):
            files = [path for path in snapshot.rglob("*") if path.is_file()]
            yield ListedModel(
                name=folder.name.removeprefix("models--").replace("--", "/", 1),
                path=str(snapshot),
                bytes=sum(path.stat().st_size for path in files),
                about="from the Hugging Face hub",
            )


def _hub_folder(cache_folder: str) -> Path:
    return models_folder(cache_folder) / "hub"


def _from_hub(model: str, cache_folder: str, progress: Progress, flag: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress(f"downloading {model}", None)
    folder = _hub_folder(cache_folder)
    try:
        found = snapshot_download(model, cache_dir=folder, allow_patterns=HUB_FILES)
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{flag} {model}: the Hugging Face hub cannot be reached and {folder} does not hold "
            "the model. Check the network, or give a local directory or GGUF file"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{flag} {model} cannot be fetched from the hub: {words}") from error
    if not any(Path(found).glob("*.safetensors")):
        raise ConfigError(
            f"{flag} {model}: the repository has no *.safetensors, the only format taken from the "
            "hub; other formats can run code. For a GGUF repository download the file and give it"
        )
    return str(Path(found).resolve())
