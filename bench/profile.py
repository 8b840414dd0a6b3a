"""The engine's own step profile as a table: where a step's time went, and the engine's share of it."""

from __future__ import annotations

from typing import Any


def render_profile(profile: dict[str, Any]) -> str:
    """`profile` is the engine's answer to the topic "profile"; see `srt.scheduler.profile`."""
    groups = profile["groups"]
    if not groups:
        return "no steps yet"
    stages = list(next(iter(groups.values()))["stages"])
    phases = list(next(iter(groups.values()))["phases"])
    head = f"{'step of':<14}{'steps':>7}{'ms':>9}"
    head += "".join(f"{name:>10}" for name in stages) + "  |"
    head += "".join(f"{name:>10}" for name in phases) + f"{'engine':>9}"
    lines = ["where a step's time went (medians, ms; engine: share that is not the forward)", head]
    for name, group in groups.items():
        row = f"{name:<14}{group['steps']:>7}{group['step_seconds'] * 1e3:>9.2f}"
        row += "".join(f"{group['stages'][stage] * 1e3:>10.3f}" for stage in stages) + "  |"
        row += "".join(f"{group['phases'][phase] * 1e3:>10.3f}" for phase in phases)
        lines.append(row + f"{group['engine_share']:>9.1%}")
    promise = profile.get("promise")
    if promise is not None:
        plain = ", ".join(f"{name}: {ms:.1f}" for name, ms in promise["plain_ms"].items())
        lines.append(
            f"promise {promise['max_itl_ms']:g} ms; a step without prompts, ms: {plain}; a prompt "
            f"token {promise['prompt_token_ms']:.3f} ms, {promise['prompt_token_ms_at_4096']:.3f} "
            f"behind 4096 others; between steps {promise['host_ms']:.1f}, kept free "
            f"{promise['kept_free_ms']:.1f}"
        )
    return "\n".join(lines)
