"""The engine's own step profile as a table: where a step's time went, and the engine's share of it."""

from __future__ import annotations

from typing import Any

MOST_GROUPS = 16  # rows of the table; batches of other sizes are summed up in a line


def render_profile(profile: dict[str, Any]) -> str:
    """`profile` is the engine's answer to the topic "profile"; see `srt.scheduler.profile`.

    A row is all steps of one size. Left of the bar the scheduler's own stages, `host` their sum without
    the wait; right of it what the worker did, as far as it did it. Where a device computes (`forward`)
    while the host goes on, the host is in nobody's way as long as `host` stays below `forward`, and
    `engine` is the share of a step in which the device had nothing to do.
    """
    groups = profile["groups"]
    if not groups:
        return "no steps yet"
    shown = sorted(groups, key=lambda name: -groups[name]["steps"])[:MOST_GROUPS]
    stages = list(next(iter(groups.values()))["stages"])
    phases = [
        name
        for name in next(iter(groups.values()))["phases"]
        if any(groups[group]["phases"][name] for group in shown)
    ]
    head = f"{'step of':<14}{'steps':>7}{'ms':>9}"
    head += "".join(f"{name:>10}" for name in stages) + f"{'host':>10}  |"
    head += "".join(f"{name:>10}" for name in phases) + f"{'engine':>9}"
    lines = ["where a step's time went (medians, ms; engine: share that is not the forward)", head]
    for name, group in groups.items():
        if name not in shown:
            continue
        row = f"{name:<14}{group['steps']:>7}{group['step_seconds'] * 1e3:>9.2f}"
        row += "".join(f"{group['stages'][stage] * 1e3:>10.3f}" for stage in stages)
        row += f"{group['host_seconds'] * 1e3:>10.3f}  |"
        row += "".join(f"{group['phases'][phase] * 1e3:>10.3f}" for phase in phases)
        lines.append(row + f"{group['engine_share']:>9.1%}")
    if len(groups) > len(shown):
        rest = sum(groups[name]["steps"] for name in groups if name not in shown)
        lines.append(f"and {rest} steps of {len(groups) - len(shown)} other sizes")
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
