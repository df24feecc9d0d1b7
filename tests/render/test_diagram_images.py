"""Images: readable in print, on light and on dark screens; and what happens where they can not be drawn."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from render_help import small_machine, small_trace

from lifecycle.render import palette
from lifecycle.render.declared import JOINT, declared
from lifecycle.render.dot import to_dot
from lifecycle.render.draw import diagram_of, draw
from lifecycle.render.extract import extract
from lifecycle.render.notebook import mimebundle, svg
from lifecycle.render.options import Detail, Format
from states.actor import ACTOR

ROOT = Path(__file__).parent.parent.parent
PICTURES = sorted((ROOT / "diagrams").glob("*.svg"))
A4 = (595.28, 841.89)  # points
SMALLEST = 6.5  # points that are still read in print

PROGRAM = """
import sys
{before}
from lifecycle.errors import LifecycleError, MissingExtra
from lifecycle.render.draw import diagram_of, draw
from lifecycle.render.options import Detail, Format
from lifecycle.render.notebook import mimebundle
from states.actor import ACTOR
diagram = diagram_of(ACTOR)
try:
    draw(diagram, Format.SVG)
except LifecycleError as error:
    print(type(error).__name__, error)
print(draw(diagram, Format.MERMAID).decode().count("flowchart"), sorted(mimebundle(ACTOR)))
"""
REFUSE = """
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "graphviz":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
"""


def test_every_declared_machine_has_its_pictures():
    """At every detail."""
    assert {path.stem for path in PICTURES} == {f"{name}-{detail}" for name in declared() for detail in Detail} | set(
        JOINT
    )


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_pictures_stay_legible_on_a4(path):
    """Scaled to the page, upright or lying, whichever is larger, the smallest letters are still large enough."""
    root = ElementTree.parse(path).getroot()
    width, height = (float(root.attrib[name].removesuffix("pt")) for name in ("width", "height"))
    scale = max(min(A4[0] / width, A4[1] / height), min(A4[1] / width, A4[0] / height))
    sizes = [float(e.attrib["font-size"]) for e in root.iter() if "font-size" in e.attrib]

    assert sizes
    assert min(sizes) * min(scale, 1) >= SMALLEST


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_every_colour_of_a_picture_has_a_dark_one(path):
    """What is drawn is drawn in the palette, so that the dark style reaches it."""
    text = path.read_text(encoding="utf-8")
    used = set(re.findall(r'(?:fill|stroke)="([^"]+)"', text)) - {"none", "transparent"}

    assert used <= set(palette.DARK)
    assert all("fill=" in text for text in re.findall(r"<text[^>]*>", text))
    assert palette.dark_style() in text


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_have_contrast(dark):
    """At least 4.5 to 1 on every ground that a text stands on."""
    seen = palette.DARK.get if dark else (lambda colour: colour)
    for ink in (palette.INK, palette.MUTED, palette.FADED, palette.BLUE, palette.VERMILLION, palette.GREEN):
        grounds = [palette.PAPER, palette.BOX]
        if ink in (palette.INK, palette.MUTED):
            grounds += [palette.MARKED, palette.FAULTY, palette.ENDED]
        for ground in grounds:
            assert palette.contrast(seen(ink), seen(ground)) >= 4.5, (ink, ground)


@pytest.mark.usefixtures("needs_dot")
def test_images_are_what_they_say():
    """By their first bytes."""
    diagram = extract(small_machine())

    assert draw(diagram, Format.PNG).startswith(b"\x89PNG")
    assert draw(diagram, Format.PDF).startswith(b"%PDF")
    assert ElementTree.fromstring(draw(diagram, Format.SVG)).tag.endswith("svg")


@pytest.mark.usefixtures("needs_dot")
@pytest.mark.parametrize("outcomes", [("done", "done", "stopped"), ("done", "undone"), ("fault",)])
def test_highlighted_paths_can_be_drawn(outcomes):
    """Graphviz takes them."""
    svg = draw(diagram_of(small_machine(), Detail.EFFECTS, trace=small_trace(*outcomes)), Format.SVG).decode()

    assert palette.VERMILLION in svg
    assert "✗ nothing is cut: it hurts" in svg.replace("&#160;", " ")


@pytest.mark.usefixtures("needs_dot")
def test_notebooks_get_a_picture_with_the_current_state():
    """SVG, and Mermaid for those that show no SVG."""
    bundle = mimebundle(ACTOR, ("ref",), current="SWITCHED(ref)")

    assert "● SWITCHED(ref)" in bundle["image/svg+xml"].replace("\xa0", " ")
    assert bundle["text/markdown"].startswith("```mermaid\n")
    assert svg(ACTOR, ("ref",), "SWITCHED(ref)") == bundle["image/svg+xml"]


def run(before: str, **environment: str) -> list[str]:
    program = PROGRAM.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_missing_program_is_named(tmp_path):
    """With an empty PATH the error says what to install, and Mermaid still works."""
    error, texts = run("", PATH=str(tmp_path))

    assert error.startswith("MissingProgram images need Graphviz's program 'dot'")
    assert "apt install graphviz" in error
    assert texts == "1 ['text/markdown']"


def test_a_missing_package_is_named(tmp_path):
    """Without the package the error names the extra, and Mermaid still works."""
    error, texts = run(REFUSE, PATH=str(tmp_path))

    told = "pip install 'actor-lifecycle[diagrams]', or in a clone '.[diagrams]'"
    assert error == f"MissingExtra drawing images needs 'graphviz': {told}"
    assert texts == "1 ['text/markdown']"


def test_dot_text_needs_no_colour_outside_the_palette():
    """Also where something is faded, current or broken."""
    diagram = diagram_of(small_machine(), Detail.CONTRACTS, current="OFF", trace=small_trace("done", "undone"))

    assert set(re.findall(r"#[0-9a-f]{6}", to_dot(diagram))) <= set(palette.DARK)
