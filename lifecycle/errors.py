"""Every error of this library.

LifecycleError
├── TransitionRefused      the table does not allow this here; nothing was done
│   ├── UnknownTag         no such tag (also a KeyError)
│   ├── Faulted            half-done and not undone: only recover() and close() are left
│   └── NoRoom             a pool of the memory saver does not fit (also a MemoryError)
├── NoReadableCopy         no complete, valid copy of what was asked for
├── EffectFailed           an effect raised; rolled_back says whether everything is as it was
├── ManifestError          the model is not what was attached, or not wholly owned (also a ValueError)
├── UntrackedChange        weights changed behind the controller's back
├── VerificationFailed     bytes are not what their version says
├── NotBroughtBack         a close would end without weights of the actor
├── RanksDisagree          ranks would take different ways
├── SyncFailed             at least one engine did not take the version
├── EngineError            a rollout engine refused, failed or died
├── MoveStopped            a move of actor and engines stopped half-way; it says where everything is
├── WorkspacesLeft         workspaces that a sleep was to drop could not be dropped
├── SaverUnusable          the memory saver can not work in this process
├── MissingExtra           an optional package is not installed (also an ImportError)
├── MissingProgram         diagrams as images need a program that is not installed
├── SpinMissing            `lifecycle check --spin` needs programs that are not installed
└── SpinFailed             Spin or the C compiler did not do its work

Those that only one part of the library raises are defined there: NoRoom in ``lifecycle.memory.room``, SaverUnusable in
``lifecycle.memory.hook_modes``, WorkspacesLeft in ``lifecycle.workspaces``, MissingProgram in
``lifecycle.render.images``, SpinMissing and SpinFailed in ``lifecycle.checker.spin``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class LifecycleError(Exception):
    """Base of every error raised by this library on purpose."""


class TransitionRefused(LifecycleError):
    """The event or operation is not allowed here. The state and all bytes are what they were.

    Attributes: ``event``, ``state`` (as text), ``allowed`` (names of what is allowed there), ``reason``, ``advice``.
    """

    def __init__(self, event: str, state: str, allowed: Iterable[str], reason: str, advice: str = "") -> None:
        self.event, self.state, self.allowed = event, state, tuple(allowed)
        self.reason, self.advice = reason, advice
        text = f"{event} refused in {state}: {reason}. Allowed here: {', '.join(self.allowed) or 'nothing'}."
        super().__init__(f"{text} {advice}".rstrip())


class UnknownTag(TransitionRefused, KeyError):
    """No such tag. ``tag`` and ``known`` say what was asked and what there is."""

    def __init__(self, event: str, state: str, tag: str, known: Iterable[str]) -> None:
        self.tag, self.known = tag, tuple(known)
        known_text = ", ".join(self.known)
        TransitionRefused.__init__(
            self,
            event,
            state,
            self.known,
            f"unknown tag {tag!r}",
            f"Declared tags: {known_text}; declare more with ActorLifecycle(tags=...).",
        )

    __str__ = Exception.__str__  # KeyError's would show the repr


class NoReadableCopy(LifecycleError):
    """No complete valid copy. Attributes: ``tag``, ``version``, ``copies`` (part name -> places seen)."""

    def __init__(self, tag: str, version: int, copies: Mapping[str, Sequence[str]], advice: str = "") -> None:
        self.tag, self.version, self.copies = tag, version, dict(copies)
        seen = "; ".join(f"{part}: {', '.join(places) or 'no copy'}" for part, places in self.copies.items())
        super().__init__(f"no readable copy of {tag!r} (version {version}): {seen}. {advice}".rstrip())


class EffectFailed(LifecycleError):
    """An effect raised. Attributes: ``event``, ``effect``, ``rolled_back``; the cause is ``__cause__``."""

    def __init__(self, event: str, effect: str, cause: BaseException, rolled_back: bool, state: str) -> None:
        self.event, self.effect, self.rolled_back, self.state = event, effect, rolled_back, state
        after = "everything is as it was" if rolled_back else "it could not be undone: call recover() or close()"
        super().__init__(f"{event}: effect {effect} failed ({type(cause).__name__}: {cause}); {after}. State: {state}.")


class Faulted(TransitionRefused):
    """The actor is FAULTED. ``effect`` is the effect that failed, ``lost`` the tags without any copy left."""

    def __init__(self, event: str, effect: str, lost: Iterable[str] = ()) -> None:
        self.effect, self.lost = effect, tuple(lost)
        reason = f"{effect} failed half-way and could not be undone"
        if self.lost:
            reason += f"; no copy is left of {', '.join(self.lost)}"
        advice = "recover() reads back what is there and restores the rest from surviving copies."
        super().__init__(event, f"FAULTED({effect})", ("recover", "close"), reason, advice)


class ManifestError(LifecycleError, ValueError):
    """The model or optimizer is not wholly owned, or changed structurally. ``problems`` lists every finding."""

    def __init__(self, what: str, problems: Iterable[str], advice: str = "") -> None:
        self.problems = tuple(problems)
        shown = "; ".join(self.problems[:10]) + ("; …" if len(self.problems) > 10 else "")
        super().__init__(f"{what}: {shown}. {advice}".rstrip())


class UntrackedChange(LifecycleError):
    """Weights changed outside a training phase and outside loading(). ``tag``, ``names`` say which."""

    def __init__(self, tag: str, version: int, names: Iterable[str], advice: str = "") -> None:
        self.tag, self.version, self.names = tag, version, tuple(names)
        shown = ", ".join(self.names[:5]) + (f" and {len(self.names) - 5} more" if len(self.names) > 5 else "")
        default = (
            "Call adopt() to make what the device holds now the tag's new version. Write weights inside training() or "
            "loading(tag), and use model.eval() outside phases where a forward changes buffers; or set "
            "on_untracked='adopt'."
        )
        super().__init__(
            f"the device no longer holds version {version} of {tag!r}: changed behind the controller's back: "
            f"{shown}. {advice or default}"
        )


class VerificationFailed(LifecycleError):
    """Bytes differ from their version. ``names``, ``expected`` and ``got`` (name -> fingerprint)."""

    def __init__(self, what: str, expected: Mapping[str, str], got: Mapping[str, str]) -> None:
        self.expected, self.got = dict(expected), dict(got)
        self.names = tuple(name for name in expected if expected[name] != got.get(name))
        first = self.names[0] if self.names else "?"
        super().__init__(
            f"{what}: {len(self.names)} tensor(s) differ from their version, first {first!r}: "
            f"expected {self.expected.get(first)}, got {self.got.get(first)}."
        )


class NotBroughtBack(LifecycleError):
    """A close would end without weights of the actor. ``slots`` maps each kind of them to why."""

    def __init__(self, slots: Mapping[str, str]) -> None:
        self.slots = dict(slots)
        told = "; ".join(f"{slot}: {why}" for slot, why in self.slots.items())
        super().__init__(
            f"weights of the actor can not be brought back ({told}). Mend that and close() again, or recover(); "
            "close(force=True) gives them up."
        )


class RanksDisagree(LifecycleError):
    """Ranks proposed different things. ``per_rank`` maps rank to what it said."""

    def __init__(self, per_rank: Mapping[int, Any]) -> None:
        self.per_rank = dict(per_rank)
        super().__init__("ranks disagree: " + "; ".join(f"rank {r}: {said}" for r, said in self.per_rank.items()))


class SyncFailed(LifecycleError):
    """A sync did not reach every engine; nothing was published. ``outcomes`` maps engine to what happened."""

    def __init__(self, version: int, outcomes: Mapping[str, str]) -> None:
        self.version, self.outcomes = version, dict(outcomes)
        told = "; ".join(f"{engine}: {outcome}" for engine, outcome in self.outcomes.items())
        super().__init__(
            f"sync of version {version} failed, nothing was published ({told}). Engines that saw a byte hold no "
            "version and stay paused until a later sync succeeds."
        )


class EngineError(LifecycleError):
    """A rollout engine refused, failed or died. ``engine`` and ``operation`` say which and what."""

    def __init__(self, engine: str, operation: str, reason: str) -> None:
        self.engine, self.operation, self.reason = engine, operation, reason
        super().__init__(f"rollout engine {engine}: {operation}: {reason}")


class MoveStopped(LifecycleError):
    """A move between actor and engines stopped half-way; what was done is done.

    Attributes: ``move``, ``step`` (what failed), ``outcomes`` (who failed -> how), ``state`` (where everything is, as
    text), ``advice``.
    """

    def __init__(self, move: str, step: str, outcomes: Mapping[str, str], state: str, advice: str) -> None:
        self.move, self.step, self.outcomes = move, step, dict(outcomes)
        self.state, self.advice = state, advice
        told = "; ".join(f"{name}: {outcome}" for name, outcome in self.outcomes.items())
        super().__init__(f"{move} stopped at {step} ({told}). State: {state}. {advice}")


class MissingExtra(LifecycleError, ImportError):
    """An optional package is missing. ``extra`` is what to install."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        self.feature, self.package, self.extra = feature, package, extra
        super().__init__(
            f"{feature} needs {package!r}: pip install 'actor-lifecycle[{extra}]', or in a clone '.[{extra}]'"
        )
