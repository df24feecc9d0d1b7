"""What tests of fingerprints compare with."""

from __future__ import annotations

import torch

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def reference(data: bytes) -> str:
    """The definition, in plain integer arithmetic."""
    padded = data + bytes(-len(data) % 8)
    words = (int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8))
    return f"{sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64:016x}"


def logical_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.tensor(list(data), dtype=torch.uint8)
    return raw.bool() if dtype is torch.bool else raw.view(dtype)


def random_bytes(count: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """uint8 of shape (count,)."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device, generator=generator)
