"""A tokenizer whose token ids 0 to 255 are the bytes themselves.

It is a byte-level BPE without a single merge, in the form that `AutoTokenizer.from_pretrained` loads, so that the demo
target looks to every tool like any other model folder. The four ids above are the special tokens below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, PAD, MASK = 256, 257, 258, 259
VOCAB_SIZE = 260
SPECIAL = {"<|bos|>": BOS, "<|eos|>": EOS, "<|pad|>": PAD, "<|mask|>": MASK}


def byte_characters() -> list[str]:
    """The visible character that byte-level tokenizers write for each byte: printable bytes stand for themselves, the
    others get the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = [""] * 256
    for byte in printable:
        names[byte] = chr(byte)
    spare = 0x100
    for byte in range(256):
        if not names[byte]:
            names[byte] = chr(spare)
            spare += 1
    return names


def tokenizer_json() -> dict[str, Any]:
    """tokenizer.json in the format of the `tokenizers` library."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, id in SPECIAL.items()
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: byte for byte, name in enumerate(byte_characters())},
            "merges": [],
        },
    }


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into an existing folder."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(), ensure_ascii=False, indent=1) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "mask_token": "<|mask|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
