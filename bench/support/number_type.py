"""The number type in which real models are measured on this machine."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch


@cache
def fast_number_type() -> Literal["bfloat16", "float32"]:
    """Return bfloat16 where the processor multiplies it fast, as the product uses it, or float32.

    Without AVX-512, torch multiplies matrices of bfloat16 one number at a time: a prompt of a
    thousand tokens then takes 17 s in place of 2 s, which measures no platform.
    """
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if supported else "float32"
