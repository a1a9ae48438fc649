"""Renders the documentation of Python's standard library as plain text, one file per module.

Every machine that runs Python has these documents. Only modules whose import changes nothing are
listed. What depends on the machine is left out: values of data, memory addresses, file names.

::

    python -I examples/pydoc_pages.py FOLDER
"""

from __future__ import annotations

import importlib
import pydoc
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

_NAMES = """
    abc argparse array asyncio.events asyncio.locks asyncio.queues asyncio.runners asyncio.streams
    asyncio.subprocess asyncio.taskgroups asyncio.tasks asyncio.timeouts atexit base64 binascii
    bisect bz2 calendar cmath cmd code codecs collections colorsys concurrent.futures
    concurrent.futures.thread configparser contextlib contextvars copy copyreg csv dataclasses
    datetime decimal difflib dis doctest email.header email.message email.parser email.policy
    email.utils enum fileinput filecmp fnmatch fractions ftplib functools gc getopt getpass gettext
    glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookiejar http.cookies
    http.server imaplib importlib.abc importlib.metadata importlib.resources importlib.util inspect
    io ipaddress itertools json json.decoder json.encoder linecache locale logging logging.config
    logging.handlers lzma mailbox math mimetypes mmap multiprocessing.pool multiprocessing.queues
    multiprocessing.shared_memory netrc numbers operator optparse os os.path pathlib pickle
    pkgutil platform plistlib poplib pprint pstats queue quopri random re reprlib runpy sched
    secrets selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat
    statistics string struct subprocess symtable sysconfig tarfile tempfile textwrap threading
    time timeit tokenize tomllib traceback tracemalloc types typing unicodedata unittest.case
    unittest.mock urllib.parse urllib.request urllib.robotparser uuid venv warnings wave weakref
    xml.dom.minidom xml.etree.ElementTree xml.sax.handler xmlrpc.client zipapp zipfile zlib zoneinfo
"""
MODULES = tuple(_NAMES.split())

_LEFT_OUT = frozenset(
    {"AUTHOR", "CREDITS", "DATA", "DATE", "FILE", "MODULE DOCS", "MODULE REFERENCE", "VERSION"}
)
"""Sections whose content is of this machine or about the text itself."""
_BORDER = re.compile(r"^ +\| ? ?")
"""What begins each line of a class."""
_REPEATED = re.compile(r"(-{60,}|[A-Z][\w ]+ inherited from .+:|Data descriptors defined here:)$")
"""Begins a part of a class that its base classes or all classes have, or a rule before a part."""
_ORDER = "Method resolution order:"
_PART = re.compile(r"[A-Z][\w ]+ defined here:$")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MAX_CHARS = 60_000
"""Of one module; a few modules with many classes would be most of the collection."""


def clean(text: str) -> str:
    """Leave out what says nothing about the module: borders, inherited members, addresses."""
    kept = [section for name, section in _sections(text) if name not in _LEFT_OUT]
    lines = _own_lines(_ADDRESS.sub("", "\n\n".join(kept)).splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts that begin with a line of capitals at the margin."""
    parts = re.split(r"^(?=[A-Z][A-Z ]+$)", text, flags=re.MULTILINE)
    for part in parts:
        yield part.partition("\n")[0].strip(), part.strip()


def _own_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines without borders and without the parts that repeat other classes."""
    skipped = ""
    for line in lines:
        inside = _BORDER.sub("", line)
        is_outside = inside == line and bool(line.strip())
        if inside == _ORDER:
            skipped = "order"
        elif _REPEATED.match(inside):
            skipped = "part"
        elif is_outside or _PART.match(inside) or (skipped == "order" and not inside.strip()):
            skipped = ""
        if not skipped:
            yield inside.rstrip()


def render(name: str) -> str | None:
    """Return the cleaned documentation of a module; None if this Python has none."""
    try:
        module = importlib.import_module(name)
        # `pydoc.plaintext` is not in the type stubs of the standard library.
        text: str = pydoc.render_doc(module, renderer=getattr(pydoc, "plaintext"))  # noqa: B009
    except Exception:  # an optional module, or one that this build of Python cannot describe
        return None
    whole = clean(text.partition("\n")[2])
    end = whole.rfind("\n\n", 0, _MAX_CHARS) if len(whole) > _MAX_CHARS else -1
    return f"{name}: Python's standard library\n\n" + (whole if end < 0 else whole[:end] + "\n")


def main() -> int:
    """Write the files into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in MODULES:
        text = render(name)
        if text is not None:
            (folder / f"{name}.txt").write_text(text, encoding="utf-8", errors="replace")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
