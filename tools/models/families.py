"""The families of models that are checked (``families.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

MAX_LENGTH: Final = 2048
"""Most tokens of prompt and answer in the check."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        config: Settings of a small model for transformers.
        reads_images: Whether they are the ``text_config`` of a model that also reads images.
    """

    config: Mapping[str, Any]
    reads_images: bool


def _read() -> dict[str, Family]:
    given = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {
        name: Family({**given["shape"], **config}, name in given["images"])
        for name, config in given["families"].items()
    }


FAMILIES: Final[Mapping[str, Family]] = _read()
