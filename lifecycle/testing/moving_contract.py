"""What every memory backend must do when it moves bytes in blocks or both ways: the second half of its contract."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from lifecycle.fingerprint import fingerprint
from lifecycle.hoststore.base import HostBuffer, tensor_over
from lifecycle.manifest import TensorSpec
from lifecycle.memory.base import Incoming, MemoryBackend
from lifecycle.testing.fakes import FakeStore
from states.resources import Region, Slot


def read(spec: TensorSpec, buffer: HostBuffer) -> Tensor:
    """The tensor that a part's copy holds at this place of its layout."""
    dtype = getattr(torch, spec.dtype)
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    storage = tensor_over(buffer).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, spec.offset // dtype.itemsize, spec.shape, spec.stride)


class Stopped(BaseException):
    """What ``stopped`` raises: no subclass of Exception, like the KeyboardInterrupt that it stands for."""


@contextmanager
def stopped(subject: object, line: int) -> Iterator[None]:
    """Inside, raise ``Stopped`` where the subject's own code is about to run its ``line``-th line, counted from 1.

    Its own code is what lies in the directories of its classes. Returns do not count: nothing goes wrong there. Nothing
    is raised where fewer lines run.
    """
    kinds = [kind for kind in type(subject).__mro__ if kind.__module__.partition(".")[0] not in sys.stdlib_module_names]
    own = {str(Path(inspect.getfile(kind)).parent) for kind in kinds}
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "call":
            file = Path(frame.f_code.co_filename)
            return trace if str(file.parent) in own and file != Path(__file__) else None
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("return"):
            left -= 1
            if left == 0:
                raise Stopped
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class MovingContract(ABC):
    """Part of ``lifecycle.testing.contracts.MemoryBackendContract``: see there."""

    device = "cpu"

    @abstractmethod
    def make(self) -> MemoryBackend:
        """A new backend that owns nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """A tied pair, views, a transposed parameter, one from inside a storage, a scalar, an empty one, odd dtypes."""
        base = torch.arange(24, dtype=torch.float32, device=self.device)
        shared = torch.nn.Parameter(base.view(4, 6))
        return {
            "embed": shared,
            "head": shared,
            "row": shared.detach()[2],
            "transposed": torch.nn.Parameter(torch.arange(15.0, device=self.device).view(3, 5).t()),
            "inside": torch.nn.Parameter(torch.arange(100.0, device=self.device)[50:60]),
            "scalar": torch.tensor(7, device=self.device),
            "empty": torch.empty(0, 3, device=self.device),
            "mask": torch.tensor([True, False, True], device=self.device),
            "half": torch.arange(5, dtype=torch.bfloat16, device=self.device),
        }

    def two_contents(self, backend: MemoryBackend) -> tuple[dict[str, Tensor], HostBuffer, HostBuffer]:
        """Adopted tensors with an old content, and copies of that and of a new one that differs in every tensor."""
        tensors = self.tensors()
        nbytes = backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors).nbytes
        old, new = FakeStore().allocate(nbytes), FakeStore().allocate(nbytes)
        backend.copy_out(Slot.TRAINED, old)
        with torch.no_grad():
            for name in self.groups_of():
                tensors[name].copy_(tensors[name].logical_not() if name == "mask" else tensors[name] + 1)
        backend.copy_out(Slot.TRAINED, new)
        backend.copy_in(Slot.TRAINED, old, nbytes)
        return tensors, old, new

    def groups_of(self) -> dict[str, frozenset[str]]:
        """Of ``tensors``: one name of each alias group that has bytes, and all names of that group."""
        alone = ("transposed", "inside", "scalar", "mask", "half")
        return {"embed": frozenset({"embed", "head", "row"}), **{name: frozenset({name}) for name in alone}}

    def saved_by_a_graph(self, backend: MemoryBackend) -> tuple[HostBuffer, Tensor]:
        """The copy of a weight, and a loss whose backward needs the weight as it is."""
        weight = torch.nn.Parameter(torch.ones(3, device=self.device))
        buffer = FakeStore().allocate(backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight}).nbytes)
        backend.copy_out(Slot.TRAINED, buffer)
        return buffer, (weight * weight).sum()

    def differing(self, backend: MemoryBackend, tensors: dict[str, Tensor], copy: HostBuffer) -> list[str]:
        """Names of the tensors whose bytes are not those of the copy."""
        layout = backend.layout(Slot.TRAINED)
        return [spec.name for spec in layout if not torch.equal(read(spec, copy), tensors[spec.name].detach().cpu())]

    def test_all_that_was_adopted_is_complete(self) -> None:
        """With nothing beside what was adopted there is nothing to refuse, and every tensor keeps its value."""
        backend = self.make()
        tensors, old, _ = self.two_contents(backend)

        backend.complete()

        assert self.differing(backend, tensors, old) == []

    @pytest.mark.parametrize("aside", [False, True], ids=["on the caller's stream", "aside"])
    def test_blocks_arrive_with_their_fingerprints(self, aside: bool) -> None:
        """Blocks are named parts of a slot: after its arrival each has its bytes, and the fingerprints asked for."""
        backend = self.make()
        tensors, _, new = self.two_contents(backend)
        groups = list(self.groups_of().values())
        names = [groups[0], groups[1] | groups[2], frozenset[str]().union(*groups[3:])]
        blocks = [[Incoming(Slot.TRAINED, new, new.nbytes, block, tuple(sorted(block)))] for block in names]

        arrivals = backend.start_copy_in(blocks, aside)

        assert len(arrivals) == len(blocks)
        for arrival, block in zip(arrivals, names, strict=True):
            found = arrival.wait()
            assert found == {Slot.TRAINED: {name: fingerprint(tensors[name]) for name in block}}
            assert block.isdisjoint(self.differing(backend, tensors, new))
            assert arrival.wait() == found
        assert self.differing(backend, tensors, new) == []

    @pytest.mark.parametrize("aside", [False, True], ids=["on the caller's stream", "aside"])
    def test_ordered_arrivals_are_seen_without_a_wait(self, aside: bool) -> None:
        """What is launched behind ``order`` reads the bytes that came; without names all of a slot comes."""
        backend = self.make()
        tensors, _, new = self.two_contents(backend)

        (arrival,) = backend.start_copy_in([[Incoming(Slot.TRAINED, new, new.nbytes)]], aside)
        arrival.order()
        seen = {name: tensor.detach().clone() for name, tensor in tensors.items()}

        assert self.differing(backend, seen, new) == []
        assert arrival.wait() == {Slot.TRAINED: {}}

    @pytest.mark.parametrize("names", [None, frozenset({"a"}), frozenset({"a", "b"})])
    def test_only_what_was_named_and_copied_arrives(self, names: frozenset[str] | None) -> None:
        """An older, shorter copy restores its prefix; what was not named, or is of another slot, is left alone."""
        backend = self.make()
        first = {"a": torch.full((5,), 1.0, device=self.device)}
        old = backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, first)
        buffer, other = FakeStore().allocate(old.nbytes), FakeStore().allocate(1024)
        backend.copy_out(Slot.OPTIMIZER, buffer)
        more = {"b": torch.full((7,), 2.0, device=self.device)}
        rest = {"c": torch.tensor([3, 4], device=self.device)}
        backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, more)
        nbytes = backend.adopt(Slot.REST, Region.REST, rest).nbytes
        backend.copy_out(Slot.REST, other)
        for tensor in (first["a"], rest["c"]):
            tensor.zero_()
        block = [
            Incoming(Slot.OPTIMIZER, buffer, old.nbytes, names, ("a",)),
            Incoming(Slot.REST, other, nbytes),
        ]

        (arrival,) = backend.start_copy_in([block], aside=True)

        assert arrival.wait() == {Slot.OPTIMIZER: {"a": fingerprint(torch.ones(5))}, Slot.REST: {}}
        assert first["a"].tolist() == [1.0] * 5
        assert more["b"].tolist() == [2.0] * 7
        assert rest["c"].tolist() == [3, 4]
        rest["c"].zero_()
        backend.start_copy_in([block[:1]], aside=False)[0].wait()
        assert rest["c"].tolist() == [0, 0]

    @pytest.mark.parametrize("taken", ["as begun", "another", "cancelled"])
    def test_what_was_begun_ahead_shows_nowhere(self, taken: str) -> None:
        """A resume and a first block may be begun with: what comes is what is asked for then, and nothing else."""
        backend = self.make()
        tensors, old, new = self.two_contents(backend)
        groups = list(self.groups_of().values())
        names = [groups[0], frozenset[str]().union(*groups[1:])]
        begun, asked = (
            [[Incoming(Slot.TRAINED, buffer, buffer.nbytes, block, tuple(sorted(block)))] for block in names]
            for buffer in (new if taken == "as begun" else old, new)
        )
        backend.pause(Region.WEIGHTS)

        backend.begin_resume(Region.WEIGHTS)
        backend.begin_copy_in(begun[0])
        assert Region.WEIGHTS not in backend.resident()
        if taken == "cancelled":
            backend.cancel_resume()
            assert Region.WEIGHTS not in backend.resident()
        backend.resume(Region.WEIGHTS)
        arrivals = backend.start_copy_in(asked, aside=True)

        for arrival, block in zip(arrivals, names, strict=True):
            assert arrival.wait() == {Slot.TRAINED: {name: fingerprint(tensors[name]) for name in block}}
        assert self.differing(backend, tensors, new) == []
        backend.cancel_resume()
        assert Region.WEIGHTS in backend.resident()

    def test_arrivals_are_seen_by_autograd(self) -> None:
        """A backward through a graph that saved a tensor before it arrived is refused, not silently wrong."""
        backend = self.make()
        buffer, loss = self.saved_by_a_graph(backend)

        one = Incoming(Slot.TRAINED, buffer, buffer.nbytes, frozenset({"weight"}))
        backend.start_copy_in([[one]], aside=True)[0].wait()

        with pytest.raises(RuntimeError):
            loss.backward()  # type: ignore[no-untyped-call]

    def test_a_pause_waits_for_what_is_under_way(self) -> None:
        """Memory is given back behind copies that nobody waited for; what comes later is whole."""
        backend = self.make()
        tensors, old, new = self.two_contents(backend)
        backend.start_copy_in([[Incoming(Slot.TRAINED, new, new.nbytes)]], aside=True)

        backend.pause(Region.WEIGHTS)
        with pytest.raises(AssertionError):
            backend.start_copy_in([[Incoming(Slot.TRAINED, new, new.nbytes)]], aside=False)
        with pytest.raises(AssertionError):
            backend.exchange(Slot.TRAINED, new, old, old.nbytes)
        backend.resume(Region.WEIGHTS)
        backend.copy_in(Slot.TRAINED, old, old.nbytes)

        assert self.differing(backend, tensors, old) == []

    def test_an_exchange_moves_both_ways(self) -> None:
        """The old bytes go out and the new ones come in, bit for bit, and back again; autograd sees it."""
        backend = self.make()
        tensors, old, new = self.two_contents(backend)
        out = FakeStore().allocate(old.nbytes)
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        loss = (tensors["transposed"] * tensors["transposed"]).sum()

        assert backend.exchange(Slot.TRAINED, out, new, new.nbytes) == old.nbytes

        assert self.differing(backend, tensors, new) == []
        assert self.differing(backend, before, out) == []
        with pytest.raises(RuntimeError):
            loss.backward()  # type: ignore[no-untyped-call]
        back = FakeStore().allocate(old.nbytes)
        backend.exchange(Slot.TRAINED, back, out, out.nbytes)
        assert self.differing(backend, tensors, old) == []
        assert (
            self.differing(backend, {spec.name: read(spec, new) for spec in backend.layout(Slot.TRAINED)}, back) == []
        )

    def test_an_exchange_with_a_shorter_copy_keeps_the_rest(self) -> None:
        """Beyond the copy that comes in, bytes are copied out and stay."""
        backend = self.make()
        first, more = torch.full((1000,), 1.0, device=self.device), torch.full((7,), 2.0, device=self.device)
        short = backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, {"first": first})
        into = FakeStore().allocate(short.nbytes)
        backend.copy_out(Slot.OPTIMIZER, into)
        whole = backend.adopt(Slot.OPTIMIZER, Region.OPTIMIZER, {"more": more})
        first.fill_(5)
        out = FakeStore().allocate(whole.nbytes)

        assert backend.exchange(Slot.OPTIMIZER, out, into, into.nbytes) == whole.nbytes

        assert first.tolist() == [1.0] * 1000
        assert more.tolist() == [2.0] * 7
        assert [read(spec, out)[0].item() for spec in whole] == [5, 2]

    def test_a_stopped_exchange_loses_nothing(self) -> None:
        """Stopped at any line of the backend and finished, with a second stop on the way: ``out`` has the old bytes."""
        backend = self.make()
        tensors, old, new = self.two_contents(backend)
        before = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        for line in count(1):
            out = FakeStore().allocate(old.nbytes)
            backend.copy_in(Slot.TRAINED, old, old.nbytes)
            if not self.stops(line, backend, partial(backend.exchange, Slot.TRAINED, out, new, new.nbytes)):
                break
            if self.stops(line % 10 + 1, backend, partial(backend.finish_exchange, Slot.TRAINED, out)):
                backend.finish_exchange(Slot.TRAINED, out)
            assert self.differing(backend, before, out) == [], f"stopped at line {line}"
        assert line > 3
        assert self.differing(backend, tensors, new) == []
        assert self.differing(backend, before, out) == []

    def stops(self, line: int, backend: MemoryBackend, call: Callable[[], object]) -> bool:
        """Whether the call was stopped at this line of the backend."""
        try:
            with stopped(backend, line):
                call()
        except Stopped:
            return True
        return False
