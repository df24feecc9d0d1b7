"""What a device backend knows of one slot, and what follows from it: made once, kept while addresses stay."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from attrs import define, evolve, field
from torch import Tensor, UntypedStorage

from lifecycle.errors import ManifestError
from lifecycle.fingerprint import Prepared, prepare
from lifecycle.manifest import PartLayout
from lifecycle.memory import aliases, moves
from states.resources import Region


@define(eq=False)
class Holding:
    """One slot's tensors and where they lie.

    ``origins`` has for each tensor its storage and its first byte there; None for one without elements.
    """

    region: Region
    layout: PartLayout
    placed: tuple[moves.Placed, ...] = ()
    tensors: Mapping[str, Tensor] = field(factory=dict)
    origins: tuple[tuple[UntypedStorage, int] | None, ...] = ()
    _addresses: list[int] | None = field(init=False, default=None)
    _runs: dict[frozenset[str] | None, tuple[moves.Run, ...]] = field(init=False, factory=dict)
    _chunks: tuple[moves.Run, ...] | None = field(init=False, default=None)
    _prepared: dict[tuple[str, ...] | None, Prepared] = field(init=False, factory=dict)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(dict.fromkeys(one.memory.device for one in self.placed))

    def addresses_changed(self) -> None:
        """The storages have other memory than before, or none."""
        self._addresses, self._chunks = None, None
        self._runs, self._prepared = {}, {}

    def runs(self, names: frozenset[str] | None = None) -> tuple[moves.Run, ...]:
        """Of all groups, or of those with one of these names."""
        if names not in self._runs:
            chosen = (group for group in self.placed if names is None or not names.isdisjoint(group.names))
            with torch.inference_mode(False):  # written to outside inference mode too
                self._runs[names] = moves.runs(chosen)
        return self._runs[names]

    def chunks(self) -> tuple[moves.Run, ...]:
        """The runs, cut for an exchange."""
        if self._chunks is None:
            with torch.inference_mode(False):
                self._chunks = tuple(moves.chunks(self.runs(), moves.CHUNK))
        return self._chunks

    def prepared(self, names: Collection[str] | None = None) -> Prepared:
        """Fingerprints of all tensors, or of these."""
        key = None if names is None else tuple(names)
        if key not in self._prepared:
            self._prepared[key] = prepare(self.tensors if key is None else {name: self.tensors[name] for name in key})
        return self._prepared[key]

    def refuse_moved(self) -> None:
        """Raise ManifestError when a tensor no longer is where it was put: its slot's bytes are not its values then."""
        if self._addresses is None:
            self._addresses = [0 if origin is None else origin[0].data_ptr() + origin[1] for origin in self.origins]
        now = [tensor.data_ptr() for tensor in self.tensors.values()]
        if now != self._addresses:
            known = zip(self.tensors, now, self._addresses, strict=True)
            raise ManifestError(
                f"tensors of slot {self.layout.slot} were rebound to other memory",
                [name for name, place, expected in known if place != expected],
                "Write into them (copy_) instead of assigning .data, and attach again after .to() or share_memory().",
            )

    def extended(self, groups: Sequence[aliases.AliasGroup], tensors: Mapping[str, Tensor]) -> Holding:
        """With these groups, of these tensors, behind what is held."""
        start = self.layout.nbytes
        places = moves.offsets(groups, start)
        placed = (
            moves.Placed(frozenset(group.tensors), start + place, aliases.extent(group))
            for group, place in zip(groups, places, strict=False)
            if group.nbytes
        )
        return evolve(
            self,
            layout=aliases.extended(self.layout, groups, places),
            placed=(*self.placed, *placed),
            tensors={**self.tensors, **tensors},
            origins=(*self.origins, *map(_origin, tensors.values())),
        )


def refuse_owned(groups: Iterable[aliases.AliasGroup], holdings: Iterable[Holding]) -> None:
    """Raise ManifestError naming the groups whose storage is in one of the holdings."""
    taken = {one.memory.untyped_storage()._cdata for holding in holdings for one in holding.placed}
    aliases.refuse_owned(groups, lambda group: group.storage._cdata in taken)


def _origin(tensor: Tensor) -> tuple[UntypedStorage, int] | None:
    if tensor.numel() == 0:
        return None
    return tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
