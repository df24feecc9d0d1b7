"""Which NUMA node a buffer belongs on: the one that the GPU in use hangs on, as copies across nodes are slower.

Everything is read from directories that tests can replace. On a machine with one node there is nothing to do.
"""

from __future__ import annotations

import ctypes
import re
from mmap import mmap
from pathlib import Path

from lifecycle.hoststore.locking import torch_on_gpu
from lifecycle.memory import pages

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def move_near(memory: mmap, nodes: Path = NODES, devices: Path = PCI) -> str | None:
    """Have the pages of a mapping, not there yet, come from the node nearest to the GPU in use, or else to this core.

    None, or why that is not possible.
    """
    if len(cpu_nodes(nodes)) < 2:
        return None
    node = nearest_node(gpu_address(), current_cpu(), nodes, devices)
    if node is None:
        return None
    try:
        pages.prefer_node(memory, node)
    except OSError as error:
        return (
            f"host memory is not bound to NUMA node {node}: {error.strerror}. It may be farther from the GPU than need "
            f"be. Start the process with 'numactl --cpunodebind={node} --membind={node}', or in a container allow it "
            "(--cap-add SYS_NICE)."
        )
    return None


def cpu_nodes(nodes: Path = NODES) -> dict[int, frozenset[int]]:
    """The cores of each node that has some. A node without any is another device's memory."""
    found = {}
    for folder in nodes.glob("node[0-9]*"):
        cores = core_list((folder / "cpulist").read_text())
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def core_list(text: str) -> frozenset[int]:
    """The kernel's way to write core numbers: "0-3,8" is 0, 1, 2, 3 and 8."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(core for first, last in spans for core in range(int(first), int(last or first) + 1))


def nearest_node(gpu: str | None, core: int, nodes: Path = NODES, devices: Path = PCI) -> int | None:
    """The node of the GPU with this PCI address, where the machine tells; else the node of the core; else None."""
    file = devices / gpu / "numa_node" if gpu else None
    told = int(file.read_text()) if file is not None and file.exists() else -1
    known = cpu_nodes(nodes)
    if told in known:
        return told
    return next((node for node, cores in known.items() if core in cores), None)


def gpu_address() -> str | None:
    """The PCI address of torch's current GPU, such as "0000:3b:00.0"; None if this process does not use one."""
    torch = torch_on_gpu()
    return None if torch is None else pci_address(torch.cuda.get_device_properties(torch.cuda.current_device()))


def pci_address(gpu: object) -> str | None:
    """From a GPU's properties, where this version of torch has them."""
    try:
        domain, bus, device = (int(getattr(gpu, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def current_cpu() -> int:
    """The core that this thread runs on just now."""
    return int(ctypes.CDLL(None).sched_getcpu())
