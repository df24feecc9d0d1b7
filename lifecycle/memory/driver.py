"""What the CUDA driver and torch's allocator say about device memory, whatever anybody here recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

_HELD = ("reserved_bytes", "active_bytes", "inactive_split_bytes")  # in torch's statistics


def mapped(addresses: Iterable[int]) -> frozenset[bool]:
    """Which answers there are to whether memory is mapped at these addresses, which are reserved.

    None at all where the driver can not be asked, or does not tell. It takes microseconds an address.
    """
    try:
        ask = _asking()
    except OSError:
        return frozenset()
    said = set(map(ask, addresses))
    return frozenset() if None in said else frozenset(answer for answer in said if answer is not None)


def allocations() -> tuple[int, ...] | None:
    """A number per device that grows whenever torch takes memory from the driver or gives some back; None: not told.

    It takes some tens of microseconds a device: torch counts everything that it can tell.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    told = [torch.cuda.memory_stats_as_nested_dict(index) for index in range(torch.cuda.device_count())]
    return tuple(one.get("num_device_alloc", 0) + one.get("num_device_free", 0) for one in told)


def reserved() -> int:
    """Bytes that torch has taken from the driver, on all devices."""
    told = map(torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count()))  # memory_reserved() is slower
    return sum(one.get("reserved_bytes", {}).get("all", {}).get("current", 0) for one in told)


def cached(index: int) -> int:
    """Bytes in whole free segments outside all pools, on the device of this index: ``empty_cache`` gives them back."""
    told = torch.cuda.memory_stats_as_nested_dict(index)
    held = {key: told.get(key, {}).get("all", {}).get("current", 0) for key in _HELD}
    if held["reserved_bytes"] == held["active_bytes"] + held["inactive_split_bytes"]:
        return 0  # in pools neither: that is quick to know
    snapshot: Any = torch.cuda.memory_snapshot  # without types in torch
    return sum(
        found["total_size"]
        for found in snapshot()
        if found["device"] == index and tuple(found["segment_pool_id"]) == (0, 0) and not found["active_size"]
    )


@cache
def _asking() -> Callable[[int], bool | None]:
    """Raises OSError where there is no driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    retain, release = driver.cuMemRetainAllocationHandle, driver.cuMemRelease
    retain.argtypes, release.argtypes = (ctypes.c_void_p, ctypes.c_void_p), (ctypes.c_ulonglong,)

    def ask(address: int) -> bool | None:
        """Only where there is memory at a reserved address there is a handle of it to be had."""
        handle = ctypes.c_ulonglong()
        status = retain(ctypes.addressof(handle), address)
        if status == 0:
            release(handle)
            return True
        return False if status == 1 else None  # CUDA_ERROR_INVALID_VALUE, or one that says nothing about the address

    return ask
