"""Trains and saves the tokenizer: a byte-level BPE of about two thousand pieces.

Any text encodes and decodes back to itself. Digits are one token each, "\\n\\n" is one token, the
handbook's words are one token each and its service names are cut into the pieces they are made
of, each seen in many names: a model learns far sooner to compare those than whole rare words.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.tinyrag import lexicon
from models.tinyrag.handbook import make_handbook, sample_questions
from models.tinyrag.prompt import SYSTEM

PAD, SYSTEM_TAG, USER_TAG, ASSISTANT_TAG, END = (
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
SPECIALS = [PAD, SYSTEM_TAG, USER_TAG, ASSISTANT_TAG, END]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_WORD = r"\n\n| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"


def _words() -> Iterator[str]:
    """Every word of the handbook, with and without the space before it; names in pieces."""
    handbook = make_handbook(seed=0, size=600, split="train")
    questions = sample_questions(handbook, 2000, "train")
    texts = [SYSTEM, *(d.text for d in handbook.documents)]
    texts += [part for q in questions for part in (q.text, q.answer)]
    rng = Random(0)
    texts += [a.draw(rng) for a in lexicon.ATTRIBUTES for _ in range(2000)]
    words = {w for text in texts for w in re.findall(r" ?[^\W\d_]+", lexicon.NAME.sub("", text))}
    words = {w.strip() for w in words}
    words |= {*lexicon.NAME_HEADS, *lexicon.NAME_SECONDS}
    for word in sorted(words):
        yield word
        yield " " + word
    # Often, so that no merge across the border of two pieces comes before those within a piece.
    for piece in (*lexicon.NAME_HEADS, *lexicon.NAME_TAILS):
        for _ in range(100):
            yield piece
    yield "\n\n"
    yield from (" " + digit for digit in "0123456789")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same lexicon gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # never reached: training ends when every word is one piece
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM_TAG, USER_TAG, ASSISTANT_TAG],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer and writes its files to `folder`."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    return tokenizer
