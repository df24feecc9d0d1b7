"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from attrs import asdict, frozen


class Status(StrEnum):
    """How much it matters. Only an error makes the command exit with 1."""

    OK = "ok"
    NOTE = "note"  # nothing is wrong; something more could be had, or is not needed here
    WARNING = "warning"  # it works, but slower or with less than this machine could do
    ERROR = "error"  # the life cycle is refused here, or ends the process


_ORDER = tuple(Status)


@frozen
class Finding:
    """One thing looked at. ``value`` is what was measured, in ``unit``, where something was."""

    name: str
    status: Status
    found: str
    advice: str = ""
    value: float | None = None
    unit: str = ""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


@frozen
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


def worst(sections: Iterable[Section]) -> Status:
    """The gravest status there is; OK where nothing was found."""
    found = (finding.status for section in sections for finding in section.findings)
    return max(found, key=_ORDER.index, default=Status.OK)


def ok(name: str, found: str) -> Finding:
    return Finding(name, Status.OK, found)


def note(name: str, found: str, advice: str = "") -> Finding:
    return Finding(name, Status.NOTE, found, advice)


def warning(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Status.WARNING, found, advice)


def error(name: str, found: str, advice: str) -> Finding:
    return Finding(name, Status.ERROR, found, advice)


def in_words(nbytes: float) -> str:
    """Bytes for a person, in a unit that leaves one to four digits before the point."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1 << 10:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1 << 10
    return f"{nbytes:.1f} GiB"
