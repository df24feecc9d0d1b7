"""Something that takes long in C, done while Python goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Beside:
    """A call that runs in a thread of its own, whose current CUDA device is that of the caller."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._work, args=(call, device), name="lifecycle-beside", daemon=True)
        self._thread.start()

    def _work(self, call: Callable[[], None], device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            call()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Return when it has ended, one way or the other."""
        self._thread.join()

    def wait(self) -> None:
        """Return when it has ended. Raises what it raised."""
        self.join()
        if self._error is not None:
            raise self._error
