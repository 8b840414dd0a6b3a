"""`tandem verify` over a worker that launches ahead: new pools and new graphs for every variant."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from test_device_worker import make_worker

from srt.scheduler.budget import Settings
from srt.verify.check import verify
from srt.verify.model_rig import DeviceRig
from srt.verify.requests import build_requests
from srt.verify.variants import baseline, plan


class Words:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3 + crc32(word.encode()) % 90 for word in text.split()]

    def token_bytes(self, token: int) -> bytes:
        return f"{token} ".encode()

    def is_special(self, token: int) -> bool:
        return False


def test_every_variant_answers_alike() -> None:
    worker = make_worker(())
    runner = worker.runner
    runner.spec = replace(runner.spec, graph_sizes=(1, 2, 4), prefill_graph_sizes=(16, 32))
    rig = DeviceRig(worker, [])
    del worker
    requests = build_requests(Words(), runner.context_length)
    yours = Settings(max_running=4, max_step_tokens=68, chunked_prefill_size=64)
    variants = plan(requests, page_size=16, algorithm=None, yours=yours)
    report = verify(rig, requests, Words(), baseline(requests, 16), variants)
    assert report.is_equal, report
    assert "5 CUDA graphs" in report.kernels and report.is_exact
    rig.close()
