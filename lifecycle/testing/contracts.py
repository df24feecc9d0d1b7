"""What every memory backend and every host store must do, as suites that pytest runs against any implementation.

Subclass one in a test module and say how to make the thing::

    class TestMyBackend(MemoryBackendContract):
        def make(self) -> MemoryBackend:
            return MyBackend()

Call ``pytest.register_assert_rewrite("lifecycle.testing.contracts", "lifecycle.testing.moving_contract")`` in
``conftest.py`` to see values in failures.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from mmap import MAP_SHARED, PROT_READ, mmap

import pytest
import torch

from lifecycle.errors import ManifestError
from lifecycle.fingerprint import fingerprint
from lifecycle.hoststore.base import HostStore, tensor_over
from lifecycle.testing.fakes import FakeStore
from lifecycle.testing.moving_contract import MovingContract, read
from states.resources import Copy, Region, Slot


class MemoryBackendContract(MovingContract):
    """Subclasses implement ``make`` and may set ``device``."""

    def test_adopt_keeps_objects_values_and_sharing(self) -> None:
        """Adopted tensors are the same objects with the same values, strides and flags; ties and views still share."""
        tensors = self.tensors()
        before = {name: (id(t), t.detach().clone(), t.stride(), t.requires_grad) for name, t in tensors.items()}

        self.make().adopt(Slot.TRAINED, Region.WEIGHTS, tensors)

        for name, (identity, value, stride, requires_grad) in before.items():
            now = tensors[name]
            assert (id(now), now.stride(), now.requires_grad) == (identity, stride, requires_grad)
            assert torch.equal(now, value)
        assert tensors["embed"] is tensors["head"]
        with torch.no_grad():
            tensors["embed"][2, 0] = -1
        assert tensors["row"][0].item() == -1

    def test_layout_describes_the_tensors(self) -> None:
        """The layout names every tensor in order, and puts exactly those that share storage into one alias group."""
        tensors = self.tensors()
        backend = self.make()
        layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)

        assert layout == backend.layout(Slot.TRAINED)
        assert (layout.slot, layout.region) == (Slot.TRAINED, Region.WEIGHTS)
        assert [spec.name for spec in layout] == list(tensors)
        for spec in layout:
            tensor = tensors[spec.name]
            assert (spec.shape, spec.stride, spec.nbytes) == (tuple(tensor.shape), tensor.stride(), tensor.nbytes)
            assert getattr(torch, spec.dtype) is tensor.dtype
            assert 0 <= spec.offset <= spec.offset + spec.nbytes <= layout.nbytes
        groups = {spec.name: spec.alias_group for spec in layout}
        assert groups["embed"] == groups["head"] == groups["row"]
        assert len(set(groups.values())) == len(groups) - 2

    def test_copies_are_read_by_the_layout(self) -> None:
        """A copy holds each tensor at the offset, shape and stride that the layout says."""
        tensors = self.tensors()
        backend = self.make()
        layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
        buffer = FakeStore().allocate(layout.nbytes)

        assert backend.copy_out(Slot.TRAINED, buffer) == layout.nbytes

        for spec in layout:
            assert torch.equal(read(spec, buffer), tensors[spec.name].detach().cpu()), spec.name

    def test_later_tensors_are_appended(self) -> None:
        """Adopting more leaves the old layout a prefix of the new one, and old copies stay readable for that prefix."""
        backend = self.make()
        first = {"a": torch.full((5,), 1.0, device=self.device)}
        old = backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, first)
        buffer = FakeStore().allocate(old.nbytes)
        backend.copy_out(Slot.OPTIMIZER, buffer)
        more = {"b": torch.full((7,), 2.0, device=self.device), "c": torch.tensor(3.0, device=self.device)}

        new = backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, more)

        assert new.tensors[: len(old.tensors)] == old.tensors
        assert [spec.name for spec in new] == ["a", "b", "c"]
        assert len({spec.alias_group for spec in new}) == 3
        assert all(spec.offset >= old.nbytes for spec in new.tensors[1:])
        first["a"].zero_()
        assert backend.copy_in(Slot.OPTIMIZER, buffer, old.nbytes) == old.nbytes
        assert first["a"].tolist() == [1.0] * 5
        assert more["b"].tolist() == [2.0] * 7
        assert more["c"].item() == 3

    def test_adopt_refuses_shared_storage(self) -> None:
        """A tensor that was not named and shares storage is refused and described; nothing has moved."""
        tensors = {"weight": torch.ones(3, 2, device=self.device)}
        outsider = tensors["weight"][1:]
        place = tensors["weight"].data_ptr()

        with pytest.raises(ManifestError) as caught:
            self.make().adopt(Slot.FROZEN, Region.WEIGHTS, tensors)

        assert "(2, 2)" in str(caught.value)
        assert "float32" in str(caught.value)
        assert tensors["weight"].data_ptr() == place
        assert outsider.tolist() == [[1, 1], [1, 1]]

    def test_released_bytes_come_back_from_the_copy(self) -> None:
        """Copy out, pause, resume, copy in: every tensor has its value again, bit for bit."""
        tensors = self.tensors()
        backend = self.make()
        layout = backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        buffer = FakeStore().allocate(layout.nbytes)
        backend.copy_out(Slot.TRAINED, buffer)

        assert backend.pause(Region.WEIGHTS) == layout.nbytes
        assert Region.WEIGHTS not in backend.resident()
        assert backend.held()[Region.WEIGHTS] == 0
        assert backend.resume(Region.WEIGHTS) == layout.nbytes
        assert Region.WEIGHTS in backend.resident()
        assert backend.held()[Region.WEIGHTS] == layout.nbytes
        backend.copy_in(Slot.TRAINED, buffer, layout.nbytes)

        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), name

    def test_regions_are_released_one_by_one(self) -> None:
        """Pausing one region leaves the others' values and residency alone."""
        backend = self.make()
        weight, state = torch.ones(5, device=self.device), torch.full((5,), 2.0, device=self.device)
        backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
        backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, {"state": state})

        backend.pause(Region.OPTIMIZER)

        assert Region.WEIGHTS in backend.resident()
        assert weight.tolist() == [1.0] * 5
        backend.resume(Region.OPTIMIZER)

    def test_misuse_is_an_assertion(self) -> None:
        """Pausing twice, resuming what is resident, and touching the bytes of a paused region raise AssertionError."""
        backend = self.make()
        layout = backend.adopt(Slot.REST, Region.REST, {"a": torch.ones(3, device=self.device)})
        buffer = FakeStore().allocate(layout.nbytes)
        with pytest.raises(AssertionError):
            backend.resume(Region.REST)
        backend.pause(Region.REST)
        with pytest.raises(AssertionError):
            backend.pause(Region.REST)
        with pytest.raises(AssertionError):
            backend.adopt(Slot.REST, Region.REST, {"b": torch.ones(3, device=self.device)})
        with pytest.raises(AssertionError):
            backend.copy_out(Slot.REST, buffer)
        with pytest.raises(AssertionError):
            backend.copy_in(Slot.REST, buffer, layout.nbytes)
        assert Region.REST not in backend.resident()

    def test_restores_are_seen_by_autograd(self) -> None:
        """A backward through a graph that saved a tensor before it was restored is refused, not silently wrong."""
        backend = self.make()
        buffer, loss = self.saved_by_a_graph(backend)

        backend.copy_in(Slot.TRAINED, buffer, buffer.nbytes)

        with pytest.raises(RuntimeError):
            loss.backward()  # type: ignore[no-untyped-call]

    def test_fingerprints_and_views_show_the_device(self) -> None:
        """Fingerprints and views are those of the tensors as they are now; views are detached and share the bytes."""
        tensors = self.tensors()
        backend = self.make()
        backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
        with torch.no_grad():
            tensors["embed"].add_(1)

        assert backend.fingerprints(Slot.TRAINED) == {name: fingerprint(tensor) for name, tensor in tensors.items()}
        assert backend.fingerprints(Slot.TRAINED, ["half"]) == {"half": fingerprint(tensors["half"])}
        views = backend.views(Slot.TRAINED)
        assert list(views) == list(tensors)
        for name, view in views.items():
            assert view.data_ptr() == tensors[name].data_ptr()
            assert not view.requires_grad

    def test_forgotten_slots_are_empty(self) -> None:
        """After forget the slot has no bytes and can be adopted anew, also with the same names; values stay."""
        backend = self.make()
        old = torch.ones(3, device=self.device)
        backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, {"state": old})

        backend.forget(Slot.OPTIMIZER)

        assert backend.layout(Slot.OPTIMIZER).nbytes == 0
        assert backend.held().get(Region.OPTIMIZER, 0) == 0
        assert old.tolist() == [1, 1, 1]
        backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, {"state": torch.zeros(3, device=self.device)})
        assert [spec.name for spec in backend.layout(Slot.OPTIMIZER)] == ["state"]

    def test_counters_are_bytes(self) -> None:
        """collect and available answer with bytes, or say that they can not tell."""
        backend = self.make()

        assert backend.collect() >= 0
        available = backend.available()
        assert available is None or available >= 0


class HostStoreContract(ABC):
    """Subclasses implement ``make``."""

    @abstractmethod
    def make(self) -> HostStore:
        """A new store without buffers."""

    def test_says_what_it_is(self) -> None:
        """A store has a name, and says whether parts in it count as host or as disk copies."""
        store = self.make()

        assert store.name
        assert store.copy in (Copy.HOST, Copy.DISK)

    def test_buffers_are_zeroed_and_independent(self) -> None:
        """Buffers have the size asked for, read as zeros, keep what is written and do not overlap."""
        store = self.make()
        sizes = (1, 4096, 100_003)
        buffers = [store.allocate(nbytes) for nbytes in sizes]

        assert len({buffer.id for buffer in buffers}) == 3
        for number, (buffer, nbytes) in enumerate(zip(buffers, sizes, strict=True), 1):
            assert buffer.nbytes == nbytes
            assert len(buffer.memory) >= nbytes
            assert not tensor_over(buffer).any()
            tensor_over(buffer).fill_(number)
        for number, buffer in enumerate(buffers, 1):
            assert buffer.memory[: buffer.nbytes] == bytes([number]) * buffer.nbytes
        store.close()

    def test_a_buffer_may_be_empty(self) -> None:
        """A part without bytes has a buffer too."""
        store = self.make()

        assert tensor_over(store.allocate(0)).shape == (0,)
        store.close()

    def test_a_shared_buffer_is_the_same_memory(self) -> None:
        """Where fd is set, another mapping of it, as another process would make, sees what is written, up to free."""
        store = self.make()
        buffer = store.allocate(5000)
        if buffer.fd is not None:
            assert os.fstat(buffer.fd).st_size == 5000
            other = mmap(buffer.fd, 5000, MAP_SHARED, PROT_READ)
            buffer.memory[4999] = 9
            assert other[4999] == 9
            store.free(buffer)
            assert len(other[:]) == 5000
        store.close()

    def test_freed_once(self) -> None:
        """Freeing what is not out, twice or of another store, is an AssertionError; close frees the rest."""
        store, other = self.make(), self.make()
        buffer = store.allocate(100)
        with pytest.raises(AssertionError):
            other.free(buffer)
        store.free(buffer)
        with pytest.raises(AssertionError):
            store.free(buffer)
        left = store.allocate(100)
        store.close()
        with pytest.raises(AssertionError):
            store.free(left)
        store.close()

    def test_no_room_is_an_error(self) -> None:
        """What can not be there is refused with OSError or MemoryError at once; the store goes on working."""
        store = self.make()
        with pytest.raises((OSError, MemoryError)):
            store.allocate(1 << 60)

        assert store.allocate(10).nbytes == 10
        store.close()
