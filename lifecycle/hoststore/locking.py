"""Page locks: memory registered with CUDA, to and from which copies run at the link's speed.

What could not be had is no error: the memory works as it is, several times slower, and a note says why and what to do.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

from lifecycle.memory import pages

_SETTING = {"enabled": ("private", "madvise"), "shmem_enabled": ("shared", "advise")}  # what is never too much to set


def cuda_runtime() -> Any:
    """torch's binding of the CUDA runtime, or None where this process does not use a GPU."""
    torch = torch_on_gpu()
    return None if torch is None else torch.cuda.cudart()


def torch_on_gpu() -> Any:
    """torch, if this process has imported it and uses a GPU through it; it is not made to for the sake of a buffer.

    An actor on the CPU of a machine with GPUs does not, nor does a child that was forked from one that does.
    """
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def loaded_cudart() -> ctypes.CDLL | None:
    """The CUDA runtime library that is loaded in this process, for what torch does not bind; None if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcudart.so"):
            return ctypes.CDLL(str(path))
    return None


class PageLocks:
    """The page locks of one store's buffers. A lock that is left when the store goes is undone then.

    ``kind`` names the system's setting for huge pages that counts for this store's memory: with small pages, locking
    takes twice as long.
    """

    def __init__(self, kind: Literal["enabled", "shmem_enabled"], runtime: Callable[[], Any]) -> None:
        self._kind, self._runtime = kind, runtime
        self._notes: dict[str, None] = {}  # an ordered set
        self._locked: dict[int, tuple[Any, mmap]] = {}  # address -> runtime and the memory registered with it
        # A mapping that goes while it is registered blocks its address for every later registration.
        finalize(self, _unlock_all, self._locked).atexit = False

    def lock(self, memory: mmap) -> bool:
        """Lock the whole mapping, whose pages are populated. False, and a note, where CUDA refuses."""
        runtime = self._runtime()
        if runtime is None:
            return False
        if len(memory) >= pages.HUGE:
            self._note_small_pages()
        address = pages.address(memory)
        self._locked[address] = runtime, memory  # first: an interrupt may come between the two
        code = int(runtime.cudaHostRegister(address, len(memory), 0))
        if code != 0:
            del self._locked[address]
            _forget_error()
            self.note(_refusal(code))
        return code == 0

    def unlock(self, memory: mmap) -> None:
        """Undo ``lock``, before the pages go; nothing where it was refused. The mapping must be writable again."""
        address = pages.address(memory)
        if address in self._locked:
            runtime, _ = self._locked.pop(address)
            if int(runtime.cudaHostUnregister(address)) != 0:
                _forget_error()

    def note(self, text: str | None) -> None:
        """Remember what was fallen back to, if anything was; told once however often it happens."""
        if text is not None:
            self._notes[text] = None

    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def _note_small_pages(self) -> None:
        setting = pages.huge_pages(self._kind)
        if setting in ("never", "deny"):
            memory, word = _SETTING[self._kind]
            self.note(
                f"huge pages are off for {memory} memory: page-locking it takes about twice as long. To have them: "
                f"echo {word} > /sys/kernel/mm/transparent_hugepage/{self._kind} (it says {setting!r})."
            )


def _refusal(code: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    told = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return (
        f"host memory is not page-locked: cudaHostRegister failed with CUDA error {code}{_meaning(code)}. Copies to "
        f"and from it run at a fraction of the link. The limit on locked memory is {told}: raise it with 'ulimit -l "
        "unlimited' (containers: --ulimit memlock=-1), and see that the host has memory to spare."
    )


def _meaning(code: int) -> str:
    """CUDA's own words for an error, where CUDA is there to ask."""
    library = loaded_cudart()
    if library is None:
        return ""
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return f" ({library.cudaGetErrorString(code).decode()})"


def _forget_error() -> None:
    """CUDA keeps the error of a failed call, and torch would raise it from the next kernel, whatever that is."""
    library = loaded_cudart()
    if library is not None:
        library.cudaGetLastError()


def _unlock_all(locked: dict[int, tuple[Any, mmap]]) -> None:
    for address, (runtime, _) in locked.items():
        runtime.cudaHostUnregister(address)
