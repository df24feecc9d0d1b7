"""What is installed, by metadata: looking at a package does not import it, as some end the import of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

from attrs import frozen


@frozen
class Package:
    """An installed distribution: its version, what it requires, and the paths of its files."""

    version: str
    requires: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers at the start of the version: (2, 11, 0) of "2.11.0+cu130"."""
        return numbers(self.version)


#: Finds a distribution by name.
Find = Callable[[str], Package | None]


def installed(name: str) -> Package | None:
    """The distribution of that name in this environment, or None."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Package(found.version, tuple(found.requires or ()), tuple(str(path) for path in found.files or ()))


def numbers(version: str) -> tuple[int, ...]:
    start = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in start[0].split(".")) if start else ()


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
