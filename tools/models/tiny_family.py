"""Makes a small model with random weights of any family that transformers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.tiny_model import write_tokenizer
from tools.models.families import Family

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


def make_tiny_family(folder: Path, family: Family, seed: int = 0) -> None:
    """Write a model of bfloat16 weights into a new folder.

    Raises:
        ValueError: If transformers does not have the family.
    """
    # Imported here, because they are slow to import and only needed to make a model.
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    folder.mkdir(parents=True)
    write_tokenizer(folder)
    torch.manual_seed(seed)
    settings = dict(family.config)
    if family.reads_images:
        kind = {"gemma3_text": "gemma3", "mistral": "mistral3"}[settings["model_type"]]
        tower = "siglip_vision_model" if kind == "gemma3" else "pixtral"
        whole: dict[str, Any] = {
            "text_config": settings,
            "vision_config": {**_VISION, "model_type": tower},
        }
        if kind == "gemma3":
            whole |= {"mm_tokens_per_image": 4, "image_token_index": 380}
        config = AutoConfig.for_model(kind, **whole)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        config = AutoConfig.for_model(**settings)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("sinks"):
                one.normal_()  # else it may be what memory contained
    model.to(torch.bfloat16).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    if not family.reads_images:
        written = {**family.config, **written}  # transformers leaves out what it does not know
    (folder / "config.json").write_text(json.dumps(written))
