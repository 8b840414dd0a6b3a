"""The shape of the repository: what the design promises and a reader relies on."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("srt", "kernels", "tokenizer_proc", "bench")
TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile",
    *PACKAGES, "tests",
}  # fmt: skip
TORCH_FREE = (
    "srt.wire.messages", "srt.wire.codec", "srt.wire.sockets", "srt.wire.memory",
    "srt.wire.limits", "srt.config.context", "srt.config.resolve", "srt.config.probe",
    "srt.client", "srt.gateway", "srt.gateway.app", "srt.metrics", "srt.scheduler",
    "srt.cache.radix", "srt.cache.lease", "srt.loading.locate", "srt.launch.supervisor",
    "srt.cli.main", "srt.cli.verify", "srt.verify.check", "srt.spec.ngram",
    "tokenizer_proc.tokenizer", "tokenizer_proc.detokenizer", "tokenizer_proc.load", "bench.drive",
)  # fmt: skip
PURE = (
    "srt.cache.radix", "srt.cache.lease", "srt.cache.pages", "srt.scheduler.policy",
    "srt.scheduler.budget", "srt.scheduler.pace", "srt.scheduler.promise",
    "tokenizer_proc.incremental", "tokenizer_proc.stop_strings", "tokenizer_proc.chat_template",
)  # fmt: skip


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_modules(names: tuple[str, ...]) -> set[str]:
    """What is loaded in a fresh interpreter after importing `names`."""
    program = f"import sys, {', '.join(names)}; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_never_reaches_torch(module: str) -> None:
    assert "torch" not in imported_modules((module,))


@pytest.mark.parametrize("module", PURE)
def test_pure_module_reaches_neither_torch_nor_zmq(module: str) -> None:
    assert not imported_modules((module,)) & {"torch", "zmq"}


def test_import_contracts_hold() -> None:
    program = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(("folders", "ceiling"), [(PACKAGES, 400), (("tests",), 500)])
def test_files_stay_small(folders: tuple[str, ...], ceiling: int) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(*folders)
        if (lines := len(path.read_text().splitlines())) > ceiling
    }
    assert not long


def test_nothing_else_stands_at_the_top() -> None:
    run = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {line.split("/")[0] for line in run.stdout.splitlines()}
    assert {name for name in tracked if not name.startswith(".")} == TOP_LEVEL


def test_readme_tree_is_the_disk() -> None:
    """Each line of README's tree names a folder that exists, and every folder of code is named."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.S)
    assert block, "README.md has no tree between <!-- tree --> and its code block's end"
    named, stack = set(), []
    for line in block.group(1).splitlines():
        found = re.match(r"^( *)([\w.]+)/", line)
        if found:
            depth = len(found.group(1)) // 2
            stack = [*stack[:depth], found.group(2)]
            named.add("/".join(stack))
    code = {
        str(path.parent.relative_to(ROOT))
        for path in sources(*PACKAGES)
        if len(path.relative_to(ROOT).parts) <= 3
    }
    assert named - {"tests"} == code


def test_no_mutable_module_state_outside_the_context() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(*PACKAGES)
        if path.relative_to(ROOT).as_posix() != "srt/config/context.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Global)
    ]
    assert not offenders


def test_no_pickle_on_the_way() -> None:
    words = re.compile(r"\bimport pickle|\bfrom pickle|recv_pyobj|send_pyobj")
    assert not [str(path) for path in sources(*PACKAGES) if words.search(path.read_text())]


def test_no_unfinished_marks() -> None:
    words = re.compile(r"NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")
    assert not [str(path) for path in sources(*PACKAGES) if words.search(path.read_text())]


def test_printing_belongs_to_the_commands() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("srt", "kernels", "tokenizer_proc")
        if "cli" not in path.parts
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not offenders


def test_environment_is_read_by_the_commands_only() -> None:
    words = re.compile(r"os\.environ|os\.getenv")
    offenders = [
        str(path.relative_to(ROOT))
        for path in sources("srt", "kernels", "tokenizer_proc")
        if "cli" not in path.parts and words.search(path.read_text())
    ]
    assert not offenders


def test_kernels_does_not_look_like_the_package_of_that_name() -> None:
    """transformers takes a `kernels` distribution of a certain version for its own helper; ours has no
    version and no imports, so it must not."""
    body = parse(ROOT / "kernels" / "__init__.py").body
    assert all(isinstance(node, ast.Expr) for node in body)  # a docstring at most
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()
