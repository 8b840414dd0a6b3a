"""The measurements of the host's share run, and count what they say they count."""

from __future__ import annotations

import re

import pytest

from bench import hops, host_turn


@pytest.mark.parametrize("flags", [[], ["--no-short", "--depth", "0", "--no-freeze"]])
def test_turns(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert host_turn.main(["--rows", "1", "3", "--turns", "40", *flags]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["rows", "turn"] and [row.split()[0] for row in rows] == ["1", "3"]
    assert all(float(row.split()[1]) > 0 for row in rows)


@pytest.mark.parametrize("flags", [[], ["--zmq"]])
def test_hops(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    """A stream that is cut, or a token that is missing, is an error of the measurement itself."""
    assert hops.main(["--streams", "5", "--tokens", "20", "--step-ms", "1", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"100 tokens of 5 streams in ", lines[0])
    assert [line.split()[0] for line in lines[2:]] == [
        "serve", "scheduler", "detokenizer", "tokenizer", "gateway", "client",
    ]  # fmt: skip
