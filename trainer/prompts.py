"""Prompt files: JSON lines, each `{"prompt": text}`, `{"messages": [...]}`, `{"conversations": [...]}` or
`{"input_ids": [...]}`.

Text is tokenized as it is, without special tokens; messages go through the model's own chat template, with the
opening of the answer. Other keys are left alone, so a dataset of a chat trainer can be given as it is (a last message
of the assistant is dropped: the target is to write it anew).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.conversation import read_tools, read_turns
from trainer.data import decode
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from trainer.chat import ChatTemplate

_FORMS = '{"prompt": "text"}, {"messages": [{"role": ..., "content": ...}]} or {"input_ids": [1, 2, 3]}'
_NAMED = 10


@dataclass(frozen=True)
class Prompt:
    """One prompt as written: the line it stands on (from 1), and one of text, messages and input_ids.

    `messages` ends with the last question; `turns` is the whole conversation, with all turns that are to be answered;
    `tools` are told to the model.
    """

    line: int
    text: str | None = None
    messages: Sequence[dict[str, Any]] | None = None
    input_ids: Sequence[int] | None = None
    turns: Sequence[dict[str, Any]] | None = None
    tools: Sequence[dict[str, Any]] | None = None


def read_prompts(file: Path, *, limit: int | None = None, skip_bad: bool = False) -> tuple[list[Prompt], list[str]]:
    """The prompts of a file, and what is wrong with the lines left out (only with `skip_bad`).

    Raises:
        ConfigError: the file cannot be read.
        DataError: bad lines (the first ten named, with file and line), or no prompt at all.
    """
    prompts: list[Prompt] = []
    bad: list[str] = []
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the prompts cannot be read: {error.strerror}", str(file), "check --prompts") from error
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if limit is not None and len(prompts) == limit:
            break
        if not line.strip():
            continue
        try:
            prompts.append(_parse(number, line))
        except ValueError as error:
            bad.append(f"{file}:{number}: {error}")
    if bad and not skip_bad:
        rest = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise DataError(
            f"{len(bad)} bad prompt line{'s' if len(bad) > 1 else ''}:\n  " + "\n  ".join(bad[:_NAMED]) + rest,
            str(file),
            f"each line is one of {_FORMS}; mend them, or leave them out with --skip-bad",
        )
    if not prompts:
        raise DataError("no prompts", str(file), f"one a line: {_FORMS}")
    return prompts, bad


def _parse(number: int, line: bytes) -> Prompt:
    value = decode(line)
    given = [key for key in ("prompt", "messages", "conversations", "input_ids") if key in value]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ValueError(f"needs one of prompt, messages, conversations, input_ids; it has {found}")
    if given == ["prompt"]:
        if not isinstance(value["prompt"], str) or not value["prompt"]:
            raise ValueError("prompt is no text, or empty")
        return Prompt(number, text=value["prompt"])
    if given == ["input_ids"]:
        ids = value["input_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("input_ids is no list of token ids, or empty")
        return Prompt(number, input_ids=ids)
    turns = read_turns(value, given[0])
    messages = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    if not messages:
        raise ValueError(f"{given[0]} holds nothing to answer")
    return Prompt(number, messages=messages, turns=turns, tools=read_tools(value.get("tools")))


def tokenize(
    prompts: Sequence[Prompt],
    target: Path,
    file: Path,
    *,
    vocab_size: int,
    longest: int,
    bad: list[str] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, by the target's own tokenizer (which is loaded only if a prompt needs it).

    Args:
        vocab_size: ids lie below it. longest: most tokens that a prompt may have.
        template_options: what the chat template is called with.
        bad: gains a text for each prompt that cannot be used, in place of an error; its ids are then [].

    Raises:
        ConfigError: the target's folder has no tokenizer, or no chat template for messages.
        DataError: a prompt is empty, too long, or holds an id that the target does not know; names file and line.
    """
    reader = _Reader(target, template_options or {})
    out: list[list[int]] = []
    for prompt in prompts:
        place = f"{file}:{prompt.line}"
        fault: DataError | None = None
        try:
            ids = reader.ids(prompt)
        except ValueError as error:
            ids, fault = [], DataError(str(error), place, "mend the line, or take it out")
        else:
            fault = _fault(ids, place, vocab_size, longest)
        if fault is not None:
            if bad is None:
                raise fault
            bad.append(f"{fault.where}: {fault.what}")
            ids = []
        out.append(ids)
    return out


def unusable_prompts(bad: Sequence[str], where: str) -> DataError:
    """The error for prompts that `tokenize` found bad, the first ten named."""
    rest = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    return DataError(
        f"{len(bad)} prompt{'s' if len(bad) > 1 else ''} cannot be used:\n  " + "\n  ".join(bad[:_NAMED]) + rest,
        where,
        "mend them, lower --max-new, or leave them out with --skip-bad",
    )


def _fault(ids: Sequence[int], place: str, vocab_size: int, longest: int) -> DataError | None:
    if not ids:
        return DataError("the prompt has no tokens", place, "remove the line")
    if max(ids) >= vocab_size:
        return DataError(f"token id {max(ids)} is not below the target's vocabulary of {vocab_size}", place)
    if len(ids) > longest:
        return DataError(
            f"the prompt has {len(ids)} tokens; with the response it would pass the target's length "
            f"(at most {longest} here)",
            place,
            "shorten it, or lower --max-new",
        )
    return None


class _Reader:
    """Prompt -> token ids. The tokenizer and its chat template are loaded when the first prompt needs them."""

    def __init__(self, target: Path, options: Mapping[str, Any]) -> None:
        self._target, self._options = target, options

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._target)

    @cached_property
    def _template(self) -> ChatTemplate:
        from trainer.chat import ChatTemplate, own_template

        text = own_template(self._tokenizer)
        if text is None:
            where = str(self._target)
            raise ConfigError("the prompts are messages, and the target has no chat template", where, "use text")
        return ChatTemplate(self._tokenizer, text, self._options, str(self._target))

    def ids(self, prompt: Prompt) -> list[int]:
        """
        Raises:
            ConfigError: no tokenizer, no template. ValueError: the template refuses the prompt.
        """
        if prompt.input_ids is not None:
            return list(prompt.input_ids)
        text = prompt.text
        if prompt.messages is not None:
            text = self._template.render(prompt.messages, prompt.tools, prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def load_tokenizer(target: Path) -> Any:
    """The tokenizer in the target's folder; ConfigError if there is none."""
    from transformers import AutoTokenizer

    if not target.is_dir():
        raise ConfigError("there is no such folder of a tokenizer", str(target), "give a folder with a tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(str(target), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"the tokenizer cannot be loaded: {first}",
            str(target),
            "put the target's tokenizer.json there, or give input_ids",
        ) from error


def end_tokens(target: Path) -> frozenset[int]:
    """The ids that end a response: `eos_token_id` of generation_config.json, else of config.json (text part too)."""
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((target / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name} cannot be read: {error}", str(target / name)) from error
        for part in (config, config.get("text_config") or {}):
            ids = part.get("eos_token_id")
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
