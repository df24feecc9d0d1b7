"""Workspaces: device memory that a sleep drops instead of copying. ``docs/workspaces.md`` lists what is known."""

from __future__ import annotations

from lifecycle.workspaces.registry import (
    Dropped,
    Dropper,
    Workspace,
    Workspaces,
    WorkspacesLeft,
    register,
    unregister,
)

__all__ = ["Dropped", "Dropper", "Workspace", "Workspaces", "WorkspacesLeft", "register", "unregister"]
