"""Compiled kernels: where they are kept, how they travel, and that they are found where they arrive."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from config_gpu import gpu, gpu_facts

from srt.config.facts import MachineFacts
from srt.errors import ConfigError
from srt.launch.kernel_caches import (
    kernel_caches,
    look_for_kernels,
    ready_folder,
    use_kernel_caches,
)
from srt.launch.kernel_pack import collect_ready, pack, unpack

ROOT = Path(__file__).parents[2]
MACHINE = gpu_facts().machine
WITHOUT_GPU = dataclasses.replace(MACHINE, gpus=[], gpu_trouble="there is no NVIDIA driver")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*kernel_caches(""), "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with monkeypatch.context():
        before = dict(os.environ)
        yield
    os.environ.clear()
    os.environ.update(before)


def fill(cache: Path) -> None:
    """What Triton and FlashInfer leave behind."""
    kernel = cache / "gpu" / "triton" / "KEY"
    kernel.mkdir(parents=True)
    (kernel / "add.cubin").write_bytes(b"cubin")
    (kernel / "add.ptx").write_text("what the cubin was made of")
    (kernel / "add.json").write_text("{}")
    group = {name: str(kernel / name) for name in ("add.cubin", "add.json")}
    (kernel / "__grp__add.json").write_text(json.dumps({"child_paths": group}))
    built = cache / "gpu/flashinfer/.cache/flashinfer/0.6.12/90a/cached_ops/page"
    built.mkdir(parents=True)
    (built / "page.so").write_bytes(b"library")
    (built / "page.o").write_bytes(b"object")


def test_both_caches_are_ours_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    use_kernel_caches(str(tmp_path), MACHINE)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path / "gpu" / "flashinfer")
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert Path(os.environ["FLASHINFER_WORKSPACE_BASE"]).is_dir()


def test_finished_operators_become_the_package_that_flashinfer_loads(
    tmp_path: Path, clean_environment: None
) -> None:
    fill(tmp_path)
    installed = tmp_path / "site" / "flashinfer_jit_cache"
    (installed / "jit_cache" / "norm").mkdir(parents=True)
    (installed / "jit_cache" / "norm" / "norm.so").write_bytes(b"other")
    assert collect_ready(str(tmp_path), MACHINE, installed) == 2
    assert collect_ready(str(tmp_path), MACHINE, None) == 2
    use_kernel_caches(str(tmp_path), MACHINE)
    spec = importlib.util.find_spec("flashinfer_jit_cache")
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    found = Path(package.get_jit_cache_dir())
    assert package.__version__ == "0.6.12"
    assert (found / "page" / "page.so").read_bytes() == b"library"
    assert (found / "norm" / "norm.so").read_bytes() == b"other"


def test_what_is_missing_to_compile_with_is_seen_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None
) -> None:
    """Without compilers nothing runs, unless it is compiled already."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    bare = dataclasses.replace(MACHINE, compiler=None)
    found = look_for_kernels(bare, str(tmp_path / "cache"))
    assert "triton needs a C compiler" in found.triton_trouble
    assert "no nvcc to compile them" in found.flashinfer_trouble
    assert look_for_kernels(WITHOUT_GPU, str(tmp_path)) is WITHOUT_GPU
    with_cc = look_for_kernels(dataclasses.replace(bare, compiler="gcc"), str(tmp_path))
    assert with_cc.triton_trouble == "" != with_cc.flashinfer_trouble

    assert "expanded here and no nvcc" in found.flashinfer_latent_trouble

    fill(tmp_path / "cache")
    (tmp_path / "cache/gpu/triton/KEY/cuda_utils.cpython.so").touch()
    collect_ready(str(tmp_path / "cache"), MACHINE, None)
    found = look_for_kernels(bare, str(tmp_path / "cache"))
    assert (found.triton_trouble, found.flashinfer_trouble) == ("", "")
    assert "expanded here and no nvcc" in found.flashinfer_latent_trouble
    ready = ready_folder(str(tmp_path / "cache"), MACHINE)
    assert ready is not None
    operator = "batch_prefill_with_kv_cache_dtype_q_bf16_head_dim_qk_192_head_dim_vo_128_sm90"
    place = ready / "flashinfer_jit_cache" / "jit_cache" / operator
    place.mkdir()
    (place / f"{operator}.so").touch()
    found = look_for_kernels(bare, str(tmp_path / "cache"))
    assert found.flashinfer_latent_trouble == "" != found.flashinfer_absorbed_trouble
    operator = (
        "batch_mla_attention_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
        "head_dim_ckv_512_head_dim_kpe_64_profiler_False_sm90"
    )
    place = ready / "flashinfer_jit_cache" / "jit_cache" / operator
    place.mkdir()
    (place / f"{operator}.so").touch()
    assert look_for_kernels(bare, str(tmp_path / "cache")).flashinfer_absorbed_trouble == ""

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    found = look_for_kernels(bare, str(tmp_path / "other"))
    assert (found.flashinfer_trouble, found.flashinfer_latent_trouble) == ("", "")


def test_another_gpu_or_version_finds_nothing(tmp_path: Path) -> None:
    names = {
        ready_folder(str(tmp_path), machine)
        for machine in (
            MACHINE,
            dataclasses.replace(MACHINE, gpus=[gpu(capability=100)]),
            dataclasses.replace(MACHINE, versions=MACHINE.versions | {"flashinfer-python": "0.7"}),
        )
    }
    assert len(names) == 3
    assert ready_folder(str(tmp_path), WITHOUT_GPU) is None


@pytest.mark.parametrize("there", [MACHINE, WITHOUT_GPU])
def test_a_pack_arrives_whole_and_points_where_it_lies(tmp_path: Path, there: MachineFacts) -> None:
    here, other, file = tmp_path / "a", tmp_path / "b", tmp_path / "kernels.tgz"
    fill(here)
    collect_ready(str(here), MACHINE, None)
    assert pack(str(here), MACHINE, file) == file.stat().st_size
    with tarfile.open(file) as archive:
        assert not [name for name in archive.getnames() if name.endswith((".o", ".ptx"))]
    assert unpack(file, str(other), there) == 5
    kernel = other / "gpu" / "triton" / "KEY"
    group = json.loads((kernel / "__grp__add.json").read_text())["child_paths"]
    assert group == {name: str(kernel / name) for name in ("add.cubin", "add.json")}
    assert all(Path(path).is_file() for path in group.values())
    ready = ready_folder(str(other), MACHINE)
    assert ready is not None
    assert (ready / "flashinfer_jit_cache/jit_cache/page/page.so").read_bytes() == b"library"
    assert unpack(file, str(other), there) == 5  # again: the same files


def test_what_cannot_be_packed_or_used_says_why(tmp_path: Path) -> None:
    cache, file = tmp_path / "a", tmp_path / "kernels.tgz"
    with pytest.raises(ConfigError, match="no compiled kernels in .*a/gpu yet"):
        pack(str(cache), MACHINE, file)
    fill(cache)
    with pytest.raises(ConfigError, match="there is no NVIDIA driver"):
        pack(str(cache), WITHOUT_GPU, file)
    with pytest.raises(ConfigError, match="--pack .*No such file"):
        pack(str(cache), MACHINE, tmp_path / "nowhere" / "kernels.tgz")
    pack(str(cache), MACHINE, file)
    newer = dataclasses.replace(
        MACHINE, versions=MACHINE.versions | {"triton": "3.7.0"}, gpus=[gpu(capability=100)]
    )
    with pytest.raises(
        ConfigError, match=r"triton 3.6.0 \(here 3.7.0\), capability 90 \(here 100\)"
    ):
        unpack(file, str(tmp_path / "b"), newer)
    assert not (tmp_path / "b").exists()


def evil(name: str) -> Callable[[tarfile.TarFile], None]:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))

    return add


@pytest.mark.parametrize(
    "add", [evil("../escaped"), evil("/tmp/escaped"), evil("about.json"), evil("triton/x")]
)
def test_no_pack_of_ours_is_refused_and_nothing_is_written(
    tmp_path: Path, add: Callable[[tarfile.TarFile], None]
) -> None:
    file = tmp_path / "kernels.tgz"
    with tarfile.open(file, "w:gz") as archive:
        add(archive)
    for content in (file.read_bytes(), b"no archive", file.read_bytes()[:40]):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="it is no pack of kernels"):
            unpack(file, str(tmp_path / "cache"), MACHINE)
    assert (
        not (tmp_path / "escaped").exists() and not (tmp_path / "cache" / "gpu" / "triton").exists()
    )


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(p, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(p + at, at)
"""
COMPILE = """
import sys, os
from pathlib import Path
source = Path(sys.argv[2]) / "kernel_of_test.py"
source.write_text(sys.argv[3])
sys.path.insert(0, sys.argv[2])
from srt.launch.kernel_caches import announce_compiles, use_kernel_caches
from config_gpu import gpu_facts
use_kernel_caches(sys.argv[1], gpu_facts().machine)
shown = []
announce_compiles(lambda phase, part: shown.append(phase.split(", ")[0]))
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernel_of_test import kernel
source = ASTSource(kernel, {"p": "*i32", "BLOCK": "constexpr"}, {"BLOCK": 16})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert compiled.asm["cubin"]
print(shown)
"""


def compile_in(cache: Path, work: Path, tests: str) -> str:
    names = {*kernel_caches(""), "TRITON_INTERPRET"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(cache), str(work), KERNEL],
        env=environment | {"PYTHONPATH": f"{ROOT}:{tests}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_what_triton_compiled_is_found_after_a_journey(tmp_path: Path) -> None:
    """Compiled for sm_90 where there is no GPU; in the other cache nothing is compiled or announced."""
    pytest.importorskip("triton", reason="Triton is an extra")
    here, other, file = tmp_path / "a", tmp_path / "b", tmp_path / "kernels.tgz"
    tests = str(Path(__file__).parent)
    assert compile_in(here, tmp_path, tests) == "['compile: kernel']"
    pack(str(here), MACHINE, file)
    unpack(file, str(other), MACHINE)
    (here / "gpu" / "triton").rename(here / "gpu" / "gone")
    assert compile_in(other, tmp_path, tests) == "[]"
