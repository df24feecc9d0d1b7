"""Find a machine that somebody declared: ``package.module:NAME`` or ``folder/file.py:NAME``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from states.spec import DefinitionError, MachineSpec

#: The machines of this project, by the name under which commands know them.
DECLARED = {
    "actor": "states.actor:ACTOR",
    "frozen": "states.frozen:FROZEN",
    "rollout": "states.rollout:ROLLOUT",
}


def find_machine(text: str) -> MachineSpec:
    """A declared machine by its name, or somebody's as MODULE:NAME, itself or in a Model. Raises ValueError."""
    from lifecycle.checker.ground import Model  # the checker loads machines too

    if ":" not in text and text not in DECLARED:
        raise ValueError(f"no machine {text!r}: write {', '.join(DECLARED)}, or MODULE:NAME for one of your own")
    found = load(DECLARED.get(text, text), (MachineSpec, Model))
    if isinstance(found, Model):
        return found.spec
    assert isinstance(found, MachineSpec)
    return found


def load_machine(text: str) -> MachineSpec:
    """The machine that the text names. Raises ValueError saying which half of it is wrong."""
    found = load(text, (MachineSpec,))
    assert isinstance(found, MachineSpec)
    return found


def load(text: str, kinds: tuple[type, ...]) -> object:
    """What the text names, which is of one of these kinds. Raises ValueError saying which half of it is wrong.

    Modules are looked for in the current directory first. Loading one runs it.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"{text!r} names no machine: write MODULE:NAME or FILE.py:NAME, such as states.actor:ACTOR")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if isinstance(value, kinds)]
        raise ValueError(f"{where} has no {name!r}; machines there: {', '.join(known) or 'none'}")
    if not isinstance(found, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{text} is a {type(found).__name__}, not a {wanted}")
    return found


def _from_name(name: str) -> ModuleType:
    with _current_directory_first():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise ValueError(f"{name} can not be imported: {error}") from error
            raise ValueError(f"no module {name!r} here or installed") from error
        except DefinitionError:
            raise
        except Exception as error:
            raise ValueError(f"{name} can not be imported: {_where(error)}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no file {path}")
    name = f"machine_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # attrs looks its module up while a class is made
    with _current_directory_first():
        try:
            spec.loader.exec_module(module)
        except DefinitionError:
            del sys.modules[name]
            raise
        except Exception as error:
            del sys.modules[name]
            raise ValueError(f"{path} can not be imported: {_where(error)}") from error
    return module


def _where(error: Exception) -> str:
    """What was raised, and in which line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


@contextmanager
def _current_directory_first() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
