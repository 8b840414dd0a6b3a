"""A model stored as two ranks hold it, served by two: the answers of one process with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from srt.config.probe import probe_model
from srt.runner.shard import write_shards
from tests.process.conftest import run_inline, run_processes
from tests.process.test_tensor_parallel import FLOAT, ask_all


async def test_ranks_serve_what_was_written_for_them(checkpoint: Path, tmp_path: Path) -> None:
    for ranks, name in ((2, "target"), (1, "draft")):
        facts = probe_model(checkpoint, "tiny")
        write_shards(facts, ranks, tmp_path / name, None, lambda phase, fraction: None)
    async with run_inline(model=str(checkpoint), **FLOAT) as running:
        alone = await ask_all(running)
    given: dict[str, Any] = {"model": str(tmp_path / "target"), "tensor_parallel_size": 2}
    given |= {"speculative_algorithm": "standalone"}
    given |= {"speculative_draft_model": str(tmp_path / "draft"), **FLOAT}
    async with run_processes(**given) as running:
        assert await ask_all(running) == alone
        config = await running.client.engine_config()
        assert config["bags"]["model"]["load_format"] == "sharded"
