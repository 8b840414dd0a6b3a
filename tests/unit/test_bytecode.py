"""Where the engine's processes keep compiled modules: beside the sources, or else in our cache."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from srt.launch.bytecode import bytecode_cache


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that nobody compiled, in a process that may not write bytecode."""
    folder = tmp_path / "site" / "heavy_one"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


def test_what_nobody_compiled_is_kept_in_our_cache(package: Path, tmp_path: Path) -> None:
    wishes = bytecode_cache(str(tmp_path / "cache"), "heavy_one")
    assert "heavy_one" not in sys.modules
    environment = {**os.environ, "PYTHONPATH": str(package.parent), **wishes}
    environment.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    subprocess.run([sys.executable, "-c", "import heavy_one"], env=environment, check=True)
    kept = list((tmp_path / "cache").rglob("heavy_one/__init__.*.pyc"))
    assert len(kept) == 1 and not (package / "__pycache__").exists()


def test_what_is_compiled_stays_where_it_is(package: Path, tmp_path: Path) -> None:
    py_compile.compile(str(package / "__init__.py"))
    assert bytecode_cache(str(tmp_path), "heavy_one") == {}


def test_python_writes_it_itself_where_it_may(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert bytecode_cache(str(tmp_path), "heavy_one") == {}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != package)
    assert "PYTHONPYCACHEPREFIX" in bytecode_cache(str(tmp_path), "heavy_one")


def test_a_cache_that_cannot_be_written_is_no_place(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would ignore all that is compiled beside other sources, and keep nothing."""
    (tmp_path / "file").touch()
    assert bytecode_cache(str(tmp_path / "file"), "heavy_one") == {}
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert bytecode_cache(str(tmp_path), "heavy_one") == {}


def test_a_place_that_the_user_chose_goes_first(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    assert bytecode_cache(str(tmp_path), "heavy_one") == {}


def test_a_package_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert bytecode_cache(str(tmp_path), "not_there_at_all") == {}
