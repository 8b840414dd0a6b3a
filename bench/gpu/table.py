"""The figures beside the targets and the other engines, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu.peers import MINI_SGLANG, VLLM, Row, rows_of

Results = dict[str, Any]  # figures by part; a part that failed has {"error": ...}


def headline(results: Results) -> dict[str, float]:
    """The figure of every row there is one for. Of two runs the slower one counts."""
    found: dict[str, float] = {}

    def take(row: str, part: str, name: str) -> None:
        value = results.get(part, {}).get(name)
        if value is not None:
            found[row] = min(value) if isinstance(value, list) else value

    take("offline", "offline", "tok_s")
    take("batch1", "batch1", "ms_per_token")
    for name, value in results.get("ttft", {}).items():
        if name.endswith("_ms"):
            found[f"ttft {name[:-3]}"] = value
    for name, value in results.get("decode", {}).items():
        if name.isdigit():
            found[f"decode {name}"] = value
    for name, value in results.get("prefix", {}).items():
        if name.endswith("_ms"):
            found[f"prefix {name[:-3]}"] = value
    take("start", "start", "second_s")
    take("online", "online", "p99_by_p50")
    take("graphs", "graphs", "share")
    for row, part in (("gateway", "gateway"), ("fp8", "fp8")):
        value, plain = results.get(part, {}).get("tok_s"), results.get("offline", {}).get("tok_s")
        if value and plain:
            found[row] = max(value) / max(plain)
    return found


def render_table(shape: str, results: Results, is_comparable: bool = True) -> str:
    """`is_comparable`: else there are no targets, and nobody beside it; see `rows_of`."""
    figures, rows = headline(results), rows_of(shape, is_comparable)
    lines = [f"{shape:<32}{'measured':>12}{'target':>12}{VLLM:>14}{MINI_SGLANG:>14}  met"]
    for name in [*rows, *(name for name in figures if name not in rows)]:
        row = rows.get(name, Row(name, None, None, None))
        if name not in figures and row.target is None:
            continue
        value = figures.get(name)
        met = None if value is None else row.is_met(value)
        cells = _cell(value) + _cell(row.target) + _cell(row.vllm, 14) + _cell(row.mini_sglang, 14)
        lines.append(f"{row.title:<32}{cells}  {'' if met is None else 'yes' if met else 'NO'}")
    return "\n".join([*lines, *_profile(results.get("profile", {}))])


def _cell(value: float | None, width: int = 12) -> str:
    if value is None:
        return f"{'-':>{width}}"
    return f"{value:>{width},.0f}" if value >= 1000 else f"{value:>{width}.2f}"


def _profile(sizes: dict[str, Any]) -> Iterator[str]:
    """A row for each batch size: host, stage by stage, beside what the device computed."""
    rows = {size: row for size, row in sizes.items() if isinstance(row, dict)}
    if not rows:
        return
    stages = list(next(iter(rows.values()))["stages_ms"])
    head = f"{'step, ms':<10}{'wall':>8}{'device':>8}{'host':>8}  |"
    yield head + "".join(f"{stage:>10}" for stage in stages)
    for size, row in rows.items():
        cells = f"{row['wall_ms']:>8.3f}{row['device_ms_per_step']:>8.3f}{row['host_ms']:>8.3f}  |"
        stages_ms = "".join(f"{row['stages_ms'][stage]:>10.3f}" for stage in stages)
        yield f"batch {size:<4}{cells}{stages_ms}"
    for size, row in rows.items():
        for kernel in row["kernels"]:
            yield (
                f"  batch {size:<4} {kernel['ms']:>8.4f} ms {kernel['calls']:>7.1f} calls  "
                f"{kernel['name']}"
            )
