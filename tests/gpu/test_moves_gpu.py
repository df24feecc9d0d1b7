"""Copies on a GPU: ordered behind and before what runs on streams, both ways at once, and whole when they stop."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread

import pytest
import torch

from lifecycle.fingerprint import fingerprint
from lifecycle.hoststore.base import HostBuffer, tensor_over
from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.memory import moves, streams
from lifecycle.memory.base import Incoming
from lifecycle.memory.storage import StorageBackend
from lifecycle.testing.moving_contract import read
from states.resources import Region, Slot

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LONG = 400_000_000  # clock cycles, about 0.2 s: launches behind it are under way when the next line runs


@pytest.fixture
def store() -> Iterator[PinnedStore]:
    store = PinnedStore()
    yield store
    torch.cuda.synchronize()
    store.close()


def random(nbytes: int, seed: int, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)


def adopted(tensors: dict[str, torch.Tensor]) -> tuple[StorageBackend, int]:
    backend = StorageBackend()
    return backend, backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors).nbytes


def one_weight(store: PinnedStore) -> tuple[StorageBackend, torch.Tensor, torch.Tensor, HostBuffer]:
    """A backend with one weight of 64 MiB, its old content, and a buffer with a new one."""
    weight = random(64 * MIB, 0)
    backend, nbytes = adopted({"weight": weight})
    buffer = store.allocate(nbytes)
    tensor_over(buffer).copy_(random(nbytes, 1))
    torch.cuda.synchronize()
    return backend, weight, weight.clone(), buffer


def whole(buffer: HostBuffer, check: tuple[str, ...] = ()) -> list[list[Incoming]]:
    return [[Incoming(Slot.TRAINED, buffer, buffer.nbytes, None, check)]]


def test_a_restore_waits_for_readers_on_the_default_stream(store: PinnedStore):
    """A restore on a user's stream overwrites nothing that an earlier launch on the default stream still reads."""
    backend, weight, old, buffer = one_weight(store)

    torch.cuda._sleep(LONG)
    seen = weight.clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        backend.copy_in(Slot.TRAINED, buffer, buffer.nbytes)

    assert torch.equal(weight, tensor_over(buffer).cuda())
    torch.cuda.synchronize()
    assert torch.equal(seen, old)


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_restore_waits_for_readers_on_the_callers_stream(store: PinnedStore, own_stream: bool):
    """Readers launched before on the caller's stream see the old bytes, those launched after the new ones."""
    backend, weight, old, buffer = one_weight(store)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.default_stream())

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        before = weight.clone()
        backend.copy_in(Slot.TRAINED, buffer, buffer.nbytes)
        after = weight.clone()

    torch.cuda.synchronize()
    assert torch.equal(before, old)
    assert torch.equal(after.cpu(), tensor_over(buffer))


def test_a_copy_has_what_the_callers_stream_wrote(store: PinnedStore):
    """Bytes written by a launch that has not ended are in the copy."""
    backend, weight, _, buffer = one_weight(store)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        weight.fill_(7)
        backend.copy_out(Slot.TRAINED, buffer)

    assert tensor_over(buffer).unique().tolist() == [7]


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_started_restore_is_ordered(store: PinnedStore, aside: bool, own_stream: bool):
    """It returns before the bytes are there; launches behind ``order`` see them, launches before it the old ones."""
    backend, weight, old, buffer = one_weight(store)
    expected = fingerprint(tensor_over(buffer))
    backend.fingerprints(Slot.TRAINED, ("weight",))  # the first one of a process compiles
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    torch.cuda.synchronize()

    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        before = weight.clone()
        (arrival,) = backend.start_copy_in(whole(buffer, ("weight",)), aside)
        under_way = not arrival.ended()
        arrival.order()
        after = weight.clone()

    assert under_way
    assert arrival.wait() == {Slot.TRAINED: {"weight": expected}}
    torch.cuda.synchronize()
    assert torch.equal(before, old)
    assert torch.equal(after.cpu(), tensor_over(buffer))


def test_launches_run_beside_a_restore_aside(store: PinnedStore):
    """What the caller launches without ``order`` does not wait for the copies."""
    size = 2048 * MIB  # at least 30 ms on the link
    weight = torch.zeros(size, dtype=torch.uint8, device="cuda")
    backend, nbytes = adopted({"weight": weight})
    buffer = store.allocate(nbytes)
    backend.copy_in(Slot.TRAINED, buffer, nbytes)

    (arrival,) = backend.start_copy_in(whole(buffer), aside=True)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()

    assert not arrival.ended()
    arrival.wait()
    assert arrival.ended()


@pytest.mark.parametrize("aside", [False, True])
def test_blocks_come_in_order(store: PinnedStore, aside: bool):
    """When a block's arrival is over its bytes are there, and those of later blocks need not be."""
    weights = {str(number): torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") for number in range(8)}
    backend, nbytes = adopted(weights)
    buffer = store.allocate(nbytes)
    tensor_over(buffer).fill_(3)
    blocks = [[Incoming(Slot.TRAINED, buffer, nbytes, frozenset({name}))] for name in weights]

    arrivals = backend.start_copy_in(blocks, aside)
    arrivals[0].wait()
    last_under_way = not arrivals[-1].ended()

    assert last_under_way
    for arrival, (name, weight) in zip(arrivals, weights.items(), strict=True):
        arrival.wait()
        assert weight.min().item() == 3, name


def test_a_copy_comes_behind_what_is_under_way(store: PinnedStore):
    """Copying out right after a restore was started aside, without waiting, has the new bytes."""
    backend, _, _, buffer = one_weight(store)
    out = store.allocate(buffer.nbytes)

    backend.start_copy_in(whole(buffer), aside=True)
    backend.copy_out(Slot.TRAINED, out)

    assert torch.equal(tensor_over(out), tensor_over(buffer))


def test_a_copy_that_does_not_match_is_told(store: PinnedStore):
    """The fingerprint is that of what came, not of what was to come."""
    backend, weight, _, buffer = one_weight(store)
    expected = fingerprint(tensor_over(buffer))
    tensor_over(buffer)[123_456] += 1

    found = backend.start_copy_in(whole(buffer, ("weight",)), aside=True)[0].wait()

    assert found[Slot.TRAINED]["weight"] != expected
    assert found[Slot.TRAINED]["weight"] == fingerprint(weight)


def many(seed: int) -> dict[str, torch.Tensor]:
    """512 MiB: large ones, odd sizes, and 400 of a few bytes."""
    sizes = [20 * MIB] * 25 + [1, 3, 17, 511, 512, 513, 4097, MIB - 1, MIB + 1, 3 * MIB + 7, 8 * MIB - 5]
    sizes += [number % 499 + 1 for number in range(400)]
    return {f"t{number}": random(size, seed + number) for number, size in enumerate(sizes)}


def test_small_neighbours_move_as_one():
    """Hundreds of tensors of a few bytes are a handful of runs, each over the tensors' own memory."""
    torch.cuda.empty_cache()
    tensors = many(0)
    backend, _ = adopted(tensors)

    runs = backend._holding(Slot.TRAINED).runs()

    assert len(tensors) > 430
    assert len(runs) < 60
    places = {spec.name: spec.offset for spec in backend.layout(Slot.TRAINED)}
    for run in runs:
        run.memory.fill_(9)
        inside = [name for name, offset in places.items() if run.offset <= offset < run.end]
        assert {places[name] + run.memory.data_ptr() - run.offset for name in inside} == {
            tensors[name].data_ptr() for name in inside
        }
    assert all(tensor.min().item() == 9 for tensor in tensors.values())


def test_runs_follow_to_new_addresses(store: PinnedStore):
    """Small tensors that shared runs come back elsewhere, apart: copies and exchanges go where they are now."""
    torch.cuda.empty_cache()
    tensors = {str(number): random(number % 499 + 1, number) for number in range(200)}
    old = {name: tensor.cpu() for name, tensor in tensors.items()}
    backend, nbytes = adopted(tensors)
    first, second, third = (store.allocate(nbytes) for _ in range(3))
    backend.copy_out(Slot.TRAINED, first)
    backend.exchange(Slot.TRAINED, second, first, nbytes)
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    backend.pause(Region.WEIGHTS)
    holes = [torch.zeros(512, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del holes[::2]  # the allocator fills the gaps first
    backend.resume(Region.WEIGHTS)

    assert places != {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.fill_(7)
    backend.exchange(Slot.TRAINED, third, first, nbytes)
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor.cpu(), old[name])] == []
    assert all(read(spec, third).unique().tolist() == [7] for spec in backend.layout(Slot.TRAINED))
    assert [hole.unique().tolist() for hole in holes] == [[0]] * 32


class LeastFree:
    """The least free memory of the device, as the driver has it, while this is open."""

    def __enter__(self) -> LeastFree:
        self.least, self.samples, self._over = torch.cuda.mem_get_info()[0], 0, Event()
        self._thread = Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.is_set():
            self.least = min(self.least, torch.cuda.mem_get_info()[0])
            self.samples += 1

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_an_exchange_of_512_mib(store: PinnedStore):
    """Both ways bit for bit, twice, with no more device memory than one chunk, by torch's count and the driver's."""
    tensors = many(0)
    backend, nbytes = adopted(tensors)
    old = {name: tensor.cpu() for name, tensor in tensors.items()}
    out, into = store.allocate(nbytes), store.allocate(nbytes)
    backend.copy_out(Slot.TRAINED, into)
    for name, tensor in many(1000).items():
        tensors[name].copy_(tensor)
    new = {name: tensor.cpu() for name, tensor in tensors.items()}
    backend.exchange(Slot.TRAINED, out, into, nbytes)  # the device has the old ones now, ``out`` the new ones
    again = store.allocate(nbytes)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    with LeastFree() as watch:
        assert backend.exchange(Slot.TRAINED, again, out, nbytes) == nbytes

    assert torch.cuda.max_memory_allocated() - before <= moves.CHUNK
    assert watch.samples > 0
    assert free - watch.least <= moves.CHUNK
    layout = backend.layout(Slot.TRAINED)
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor.cpu(), new[name])] == []
    assert [spec.name for spec in layout if not torch.equal(read(spec, out), new[spec.name])] == []
    assert [spec.name for spec in layout if not torch.equal(read(spec, again), old[spec.name])] == []


def test_an_exchange_waits_for_streams(store: PinnedStore):
    """It takes out what the caller's stream was told to write, and overwrites nothing that is still being read."""
    backend, weight, _, into = one_weight(store)
    out, stream = store.allocate(into.nbytes), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())

    with torch.cuda.stream(stream):
        weight.fill_(7)
    torch.cuda.default_stream().wait_stream(stream)
    torch.cuda._sleep(LONG)
    on_default = weight.clone()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG // 2)
        seen = weight.clone()
        backend.exchange(Slot.TRAINED, out, into, into.nbytes)
        after = weight.clone()

    torch.cuda.synchronize()
    assert on_default.unique().tolist() == [7]
    assert seen.unique().tolist() == [7]
    assert tensor_over(out).unique().tolist() == [7]
    assert torch.equal(after.cpu(), tensor_over(into))


@pytest.mark.parametrize("at", [1, 2, 9, 30])
@pytest.mark.parametrize("lane", ["out", "into"])
def test_an_exchange_stopped_half_way(store: PinnedStore, monkeypatch: pytest.MonkeyPatch, lane: str, at: int):
    """Stopped between chunks, with copies under way: ``out`` is completed, and the new bytes can still come."""
    monkeypatch.setattr(moves, "CHUNK", 2 * MIB)
    backend, weight, old, into = one_weight(store)
    out, left = store.allocate(into.nbytes), at
    use = getattr(streams.Lanes, lane)

    def stops(lanes: streams.Lanes, device: torch.device) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return use(lanes, device)

    monkeypatch.setattr(streams.Lanes, lane, stops)
    with pytest.raises(KeyboardInterrupt):
        backend.exchange(Slot.TRAINED, out, into, into.nbytes)

    half = weight.cpu()
    done = (at - 1) * 2 * MIB
    assert torch.equal(half[:done], tensor_over(into)[:done])
    assert torch.equal(half[done:], old.cpu()[done:])
    assert backend.finish_exchange(Slot.TRAINED, out) == into.nbytes - done
    assert torch.equal(tensor_over(out), old.cpu())
    backend.copy_in(Slot.TRAINED, into, into.nbytes)
    assert torch.equal(weight.cpu(), tensor_over(into))


@pytest.mark.parametrize("nbytes", [0, 1, 16 * MIB - 1, 16 * MIB, 40 * MIB + 13])
def test_an_exchange_with_less_keeps_the_tail(store: PinnedStore, nbytes: int):
    """All old bytes go out; only the first ``nbytes`` are overwritten."""
    backend, weight, old, into = one_weight(store)
    out = store.allocate(into.nbytes)

    backend.exchange(Slot.TRAINED, out, into, nbytes)

    assert torch.equal(tensor_over(out), old.cpu())
    assert torch.equal(weight[:nbytes].cpu(), tensor_over(into)[:nbytes])
    assert torch.equal(weight[nbytes:], old[nbytes:])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices_at_once(store: PinnedStore):
    """A slot over two devices moves whole, whichever is current."""
    weights = {f"w{number}": random(8 * MIB + number, number, f"cuda:{number % 2}") for number in range(4)}
    old = {name: weight.cpu() for name, weight in weights.items()}
    backend, nbytes = adopted(weights)
    first, into, out = (store.allocate(nbytes) for _ in range(3))
    backend.copy_out(Slot.TRAINED, first)
    for weight in weights.values():
        weight.add_(1)
    backend.copy_out(Slot.TRAINED, into)
    new = {name: weight.cpu() for name, weight in weights.items()}

    with torch.cuda.device(1):
        backend.pause(Region.WEIGHTS)
        backend.resume(Region.WEIGHTS)
        (arrival,) = backend.start_copy_in(whole(first, tuple(weights)), aside=True)
        assert arrival.wait()[Slot.TRAINED] == {name: fingerprint(content) for name, content in old.items()}
        backend.exchange(Slot.TRAINED, out, into, nbytes)

    assert all(torch.equal(weight.cpu(), new[name]) for name, weight in weights.items())
    assert all(torch.equal(read(spec, out), old[spec.name]) for spec in backend.layout(Slot.TRAINED))
    assert torch.cuda.current_device() == 0
