"""Fixtures that several parts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama with random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))
