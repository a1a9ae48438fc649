"""The demo's documents: the standard library as pydoc renders it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from examples.pydoc_pages import MODULES, clean, render

SCRIPT = Path(__file__).parents[3] / "examples" / "pydoc_pages.py"

RENDERED = """
NAME
    shapes - Things with corners.

MODULE REFERENCE
    https://docs.example/shapes.html

CLASSES
    class Square(Shape)
     |  Square(side=<object object at 0x7f0a12345678>)
     |  
     |  A shape with four sides.
     |  
     |  Method resolution order:
     |      Square
     |      Shape
     |  
     |  Methods defined here:
     |  
     |  area(self)
     |      Return the area.
     |  
     |  ----------------------------------------------------------------------
     |  Data descriptors defined here:
     |  
     |  __weakref__
     |      list of weak references to the object
     |  
     |  ----------------------------------------------------------------------
     |  Methods inherited from Shape:
     |  
     |  rotate(self)
    
    class Circle(Shape)
     |  Round.

FUNCTIONS
    draw(shape)
        Draw it.

DATA
    environ = {'SECRET': 'x'}

FILE
    /home/me/shapes.py
"""  # noqa: W291, W293  pydoc ends lines with spaces

CLEANED = """NAME
    shapes - Things with corners.

CLASSES
    class Square(Shape)
Square(side=<object object>)

A shape with four sides.

Methods defined here:

area(self)
    Return the area.

    class Circle(Shape)
Round.

FUNCTIONS
    draw(shape)
        Draw it.
"""


def test_what_is_of_this_machine_or_of_another_class_is_left_out() -> None:
    assert clean(RENDERED) == CLEANED


def test_a_module_that_is_not_there_is_left_out() -> None:
    assert render("no_such_module_at_all") is None


def test_every_python_has_nearly_all_pages_and_they_are_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-I", SCRIPT, tmp_path / name], check=True, timeout=120)
    pages = {path.name: path.read_text() for path in (tmp_path / "one").iterdir()}
    assert pages == {path.name: path.read_text() for path in (tmp_path / "two").iterdir()}
    assert len(pages) >= 0.9 * len(MODULES)
    assert "copytree(" in pages["shutil.txt"]
    assert 1_000_000 < sum(map(len, pages.values())) < 3_000_000
    assert not [name for name, text in pages.items() if " at 0x" in text or "environ({" in text]
