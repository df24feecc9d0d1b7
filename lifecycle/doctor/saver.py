"""torch-memory-saver and the environment it is used in, looked at without importing it.

What it says of itself is an assertion, or the end of the process, so what would lead there is looked for beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath

from lifecycle.doctor.finding import Finding, error, note, ok, warning
from lifecycle.doctor.packages import Find

_NAME = "torch-memory-saver"
_TESTED = (0, 0, 10)
#: It reads these once, in C++, and ends the process where one is set to nothing.
_SWITCHES = ("TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP", "TMS_RETAIN_CPU_BACKUP")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def package(find: Find, cuda: str | None) -> Finding:
    """``cuda``: the CUDA version of torch ("13.0"), or None where there is no device for it."""
    found = find(_NAME)
    if cuda is None:
        return note(_NAME, found.version if found else "not installed", "not needed without a GPU")
    if found is None:
        advice = "pip install 'actor-lifecycle[cuda]': addresses, and with them CUDA graphs, then survive a sleep"
        return warning(_NAME, "not installed", advice)
    library = f"torch_memory_saver_hook_mode_torch_cu{cuda.split('.')[0]}."
    if not any(PurePath(path).name.startswith(library) for path in found.files):
        return error(_NAME, f"{found.version} has no library for CUDA {cuda}", f"pip install --upgrade {_NAME}")
    if found.release < _TESTED:
        return warning(
            _NAME, found.version, f"tested with {'.'.join(map(str, _TESTED))}; pip install --upgrade {_NAME}"
        )
    return ok(_NAME, f"{found.version}, with a library for CUDA {cuda}")


def hook_mode(
    environment: Mapping[str, str], cuda: str | None, exists: Callable[[str], bool] = lambda path: Path(path).exists()
) -> Finding:
    """Which hook mode LD_PRELOAD makes of this environment: "preload" with the saver's library in it, else "torch"."""
    name, preload = "hook mode", environment.get("LD_PRELOAD", "")
    ours = [path for path in re.split(r"[: ]", preload) if "torch_memory_saver" in path]
    if not ours:
        return ok(name, "torch (LD_PRELOAD does not name the saver)")
    if len(ours) > 1:
        return error(name, f"LD_PRELOAD names the saver {len(ours)} times: {preload}", "leave one; it refuses more")
    if not exists(ours[0]):
        return error(
            name, f"LD_PRELOAD names {ours[0]}, which is not there", "preload the library of the installed wheel"
        )
    built = re.search(r"_cu(\d+)\.", ours[0])
    if built and cuda is not None and built[1] != cuda.split(".")[0]:
        return error(name, f"{PurePath(ours[0]).name} is preloaded, torch is for CUDA {cuda}", "preload the one for it")
    return ok(name, f"preload ({PurePath(ours[0]).name})")


def switches(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The saver's own settings, where one is set that matters."""
    for name in _SWITCHES:
        if environment.get(name) == "":
            yield error(name, "set to nothing, at which the saver ends the process", f"unset {name}")
    doubled = [name for name in _SWITCHES[1:3] if environment.get(name) not in (None, "", "0")]
    for name in doubled:
        found = f"{environment[name]}: what is allocated outside regions is copied at every pause"
        yield warning(name, found, f"unset {name}: a sleep makes the copies that are needed, once")


def allocator(environment: Mapping[str, str], cuda: bool) -> Finding:
    """torch's allocator settings: the saver can neither pause expandable segments nor serve another allocator."""
    set_ = {name: environment[name] for name in _ALLOCATOR if environment.get(name)}
    for name, value in set_.items():
        expandable = re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE)
        if expandable or re.search(r"backend\s*:\s*cudaMallocAsync", value, re.IGNORECASE):
            option = "expandable_segments" if expandable else "backend"
            advice = f"take {option} out of {name}: the memory saver refuses it, and memory='auto' is 'storage' then"
            found = f"{name}={value}"
            return warning("allocator", found, advice) if cuda else note("allocator", found, advice)
    return ok("allocator", ", ".join(f"{name}={value}" for name, value in set_.items()) or "default")
