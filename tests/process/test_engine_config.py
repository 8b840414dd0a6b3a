"""What a live engine says about its configuration, over HTTP and over ZMQ."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from srt.client import SamplingParams
from srt.config.facts import MachineFacts
from srt.config.probe import probe_machine
from srt.launch import prepare
from srt.launch.inline import InlineEngine
from tests.process.conftest import RunEngine, boot_for


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that could have native kernels, but whose compiler fails: known only while loading."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)

    def probe() -> MachineFacts:
        flags = ("avx2", "avx512f")
        return dataclasses.replace(probe_machine(), cpu_flags=flags, compiler=str(compiler))

    monkeypatch.setattr(prepare, "probe_machine", probe)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def entries(config: dict[str, Any], field: str) -> list[dict[str, Any]]:
    return [entry for entry in config["trail"] if entry["field"] == field]


async def test_what_loading_changed_is_shown(
    engine: RunEngine, checkpoint: Path, broken_compiler: None
) -> None:
    async with engine(model=str(checkpoint), dtype="bfloat16", max_running=3) as running:
        async with running.http() as http:
            over_http = (await http.get("/v1/engine/config")).json()
        config = await running.client.engine_config()
        assert config == over_http
        values = config["bags"]
        assert values["exec"]["native_kernels"] is False
        assert values["schedule"]["max_running"] == 3
        hoped, taken_back = entries(config, "exec.native_kernels")
        assert hoped["value"] is True and "can build them" in hoped["reason"]
        assert taken_back["value"] is False and taken_back["replaced"] is True
        assert taken_back["source"] == "kernel build" and "does not run" in taken_back["reason"]
        assert [e["source"] for e in entries(config, "schedule.max_running")] == ["typed"]
        [target] = [each for each in config["runners"] if each["role"] == "target"]
        assert target["decode_attention_backend"] == "sdpa"
        assert entries(config, "target.decode_attention_backend")[-1]["source"] == "kernel build"
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        answer = await running.client.generate([5, 6, 7], params)
        assert len(answer.samples[0].token_ids) == 3
        await running.settle()


async def test_the_start_in_one_process_shows_its_phases(checkpoint: Path) -> None:
    seen: list[tuple[str, str, float | None]] = []

    def progress(actor: str, phase: str, share: float | None) -> None:
        seen.append((actor, phase, share))

    boot = boot_for("inline", model=str(checkpoint), dtype="float32")
    async with InlineEngine(boot, progress):
        pass
    assert {actor for actor, _, _ in seen} == {"engine"}
    shares = [share for _, phase, share in seen if phase == "warm-up"]
    assert len(shares) == 5 and shares[0] == 0.0 and shares[-1] == 1.0
    assert shares == sorted(share for share in shares if share is not None)
    assert seen[0][1] == "imports" and seen[-1][1] == "warm-up"
