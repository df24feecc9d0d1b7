"""Hook modes of the memory saver, the environment that each needs, and which backend "auto" is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from saver_rig import CHECKOUT, variables

import lifecycle
from lifecycle import MissingExtra, Region, TransitionRefused
from lifecycle.memory import environment, hook_modes, saver
from lifecycle.memory.arena import ArenaBackend
from lifecycle.memory.choose import choose
from lifecycle.memory.hook_modes import SaverUnusable
from lifecycle.memory.storage import StorageBackend

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens where there is no CUDA device")


def test_the_mode_is_how_the_process_was_started(world):
    """A process with the saver's library in LD_PRELOAD has mode preload, any other torch; the saver is told so."""
    out = world.lives("print(start().mode, torch_memory_saver.torch_memory_saver._impl._hook_mode)")

    assert out.split() == [world.mode, world.mode]


def test_another_mode_set_before(world):
    """Where another import has set the other hook mode, ours is refused with both ways out; its setting stays."""
    other = {"preload": "torch", "torch": "preload"}[world.mode]
    world.lives(
        f"""
        from lifecycle.memory.choose import choose
        direct = torch_memory_saver.torch_memory_saver
        direct.hook_mode = {other!r}
        error = refusal(saver.ledger)
        assert {other!r} in error.state and "environment()" in error.advice, error
        assert direct._impl is None and direct._impl_ctor_kwargs == {{"hook_mode": {other!r}}}
        assert "memory: storage, because" in choose("auto", "cuda").why
        """
    )


def test_another_mode_set_afterwards(world):
    """Once the ledger is made the hook mode can't be changed: the other import is told who has it. The same is fine."""
    other = {"preload": "torch", "torch": "preload"}[world.mode]
    world.lives(
        f"""
        book = start()
        direct = torch_memory_saver.torch_memory_saver
        error = refusal(setattr, direct, "hook_mode", {other!r})
        assert error.allowed == ("torch_memory_saver.hook_mode = {world.mode!r}",), error
        direct.hook_mode = {world.mode!r}
        allocate("actor.weights")
        book.pause("actor.weights")
        direct._impl._hook_mode = {other!r}
        assert {other!r} in refusal(book.resume, "actor.weights").state
        direct._impl = None
        refusal(book.resume, "actor.weights")
        """
    )


def test_initialised_by_another(world):
    """A saver that another import has initialised is taken over if its mode is ours, and what it calls is heard."""
    world.lives(
        f"""
        direct = torch_memory_saver.torch_memory_saver
        direct.hook_mode = {world.mode!r}
        direct.pause("kv_cache")
        book = start()
        allocate("actor.weights")
        refusal(direct.pause)
        """
    )


def test_names_that_moved(world):
    """A version of the saver that keeps its state elsewhere is refused, with the version that works."""
    world.lives(
        f"""
        direct = torch_memory_saver.torch_memory_saver
        direct.hook_mode = {world.mode!r}
        direct._ensure_initialized()
        del direct._impl._mem_pools
        error = refusal(saver.ledger)
        assert "0.0.10" in str(error) and "_mem_pools" in str(error), error
        """
    )


def test_environment_for_preload(tmp_path, monkeypatch):
    """LD_PRELOAD and LD_LIBRARY_PATH are extended, an older saver's library is replaced, expandable segments go off."""
    had = {
        "LD_PRELOAD": "/lib/libjemalloc.so /old/torch_memory_saver_x.so",
        "LD_LIBRARY_PATH": "/mine",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    }
    monkeypatch.setattr(hook_modes, "_runtime_folder", lambda: "/cuda/lib")
    found = hook_modes.environment("preload", had)

    library, *others = found.pop("LD_PRELOAD").split(":")
    assert os.path.basename(library).startswith("torch_memory_saver_hook_mode_preload_cu")
    assert os.path.exists(library)
    assert others == ["/lib/libjemalloc.so"]
    assert found == {
        "LD_LIBRARY_PATH": "/mine:/cuda/lib",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False",
    }


def test_environment_for_torch():
    """Mode torch needs nothing, and the absence of the saver's library."""
    assert hook_modes.environment("torch", {"LD_PRELOAD": "/lib/x.so"}) == {}
    assert hook_modes.environment("torch", {"LD_PRELOAD": "/old/torch_memory_saver_x.so:/lib/x.so"}) == {
        "LD_PRELOAD": "/lib/x.so"
    }
    with pytest.raises(ValueError, match="preload"):
        environment("cuda")


def test_the_environment_starts_a_process(fakes):
    """A process started with the environment is in mode preload, and has the library in front of cudaMalloc."""
    code = (
        "import ctypes; from lifecycle.memory.hook_modes import hook_mode\n"
        "print(hook_mode(), hasattr(ctypes.CDLL(None), 'tms_pause'))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables(fakes, "preload"), capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["preload", "True"]


def test_without_the_saver(monkeypatch):
    """Where it is not installed every way to it names the extra; "auto" is storage, and says why in one line."""
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)

    monkeypatch.setattr(saver, "_made", [])

    with pytest.raises(MissingExtra, match=r"actor-lifecycle\[cuda\]"):
        environment()
    with pytest.raises(MissingExtra, match="torch-memory-saver"):
        choose("torch_memory_saver", "cuda")
    chosen = choose("auto", "cuda")
    assert isinstance(chosen.backend, StorageBackend)
    assert chosen.why == (
        "memory: storage, because torch-memory-saver is not installed: pip install 'actor-lifecycle[cuda]'"
    )


@without_cuda
def test_without_a_driver():
    """Without a CUDA driver the saver's OSError is ours, says what it needs, and leaves its settings as they were."""
    import torch_memory_saver

    with pytest.raises(SaverUnusable, match=r"libcuda.*memory='storage'"):
        choose("torch_memory_saver", "cuda")
    with pytest.raises(SaverUnusable), lifecycle.region("weights", memory="torch_memory_saver"):
        pass
    assert torch_memory_saver.torch_memory_saver._impl_ctor_kwargs == {}
    assert "because the memory saver does not start" in choose("auto", "cuda").why


@without_cuda
def test_a_wrong_preload(monkeypatch):
    """The saver's AssertionError over LD_PRELOAD is ours."""
    monkeypatch.setenv("LD_PRELOAD", "/a/torch_memory_saver.so:/b/torch_memory_saver.so")

    with pytest.raises(SaverUnusable, match="hook mode 'preload'"):
        saver.ledger()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_expandable_segments_in_the_environment(monkeypatch, name):
    """Expandable segments are refused by the name of the variable, with the fix, in any spelling torch takes."""
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")

    with pytest.raises(SaverUnusable, match=rf"{name}.*expandable_segments.*False"):
        hook_modes.refuse_allocator()

    monkeypatch.setenv(name, "expandable_segments:False")
    hook_modes.refuse_allocator()


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell its settings"
)
def test_expandable_segments_set_later():
    """Set in the running process they are refused too."""
    code = (
        "import torch\nfrom lifecycle.memory import hook_modes\n"
        "torch._C._accelerator_setAllocatorSettings('expandable_segments:True')\n"
        "try: hook_modes.refuse_allocator()\n"
        "except hook_modes.SaverUnusable as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert "of this process" in done.stdout


def test_choices_without_cuda():
    """On the CPU "auto" is the arena, on other accelerators storage; what was asked for is given; a wrong name told."""
    assert choose("auto", "cpu").why == "memory: arena, because the tensors are on the CPU"
    assert choose("auto", "xpu").why == "memory: storage, because the tensors are on xpu"
    assert choose("storage", "cuda").why == "memory: storage, as asked"
    own = ArenaBackend()
    assert choose(own, "cpu").backend is own
    with pytest.raises(ValueError, match="torch_memory_saver"):
        choose("pinned", "cpu")


@without_cuda
def test_regions_without_cuda():
    """Without CUDA a region checks its name alone, and nests no more than it would there."""
    with lifecycle.region("optimizer", actor="ref") as entered:
        assert entered is Region.OPTIMIZER
        with pytest.raises(TransitionRefused, match="do not nest"), lifecycle.region("weights"):
            pass
    with lifecycle.region("weights", memory="storage"):
        pass
    with pytest.raises(ValueError, match="no pool"), lifecycle.region("workspaces"):
        pass
    with pytest.raises(ValueError, match="known are"), lifecycle.region("weights", memory="gpu"):
        pass
