"""The shape of the repository: what the design promises and a reader relies on."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from srt.cli.main import COMMANDS

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

VAGUE = {"utils", "util", "common", "manager", "helper", "helpers", "base", "impl"}
VALUES = {  # calls whose results nobody can change, or nobody does: Python's, our types, our functions
    "MappingProxyType", "TypeVar", "Path", "compile", "frozenset", "getLogger", "tuple", "range",
    "constexpr",
    "Struct", "bytes", "join", "getincrementaldecoder", "Encoder", "Decoder",
    "SamplingParams", "LatentArch", "Limit", "Refusal", "_Split", "Sizes", "_rows", "Alone",
    "Plan", "FewPlan", "TilePlan", "FetchPlan",
    "boolean", "integer", "number", "_signed", "_split", "_byte_alphabet",
}  # fmt: skip
MODULE_STATE = {
    "kernels/launch.py:launch_options": "two options by device; read-only",
    "kernels/launch.py:pdl_supported": "a fact of a device",
    "kernels/launch.py:shared_memory": "a fact of a device",
    "srt/config/context.py:_context": "the one context of a process, with its phases",
    "srt/config/leaves.py:leaf_table": "a table made of the fields of ServerArgs; read-only",
    "srt/spec/train/fuse.py:compiled": "torch's compilation of a function, made at its first use",
}
CHANGING = {
    "append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update", "setdefault",
    "popitem", "add", "discard",
}  # fmt: skip


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


def test_readme_names_every_command_and_route() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^\| `(?:tandem|python -m) ([\w.]+)", text, re.M)
    assert set(COMMANDS) <= set(commands)
    routes = {
        route
        for path in sources("srt/gateway")
        for route in re.findall(r'router\.(?:get|post)\("([^"{]+?)/?["{]', path.read_text())
    }
    named = text.replace("Chat and text\ncompletions", "`/v1/chat/completions`, `/v1/completions`")
    twins = {"/v1/tokenize", "/v1/detokenize"}  # second names of what is named
    assert not {route for route in routes - twins if f"{route}`" not in named}


def test_no_global_statement() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Global)
    ]
    assert not offenders


def bindings(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names bound at the top of a module, also under `if` and `try`, with their values."""
    waiting: list[ast.AST] = list(module.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            waiting += ast.iter_child_nodes(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield ast.unparse(target), node.value


def made_by(value: ast.expr) -> str:
    """The name of what is called, without its modules."""
    return ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""


def is_table(name: str, value: ast.expr) -> bool:
    """A list, dict or set under a constant's name; that nobody writes to it is another test."""
    is_container = isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    ) or made_by(value) in ("list", "dict", "set")
    return is_container and (name.isupper() or name == "__all__")


def may_be_state(name: str, value: ast.expr) -> bool:
    """Mutable by its looks: a container under a variable's name, or an object of a kind that is not
    known to be a value."""
    if isinstance(value, ast.Call):
        return made_by(value) not in VALUES and not is_table(name, value)
    containers = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, containers) and not is_table(name, value)


def test_module_state_is_listed() -> None:
    """And what is listed is there: an entry of the list cannot outlive its reason."""
    found = set()
    for path in sources(*PACKAGES):
        where, module = path.relative_to(ROOT).as_posix(), parse(path)
        found |= {
            f"{where}:{name}" for name, value in bindings(module) if may_be_state(name, value)
        }
        found |= {
            f"{where}:{node.name}"
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and any(
                re.search(r"\b(lru_)?cache\b(?!_)", ast.unparse(d)) for d in node.decorator_list
            )
        }
    assert found == set(MODULE_STATE)


def writes(node: ast.AST) -> Iterator[ast.expr]:
    """Containers that a statement changes: by item, by operator, or by a method that changes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            yield from (target.value for target in targets if isinstance(target, ast.Subscript))
        case ast.AugAssign(target=ast.Subscript(value=container)):
            yield container
        case ast.AugAssign(target=container):
            yield container
        case ast.Call(func=ast.Attribute(value=container, attr=name)) if name in CHANGING:
            yield container


def test_nobody_writes_to_a_table() -> None:
    """Lists, dicts and sets of modules are only read, whoever imports them. (The list in
    srt/config/gate.py is there for packages outside this tree to append to.)"""
    modules = {path: parse(path) for path in sources(*PACKAGES)}
    tables = {
        name
        for module in modules.values()
        for name, value in bindings(module)
        if is_table(name, value)
    }
    assert len(tables) > 10  # it does find them
    offenders = [
        f"{path.relative_to(ROOT)}:{container.lineno} {ast.unparse(container)}"
        for path, module in modules.items()
        for node in ast.walk(module)
        for container in writes(node)
        if ast.unparse(container).rpartition(".")[2] in tables
    ]
    assert not offenders


def test_the_search_for_state_sees_it() -> None:
    seen = dict(bindings(ast.parse("seen = {}\nif 1:\n    Pool = Pool()\nT: dict = {1: 2}\nN = 3")))
    assert {name for name, value in seen.items() if may_be_state(name, value)} == {"seen", "Pool"}
    changes = ast.parse("T[1] = 2\nT.append(3)\ndel T[1]\nT |= x\nT[1] += 1\nT.get(4)\ny = T[1]")
    assert len([found for node in ast.walk(changes) for found in writes(node)]) == 5


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_names_say_what_things_are() -> None:
    """Of folders, files, classes and functions."""
    named = {part for path in sources(*PACKAGES, "tests") for part in path.relative_to(ROOT).parts}
    for path in sources(*PACKAGES, "tests"):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        named |= {node.name for node in ast.walk(parse(path)) if isinstance(node, kinds)}
    assert not {name for name in named if words_of(name) & VAGUE}
    assert words_of("HTTPBase_utils.py") & VAGUE == {"base", "utils"}


def test_what_the_code_reads_is_packed() -> None:
    """Every file beside the code is in the wheel, so an installed engine finds what a clone has."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    run = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    others = [Path(line) for line in run.stdout.split() if not line.endswith((".py", ".md"))]
    assert {".toml", ".jsonl", ".safetensors", ".c"} <= {path.suffix for path in others}
    assert not [path for path in others if not any(map(path.match, patterns))]


def test_every_dependency_has_a_range_and_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"].values()
    wanted = {wish for wishes in (project["dependencies"], *extras) for wish in wishes}
    pattern = r"[\w-]+>=[\d.]+,<[\d.]+(; [\w =']+)?"
    assert not [wish for wish in wanted if not re.fullmatch(pattern, wish)]
    assert not [wish for wish in wanted if not re.search(f'"{wish}", +# .{{8}}', text)]


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
    """Two files besides: which GPUs are hidden is a fact of the machine, and where Triton and FlashInfer
    keep what they compile can be said to them in no other way."""
    besides = {"srt/config/probe_gpu.py", "srt/launch/kernel_caches.py"}
    words = re.compile(r"os\.environ|os\.getenv")
    offenders = [
        str(path.relative_to(ROOT))
        for path in sources("srt", "kernels", "tokenizer_proc")
        if "cli" not in path.parts and words.search(path.read_text())
    ]
    assert set(offenders) <= besides


def test_kernels_does_not_look_like_the_package_of_that_name() -> None:
    """transformers takes a `kernels` distribution of a certain version for its own helper; ours has no
    version and no imports, so it must not."""
    body = parse(ROOT / "kernels" / "__init__.py").body
    assert all(isinstance(node, ast.Expr) for node in body)  # a docstring at most
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()
