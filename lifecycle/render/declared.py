"""The machines that this project declares, by name, and how their pictures are laid out."""

from __future__ import annotations

from lifecycle.load import DECLARED, load_machine
from lifecycle.render.dot import Layout
from lifecycle.render.options import Detail
from states.joint import COLOCATED, JointSpec
from states.spec import MachineSpec

#: Machines that run together, by the name of their picture.
JOINT: dict[str, JointSpec] = {"joint": COLOCATED}
#: Tags with which the pictures of this project are drawn: those that trainers declare.
TAGS: dict[str, tuple[str, ...]] = {"actor": ("ref", "old_actor")}

# Chosen among many by counting arrows that cross each other, or a text: the fewest that stay legible on A4.
_FROZEN = Layout(0.2, 0.25, together=False, order=("RESIDENT", "FAULTED", "SYNCING", "ASLEEP", "CLOSED"))
_LAYOUTS: dict[tuple[str, Detail], Layout] = {
    ("actor", Detail.STATES): Layout(
        0.18, 0.25, order=("RESIDENT", "FAULTED", "SYNCING", "SWITCHED", "ASLEEP", "CLOSED")
    ),
    ("actor", Detail.EFFECTS): Layout(
        0.14, 0.3, ends_last=False, order=("RESIDENT", "SYNCING", "FAULTED", "ASLEEP", "SWITCHED", "CLOSED")
    ),
    ("actor", Detail.CONTRACTS): Layout(
        0.18, 0.2, ends_last=False, order=("RESIDENT", "SYNCING", "FAULTED", "CLOSED", "ASLEEP", "SWITCHED")
    ),
    **{("frozen", detail): _FROZEN for detail in Detail},
    ("rollout", Detail.STATES): Layout(
        0.18, 0.25, ends_last=False, order=("AWAKE", "ASLEEP", "UPDATING", "PAUSED", "STOPPED")
    ),
    ("rollout", Detail.EFFECTS): Layout(
        0.25, 0.3, ends_last=False, order=("AWAKE", "UPDATING", "PAUSED", "ASLEEP", "STOPPED")
    ),
    ("rollout", Detail.CONTRACTS): Layout(
        0.16, 0.2, ends_last=False, order=("AWAKE", "ASLEEP", "UPDATING", "PAUSED", "STOPPED")
    ),
}


def declared() -> dict[str, MachineSpec]:
    """Every machine of this project, by the name under which commands know it."""
    return {name: load_machine(where) for name, where in DECLARED.items()}


def layout_of(name: str, detail: Detail) -> Layout:
    """How the machine's picture is laid out; for a machine nobody has looked at, by a default."""
    return _LAYOUTS.get((name, detail), Layout())
