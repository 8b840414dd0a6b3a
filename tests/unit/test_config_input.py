"""Flags, the config file, and the bytes a child process gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from srt.config.args import ServerArgs
from srt.config.context import get_context, publish
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.config.file import read_config_file
from srt.config.flags import build_parser, read_namespace
from srt.config.leaves import leaf_table
from srt.config.trail import InputSource
from srt.errors import ConfigError

ROOT = Path(__file__).parents[2]


def parse_flags(argv: Sequence[str]) -> tuple[ServerArgs, dict[str, InputSource]]:
    return read_namespace(build_parser().parse_args(argv))


def test_no_flags_no_sources() -> None:
    assert parse_flags([]) == (ServerArgs(), {})


def test_flags_of_every_type() -> None:
    args, sources = parse_flags(
        "--page-size 8 --overlap --no-gateway --kv-memory-gb 0.5 --model tiny --policy priority "
        "--cors-origins http://a http://b --strict-fields".split()
    )
    assert args == ServerArgs(
        page_size=8,
        overlap=True,
        gateway=False,
        kv_memory_gb=0.5,
        model="tiny",
        policy="priority",
        cors_origins=("http://a", "http://b"),
        strict_fields=True,
    )
    assert set(sources) == {
        "page_size", "overlap", "gateway", "kv_memory_gb", "model", "policy", "cors_origins",
        "strict_fields",
    }  # fmt: skip
    assert set(sources.values()) == {"typed"}


def test_a_default_that_is_typed_counts_as_typed() -> None:
    assert parse_flags(["--port", "8000"]) == (ServerArgs(), {"port": "typed"})


def test_every_field_has_its_flag_and_help_shows_it() -> None:
    text = build_parser().format_help()
    for leaf in leaf_table().values():
        assert leaf.flag in text
    assert "--overlap, --no-overlap" in text
    assert "(default: 8000)" in " ".join(text.split())


@pytest.mark.parametrize(
    "flags",
    [["--page-size", "big"], ["--policy", "lottery"], ["--page", "8"], ["--overlap", "yes"]],
)
def test_wrong_flags_exit_with_two(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_flags(flags)
    assert raised.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_flag_out_of_range() -> None:
    with pytest.raises(ConfigError, match="--page-size cannot be 0; the smallest allowed is 1"):
        parse_flags(["--page-size", "0"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'page-size = 8\nmax_queued = 5\ncors_origins = ["x"]\n'),
        ("b.toml", "cors_origins = ['x']\n[schedule]\npage_size = 8\nmax-queued = 5\n"),
        ("c.json", '{"page_size": 8, "schedule": {"max_queued": 5}, "cors_origins": ["x"]}'),
    ],
)
def test_file_forms(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    args, sources = parse_flags(["--config", str(path), "--page-size", "4"])
    assert args == ServerArgs(page_size=4, max_queued=5, cors_origins=("x",))
    assert sources == {"page_size": "typed", "max_queued": "file", "cors_origins": "file"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "page_sise = 8", "there is no setting 'page_sise'; did you mean 'page_size'"),
        ("a.toml", "page_size = 'big'", "--page-size cannot be 'big'"),
        ("a.toml", "page_size = 8\npage-size = 8", "page-size is given twice"),
        ("a.toml", "[scheduler]\npage_size = 8", "no group 'scheduler'; did you mean 'schedule'"),
        ("a.toml", "[memory]\npage_size = 8", r"belongs to \[schedule\], not to \[memory\]"),
        ("a.toml", "page_size = ", "a.toml"),
        ("a.toml", "policy = 'lottery'", "allowed: fcfs"),
        ("a.json", "[1]", "an object is needed, not list"),
        ("a.json", "{", "a.json"),
        ("a.yaml", "a: 1", "must end in .toml or .json"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        read_config_file(path)
    assert str(path) in str(raised.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config_file(tmp_path / "none.toml")


Inputs = tuple[ServerArgs, Facts, dict[str, InputSource], int]  # what a boot record carries
CHILD = """
import json, sys
import msgspec
from test_config_input import Inputs
from srt.config.context import get_context, get_serving, publish
data = sys.stdin.buffer.read()
args, facts, sources, entropy = inputs = msgspec.json.decode(data, type=Inputs)
assert msgspec.json.encode(inputs) == data
publish(args, facts, role="scheduler", entropy=entropy, sources=sources)
assert get_serving().api_key == "hush"
assert not {"torch", "numpy", "zmq"} & set(sys.modules)
print(json.dumps(get_context().describe()))
"""


def test_child_process_resolves_to_equal_bags() -> None:
    args, sources = parse_flags("--page-size 8 --api-key hush --cors-origins a b".split())
    facts, entropy = dummy_facts(), 77
    data = msgspec.json.encode((args, facts, sources, entropy))
    assert msgspec.json.decode(data, type=Inputs) == (args, facts, sources, entropy)
    run = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=data,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"},
    )
    assert run.returncode == 0, run.stderr.decode()
    there = json.loads(run.stdout)
    with get_context().override_server_args():
        publish(args, facts, role="scheduler", entropy=entropy, sources=sources)
        assert there == json.loads(msgspec.json.encode(get_context().describe()))


def test_a_published_record_keeps_its_secrets_out_of_its_repr() -> None:
    assert "hush" not in repr(ServerArgs(api_key="hush", admin_key="hush"))


def test_a_port_that_no_machine_has_is_refused_where_it_is_typed() -> None:
    with pytest.raises(ConfigError, match="--port cannot be 99999; the largest allowed is 65535"):
        parse_flags(["--port", "99999"])
