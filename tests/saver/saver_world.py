"""A process where the memory saver's shipped library runs over the fake driver, and programs are run in forks of it.

``saver_rig`` starts it and sends it programs. What a torch without CUDA lacks is stood in for here: memory pools and
their segments, the pluggable allocator, free bytes. The saver's Python and C++ are the real ones, and so is the ledger,
which each program makes for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
import traceback
from typing import ClassVar

import torch
import torch_memory_saver

from lifecycle.errors import LifecycleError
from lifecycle.memory import hook_modes, room, saver  # noqa: F401  (programs name room)

MODE = hook_modes.hook_mode()
MiB = 1 << 20
driver = ctypes.CDLL("libcuda.so.1")
driver.fake_free.restype = ctypes.c_size_t


class Pool:
    """Stands for ``torch.cuda.MemPool``: every allocation is a segment of its own."""

    in_use: ClassVar[list[Pool]] = []

    def __init__(self, allocator: object = None) -> None:
        self.segments: dict[int, tuple[int, str]] = {}

    def snapshot(self) -> list[dict]:
        return [
            {
                "device": 0,
                "address": address,
                "total_size": nbytes,
                "is_expandable": False,
                "blocks": [{"address": address, "size": nbytes, "state": state}],
            }
            for address, (nbytes, state) in self.segments.items()
        ]


class Devices:
    """Stands for the module ``torch.cuda``, as the saver uses it."""

    MemPool = Pool

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    @contextlib.contextmanager
    def use_mem_pool(pool: Pool):
        Pool.in_use.append(pool)
        yield
        Pool.in_use.remove(pool)


class PluggableAllocator:
    """Stands for ``torch.cuda.memory.CUDAPluggableAllocator``: loads the library, as that does."""

    def __init__(self, path: str, malloc: str, free: str) -> None:
        self.library = ctypes.CDLL(path)

    def allocator(self) -> None:
        return None


def start() -> saver.Ledger:
    """This process's ledger, and with it the saver."""
    book = saver.ledger()
    torch_memory_saver.torch_memory_saver._impl._device_module = Devices
    return book


def cuda_malloc(nbytes: int) -> int:
    """As torch's allocator would for the pool in use. Returns the address; MemoryError where the saver says so."""
    address = ctypes.c_void_p()
    if MODE == "preload":
        status = ctypes.CDLL(None).cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if status:
            raise MemoryError(f"cudaMalloc: {status}")
    else:
        library = torch_memory_saver.torch_memory_saver._impl._binary_wrapper.cdll
        library.tms_torch_malloc.restype = ctypes.c_void_p
        address = ctypes.c_void_p(library.tms_torch_malloc(ctypes.c_ssize_t(nbytes), 0, ctypes.c_void_p()))
    Pool.in_use[-1].segments[address.value] = nbytes, "active_allocated"
    return address.value


def cuda_free(address: int, nbytes: int) -> None:
    """As torch's allocator would when it drops a segment, wherever that happens."""
    if MODE == "preload":
        assert ctypes.CDLL(None).cudaFree(ctypes.c_void_p(address)) == 0
    else:
        library = torch_memory_saver.torch_memory_saver._impl._binary_wrapper.cdll
        library.tms_torch_free(ctypes.c_void_p(address), ctypes.c_ssize_t(nbytes), 0, ctypes.c_void_p())


def allocate(pool: str, nbytes: int = 8 * MiB) -> int:
    """An allocation through the ledger."""
    with saver.ledger().allocating(pool):
        return cuda_malloc(nbytes)


def at(address: int, nbytes: int = 8 * MiB) -> torch.Tensor:
    """What lies there, as uint8."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def take(nbytes: int) -> None:
    """Another process takes this much of the device, in all."""
    driver.fake_take(ctypes.c_size_t(nbytes))


def free_bytes() -> int:
    return int(driver.fake_free())


def refusal(call, *args, **kwargs) -> LifecycleError:
    """The error of ours with which the call is refused."""
    try:
        call(*args, **kwargs)
    except LifecycleError as error:
        return error
    raise AssertionError(f"{call} was not refused")


def run(program: str) -> dict:
    """Run the program in a fork. Its exit status (negative: a signal), and what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 99
            try:
                exec(program, globals())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {"status": status, "out": _read(out), "err": _read(err)}


def _read(file) -> str:
    file.seek(0)
    return file.read()


def main() -> None:
    torch.set_num_threads(1)
    torch.cuda.mem_get_info = lambda device=None: (free_bytes(), 0)
    torch.cuda.current_device = Devices.current_device
    torch.cuda.memory.CUDAPluggableAllocator = PluggableAllocator
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
