"""Start, stop, death: no process, socket or file is left, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from srt.client import SamplingParams
from srt.errors import TandemError
from tests.process.conftest import RunEngine
from tests.process.served import Served, slow_script

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", [(), ("--inline",)], ids=["processes", "inline"])
async def test_sigterm_drains_and_leaves_nothing(
    tmp_path: Path, script: Callable[..., str], mode: tuple[str, ...]
) -> None:
    served = Served(tmp_path, "--model", slow_script(script), *mode)
    url = await asyncio.to_thread(served.wait_ready)
    children = list(served.children().values())
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"model": (await client.get("/v1/models")).json()["data"][0]["id"], "prompt": "x"}
        running = asyncio.create_task(
            client.post("/v1/completions", json={**body, "max_tokens": 100, "temperature": 0})
        )
        await asyncio.sleep(0.5)
        served.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        answer = (await running).json()
        assert answer["choices"][0]["text"] == "ab" * 50  # it was let finish
    code, errors = await asyncio.to_thread(served.end)
    assert code == 0, errors
    assert "Traceback" not in errors and "Fatal" not in errors
    assert not [child for child in children if child.is_running()]
    assert not served.leftovers()


@pytest.mark.parametrize("signals", [1, 2], ids=["deadline", "second signal"])
async def test_what_a_drain_cuts_short_is_told_so(
    tmp_path: Path, script: Callable[..., str], signals: int
) -> None:
    """One signal and a short drain time, or two signals and a long one."""
    seconds = "1" if signals == 1 else "60"
    model = script(["a"], script=[256] * 500, step_seconds=0.1)
    served = Served(tmp_path, "--model", model, "--drain-seconds", seconds)
    url = await asyncio.to_thread(served.wait_ready)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": name, "prompt": "x", "max_tokens": 400}
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        stream = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": True}))
        await asyncio.sleep(0.7)
        for _ in range(signals):
            served.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
        answer = await whole
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        events = (await stream).text
        assert '"shutting_down"' in events and events.endswith("data: [DONE]\n\n")
        code, errors = await asyncio.to_thread(served.end)
    assert code == 0, errors
    assert not served.leftovers()


async def test_a_client_that_dies_is_an_abort(
    processes: RunEngine, script: Callable[..., str]
) -> None:
    program = (
        "import sys, time\n"
        "from srt.client import Client, SamplingParams\n"
        "client = Client.connect(sys.argv[1])\n"
        "stream = client.stream('x', SamplingParams(max_tokens=400))\n"
        "for _ in range(3): next(stream)\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    model = script(["a"], script=[256] * 450, step_seconds=0.02)
    async with processes(model=model) as running:
        dying = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, running.front, stdout=asyncio.subprocess.PIPE
        )
        assert dying.stdout is not None
        assert await dying.stdout.readline() == b"started\n"
        assert (await running.client.health())["live"] == 1
        dying.kill()
        await dying.wait()
        for _ in range(40):
            if (await running.client.health())["live"] == 0:
                break
            await asyncio.sleep(0.05)
        await running.settle()


async def test_idle_scheduler_uses_no_cpu(processes: RunEngine, script: Callable[..., str]) -> None:
    async with processes(model=slow_script(script)) as running:
        await running.client.generate("x", SamplingParams(max_tokens=5))
        scheduler = psutil.Process(running.pids["scheduler"])
        before = scheduler.cpu_times()
        await asyncio.sleep(2.0)
        after = scheduler.cpu_times()
        used = after.user + after.system - before.user - before.system
        assert used <= 0.05  # seconds of CPU in two seconds of idling


def test_bad_wishes_are_refused_at_once(tmp_path: Path, script: Callable[..., str]) -> None:
    for flags, words in (
        (("--model", str(tmp_path / "nothing")), ("nothing", "--model")),
        (("--model", script(["a"]), "--context-length", "9999999"), ("9999999", "512")),
        (("--model", script(["a"]), "--page-size", "0"), ("page-size", "0")),
        (("--model", script(["a"]), "--attention-backend", "flux"), ("flux",)),
    ):
        run = subprocess.run(
            [sys.executable, "-m", "srt.cli.main", "serve", "--port", "0", *flags],
            capture_output=True, text=True, cwd=ROOT, timeout=30,
        )  # fmt: skip
        assert run.returncode == 2, run.stderr
        assert all(word in run.stderr for word in words), run.stderr
        assert "Traceback" not in run.stderr


async def test_a_port_that_is_taken_is_refused(
    processes: RunEngine, script: Callable[..., str]
) -> None:
    model = script(["a"])
    async with processes(model=model) as running:
        port = int(running.url.rsplit(":", 1)[1])
        with pytest.raises((ValueError, TandemError), match=str(port)):
            async with processes(model=model, port=port):
                pass


async def test_a_checkpoint_is_served(processes: RunEngine, checkpoint: Path) -> None:
    async with processes(model=str(checkpoint), dtype="float32") as running:
        assert running.client.welcome.model == checkpoint.name
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        answer = await running.client.generate([5, 6, 7], params)
        assert len(answer.samples[0].token_ids) == 5
        await running.settle()


@pytest.mark.parametrize("fault", ["missing", "unknown", "misshapen"])
def test_a_broken_checkpoint_is_refused_by_tensor(
    checkpoint: Path, tmp_path: Path, fault: str
) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        name = "model.layers.1.mlp.sideways_proj.weight"
        weights[name] = torch.zeros(3)
    else:
        weights[name] = torch.zeros(3, 4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    run = subprocess.run(
        [sys.executable, "-m", "srt.cli.main", "serve", "--port", "0", "--model", str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=10,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert name in run.stderr and "Traceback" not in run.stderr, run.stderr
    if fault == "misshapen":
        assert "[3, 4]" in run.stderr
