"""The Triton kernel's arithmetic and its table, on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from lifecycle.fingerprint import KERNEL_CHUNK_BYTES, chunks_of

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# In a process of its own: Triton decides when a kernel is defined whether it is interpreted.
PROGRAM = """
import torch
from fingerprint_help import random_bytes
from lifecycle import fingerprint, fingerprint_triton as kernel
from lifecycle.fingerprint import MASK, combined, partial

def sums(pieces):
    table = kernel.table([(p.data_ptr(), p.nbytes, first // 8) for p, first in pieces], torch.device("cpu"))
    totals = torch.zeros(table.count, dtype=torch.int64)
    kernel.launch(table.chunks, totals)
    return [total & MASK for total in totals.tolist()]

fingerprint.KERNEL_CHUNK_BYTES = 5 * 8 * kernel.BLOCK
assert kernel.INTERPRETED
chunk, block = fingerprint.KERNEL_CHUNK_BYTES, 8 * kernel.BLOCK
raw = random_bytes(3 * chunk + 64)
raw[0:4096] = 255
starts = (0, 8)  # one of them is no multiple of 16
assert sorted((raw.data_ptr() + start) % 16 for start in starts) == [0, 8]
sizes = (0, 1, 7, 8, 9, 15, 16, 17, block - 1, block, block + 8, block + 13, chunk - 8, chunk, chunk + 8, 3 * chunk + 5)
whole = [(raw[start : start + size], 0) for start in starts for size in sizes]
assert [combined([total]) for total in sums(whole)] == [fingerprint.fingerprint(tensor) for tensor, _ in whole]

far = 24 << 30  # word numbers beyond 32 bits
pieces = [(raw[:1000], far), (raw[8:chunk], 8)]
assert sums(pieces) == [partial(*piece) for piece in pieces]
print("equal")
"""


@needs_triton
def test_kernel_equals_torch_in_the_interpreter():
    """Every length around words, blocks and chunks, both alignments, far offsets: the kernel's sums are torch's."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)

    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("the interpreter of this Triton does not work with this NumPy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


@pytest.mark.parametrize("address", [4096, 4104])
@pytest.mark.parametrize("nbytes", [0, 3, 8, 11, 512 << 10, (512 << 10) + 1, (5 << 30) + 12])
def test_chunks_cover_every_byte_once(address: int, nbytes: int):
    """A tensor's chunks follow each other; all but a first of one word begin at a multiple of 16."""
    found = chunks_of(address, nbytes, 7, 3).tolist()

    ends = [address, *(start + size for start, size, _, _ in found)]
    assert [start for start, *_ in found] == ends[:-1]
    assert ends[-1] == address + nbytes
    assert all(start % 16 == 0 or size <= 8 for start, size, _, _ in found)
    assert all(first == 7 + (start - address) // 8 and size <= KERNEL_CHUNK_BYTES for start, size, first, _ in found)
    assert {row[3] for row in found} == {3}


def test_without_triton_torch_sums():
    """Where Triton can not be imported the kernel is not used, and the reason is told."""
    done = kernel_problem("sys.modules['triton'] = None")

    assert done.stdout.startswith("Triton can not be imported: "), done.stderr
    assert not done.stderr


@needs_triton
@pytest.mark.parametrize(("interpreted", "reason"), [("0", ""), ("1", "TRITON_INTERPRET is set")])
def test_a_kernel_that_can_not_run_warns_once(interpreted: str, reason: str):
    """Triton is there and its kernel can not run, for want of a device or by a setting: it says why."""
    done = kernel_problem(f"import os; os.environ['TRITON_INTERPRET'] = '{interpreted}'")

    assert done.stdout.startswith("Triton could not run the kernel: "), done.stderr
    assert reason in done.stdout
    assert done.stderr.count("UserWarning: fingerprints on cuda:61 take two passes") == 1


def kernel_problem(before: str) -> subprocess.CompletedProcess:
    program = f"import sys, torch; {before}\nfrom lifecycle.fingerprint import kernel_problem as problem\n"
    program += "device = torch.device('cuda', 61); print(problem(device)); problem(device)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
