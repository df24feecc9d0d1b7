"""The doctor: each check over a tree, an environment or packages of the test's, and the command on this machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from lifecycle import LifecycleError
from lifecycle.doctor import device, host, saver, software, speed
from lifecycle.doctor.command import document, show
from lifecycle.doctor.examine import Machine, examine
from lifecycle.doctor.finding import Finding, Section, Status, in_words, worst
from lifecycle.doctor.packages import Package, installed
from lifecycle.memory import choose, pages

ROOT = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
OK, NOTE, WARNING, ERROR = Status
GIB = 1 << 30


def finder(**versions: str | Package):
    """Finds these distributions, and no others; an underscore in a name is a dash."""
    known = {name.replace("_", "-"): one for name, one in versions.items()}
    packages = {name: one if isinstance(one, Package) else Package(one) for name, one in known.items()}
    return packages.get


def torch_like(version="2.11.0+cu130", cuda="13.0", devices=(), told="") -> SimpleNamespace:
    """What the checks ask of torch, for a machine with these devices: (name, capability, free, total) or an error."""

    def is_available():
        if told:
            warnings.warn(told, UserWarning, stacklevel=1)
        return bool(devices)

    def properties(index):
        name, (major, minor), *_ = devices[index]
        return SimpleNamespace(name=name, major=major, minor=minor)

    def mem_get_info(index):
        *_, free, total = devices[index]
        if isinstance(free, Exception):
            raise free
        return free, total

    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=is_available,
            device_count=lambda: len(devices),
            get_device_properties=properties,
            mem_get_info=mem_get_info,
        ),
    )


def tree(root: Path, **files: str) -> Path:
    """Files below ``root``; ``__`` in a name is a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10, 9), ERROR), ((3, 11, 0), OK), ((3, 13, 5), OK), ((3, 14, 0), ERROR)]
)
def test_python(version, status):
    assert software.python(version).status is status


def test_what_is_supported_is_what_the_project_declares():
    """The versions that the checks name are those of pyproject.toml, and so are the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (first, below) = (".".join(map(str, v)) for v in (software.PYTHON_FROM, software.PYTHON_BELOW))
    extras = project["optional-dependencies"]

    assert project["requires-python"] == f">={first},<{below}"
    assert f"torch>={'.'.join(map(str, software.TORCH_FROM))}" in extras["torch"]
    for extra, (package, _) in software.EXTRAS.items():
        assert any(requirement.startswith(package) for requirement in extras[extra])


@pytest.mark.parametrize(
    ("find", "loaded", "gpus", "status", "told"),
    [
        (finder(), ModuleNotFoundError("torch"), 0, ERROR, "actor-lifecycle[torch]"),
        (finder(torch="2.11.0"), OSError("libcudart.so.13"), 1, ERROR, "libcudart.so.13"),
        (finder(torch="2.7.1"), torch_like("2.7.1"), 0, ERROR, "2.8"),
        (finder(torch="2.10.0"), torch_like("2.10.0"), 1, OK, "CUDA 13.0"),
        (finder(torch="2.13.0+cpu"), torch_like("2.13.0+cpu", None), 0, OK, "for the CPU"),
        (finder(torch="2.13.0+cpu"), torch_like("2.13.0+cpu", None), 2, ERROR, "2 NVIDIA GPU(s)"),
    ],
)
def test_torch(find, loaded, gpus, status, told):
    found = software.torch(find, loaded, gpus)

    assert found.status is status
    assert told in found.found + found.advice


@pytest.mark.parametrize(
    ("find", "status", "told"),
    [
        (finder(), OK, "not installed"),
        (finder(transformer_engine="2.20.2"), WARNING, "without every library"),
        (finder(transformer_engine="2.20.2", megatron_core="0.16.1"), ERROR, "import megatron.core"),
        (finder(transformer_engine="2.20.2", transformer_engine_cu13="2.20.2"), WARNING, "transformer-engine-torch"),
        (
            finder(transformer_engine="2.20.2", transformer_engine_cu13="2.20.2", transformer_engine_torch="2.20.2"),
            OK,
            "with its libraries",
        ),
        (
            finder(transformer_engine=Package("2.20.0", files=("transformer_engine/te.so",)), megatron_core="0.16.1"),
            OK,
            "with its libraries",
        ),
    ],
)
def test_transformer_engine(find, status, told):
    """The empty distribution is told from one with libraries, by metadata alone."""
    found = software.transformer_engine(find)

    assert found.status is status
    assert told in found.found


@pytest.mark.parametrize(
    ("requirement", "torch", "status"),
    [
        ("torch==2.11.0", "2.11.0+cu130", OK),
        ("torch (==2.11.0)", "2.13.0+cpu", WARNING),
        ("torch==2.8.0; python_version < '4'", "2.13.0", WARNING),
        ("torch", "2.13.0", OK),
        ("torchdata==0.1", "2.13.0", OK),
    ],
)
def test_torchvision(requirement, torch, status):
    """What it was built for is what it requires."""
    find = finder(torchvision=Package("0.26.0", (requirement, "numpy")), torch=torch)

    assert software.torchvision(find).status is status
    assert software.torchvision(finder(torch=torch)).status is OK


def test_packages_and_programs():
    """What is missing is named with what brings it."""
    assert [one.status for one in software.needed(finder(numpy="2.4"))] == [OK, ERROR]
    assert software.triton(finder(), cuda=True).status is WARNING
    assert software.triton(finder(), cuda=False).status is NOTE
    assert software.triton(finder(pytorch_triton="3.6"), cuda=True).status is OK
    advice = [one.advice for one in software.extras(finder(transformers="5.0"))]
    assert advice[0] == ""
    assert "actor-lifecycle[diagrams]" in advice[1]
    assert software.program("dot", "/usr/bin/dot").status is OK
    assert "apt install graphviz" in software.program("dot", None).advice


def test_metadata_of_what_is_installed():
    """The finder that is used in earnest."""
    found = installed("attrs")

    assert found is not None
    assert found.release >= (24, 2)
    assert any(path.endswith("attr/__init__.py") for path in found.files)
    assert installed("no-such-distribution-anywhere") is None


SAVER_FILES = ("torch_memory_saver/utils.py", "torch_memory_saver_hook_mode_torch_cu13.abi3.so")


@pytest.mark.parametrize(
    ("find", "cuda", "status"),
    [
        (finder(), None, NOTE),
        (finder(), "13.0", WARNING),
        (finder(torch_memory_saver=Package("0.0.10", files=SAVER_FILES)), "13.0", OK),
        (finder(torch_memory_saver=Package("0.0.10", files=SAVER_FILES)), "12.8", ERROR),
        (finder(torch_memory_saver=Package("0.0.9.post1", files=SAVER_FILES)), "13.0", WARNING),
    ],
)
def test_memory_saver(find, cuda, status):
    assert saver.package(find, cuda).status is status


LIBRARY = "/site/torch_memory_saver_hook_mode_preload_cu13.abi3.so"


@pytest.mark.parametrize(
    ("preload", "there", "status", "told"),
    [
        (None, True, OK, "torch"),
        ("/usr/lib/libjemalloc.so", True, OK, "torch"),
        (LIBRARY, True, OK, "preload"),
        (f"/usr/lib/libjemalloc.so:{LIBRARY}", True, OK, "preload"),
        (f"{LIBRARY}:{LIBRARY}", True, ERROR, "2 times"),
        (f"{LIBRARY} {LIBRARY}", True, ERROR, "2 times"),
        (LIBRARY, False, ERROR, "not there"),
        (LIBRARY.replace("cu13", "cu12"), True, ERROR, "torch is for CUDA 13.0"),
    ],
)
def test_hook_mode(preload, there, status, told):
    environment = {} if preload is None else {"LD_PRELOAD": preload}
    found = saver.hook_mode(environment, "13.0", exists=lambda path: there)

    assert found.status is status
    assert told in found.found


def test_switches_of_the_saver():
    """Nothing set is no finding; its own backup doubles ours; an empty value ends the process."""
    assert list(saver.switches({})) == []
    assert list(saver.switches({"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "0"})) == []
    (doubled,) = saver.switches({"TMS_INIT_ENABLE_CPU_BACKUP": "1"})
    assert doubled.status is WARNING
    (ends,) = saver.switches({"TMS_INIT_ENABLE": ""})
    assert ends.status is ERROR


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocator_settings(name):
    """Expandable segments are found where there is a GPU, whatever else is set and however it is written."""
    on = {name: "max_split_size_mb:64, expandable_segments : True"}

    assert saver.allocator(on, cuda=True).status is WARNING
    assert name in saver.allocator(on, cuda=True).advice
    assert saver.allocator(on, cuda=False).status is NOTE
    assert saver.allocator({name: "expandable_segments:False"}, cuda=True).status is OK
    assert saver.allocator({name: "backend:cudaMallocAsync"}, cuda=True).status is WARNING
    assert saver.allocator({}, cuda=True).status is OK


@pytest.mark.parametrize(
    ("enabled", "status"),
    [("always [madvise] never", OK), ("[always] madvise never", OK), ("always madvise [never]", WARNING), (None, NOTE)],
)
def test_huge_pages(tmp_path, enabled, status):
    if enabled is not None:
        tree(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=enabled)

    assert host.huge_pages(tmp_path).status is status


@pytest.mark.parametrize(
    ("enabled", "status"),
    [
        ("always within_size [advise] never deny force", OK),
        ("always within_size advise [never] deny force", NOTE),
        ("always within_size advise never [deny] force", NOTE),
        (None, NOTE),
    ],
)
def test_shared_huge_pages(tmp_path, enabled, status):
    if enabled is not None:
        tree(tmp_path, sys__kernel__mm__transparent_hugepage__shmem_enabled=enabled)

    assert host.shared_huge_pages(tmp_path).status is status


def test_old_cgroups(tmp_path):
    """A limit of version 1 on the group or on its mount is told; the huge number that means none is not."""
    assert host.old_cgroups(tmp_path) is None
    tree(tmp_path, proc__self__cgroup="4:cpu,memory:/job/one\n0::/\n")
    assert host.old_cgroups(tmp_path) is None
    group = tmp_path / "sys/fs/cgroup/memory/job/one"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert host.old_cgroups(tmp_path) is None
    (group.parents[1] / "memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
    limited = host.old_cgroups(tmp_path)
    assert limited is not None
    assert "3.0 GiB" in limited.found


def test_nodes(tmp_path):
    """No tree at all is one node."""
    assert host.nodes(tmp_path).found == "1"
    for number in range(2):
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    assert host.nodes(tmp_path).status is NOTE
    assert host.nodes(tmp_path).found == "2"


def test_limits():
    assert host.locked_memory(-1).status is OK
    assert "8 MiB" in host.locked_memory(8 << 20).found
    assert host.memory(100 * GIB).status is OK
    assert host.memory(GIB // 2).status is WARNING
    assert "psutil" in host.memory(ImportError("No module named 'psutil'")).found
    assert host.cores(16, 16).status is OK
    assert host.cores(16, 2).found == "16, 2 of them fill host memory"
    assert host.cores(16, 2).status is NOTE
    assert host.shared_memory(64 << 20).status is NOTE
    assert host.shared_memory(None).status is NOTE
    assert host.shared_memory(16 * GIB).status is OK
    assert host.memfd(None).status is OK
    assert host.memfd(OSError(38, "Function not implemented")).status is WARNING


def test_gpus_and_driver(tmp_path):
    """Devices are counted without the control files beside them; the version is told in two places."""
    assert host.gpus(tmp_path) == 0
    assert host.driver(tmp_path) is None
    tree(tmp_path, dev__nvidia0="", dev__nvidia11="", dev__nvidiactl="")
    assert host.gpus(tmp_path) == 2
    told = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12\n"
    tree(tmp_path, proc__driver__nvidia__version=told)
    assert host.driver(tmp_path) == "580.159.04"
    tree(tmp_path, sys__module__nvidia__version="590.1\n")
    assert host.driver(tmp_path) == "590.1"


@pytest.mark.parametrize(
    ("one", "status", "told"),
    [
        (("H200", (9, 0), 130 * GIB, 139 * GIB), OK, "130.0 GiB of 139.0 GiB free"),
        (("H200", (9, 0), 30 * GIB, 139 * GIB), NOTE, "30.0 GiB"),
        (("P100", (6, 0), 15 * GIB, 16 * GIB), WARNING, "6.0"),
        (("H200", (9, 0), RuntimeError("CUDA error: busy\nmore"), 0), ERROR, "CUDA error: busy"),
    ],
)
def test_devices(one, status, told):
    driver, found = device.devices(torch_like(devices=[one]), 1, "580.1")

    assert driver.found == "580.1"
    assert found.status is status
    assert told in found.found


def test_a_gpu_that_torch_can_not_use():
    """The warning that torch gives is in the finding, and is no warning of ours."""
    told = "CUDA initialization: the NVIDIA driver on your system is too old\nPlease update"
    (found,) = device.devices(torch_like(told=told), 2, "470.1")

    assert found.status is ERROR
    assert "too old" in found.found
    assert "470.1" in found.advice
    (none,) = device.devices(torch_like(cuda=None), 0, None)
    assert none.status is NOTE


def test_examining_a_machine_without_torch(tmp_path):
    """Everything else is looked at all the same."""
    machine = Machine(ModuleNotFoundError("No module named 'torch'"), tmp_path, {"PATH": ""}, finder(attrs="26.1.0"))
    sections = examine(machine)
    found = {one.name: one for section in sections for one in section.findings}

    assert found["torch"].status is ERROR
    assert found["dot"].status is NOTE
    assert found["huge pages"].status is NOTE
    assert found["host='auto'"].status is OK
    assert "CUDA" not in found
    assert worst(sections) is ERROR


def test_what_auto_is():
    """The real choice for the CPU, and the store of this system."""
    assert device.backend("cpu") == Finding("memory='auto'", OK, "arena, because the tensors are on the CPU")
    assert device.host_store("cpu").found == ("shared" if sys.platform == "linux" else "pinned")


@pytest.mark.parametrize(
    ("pages_are", "found"), [("never", "pinned, as shared memory has no huge pages here"), ("advise", "shared")]
)
def test_what_auto_is_for_host_memory_beside_a_gpu(monkeypatch, pages_are, found):
    """Shared memory where the system has huge pages for it, which depends on the machine: here on what it is told."""
    monkeypatch.setattr(pages, "huge_pages", lambda kind: pages_are)

    assert device.host_store("cuda").found == found


def choosing(monkeypatch, backend: str, why: str) -> None:
    """Let the choice for a GPU be this one: the real one would start the memory saver in this process."""
    choice = choose.Choice(SimpleNamespace(name=backend), why)
    monkeypatch.setattr(choose, "choose", lambda memory, device_type, name: choice)


def test_what_auto_is_on_a_gpu(monkeypatch):
    """Storage is less than a GPU could do, and its reason is told; a refusal is an error."""
    choosing(monkeypatch, "torch_memory_saver", "memory: torch_memory_saver 0.0.10, hook mode torch")
    assert device.backend("cuda") == Finding("memory='auto'", OK, "torch_memory_saver 0.0.10, hook mode torch")
    choosing(monkeypatch, "storage", "memory: storage, because expandable segments are on")
    assert device.backend("cuda").status is WARNING
    assert "expandable segments are on" in device.backend("cuda").found

    def refuse(memory, device_type, name):
        raise LifecycleError("no way")

    monkeypatch.setattr(choose, "choose", refuse)
    assert device.backend("cuda").status is ERROR


def test_examining_a_machine_with_a_gpu(tmp_path, monkeypatch):
    """What torch sees decides what is missing: the same packages are enough on a CPU."""
    choosing(monkeypatch, "storage", "memory: storage, because the saver is not installed")
    tree(tmp_path, dev__nvidia0="")
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "LOCAL_WORLD_SIZE": "100000", "TMS_INIT_ENABLE": ""}
    find = finder(torch="2.11.0", numpy="2.4", psutil="7")
    machine = Machine(torch_like(devices=[("H200", (9, 0), 130 * GIB, 139 * GIB)]), tmp_path, conf, find)
    found = {one.name: one for section in examine(machine) for one in section.findings}

    assert found["torch-memory-saver"].status is WARNING
    assert found["allocator"].status is WARNING
    assert found["triton"].status is WARNING
    assert found["cuda:0"].status is OK
    assert "1 of them" in found["cores"].found
    assert found["TMS_INIT_ENABLE"].status is ERROR


def test_gravest_status():
    """Nothing, and each in turn."""
    assert worst([]) is OK
    for most in Status:
        statuses = [one for one in Status if list(Status).index(one) <= list(Status).index(most)]
        assert worst([Section("s", tuple(Finding("n", one, "f") for one in statuses))]) is most


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (8 << 20, "8 MiB"), (GIB, "1.0 GiB"), (1 << 42, "4096.0 GiB")],
)
def test_bytes_in_words(nbytes, words):
    assert in_words(nbytes) == words


def test_speeds_of_this_machine():
    """Memory is really filled, copied and fingerprinted: each speed is a number of its unit, and was announced."""
    import torch

    told: list[str] = []
    section = speed.measure(torch, False, told.append)

    assert [one.name for one in section.findings] == [*told[:2], "fingerprint on cpu"]
    assert all(one.status is OK and one.value is not None and one.value > 0 for one in section.findings)
    assert all(one.found == f"{one.value:.1f} GB/s" and one.unit == "GB/s" for one in section.findings)


def test_what_can_not_be_measured_says_why(monkeypatch):
    """A machine without room for it gets a finding, not a traceback."""

    def refuse(memory):
        raise MemoryError("no room")

    monkeypatch.setattr(speed.pages, "populate", refuse)
    section = speed.measure(ImportError("torch"), False, lambda what: None)

    assert [one.status for one in section.findings] == [WARNING, WARNING]
    assert "no room" in section.findings[0].found


def test_table_shows_every_finding():
    """Names, advice and brackets come through as they are; the line below counts and judges."""
    sections = [
        Section("a [section]", (Finding("one", ERROR, "[red]", "pip install 'x[cuda]'"), Finding("two", OK, "yes")))
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    show(sections, console)
    text = console.export_text()

    assert all(word in text for word in ("a [section]", "one", "[red]", "pip install 'x[cuda]'", "two", "yes"))
    assert "error: 1, ok: 1. It will not work well here" in text


def test_document_is_plain():
    sections = [Section("host", (Finding("one", NOTE, "found", "do", 1.5, "GB/s"),))]
    plain = {"name": "one", "status": "note", "found": "found", "advice": "do", "value": 1.5, "unit": "GB/s"}

    assert json.loads(json.dumps(document(sections))) == {"status": "note", "sections": {"host": [plain]}}


def doctor(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m lifecycle doctor ARGUMENTS``, in a process whose ``code`` runs first."""
    program = f"import runpy, sys\n{code}\nrunpy.run_module('lifecycle', run_name='__main__', alter_sys=True)"
    own = {**os.environ, "PYTHONPATH": PYTHONPATH, "NO_COLOR": "1", **environment}
    command = [sys.executable, "-c", program, "doctor", *arguments]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=False)


def test_command_on_this_machine():
    """The real command: a table on standard output, progress on standard error, speeds among the findings."""
    done = doctor()

    assert "lifecycle doctor" in done.stdout, done.stderr
    assert "copying in host memory" in done.stdout
    assert "GB/s" in done.stdout
    assert "filling host memory …" in done.stderr


def test_command_for_programs():
    """--json is one document; the exit status is its status; --no-measure measures nothing."""
    done = doctor("--json", "--no-measure")
    told = json.loads(done.stdout)

    assert done.returncode == (told["status"] == "error"), done.stderr
    assert list(told["sections"]) == ["software", "memory saver", "host", "devices"]
    assert "…" not in done.stderr


def test_command_without_torch():
    """On a machine without torch the command runs, says what to install, and exits with 1."""
    code = (
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'psutil', 'numpy'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    done = doctor("--json", code=code)
    sections = json.loads(done.stdout)["sections"]

    assert done.returncode == 1
    (torch,) = [one for one in sections["software"] if one["name"] == "torch"]
    assert torch["status"] == "error"
    assert "No module named 'torch'" in torch["found"]
    assert [one["name"] for one in sections["speed"]] == ["filling host memory", "copying in host memory"]


def test_command_leaves_packages_alone():
    """No package that may break an import is imported to be looked at."""
    names = ("transformer_engine", "torchvision", "transformers", "graphviz")
    told = f"print('imported:', [name for name in {names} if name in sys.modules], file=sys.stderr)"
    code = f"import atexit; atexit.register(lambda: {told})"
    done = doctor("--json", "--no-measure", code=code)

    assert json.loads(done.stdout)
    assert "imported: []" in done.stderr


def test_usage():
    assert doctor("--measure=maybe").returncode == 2
