"""Accelerators as torch sees them, and what the controller chooses for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType

from lifecycle.doctor.finding import Finding, error, in_words, note, ok, warning

_TRITON_FROM = (7, 0)


def cuda_available(torch: ModuleType) -> tuple[bool, str]:
    """Whether torch can use a CUDA device, and what it warned of while it looked."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        available = bool(torch.cuda.is_available())
    return available, "; ".join(str(one.message).splitlines()[0] for one in told)


def devices(torch: ModuleType, gpus: int, driver: str | None) -> Iterator[Finding]:
    """``gpus``: how many devices the driver shows; ``driver``: its version, where it is told."""
    available, told = cuda_available(torch)
    if available:
        yield ok("driver", driver or "its version is not told here")
        for index in range(torch.cuda.device_count()):
            yield _device(torch, index)
    elif gpus and torch.version.cuda is not None:
        found = f"{gpus} GPU(s) that torch can not use" + (f": {told}" if told else "")
        yield error(
            "CUDA", found, f"driver {driver or 'unknown'}: it must serve CUDA {torch.version.cuda}, see nvidia-smi"
        )
    else:
        yield note("CUDA", "no device", "actors are in host memory here, and sleep in it")


def _device(torch: ModuleType, index: int) -> Finding:
    name = f"cuda:{index}"
    try:
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as refused:  # another process has it alone, or it is broken
        return error(name, str(refused).splitlines()[0], "see nvidia-smi; choose others with CUDA_VISIBLE_DEVICES")
    capability = (facts.major, facts.minor)
    found = f"{facts.name}, compute capability {facts.major}.{facts.minor}, {in_words(free)} of {in_words(total)} free"
    if capability < _TRITON_FROM:
        return warning(name, found, "Triton begins at 7.0: fingerprints take torch's slower way")
    if 2 * free < total:
        return note(name, found, "other processes hold more than half: what they have taken, a wake can not take back")
    return ok(name, found)


def backend(device_type: str) -> Finding:
    """What ``memory="auto"`` is for tensors on this type of device, and why. Initialises the saver where it is it."""
    from lifecycle.errors import LifecycleError
    from lifecycle.memory.choose import choose

    name = "memory='auto'"
    try:
        choice = choose("auto", device_type, "doctor")
    except (LifecycleError, RuntimeError) as refused:
        return error(name, str(refused), "choose another backend: memory='storage'")
    why = choice.why.removeprefix("memory: ")
    if choice.backend.name == "storage":
        return warning(name, why, "addresses move then, so an actor with captured CUDA graphs can not sleep")
    return ok(name, why)


def host_store(device_type: str) -> Finding:
    """What ``host="auto"`` is for tensors on this type of device."""
    from lifecycle.attach import make_store

    name = make_store("auto", device_type).name
    why = ", as shared memory has no huge pages here" if name == "pinned" and device_type != "cpu" else ""
    return ok("host='auto'", name + why)
