"""What happened, in order: frozen records in memory and, where asked, JSON lines on disk."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO, overload

from attrs import frozen

Kind = Literal["attach", "intent", "effect", "commit", "unwind", "fault", "allocate", "note"]


@frozen
class Record:
    """One line of the journal. Times are seconds since the epoch, ``seconds`` a duration, ``nbytes`` bytes moved.

    ``intent`` stands before the first effect of an event that can not be undone; ``effect`` after each action;
    ``commit`` ends an event that succeeded, ``unwind`` one that was rolled back, ``fault`` one that could not be.
    """

    seq: int
    time: float
    kind: Kind
    event: str
    tag: str | None = None
    effect: str | None = None
    slot: str | None = None
    region: str | None = None
    source: str | None = None
    target: str | None = None
    version: int | None = None
    part: int | None = None
    nbytes: int = 0
    direction: str | None = None
    seconds: float = 0.0
    note: str = ""


_encode = json.JSONEncoder(separators=(",", ":")).encode


def read_journal(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a journal on disk. Raises ValueError naming the line that is no record.

    A last line without its newline is a write that was cut short, and is left out.
    """
    records = []
    text = Path(path).read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            records.append(Record(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no journal record: {error}") from error
    return records


class Journal:
    """Append-only. Keeps the newest ``keep`` records in memory; the file, private to the user, keeps all."""

    def __init__(self, path: str | os.PathLike[str] | None = None, keep: int = 100_000) -> None:
        self._records: deque[Record] = deque(maxlen=keep)
        self._seq = 0
        self._file: TextIO | None = None
        if path is not None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = os.fdopen(fd, "a", encoding="utf-8", buffering=1)  # a line is on its way before the next

    def add(self, kind: Kind, event: str, **fields: Any) -> Record:
        self._seq += 1
        now = time.time()
        record = Record(self._seq, now, kind, event, **fields)
        self._records.append(record)
        if self._file is not None:
            told = {name: value for name, value in fields.items() if value}  # what is left out is at its default
            self._file.write(_encode({"seq": self._seq, "time": now, "kind": kind, "event": event, **told}) + "\n")
        return record

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __iter__(self) -> Iterator[Record]:
        return iter(tuple(self._records))

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...
    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        return tuple(self._records)[index]
