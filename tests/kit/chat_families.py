"""Tokenizers of the forms that model families have, with chat templates that do to texts what
those of the families do.

The templates are written here. They trim texts, write tool calls as JSON, give tools as tags, drop
the reasoning of earlier turns, and write the system prompt into the first turn of the user.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from harness.tiny_model import CORPUS

_CHATML: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}
"""

_LLAMA: Final = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- message.content | tojson }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {%- if loop.first and tools %}
        {%- for tool in tools %}{{- '\\n\\n' + (tool | tojson(indent=4)) }}{%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_QWEN: Final = """\
{%- set ns = namespace(last=messages | length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.looking and message.role == 'user' and
           not (message.content.startswith('<tool_response>') and
                message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set text = message.content %}
    {%- if loop.first %}
        {{- '<|im_start|>system\\n' }}{{- text if message.role == 'system' else '' }}
        {%- if tools %}
            {{- '\\n<tools>' }}{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
            {{- '\\n</tools>' }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + text + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_MISTRAL: Final = """\
{{- '<s>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
        {%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + message.content.strip() + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- ' ' + message.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA: Final = """\
{{- '<bos>' }}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {{- (first if loop.first else '') + (message.content | trim) }}{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

_TAGS: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}{{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<' ~ name ~ '>' ~ value ~ '</' ~ name ~ '>' }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if tools %}{{- (tools | first).function.name ~ '<' ~ messages[0].role }}{%- endif %}
"""

_MIDDLE: Final = """\
{%- for message in messages %}
    {%- set text = message.content %}
    {%- if '</think>' in text %}
        {%- set text = (text.split('<think>') | first) ~ (text.split('</think>') | last) %}
    {%- endif %}
    {{- '<|User|>' if message.role != 'assistant' else '<|Assistant|>' }}{{- text }}
{%- endfor %}
{{- '<|Assistant|>' }}
"""


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """A chat template with the control tokens of its tokenizer.

    Attributes:
        controls: Special tokens.
        added: Added tokens that are not special.
        spaces: Whether the tokenizer normalizes spaces to the character of sentencepiece.
    """

    template: str
    controls: tuple[str, ...]
    added: tuple[str, ...] = ()
    spaces: bool = False


_THINK: Final = ("<think>", "</think>")
FAMILIES: Final[dict[str, ChatFamily]] = {
    "chatml": ChatFamily(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama": ChatFamily(
        _LLAMA,
        (
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
    ),
    "qwen": ChatFamily(
        _QWEN,
        ("<|im_start|>", "<|im_end|>"),
        (*_THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "mistral": ChatFamily(
        _MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        spaces=True,
    ),
    "gemma": ChatFamily(
        _GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), ("<b>", "</b>"), spaces=True
    ),
    "tags": ChatFamily(_TAGS, ("<|im_start|>", "<|im_end|>"), _THINK),
    "middle": ChatFamily(_MIDDLE, ("<|User|>", "<|Assistant|>"), _THINK),
}
"""Families by name. Those of ``tags`` and ``middle`` join texts of messages with each other."""


def write_family(family: ChatFamily, folder: Path) -> Path:
    """Write the tokenizer of a family into a folder, which is made, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    if family.spaces:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Replace("\u2581", " ")
        alphabet = [chr(code) for code in (*range(9, 11), *range(33, 256), 0x2581)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in family.controls])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in family.added])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": family.controls[-1],
        "chat_template": family.template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return folder
