"""``python -m lifecycle.render.generate [--check]``: all pictures and reference pages of the declared machines.

The texts (dot, Mermaid, Markdown) are the same on every machine and are compared; an SVG depends on the fonts and on
the version of Graphviz, so it is drawn again but not compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from lifecycle.render.declared import JOINT, TAGS, declared, layout_of
from lifecycle.render.draw import draw, draw_joint
from lifecycle.render.extract import extract
from lifecycle.render.joint import extract_joint
from lifecycle.render.options import Detail, Format
from lifecycle.render.reference import COMMAND, index, reference

TEXTS = {Format.DOT: "dot", Format.MERMAID: "mmd", Format.MARKDOWN: "md"}
DIAGRAMS, REFERENCE = Path("diagrams"), Path("docs/reference")


def texts() -> dict[Path, str]:
    """Every generated text by its path from the root of the project."""
    made: dict[Path, str] = {}
    specs = declared()
    for name, spec in specs.items():
        for detail in Detail:
            diagram = extract(spec, detail, TAGS.get(name, ()))
            for kind, ending in TEXTS.items():
                made[DIAGRAMS / f"{name}-{detail}.{ending}"] = draw(diagram, kind, layout_of(name, detail)).decode()
        for page, text in reference(spec).items():
            made[REFERENCE / name / page] = text
    for name, together in JOINT.items():
        for kind, ending in TEXTS.items():
            made[DIAGRAMS / f"{name}.{ending}"] = draw_joint(extract_joint(together), kind).decode()
    made[REFERENCE / "README.md"] = index(specs, JOINT)
    return made


def images() -> dict[Path, bytes]:
    """Every generated picture by its path from the root of the project."""
    joint = {
        DIAGRAMS / f"{name}.svg": draw_joint(extract_joint(together), Format.SVG) for name, together in JOINT.items()
    }
    return joint | {
        DIAGRAMS / f"{name}-{detail}.svg": draw(
            extract(spec, detail, TAGS.get(name, ())), Format.SVG, layout_of(name, detail)
        )
        for name, spec in declared().items()
        for detail in Detail
    }


def differences(root: Path) -> list[str]:
    """What in the project is not what would be generated now, one line each."""
    made = texts()
    pictures = {path.with_suffix(".svg") for path in made if path.suffix == ".dot"}
    found = []
    for path, text in made.items():
        there = root / path
        if not there.is_file():
            found.append(f"{path} is missing")
        elif there.read_text(encoding="utf-8") != text:
            found.append(f"{path} differs")
    found += [f"{path} is missing" for path in sorted(pictures) if not (root / path).is_file()]
    known = {root / path for path in (*made, *pictures)}
    there_now = (path for folder in (DIAGRAMS, REFERENCE) for path in (root / folder).rglob("*") if path.is_file())
    found += [f"{path.relative_to(root)} is of no declared machine" for path in sorted(there_now) if path not in known]
    return found


def write(root: Path) -> None:
    """Writes all of it."""
    for path, content in (*((path, text.encode()) for path, text in texts().items()), *images().items()):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def main(arguments: Iterable[str]) -> int:
    root = Path.cwd()
    if "--check" not in arguments:
        write(root)
        return 0
    found = differences(root)
    for line in found:
        print(line)
    if found:
        print(f"run: {COMMAND}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
