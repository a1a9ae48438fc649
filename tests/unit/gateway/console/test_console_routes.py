"""The files of the console need no build, no other host and no inline code."""

from __future__ import annotations

import re

import pytest

from ragcache_core.access.caller import Scope
from ragcache_core.access.endpoints import CONSOLE_PATH, allowed_scopes, is_on_ask_port
from ragcache_core.errors import NotFound
from ragcache_gateway.console.console_routes import (
    HEADERS,
    INDEX,
    console,
    console_file,
    read_files,
)

FILES = {name: file.content.decode() for name, file in read_files().items()}
PAGE = FILES[INDEX]


def test_the_page_names_files_that_there_are() -> None:
    named = set(re.findall(r'(?:href|src)="console/([^"]+)"', PAGE))
    imported = {name for text in FILES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named | imported | {INDEX} == set(FILES)


def test_the_page_has_no_inline_code_or_style() -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)", PAGE) == []
    assert re.findall(r"<style|\bstyle=|\bon\w+=", PAGE) == []


@pytest.mark.parametrize("name", sorted(set(FILES) - {"icon.svg"}))
def test_no_file_names_another_host(name: str) -> None:
    without_names = FILES[name].replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|//[a-z0-9-]+\.[a-z]", without_names) == []


def test_every_field_has_a_label() -> None:
    labelled = set(re.findall(r'<label for="([^"]+)"', PAGE))
    assert set(re.findall(r'<(?:input|select|textarea) id="([^"]+)"', PAGE)) == labelled


async def test_responses_have_strict_headers() -> None:
    for response in (await console(), await console_file("console.css")):
        for name, value in HEADERS.items():
            assert response.headers[name] == value
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


async def test_an_unknown_file_is_not_found() -> None:
    with pytest.raises(NotFound):
        await console_file("../console_routes.py")


def test_the_page_needs_no_key_and_is_on_the_admin_port() -> None:
    for path in (CONSOLE_PATH, f"{CONSOLE_PATH}/", f"{CONSOLE_PATH}/main.js"):
        assert allowed_scopes("GET", path) == ()
        assert not is_on_ask_port(path)
    assert allowed_scopes("GET", f"{CONSOLE_PATH}s") == (Scope.ADMIN,)
