"""Training examples point at what they should, and the exported model is the trained one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models.tinyrag.examples import (  # noqa: E402
    ATTRIBUTE_IDS,
    IGNORED,
    NOWHERE,
    QUESTION_TOKENS,
    SLOT_SIZES,
    Encoder,
    Example,
    stage_scene,
)
from models.tinyrag.export import export  # noqa: E402
from models.tinyrag.handbook import KINDS  # noqa: E402
from models.tinyrag.lessons import collate  # noqa: E402
from models.tinyrag.model import Shape, TinyLlama, lay_out  # noqa: E402
from models.tinyrag.vocabulary import build_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def _example(
    tokenizer: PreTrainedTokenizerFast, seed: int, documents: int = 4, questions: int = 12
) -> Example:
    encoder, rng = Encoder(tokenizer), random.Random(seed)
    scene = stage_scene(rng, "train", documents, encoder.count_tokens)
    return encoder.encode(rng, scene, "train", questions, absent_share=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_sources_hold_the_tokens_to_copy(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    example = _example(tokenizer, seed)
    for row in range(len(example.kinds)):
        for at in range(QUESTION_TOKENS):
            wanted, sources = example.answers[row, at], example.source[row, at]
            if wanted == IGNORED or sources[0] == IGNORED:
                continue
            if KINDS[example.kinds[row]] == "absent":
                assert list(sources) == [NOWHERE, IGNORED]
                continue
            word = tokenizer.decode([wanted]).strip()
            for source in sources[sources != IGNORED]:
                copied = tokenizer.decode([example.context[source]]).strip()
                assert copied == word or word in ("<|end|>", ",")


@pytest.mark.parametrize("seed", range(5))
def test_titles_and_tags_lie_where_they_are_said_to(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    example = _example(tokenizer, seed)
    for position in set(example.title[example.title != IGNORED]):
        start = position - 3
        assert tokenizer.decode(example.context[start]) == "#"
    tagged = example.context[example.tag == ATTRIBUTE_IDS["port"]]
    assert all(tokenizer.decode(i).strip().isdigit() for i in tagged)


def test_exported_llama_computes_what_was_trained(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape = Shape(len(tokenizer), width=64, layers=4, heads=2, hidden=96)
    model = TinyLlama(shape, SLOT_SIZES, len(ATTRIBUTE_IDS) + 1)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    export(tmp_path / "model", shape, model.state_dict(), tokenizer, {})
    llama = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    example = _example(tokenizer, 0, documents=2, questions=3)
    batch = collate([example], len(example.context) + 5)
    layout = lay_out(shape, batch)
    x = model.embed_tokens(torch.cat([batch.context, batch.questions.flatten(1)], 1))
    with torch.no_grad():
        for block in model.blocks:
            x = block(x, layout)[0]
        ours = model.norm(x)[0, layout.context :].view(3, QUESTION_TOKENS, -1)
        for row in range(3):
            ids = torch.cat([torch.from_numpy(example.context), batch.questions[0, row]])[None]
            theirs = llama.model(ids).last_hidden_state[0, -QUESTION_TOKENS:]
            assert torch.allclose(ours[row], theirs, atol=1e-4)
