"""The pictures of the console as files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ragcache_core.errors import RagCacheError
from tools.screenshots import MOST_COLORS, write


def png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_picture_keeps_its_frequent_colours_and_its_size(tmp_path: Path) -> None:
    pixels = np.full((60, 400, 3), 255, np.uint8)
    pixels[:20, :200] = (124, 58, 237)
    pixels[-1, :300] = np.arange(900).reshape(300, 3) % 251  # rare ones
    write(png(pixels), tmp_path / "one.png")
    written = np.asarray(Image.open(tmp_path / "one.png").convert("RGB"))
    assert written.shape == pixels.shape
    np.testing.assert_array_equal(written[:-1], pixels[:-1])
    assert len(np.unique(written.reshape(-1, 3), axis=0)) <= MOST_COLORS


def test_a_picture_that_is_too_large_is_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (600, 600, 3), np.uint8)
    with pytest.raises(RagCacheError, match="show less of the page"):
        write(png(noise), tmp_path / "noise.png")
