"""Compiled GPU kernels in one file, for machines that should not compile: a tar.gz of the cache's `gpu`
folder, less what only a compiler needs, and `about.json`, which says what it was made with."""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from srt.config.facts import MachineFacts
from srt.errors import ConfigError
from srt.launch.kernel_caches import FOLDER, PACKAGE, kernel_caches, ready_folder

ABOUT = "about.json"
TRITON = "triton"
GROUPS = "__grp__*.json"  # Triton's lists of a kernel's files, by absolute path
STAGES = (".source", ".ttir", ".ttgir", ".llir", ".ptx")  # what it compiled by; 5/6 of a cache
PACKAGE_TEXT = '''"""Compiled FlashInfer operators, loaded instead of being compiled at first use."""

from pathlib import Path

__version__ = "{version}"


def get_jit_cache_dir() -> str:
    return str(Path(__file__).parent / "jit_cache")
'''


class About(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a pack was made with. capability: of the GPU, 90 for sm_90."""

    triton: str
    flashinfer: str | None
    capability: int


def about(machine: MachineFacts) -> About:
    """Raises ConfigError if there is nothing here to make a pack with."""
    if not machine.gpus or "triton" not in machine.versions:
        why = machine.gpu_trouble or "triton is not installed"
        raise ConfigError(f"kernels are compiled on the GPU that runs them, and here {why}")
    return About(
        triton=machine.versions["triton"],
        flashinfer=machine.versions.get("flashinfer-python"),
        capability=machine.gpus[0].capability,
    )


def collect_ready(cache_folder: str, machine: MachineFacts, installed: Path | None) -> int:
    """Copies FlashInfer's finished libraries, those compiled here and those of an `installed` package,
    into the package of ours. Returns how many there are now."""
    ready = ready_folder(cache_folder, machine)
    if ready is None:
        return 0
    workspace = Path(kernel_caches(cache_folder)["FLASHINFER_WORKSPACE_BASE"])
    version = machine.versions["flashinfer-python"]
    built = workspace / ".cache" / "flashinfer" / version
    sources = [*built.glob("*/cached_ops/*/*.so")]
    if installed is not None:
        sources += installed.glob("jit_cache/*/*.so")
    package = ready / PACKAGE
    for source in sources:
        target = package / "jit_cache" / source.parent.name / source.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    if package.is_dir():
        (package / "__init__.py").write_text(PACKAGE_TEXT.format(version=version), encoding="utf-8")
    return len(list(package.glob("jit_cache/*/*.so")))


def pack(cache_folder: str, machine: MachineFacts, file: Path) -> int:
    """Returns the bytes of the file. Raises ConfigError if it cannot be written or there is nothing in
    the cache."""
    made_with = about(machine)
    root = Path(cache_folder) / FOLDER
    folders = [root / TRITON, ready_folder(cache_folder, machine)]
    found = [folder for folder in folders if folder is not None and folder.is_dir()]
    if not any(any(folder.iterdir()) for folder in found):
        raise ConfigError(f"there are no compiled kernels in {root} yet; run without --pack first")
    try:
        with tempfile.TemporaryDirectory() as place, tarfile.open(file, "w:gz") as archive:
            note = Path(place) / ABOUT
            note.write_bytes(msgspec.json.encode(made_with))
            archive.add(note, ABOUT)
            for folder in found:
                archive.add(folder, folder.name, filter=_leave_stages)
        return file.stat().st_size
    except OSError as error:
        raise ConfigError(f"--pack {file}: {error.strerror or error}") from None


def unpack(file: Path, cache_folder: str, machine: MachineFacts) -> int:
    """Puts a pack's kernels into the cache, beside what is there; returns how many files. Raises
    ConfigError for a file that is no pack, or one made with what this machine does not have."""
    root = Path(cache_folder).absolute() / FOLDER
    try:
        with tarfile.open(file, "r:gz") as archive, tempfile.TemporaryDirectory() as place:
            archive.extractall(place, filter="data")
            new = Path(place)
            _check(file, msgspec.json.decode((new / ABOUT).read_bytes(), type=About), machine)
            (new / ABOUT).unlink()
            moved = 0
            for source in _files(new):
                target = root / source.relative_to(new)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, target)
                moved += 1
    except (OSError, tarfile.TarError, EOFError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--unpack {file}: it is no pack of kernels: {error}") from None
    for group in (root / TRITON).glob(f"*/{GROUPS}"):
        _point_here(group)
    return moved


def _leave_stages(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Triton reads those of a kernel's files that are there, and launches the last stage alone."""
    return None if entry.name.startswith(TRITON) and entry.name.endswith(STAGES) else entry


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


def _check(file: Path, made_with: About, machine: MachineFacts) -> None:
    """A machine without a GPU may take a pack: an image is often built on one."""
    here = {
        "triton": machine.versions.get("triton"),
        "flashinfer": machine.versions.get("flashinfer-python"),
        "capability": machine.gpus[0].capability if machine.gpus else made_with.capability,
    }
    wanted = msgspec.to_builtins(made_with)
    wrong = [
        f"{name} {wanted[name]} (here {here[name]})"
        for name in wanted
        if wanted[name] is not None and wanted[name] != here[name]
    ]
    if wrong:
        raise ConfigError(
            f"--unpack {file}: it was made with {', '.join(wrong)}, so nothing in it would be used; "
            "make one with the same versions on the same kind of GPU"
        )


def _point_here(group: Path) -> None:
    """Triton looks for a kernel's files where the group says; a moved cache must say anew."""
    try:
        data: Any = json.loads(group.read_text(encoding="utf-8"))
        names = list(data["child_paths"])
    except (OSError, ValueError, KeyError, TypeError):
        group.unlink(missing_ok=True)  # unreadable: Triton compiles that kernel again
        return
    data["child_paths"] = {name: str(group.parent / name) for name in names}
    group.write_text(json.dumps(data), encoding="utf-8")
