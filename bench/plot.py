"""A picture of latency against load, from the JSON lines of several runs. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from srt.errors import ConfigError


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG: TTFT and TPOT (p50, p99) over output tokens per second, one point per result."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    points = sorted((result["summary"] for result in results), key=lambda s: s["output_tok_per_s"])
    load = [point["output_tok_per_s"] for point in points]
    figure = Figure(figsize=(9, 4), layout="constrained")
    for column, (name, title) in enumerate((("ttft_ms", "first token"), ("tpot_ms", "per token"))):
        axes = figure.add_subplot(1, 2, column + 1)
        for part in ("p50", "p99"):
            axes.plot(load, [point[name][part] for point in points], marker="o", label=part)
        axes.set(xlabel="output tokens/s", ylabel="ms", title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
