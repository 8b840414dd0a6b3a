"""What is shown while something takes its time: a bar on a terminal, a line per phase elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class PhaseBars:
    """One bar per actor: a process, a download. A fraction of None is unknown."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[actor]:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last: dict[str, str] = {}

    def show(self, actor: str, phase: str, fraction: float | None) -> None:
        if not self._console.is_terminal:
            if self._last.get(actor) != phase:
                self._last[actor] = phase
                self._console.print(f"{actor}: {phase}", highlight=False)
            return
        if actor not in self._tasks:
            self._tasks[actor] = self._bars.add_task(phase, actor=actor, total=None)
        task = self._tasks[actor]
        if fraction is None:
            self._bars.update(task, description=phase, total=None)
        else:
            self._bars.update(task, description=phase, total=1.0, completed=fraction)
        if fraction is not None and fraction >= 1.0 and phase == "ready":
            self._bars.stop_task(task)

    def stop(self) -> None:
        """The bars stay on the screen as they are."""
        self._bars.stop()

    def __enter__(self) -> PhaseBars:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
