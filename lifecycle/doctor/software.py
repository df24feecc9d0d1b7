"""Python, torch, and the packages and programs beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

from lifecycle.doctor.finding import Finding, error, note, ok, warning
from lifecycle.doctor.packages import Find, dotted, numbers

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 14)
TORCH_FROM = (2, 8)

#: Extras of this distribution, and a package of each. The extras ``torch`` and ``cuda`` have checks of their own.
EXTRAS = {
    "rollout": ("transformers", "a transformers model as rollout engine"),
    "diagrams": ("graphviz", "diagrams as images"),
    "demo": ("gguf", "`lifecycle demo`"),
}

#: Programs: what they are for, and the package of Debian, Ubuntu and Homebrew that has them.
PROGRAMS = {"dot": ("diagrams as images", "graphviz"), "spin": ("`lifecycle check --spin`", "spin")}

_TE_PARTS = ("transformer-engine-cu13", "transformer-engine-cu12", "transformer-engine-torch")


def python(version: tuple[int, ...]) -> Finding:
    found = dotted(version[:3])
    if PYTHON_FROM <= version[:2] < PYTHON_BELOW:
        return ok("python", found)
    supported = f"{dotted(PYTHON_FROM)} and newer, below {dotted(PYTHON_BELOW)}"
    return error("python", found, f"supported: {supported}")


def torch(find: Find, loaded: ModuleType | Exception, gpus: int) -> Finding:
    """``loaded``: the module, or what its import raised. ``gpus``: how many devices of NVIDIA the machine has."""
    package = find("torch")
    if isinstance(loaded, Exception):
        if package is None:
            return error("torch", "not installed", "pip install 'actor-lifecycle[torch]'")
        return error("torch", f"{package.version} can not be imported: {loaded}", "install it anew, for this Python")
    version = str(loaded.__version__)
    if numbers(version)[:2] < TORCH_FROM:
        return error("torch", version, f"supported: {dotted(TORCH_FROM)} and newer; pip install --upgrade torch")
    if gpus and loaded.version.cuda is None:
        return error("torch", f"{version}, a build without CUDA, beside {gpus} NVIDIA GPU(s)", _TORCH_FOR_CUDA)
    return ok("torch", f"{version}, {f'CUDA {loaded.version.cuda}' if loaded.version.cuda else 'for the CPU'}")


_TORCH_FOR_CUDA = "install a build for the driver's CUDA version: https://pytorch.org/get-started/locally"


def needed(find: Find) -> Iterator[Finding]:
    """What torch's part of this library imports beside torch."""
    for name in ("numpy", "psutil"):
        package = find(name)
        if package is None:
            yield error(name, "not installed", "pip install 'actor-lifecycle[torch]'")
        else:
            yield ok(name, package.version)


def triton(find: Find, cuda: bool) -> Finding:
    package = find("triton") or find("pytorch-triton")
    if package is not None:
        return ok("triton", package.version)
    if not cuda:
        return note("triton", "not installed", "not needed without a GPU")
    return warning(
        "triton", "not installed", "pip install triton: without it fingerprints take two passes, and launches"
    )


def transformer_engine(find: Find) -> Finding:
    """The distribution ``transformer-engine`` alone is empty and ends the import of whatever looks for it."""
    name, package = "transformer-engine", find("transformer-engine")
    if package is None:
        return ok(name, "not installed")
    parts = [part for part in _TE_PARTS if find(part) is not None]
    built = any(path.endswith(".so") for path in package.files)
    if built or "transformer-engine-torch" in parts:
        return ok(name, f"{package.version}, with its libraries")
    missing = "transformer-engine-torch" if parts else "every library"
    found = f"{package.version} without {missing}: importing it raises an error that is no ImportError"
    advice = "pip install --no-build-isolation 'transformer-engine[pytorch]', or uninstall transformer-engine"
    if find("megatron-core") is not None:
        return error(name, f"{found}, and `import megatron.core` with it", advice)
    return warning(name, found, advice)


def torchvision(find: Find) -> Finding:
    """A torchvision built for another torch fails when it is imported, and so does transformers, which looks for it."""
    package, torch_package = find("torchvision"), find("torch")
    if package is None:
        return ok("torchvision", "not installed")
    exact = (re.match(r"torch\s*\(?==\s*([\w.+]+)", requirement) for requirement in package.requires)
    wanted = next((match[1] for match in exact if match), None)
    if wanted is None or torch_package is None or numbers(wanted) == torch_package.release:
        return ok("torchvision", package.version)
    found = f"{package.version} is for torch {wanted}, but torch is {torch_package.version}"
    advice = "pip uninstall torchvision, or install the one for this torch; importing transformers fails with this one"
    return warning("torchvision", found, advice)


def extras(find: Find) -> Iterator[Finding]:
    for extra, (name, purpose) in EXTRAS.items():
        package = find(name)
        if package is None:
            yield note(
                f"extra {extra}", f"{name} is not installed", f"pip install 'actor-lifecycle[{extra}]': {purpose}"
            )
        else:
            yield ok(f"extra {extra}", f"{name} {package.version}")


def program(name: str, path: str | None) -> Finding:
    purpose, package = PROGRAMS[name]
    if path is None:
        return note(name, "not on the PATH", f"apt install {package}, or brew install {package}: {purpose}")
    return ok(name, path)
