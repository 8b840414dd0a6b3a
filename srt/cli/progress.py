"""What is shown while something takes its time: a bar on a terminal, a line per phase elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class PhaseBars:
    """One bar per actor: a process, a download. A fraction of None is unknown."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[actor]:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[share]:>5}"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last: dict[str, str] = {}
        self._is_shown = False

    def show(self, actor: str, phase: str, fraction: float | None) -> None:
        if not self._console.is_terminal:
            if self._last.get(actor) != phase:
                self._last[actor] = phase
                self._console.print(f"{actor}: {phase}", highlight=False)
            return
        if actor not in self._tasks:
            self._tasks[actor] = self._bars.add_task(phase, actor=actor, share="", total=None)
        task = self._tasks[actor]
        if fraction is None:
            self._bars.update(task, description=phase, share="", total=None)
        else:
            share = f"{100 * fraction:.0f} %"
            self._bars.update(task, description=phase, share=share, total=1.0, completed=fraction)
        if fraction is not None and fraction >= 1.0 and phase == "ready":
            self._bars.stop_task(task)

    def stop(self) -> None:
        """The bars stay on the screen as they are. Idempotent."""
        if self._is_shown:
            self._is_shown = False
            self._bars.stop()

    def __enter__(self) -> PhaseBars:
        if self._console.is_terminal:
            self._is_shown = True
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
