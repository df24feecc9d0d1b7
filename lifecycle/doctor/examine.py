"""All checks of this machine, section by section."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

from attrs import field, frozen

from lifecycle.doctor import device, host, saver, software
from lifecycle.doctor.finding import Finding, Section
from lifecycle.doctor.packages import Find, installed
from lifecycle.memory import pages


@frozen(eq=False)
class Machine:
    """What the checks look at. ``torch`` is the module, or what its import raised."""

    torch: ModuleType | Exception
    root: Path = Path("/")
    environment: Mapping[str, str] = field(factory=lambda: dict(os.environ))
    find: Find = installed

    @property
    def cuda(self) -> str | None:
        """The CUDA version of torch, where it can use a device; else None."""
        if isinstance(self.torch, Exception) or not device.cuda_available(self.torch)[0]:
            return None
        version: str | None = self.torch.version.cuda
        return version


def this_machine() -> Machine:
    try:
        return Machine(import_module("torch"))
    except Exception as error:  # a wrong build raises OSError or RuntimeError, for libraries that it misses
        return Machine(error)


def examine(machine: Machine) -> tuple[Section, ...]:
    """Every finding. Changes nothing; with a GPU it makes a CUDA context in this process, to ask for free memory."""
    return (
        Section("software", tuple(_software(machine))),
        Section("memory saver", tuple(_saver(machine))),
        Section("host", tuple(_host(machine))),
        Section("devices", tuple(_devices(machine))),
    )


def _software(machine: Machine) -> Iterator[Finding]:
    find = machine.find
    yield software.python(sys.version_info[:3])
    yield software.torch(find, machine.torch, host.gpus(machine.root))
    yield from software.needed(find)
    yield software.triton(find, machine.cuda is not None)
    yield software.transformer_engine(find)
    yield software.torchvision(find)
    yield from software.extras(find)
    for name in software.PROGRAMS:
        yield software.program(name, shutil.which(name, path=machine.environment.get("PATH")))


def _saver(machine: Machine) -> Iterator[Finding]:
    yield saver.package(machine.find, machine.cuda)
    yield saver.hook_mode(machine.environment, machine.cuda)
    if machine.cuda is not None:
        yield from saver.switches(machine.environment)
    yield saver.allocator(machine.environment, machine.cuda is not None)


def _host(machine: Machine) -> Iterator[Finding]:
    yield host.memory(_available())
    if (limit := host.old_cgroups(machine.root)) is not None:
        yield limit
    yield host.huge_pages(machine.root)
    yield host.shared_huge_pages(machine.root)
    yield host.locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield host.nodes(machine.root)
    yield host.cores(_cores(), pages.populate_threads(machine.environment))
    yield host.shared_memory(_size(machine.root / "dev/shm"))
    yield host.memfd(_memfd_refused())


def _devices(machine: Machine) -> Iterator[Finding]:
    device_type = "cpu" if machine.cuda is None else "cuda"
    if not isinstance(machine.torch, Exception):
        yield from device.devices(machine.torch, host.gpus(machine.root), host.driver(machine.root))
        yield device.backend(device_type)
    yield device.host_store(device_type)


def _available() -> int | Exception:
    try:
        return pages.available()
    except (ImportError, OSError) as error:  # it asks psutil
        return error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _size(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _memfd_refused() -> OSError | None:
    try:
        os.close(os.memfd_create("actor-lifecycle-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return error
    return None
