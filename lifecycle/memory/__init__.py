"""Memory backends: who owns the device's bytes, and how they are released and taken back."""

from __future__ import annotations


def environment(hook_mode: str = "preload") -> dict[str, str]:
    """Environment variables for a process that is to use the memory saver: a Ray runtime env's, or a subprocess's.

    See ``lifecycle.memory.hook_modes.environment``.
    """
    from lifecycle.memory import hook_modes

    return hook_modes.environment(hook_mode)
