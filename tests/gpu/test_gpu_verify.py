"""`tandem verify --deterministic`: one engine after the other over the same weights, each with graphs
and pools of its own, and the same answers from all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from gpu_engine import FLAGS
from gpu_models import NUMBERS, save_network

from bench.gpu.folder import END_TOKENS, build_tokenizer

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 110
SPECIALS = {NUMBERS["bos_token_id"]: END_TOKENS[0], NUMBERS["eos_token_id"]: END_TOKENS[1]}
LEFT_OUT = {"page size 16", "speculation: draft"}  # the baseline's own; no draft is given


def eagle(draft: Path) -> list[str]:
    return [
        *("--speculative-algorithm", "eagle3", "--speculative-draft-model", str(draft)),
        *("--speculative-draft-load-format", "dummy"),
    ]


@pytest.mark.parametrize("guesser", ["none", "ngram", "eagle3"])
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_every_engine_gives_the_same_answers(model: Path, tmp_path: Path, guesser: str) -> None:
    tokenizer = build_tokenizer(NUMBERS["vocab_size"], SPECIALS)
    (model / "tokenizer.json").write_bytes(orjson.dumps(tokenizer))
    ways = {
        "none": [],
        "ngram": ["--speculative-algorithm", "ngram"],
        "eagle3": eagle(save_network(tmp_path, model)),
    }
    words = ["--model", str(model), "--device", "cuda", "--deterministic", "--json", *FLAGS]
    run = subprocess.run(
        [sys.executable, "-m", "srt.cli.main", "verify", *words, *ways[guesser]],
        cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stderr
    found = json.loads(run.stdout)
    print(f"{found['kernels']}, {found['seconds']} s")
    rows = {row["name"]: row for row in found["variants"]}
    assert [row for row in rows.values() if row["requests"] != row["equal"] or row["broke"]] == []
    assert found["equal"] and found["exact_kernels"] and "triton" in found["kernels"]
    left_out = {name for name, row in rows.items() if row["not_applicable"]}
    assert left_out == (LEFT_OUT - {"speculation: draft"} if guesser == "eagle3" else LEFT_OUT)
    guessed = "speculation: eagle3" if guesser == "eagle3" else "speculation: ngram"
    assert "guesses" in rows[guessed]["evidence"]
