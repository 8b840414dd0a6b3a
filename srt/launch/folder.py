"""The private folder that holds an engine's ipc sockets."""

from __future__ import annotations

import os
import shutil
import tempfile
from types import TracebackType


class SocketFolder:
    """A fresh folder, mode 0700, removed with everything in it on close.

    It lies in XDG_RUNTIME_DIR's kind of place if the caller says so, else in the temporary folder; the
    path stays short because an ipc address may have about 100 characters.
    """

    def __init__(self, parent: str | None = None) -> None:
        self.path = tempfile.mkdtemp(prefix="tandem-", dir=parent)
        os.chmod(self.path, 0o700)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> SocketFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
