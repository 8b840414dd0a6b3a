"""The vocabulary on the wire: every message round-trips, nothing else gets in, bytes never change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_examples import EXAMPLES, HOPS, values

import srt.wire
from srt.errors import ProtocolError
from srt.wire import codec
from srt.wire.messages import Generate, Hello

GOLDEN = Path(__file__).parents[1] / "golden" / "wire_v1.json"
DECODERS: dict[str, codec.Decoder[Any]] = {name: getattr(codec, name)() for name in HOPS}


def hops_of(kind: type) -> list[str]:
    return [name for name, union in HOPS.items() if kind in get_args(union)]


@pytest.mark.parametrize("hop", HOPS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_message_round_trips(hop: str, data: st.DataObject) -> None:
    message = data.draw(st.one_of(*map(values, get_args(HOPS[hop]))))
    assert DECODERS[hop].decode(codec.encode(message)) == message


@given(frame=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_protocol_errors_at_worst(frame: bytes) -> None:
    for decoder in DECODERS.values():
        for bytes_ in (frame, b"\x01" + frame):
            try:
                decoder.decode(bytes_)
            except ProtocolError:
                pass


@given(
    name=st.sampled_from(sorted(EXAMPLES)),
    position=st.integers(0, 10_000),
    byte=st.integers(0, 255),
    cut=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_damaged_frames_are_protocol_errors_at_worst(
    name: str, position: int, byte: int, cut: bool
) -> None:
    frame = bytearray(codec.encode(EXAMPLES[name]))
    position %= len(frame)
    frame[position] = byte
    damaged = bytes(frame[:position] if cut else frame)
    for decoder in DECODERS.values():
        try:
            decoder.decode(damaged)
        except ProtocolError:
            pass


def test_examples_cover_the_vocabulary() -> None:
    shown = {type(example) for example in EXAMPLES.values()}
    assert shown == {kind for union in HOPS.values() for kind in get_args(union)}


def test_golden_bytes() -> None:
    """Changed bytes are a new protocol version: then change VERSION and start another golden file."""
    golden = json.loads(GOLDEN.read_text())
    assert {name: codec.encode(example).hex() for name, example in EXAMPLES.items()} == golden
    for name, example in EXAMPLES.items():
        for hop in hops_of(type(example)):
            assert DECODERS[hop].decode(bytes.fromhex(golden[name])) == example


def test_a_hop_takes_only_its_own_messages() -> None:
    for example in EXAMPLES.values():
        frame = codec.encode(example)
        for hop, decoder in DECODERS.items():
            if hop in hops_of(type(example)):
                decoder.decode(frame)
            else:
                with pytest.raises(ProtocolError):
                    decoder.decode(frame)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "empty"),
        (b"\x02" + codec.encode(Hello(rid="a"))[1:], "version 2"),
        (codec.encode(Hello(rid="a")) + b"\xc0", "trailing"),
        (b"\x01\x82\xa1t\xa5hullo\xa3rid\xa1a", "hullo"),
        (b"\x01\x83\xa1t\xa5hello\xa3rid\xa1a\xa1x\x01", "`x`"),
        (b"\x01" + b"\x91" * 100_000, "message"),
        (codec.encode(Generate(rid="a", n="two")), "n"),  # type: ignore[arg-type]
    ],
)
def test_refusals_say_what_is_wrong(frame: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        DECODERS["front_requests"].decode(frame)


def test_the_documented_frames_are_real() -> None:
    paragraphs = (srt.wire.__doc__ or "").split("\n\n")
    frames = [bytes.fromhex(text) for text in paragraphs if text.startswith("    01 ")]
    messages = [DECODERS["front_requests"].decode(frame) for frame in frames[:2]]
    messages += [DECODERS["front_replies"].decode(frame) for frame in frames[2:]]
    assert [type(message).__name__ for message in messages] == [
        "Hello",
        "Generate",
        "Outputs",
        "Refused",
    ]
