"""How the memory saver hooks into CUDA, and what the process must look like for it.

In hook mode ``torch`` its allocator serves torch's memory pools alone. In hook mode ``preload`` it stands in front of
``cudaMalloc`` for the whole process, which must be started that way: ``environment`` says how.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lifecycle.errors import LifecycleError, MissingExtra

MODES = ("torch", "preload")
_LIBRARY = "torch_memory_saver"  # what the saver looks for in LD_PRELOAD
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class SaverUnusable(LifecycleError):
    """The memory saver can not be used in this process; the text says why and what to do."""


def saver_module(feature: str = "memory backend 'torch_memory_saver'") -> ModuleType:
    """The ``torch_memory_saver`` package. Raises MissingExtra where it, or what it imports, is not installed."""
    try:
        import torch_memory_saver
    except ImportError as error:
        missing = str(error.name or "torch_memory_saver").replace("_", "-")  # numpy it does not declare
        raise MissingExtra(feature, missing, "cuda") from error
    module: ModuleType = torch_memory_saver
    return module


def hook_mode(variables: Mapping[str, str] = os.environ) -> str:
    """ "preload" in a process that was started with the saver's library, else "torch"."""
    return "preload" if _preloaded(variables) else "torch"


def environment(hook_mode: str = "preload", variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables to set, with what ``variables`` has for them kept, for a process that shall use this hook mode.

    ``preload``: LD_PRELOAD with the saver's library; LD_LIBRARY_PATH with the folder of the CUDA runtime that it needs,
    which the loader finds by itself only where CUDA is installed on the system. Both: expandable segments off where
    they were on. The driver (libcuda.so.1) must be there, else the process does not start. Raises MissingExtra without
    the saver, SaverUnusable without a CUDA runtime, ValueError for an unknown mode.
    """
    if hook_mode not in MODES:
        raise ValueError(f"hook_mode={hook_mode!r}: known modes are {', '.join(MODES)}")
    saver_module(f"hook mode {hook_mode!r}")
    found = {name: _without_expandable(variables[name]) for name in _SETTINGS if _expandable(variables.get(name, ""))}
    others = [entry for entry in _entries(variables, "LD_PRELOAD") if _LIBRARY not in entry]
    if hook_mode == "torch":
        return found | ({"LD_PRELOAD": ":".join(others)} if _preloaded(variables) else {})
    found["LD_PRELOAD"] = ":".join([_library(), *others])
    folder = _runtime_folder()
    folders = _entries(variables, "LD_LIBRARY_PATH")
    if folder and folder not in folders:
        found["LD_LIBRARY_PATH"] = ":".join([*folders, folder])
    return found


def refuse_allocator(variables: Mapping[str, str] = os.environ) -> None:
    """Raise SaverUnusable where torch's allocator is set to something that the saver does not work with.

    These are expandable segments, which it can neither pause nor see, and backends other than torch's own.
    """
    import torch

    where = [name for name in _SETTINGS if _expandable(variables.get(name, ""))]
    if not where and _expandable(_live_settings()):
        where = ["torch's allocator settings of this process"]
    if where:
        raise SaverUnusable(
            f"expandable segments are on ({', '.join(where)}), and the memory saver can not pause them. Unset "
            "expandable_segments, or set it to False, before torch is imported; or choose memory='storage', which "
            "works with them."
        )
    backend = torch.cuda.get_allocator_backend() if torch.cuda.is_available() else "native"
    if backend != "native":
        raise SaverUnusable(f"torch's allocator is {backend!r}, which has no memory pools. Use backend:native.")


def _live_settings() -> str:
    """Torch's own record of its allocator settings, or "" where this version has none to read."""
    import torch

    read: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return str(read()) if read is not None else ""


def _expandable(settings: str) -> bool:
    return any(_pair(option) == ("expandable_segments", "true") for option in settings.split(","))


def _without_expandable(settings: str) -> str:
    options = settings.split(",")
    return ",".join("expandable_segments:False" if _expandable(option) else option for option in options)


def _pair(option: str) -> tuple[str, str]:
    key, _, value = option.partition(":")
    return key.strip(), value.strip().lower()


def _preloaded(variables: Mapping[str, str]) -> bool:
    return any(_LIBRARY in entry for entry in _entries(variables, "LD_PRELOAD"))


def _entries(variables: Mapping[str, str], name: str) -> list[str]:
    separators = variables.get(name, "").replace(" ", ":") if name == "LD_PRELOAD" else variables.get(name, "")
    return [entry for entry in separators.split(":") if entry]


def _library() -> str:
    from torch_memory_saver.utils import get_binary_path_from_package

    try:
        return str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    except RuntimeError as error:
        raise SaverUnusable(f"no library of the memory saver fits this process: {error}") from error


def _runtime_folder() -> str:
    """The folder of the CUDA runtime that this process has loaded, or "" where it has none."""
    import torch  # noqa: F401  # loads it

    maps = Path("/proc/self/maps")
    if sys.platform != "linux" or not maps.exists():
        return ""
    paths = (line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/libcudart" in line)
    return next((str(Path(path).parent) for path in paths), "")
