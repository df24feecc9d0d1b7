"""The arena: memory is really released, contents really gone, and really restored, bit for bit."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lifecycle.errors import ManifestError
from lifecycle.fingerprint import fingerprint
from lifecycle.hoststore.base import tensor_over
from lifecycle.hoststore.pinned import PinnedStore
from lifecycle.memory import aliases, pages
from lifecycle.memory.arena import ArenaBackend
from lifecycle.testing.contracts import MemoryBackendContract
from lifecycle.testing.fakes import FakeMemory
from states.resources import Region, Slot

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


class TestArena(MemoryBackendContract):
    def make(self) -> ArenaBackend:
        return ArenaBackend()


class TestPoisonedArena(MemoryBackendContract):
    def make(self) -> ArenaBackend:
        return ArenaBackend(poison=0xCB)


class TestFakeMemory(MemoryBackendContract):
    def make(self) -> FakeMemory:
        return FakeMemory()


def resident_anonymous() -> int:
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def adopt(tensors: dict[str, torch.Tensor], backend: ArenaBackend | None = None) -> ArenaBackend:
    backend = backend or ArenaBackend()
    backend.adopt(Slot.TRAINED, Region.WEIGHTS, tensors)
    return backend


def test_memory_is_really_released():
    """Pausing gives 256 MiB back to the system; resuming takes them again; the bytes come back from the copy."""
    weight = nn.Parameter(torch.arange(32 * MIB).mul_(0x9E3779B97F4A7C15 - (1 << 64)).view(torch.float32))
    content = fingerprint(weight)
    backend = adopt({"weight": weight})
    buffer = PinnedStore().allocate(weight.nbytes)
    backend.copy_out(Slot.TRAINED, buffer)
    before, address = resident_anonymous(), weight.data_ptr()

    assert backend.pause(Region.WEIGHTS) == 256 * MIB
    assert resident_anonymous() < before - 250 * MIB
    assert weight.data_ptr() == address
    assert weight[:1000].tolist() == [0.0] * 1000
    backend.resume(Region.WEIGHTS)
    assert resident_anonymous() > before - 6 * MIB
    assert not weight.any()
    backend.copy_in(Slot.TRAINED, buffer, weight.nbytes)

    assert torch.equal(weight.detach().view(torch.uint8), tensor_over(buffer))
    assert fingerprint(weight) == content


def test_what_a_view_was_made_from_is_released_too():
    """A view keeps its base, and so its old storage, alive: the base moves along, and no second copy stays behind."""
    view = torch.ones(16 * MIB).view(4, -1)
    before = resident_anonymous()

    backend = adopt({"view": view})

    assert resident_anonymous() < before + 8 * MIB
    assert view._base.data_ptr() == view.data_ptr()
    backend.pause(Region.WEIGHTS)
    assert resident_anonymous() < before - 56 * MIB


def test_poison_marks_what_was_not_restored():
    """With a poison byte, released memory reads as poison while paused and after resume, never as zeros."""
    weight = torch.zeros(3000, dtype=torch.uint8)
    backend = adopt({"weight": weight}, ArenaBackend(poison=0xCB))

    backend.pause(Region.WEIGHTS)
    assert weight.unique().tolist() == [0xCB]
    weight.zero_()
    backend.resume(Region.WEIGHTS)

    assert weight.unique().tolist() == [0xCB]


def test_a_former_base_is_left_alone():
    """A view that was given other memory no longer moves with the tensor that it was made from."""
    base = torch.arange(6)
    view = base[2:]
    view.data = torch.zeros(4, dtype=torch.int64)
    place = base.data_ptr()

    adopt({"view": view, "other": torch.ones(3)})

    assert view._base is base
    assert base.data_ptr() == place
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


def test_parameters_keep_their_optimizer_and_gradients():
    """Moving a parameter leaves its gradient, its hooks and the optimizer's reference to it as they were."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    seen = []
    weight.register_hook(seen.append)
    (weight * 2).sum().backward()

    adopt({"weight": weight})
    optimizer.step()

    assert weight.tolist() == [0.0] * 4
    weight.sum().backward()
    assert len(seen) == 2


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16]
)
def test_dtypes_move_as_bytes(dtype: torch.dtype):
    """Odd dtypes come through adoption, release and restore with their exact bytes."""
    raw = torch.randint(0, 2, (3 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.clone().view(dtype)
    backend = adopt({"tensor": tensor}, ArenaBackend(poison=0xCB))
    buffer = PinnedStore().allocate(64)
    backend.copy_out(Slot.TRAINED, buffer)
    backend.pause(Region.WEIGHTS)
    backend.resume(Region.WEIGHTS)
    backend.copy_in(Slot.TRAINED, buffer, 64)

    assert torch.equal(tensor.view(torch.uint8), raw)


def test_views_of_other_dtypes_keep_their_place():
    """Views of one storage in different dtypes, starting anywhere in it, still overlap in the same way."""
    base = torch.arange(64, dtype=torch.uint8)
    tensors = {"bytes": base[3:50], "words": base[8:40].view(torch.int64), "wide": base[32:48].view(torch.complex128)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    del base
    adopt(tensors)

    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    tensors["words"][0] = -1
    assert tensors["bytes"][4:14].tolist() == [7, *[255] * 8, 16]


def test_only_the_covered_bytes_move():
    """A small parameter in a large storage takes its own bytes along, not the storage's."""
    small = nn.Parameter(torch.zeros(MIB)[1000:1010])

    assert adopt({"small": small}).layout(Slot.TRAINED).nbytes == 64
    assert small.untyped_storage().nbytes() < 64


def test_a_saved_weight_is_small():
    """torch.save of one weight writes that weight, not the arena; a deep copy is a normal tensor."""
    tensors = {"large": torch.zeros(MIB), "small": torch.ones(10)}
    adopt(tensors)
    file = io.BytesIO()
    torch.save(tensors["small"], file)

    assert file.tell() < 3000
    file.seek(0)
    assert torch.equal(torch.load(file), torch.ones(10))
    assert copy.deepcopy(tensors["small"]).untyped_storage().resizable()


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_parameters_loaded_from_files(kind: str, tmp_path: Path):
    """What a file was mapped for is dropped and restored from our copy, and not read from the file again."""
    written = {"a": torch.randn(33, 7), "b": torch.randn(5).bfloat16()}
    path = tmp_path / "weights"
    if kind == "safetensors":
        save_file(written, path)
        tensors = load_file(path)
    else:
        torch.save(written, path)
        tensors = torch.load(path, mmap=True)
    backend = adopt(tensors)
    tensors["a"].zero_()
    buffer = PinnedStore().allocate(backend.layout(Slot.TRAINED).nbytes)
    backend.copy_out(Slot.TRAINED, buffer)

    backend.pause(Region.WEIGHTS)
    assert not tensors["b"].any()
    backend.resume(Region.WEIGHTS)
    backend.copy_in(Slot.TRAINED, buffer, buffer.nbytes)

    assert not tensors["a"].any()
    assert torch.equal(tensors["b"], written["b"])


def test_pretrained_models_are_adopted_whole(tmp_path: Path):
    """A transformers model read from its files, with tied embeddings, survives a release."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits.detach()
    backend = adopt(dict(model.named_parameters(remove_duplicate=False)), ArenaBackend(poison=0xFF))
    buffer = PinnedStore().allocate(backend.layout(Slot.TRAINED).nbytes)
    backend.copy_out(Slot.TRAINED, buffer)
    backend.pause(Region.WEIGHTS)
    backend.resume(Region.WEIGHTS)
    assert model(tokens).logits.isnan().all()

    backend.copy_in(Slot.TRAINED, buffer, buffer.nbytes)

    assert torch.equal(model(tokens).logits, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_adopting_under_inference_mode_gives_normal_tensors():
    """Whatever mode the caller is in, what was adopted can still be trained."""
    weight = nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        backend = adopt({"weight": weight})
        buffer = PinnedStore().allocate(64)
        backend.copy_out(Slot.TRAINED, buffer)
        backend.copy_in(Slot.TRAINED, buffer, 64)

    weight.sum().backward()
    with torch.no_grad():
        weight.add_(weight.grad)
    assert weight.tolist() == [2.0] * 3


class Tagged(torch.Tensor):
    """A tensor subclass."""


def released_tensor() -> torch.Tensor:
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(3, device="meta"), "on meta, not on cpu"),
        (lambda: torch.ones(3).as_subclass(Tagged), "Tagged"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "UninitializedParameter"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
        (released_tensor, "0 bytes are left"),
    ],
)
def test_what_can_not_be_moved_is_named(make, reason: str):
    """Tensors that are more than bytes in CPU memory are refused by name and reason; the others have not moved."""
    good, odd = torch.ones(3), make()
    place = good.data_ptr()

    with pytest.raises(ManifestError, match=reason) as caught:
        adopt({"good": good, "odd": odd})

    assert caught.value.problems[0].startswith("odd (")
    assert good.data_ptr() == place


def test_inference_tensors_are_refused():
    """A tensor made in inference mode can not be restored under autograd's eyes, so it is refused with advice."""
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(3))

    with pytest.raises(ManifestError, match=r"weight \(an inference tensor.*clone"):
        adopt({"weight": weight})


def test_storages_that_overlap_are_refused():
    """Two storage objects over the same memory would be torn apart: refused."""
    raw = bytearray(64)
    tensors = {
        "low": torch.frombuffer(raw, dtype=torch.float32, count=8),
        "high": torch.frombuffer(raw, dtype=torch.float32, offset=16),
    }

    with pytest.raises(ManifestError, match="low and high"):
        adopt(tensors)


def test_outsiders_without_storage_are_no_matter():
    """Sparse and uninitialised tensors elsewhere in the process do not disturb the search; empty ones share nothing."""
    elsewhere = (torch.eye(2).to_sparse(), torch.nn.parameter.UninitializedParameter())
    weight, empty = torch.ones(3), torch.ones(0)
    view_of_nothing = empty[:]

    adopt({"weight": weight, "empty": empty})

    assert len(elsewhere) == 2
    assert view_of_nothing.shape == (0,)


def test_two_actors_can_not_own_the_same_tensor():
    """A tensor of another actor's, or of another slot, is refused until its owner forgets it."""
    weight = torch.ones(3)
    first = adopt({"weight": weight})

    with pytest.raises(ManifestError, match="weight"):
        adopt({"weight": weight})
    with pytest.raises(ManifestError, match="weight"):
        first.adopt(Slot.REST, Region.REST, {"same weight": weight})
    first.forget(Slot.TRAINED)
    adopt({"weight": weight})
    assert weight.tolist() == [1.0] * 3


def test_names_and_regions_are_fixed():
    """The controller's mistakes are assertions: a name twice in a slot, a slot in two regions, a short buffer."""
    backend = adopt({"a": torch.ones(100)})
    with pytest.raises(AssertionError, match="names"):
        adopt({"a": torch.ones(3)}, backend)
    with pytest.raises(AssertionError, match="belongs to region"):
        backend.adopt(Slot.TRAINED, Region.REST, {"b": torch.ones(3)})
    with pytest.raises(AssertionError, match="buffer of 64 bytes"):
        backend.copy_out(Slot.TRAINED, PinnedStore().allocate(64))
    with pytest.raises(AssertionError, match="more than there are"):
        backend.copy_in(Slot.TRAINED, PinnedStore().allocate(4096), 4096)
    assert backend.adopt(Slot.TRAINED, Region.WEIGHTS, {}) == backend.layout(Slot.TRAINED)


def test_a_failed_move_is_undone(monkeypatch: pytest.MonkeyPatch):
    """When the last tensor can not be rebound, those before it are back on their old memory, and nothing is owned."""
    tensors = {"a": torch.ones(3), "b": torch.ones(4), "c": torch.ones(5)}
    places = [tensor.data_ptr() for tensor in tensors.values()]
    real = aliases.over

    def over(storage, dtype, offset, shape, stride):
        if tuple(shape) == (5,):
            raise RuntimeError("no")
        return real(storage, dtype, offset, shape, stride)

    monkeypatch.setattr(aliases, "over", over)
    backend = ArenaBackend()
    with pytest.raises(RuntimeError, match="no"):
        adopt(tensors, backend)

    assert [tensor.data_ptr() for tensor in tensors.values()] == places
    assert backend.layout(Slot.TRAINED).nbytes == 0


def test_rebound_tensors_are_noticed():
    """A parameter that its owner moved elsewhere is named before its bytes are copied, overwritten or dropped."""
    weight, other = nn.Parameter(torch.ones(3)), torch.ones(4)
    backend = adopt({"weight": weight, "other": other})
    backend.adopt(Slot.REST, Region.REST, {"rest": torch.ones(2)})
    buffer = PinnedStore().allocate(128)
    weight.data = torch.zeros(3)

    for act in (
        lambda: backend.copy_out(Slot.TRAINED, buffer),
        lambda: backend.copy_in(Slot.TRAINED, buffer, 128),
        lambda: backend.pause(Region.WEIGHTS),
    ):
        with pytest.raises(ManifestError) as caught:
            act()
        assert caught.value.problems == ("weight",)
    assert other.tolist() == [1.0] * 4
    assert backend.resident() == frozenset(Region)
    assert backend.pause(Region.REST) == 64


def test_segments_go_with_their_last_tensor():
    """The arena's memory is unmapped when the tensors and the backend are gone, not before and not never."""
    weight = torch.ones(16 * MIB)
    backend = adopt({"weight": weight})
    before = resident_anonymous()
    backend.forget(Slot.TRAINED)
    assert weight.sum().item() == 16 * MIB
    del weight
    assert resident_anonymous() < before - 60 * MIB


def test_collect_gives_freed_memory_back():
    """Small tensors that were freed are returned to the system, and counted."""
    kept = [[torch.ones(8000), torch.ones(8000)] for _ in range(1000)]
    for pair in kept:
        pair.pop()
    before = resident_anonymous()

    freed = ArenaBackend().collect()

    assert freed > 20 * MIB
    assert resident_anonymous() <= before - freed + MIB


def test_collect_without_glibc(monkeypatch: pytest.MonkeyPatch):
    """Where the C library can not trim, nothing happens and nothing is claimed."""
    monkeypatch.setattr(pages, "_malloc_trim", None)

    assert 0 <= ArenaBackend().collect() < MIB


def limited(code: str) -> str:
    """Run code in a process whose address space ends 300 MiB above what torch needs; what it printed."""
    preamble = """
import resource, psutil, torch
from lifecycle.memory.arena import ArenaBackend
from lifecycle.memory import pages
from states.resources import Region, Slot
MIB = 1 << 20
torch.set_num_threads(1)
weight = torch.ones(40 * MIB)
backend = ArenaBackend()
def limit(more):
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + more * MIB, -1))
"""
    done = subprocess.run(
        [sys.executable, "-c", preamble + code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_room_to_adopt():
    """Without room for the second copy adoption is refused with the sizes, and the tensors are where they were."""
    told = limited("""
limit(100)
place = weight.data_ptr()
try:
    backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
except MemoryError as error:
    print(error)
assert weight.data_ptr() == place and weight[-1] == 1
print(backend.available() <= 100 * MIB)
""")

    assert "167772160 bytes needed" in told
    assert told.endswith("True\n")


def test_no_room_to_resume():
    """Without room a region stays paused, and can be resumed later."""
    told = limited("""
backend.adopt(Slot.TRAINED, Region.WEIGHTS, {"weight": weight})
backend.pause(Region.WEIGHTS)
limit(100)
try:
    backend.resume(Region.WEIGHTS)
except MemoryError as error:
    print(error)
print(Region.WEIGHTS in backend.resident())
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
backend.resume(Region.WEIGHTS)
print(Region.WEIGHTS in backend.resident())
""")

    assert "region weights" in told
    assert told.endswith("False\nTrue\n")
