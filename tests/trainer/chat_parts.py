"""Chat templates as published families have them, in their own words, and a tokenizer of words to try them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Plain: every turn between two marks, nothing rewritten.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Thoughts of turns before the last question are cut out; the last turn always has a (perhaps empty) thought.
THINKING = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
#: The prompt for an answer opens the thought already; earlier answers have none.
OPENED = THINKING.replace(
    "prompt %}{{- '<|im_start|>assistant\n' }}", "prompt %}{{- '<|im_start|>assistant\n<think>\n' }}"
)
assert OPENED != THINKING
#: Texts are trimmed, the system's turn is moved into the first question, the order is enforced.
STRICT = """{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{%- set sys = messages[0].content + '\n\n' %}
{%- else %}{% set rest = messages %}{% set sys = '' %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + (sys if loop.first else '') + m.content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + '<|im_end|>' }}{% endif %}
{%- endfor %}"""
#: With marks of its own.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_words(folder: Path, *, template: str | None = PLAIN, extra: int = 0) -> Path:
    """A byte-level tokenizer that knows a few whole words and blanks, with `<|im_start|>`, `<|im_end|>` and a bos;
    259 tokens in all. Its post-processor leaves blanks out of the offsets, as some published ones do.

    Args:
        template: its chat template. extra: more tokens, to pass a target's vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set("\u0100\u0101\u0102"))  # not bytes 0 to 2
    vocab = {c: i for i, c in enumerate(letters)}
    merges: list[tuple[str, str]] = []
    for i, pair in enumerate([("Ġ", "y"), ("h", "e"), ("Ċ", "Ċ")]):
        vocab[pair[0] + pair[1]] = 253 + i
        merges.append(pair)
    for n in range(extra):
        vocab[f"extra{n}"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def save_trained(folder: Path, kind: str) -> Path:
    """A tokenizer of another make, trained on a few words; its post-processor would add a token in front.

    Args:
        kind: "pieces" (blanks written as a mark, unknown characters as bytes, as SentencePiece has it), "composed"
            (byte-level after Unicode composition) or "words" (blanks are dropped).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    trainer: Any = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    if kind == "pieces":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        blank = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(blank)
        trainer.special_tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    elif kind == "composed":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["user assistant hello there you yes the way to be or not one two é"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<|im_start|>"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant by turns."""
    head = [{"role": "system", "content": system}] if system is not None else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
