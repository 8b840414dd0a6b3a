"""Tiny random checkpoints, and a driver that runs a `ModelRunner` without a scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kernels.ops import select
from srt.config.context import get_context
from srt.config.facts import ModelFacts
from srt.config.runner_spec import RunnerSpec
from srt.parallel.group import ALONE, Group
from srt.protocols.forward_batch import ForwardBatch, Slice, TableWrite
from srt.runner.model_runner import ModelRunner

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def read_facts(path: Path, **changes: Any) -> ModelFacts:
    """Facts of a saved Hugging Face directory."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    heads = config["num_attention_heads"]
    return ModelFacts(
        name="tiny",
        path=str(path),
        format="safetensors",
        architecture=config["architectures"][0],
        config=config,
        context_length=config["max_position_embeddings"],
        dtype="float32",
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        num_parameters=0,
        end_token_ids=[2],
    )


def published_target(*, load: bool = True) -> ModelRunner:
    """A runner of the target that was published, on a CPU."""
    context = get_context()
    runner = ModelRunner(
        context.target,
        context.facts.model,
        ops=select("torch"),
        device=torch.device("cpu"),
        seed=1,
    )
    if load:
        runner.load()
    return runner


def make_spec(facts: ModelFacts, **changes: Any) -> RunnerSpec:
    values: dict[str, Any] = {
        "role": "target",
        "model_path": facts.path,
        "load_format": facts.format,
        "dtype": "float32",
        "quantization": None,
        "context_length": facts.context_length,
        "kv_cache_dtype": changes.get("dtype", "float32"),
        "prefill_attention_backend": "sdpa",
        "decode_attention_backend": "sdpa",
        "graph_sizes": (),
    }
    return RunnerSpec(**{**values, **changes})


def make_runner(
    facts: ModelFacts,
    *,
    page_size: int = 16,
    max_rows: int = 4,
    num_pages: int | None = None,
    implementation: str = "torch",
    group: Group = ALONE,
    seed: int = 0,
    **changes: Any,
) -> ModelRunner:
    """Loaded and ready, in float32 unless `changes` to the spec say otherwise."""
    runner = ModelRunner(
        make_spec(facts, **changes),
        facts,
        ops=select(implementation),
        device=torch.device("cpu"),
        seed=seed,
        group=group,
    )
    runner.load()
    pages = num_pages or 1 + max_rows * -(-facts.context_length // page_size)
    runner.allocate(num_pages=pages, page_size=page_size, max_rows=max_rows)
    if runner.arch.latent is None:
        runner.init_backends()
    else:  # its attention reads the schedule
        with get_context().override_server_args():
            runner.init_backends()
    return runner


class Driver:
    """Gives every row its own pages, in an order that is not sorted, and runs one step at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.starts: dict[int, int] = {}
        count = runner.pool.num_pages - 1
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        self.free = [int(page) + 1 for page in order]
        self.pages: dict[int, list[int]] = {}

    def reserve(self, row: int, num_tokens: int) -> TableWrite:
        """Pages for the row's first `num_tokens` tokens."""
        held = self.pages.setdefault(row, [])
        first = len(held)
        while len(held) * self.runner.pool.page_size < num_tokens:
            held.append(self.free.pop())
        return TableWrite(row=row, first=first, pages=held[first:])

    def release(self, row: int) -> None:
        self.free.extend(self.pages.pop(row))
        self.starts.pop(row)

    def step(self, work: dict[int, list[int] | int]) -> dict[int, torch.Tensor]:
        """A list prefills these tokens, an int decodes this one. Returns logits [n, V] by row."""
        slices, writes = [], []
        decoding = {row: token for row, token in work.items() if isinstance(token, int)}
        if decoding:
            self.runner.remember(list(decoding), torch.tensor(list(decoding.values())))
        for row in [*decoding, *(row for row in work if row not in decoding)]:
            given = work[row]
            tokens = given if isinstance(given, list) else None
            length = 1 if tokens is None else len(tokens)
            start = self.starts.get(row, 0)
            writes.append(self.reserve(row, start + length))
            slices.append(
                Slice(
                    row=row,
                    start=start,
                    length=length,
                    tokens=tokens,
                    sample=False,
                    prompt_logprobs=0,
                    targets=[0] * length,
                )
            )
            self.starts[row] = start + length
        batch = ForwardBatch(step=0, slices=slices, table_writes=writes)
        with torch.inference_mode():
            logits = self.runner.logits(self.runner.forward(self.runner.prepare(batch)))
        pieces = logits.split([piece.length for piece in slices])
        return {piece.row: part for piece, part in zip(slices, pieces, strict=True)}

    def run(self, tokens: list[int], chunks: list[int], row: int = 0) -> torch.Tensor:
        """Prefills `chunks` tokens at a time, then decodes the rest one by one: logits [len, V]."""
        found, at = [], 0
        for size in chunks:
            found.append(self.step({row: tokens[at : at + size]})[row])
            at += size
        for token in tokens[at:]:
            found.append(self.step({row: token})[row])
        return torch.cat(found)
