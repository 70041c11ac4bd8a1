"""Lines of text data -> lines of tokens with their loss: what trainer.corpus keeps, made by one tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import DataConfig
from trainer.conversation import Completion, parse_text
from trainer.data import decode
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.chat import ChatTemplate, Rendered


@dataclass(frozen=True)
class Made:
    """One line of the tokens' file. skipped: turns without loss. refused: why it is a bad one."""

    line: bytes
    skipped: int = 0
    refused: str | None = None


class Encoder:
    """Lines of text -> lines of tokens.

    Args:
        folder: of the tokenizer. config: [data]. template: instead of the tokenizer's own. options: for it.
        ends: end tokens of the target.

    Raises:
        ConfigError: no tokenizer, no fast one.
    """

    def __init__(
        self, folder: Path, config: DataConfig, template: str | None, options: dict[str, Any], ends: frozenset[int]
    ) -> None:
        from trainer.prompts import load_tokenizer

        self.tokenizer = load_tokenizer(folder)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(self.tokenizer).__name__} does not tell where its tokens stand in the text",
                str(folder),
                "put a tokenizer.json there (a fast tokenizer)",
            )
        _keep_blanks(self.tokenizer)
        own = self.tokenizer.eos_token_id
        self.end: int | None = own
        self.ends = ends if own is None else ends | {own}
        self._folder = folder
        self._last_only = config.turns == "last"
        self._text, self._options, self._file = template, options, config.chat_template
        self._template: ChatTemplate | None = None

    def check_vocabulary(self, vocab_size: int, target: Path) -> None:
        """
        Raises:
            ConfigError: the tokenizer is another target's.
        """
        tokenizer = self.tokenizer
        fix = "give the target's own tokenizer: remove data.tokenizer, or copy the tokenizer into the target's folder"
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the target's vocabulary {vocab_size}",
                str(self._folder),
                fix,
            )
        unknown = [i for i in sorted(self.ends) if tokenizer.convert_ids_to_tokens(i) is None]
        if unknown:
            raise ConfigError(
                f"the target ends its text with token {unknown[0]}, which the tokenizer does not know",
                f"{self._folder}, target {target}",
                fix,
            )
        if target.resolve() != self._folder.resolve() and (target / "tokenizer.json").exists():
            from trainer.prompts import load_tokenizer

            theirs, ours = load_tokenizer(target).get_vocab(), tokenizer.get_vocab()
            differ = sorted((i, t) for t, i in theirs.items() if ours.get(t, i) != i)
            if not differ and len(theirs.keys() - ours.keys()) > len(theirs) // 100:
                differ = sorted((i, t) for t, i in theirs.items() if t not in ours)
            if differ:
                number, token = differ[0]
                raise ConfigError(
                    f"the tokenizer is not the target's: {token!r} is token {number} of the target, "
                    f"{ours.get(token, 'none')} of the tokenizer",
                    f"data.tokenizer = {self._folder}, target {target}",
                    fix,
                )

    @property
    def template(self) -> ChatTemplate:
        """Raises ConfigError if there is none."""
        if self._template is None:
            from trainer.chat import ChatTemplate

            text = self._text if self._text is not None else self._own()
            where = str(self._folder) if self._text is None else f"data.chat_template = {self._file}"
            self._template = ChatTemplate(self.tokenizer, text, self._options, where)
        return self._template

    def _own(self) -> str:
        from trainer.chat import own_template

        found = own_template(self.tokenizer)
        if found is None:
            raise ConfigError(
                "the data are conversations, and the tokenizer has no chat template",
                str(self._folder),
                "name a file of one in data.chat_template",
            )
        return found

    def encode(self, lines: list[bytes]) -> list[Made]:
        """One for each line, in order.

        Raises:
            ConfigError: no chat template, or one that cannot be parsed.
        """
        out: list[Made | None] = []
        texts: list[str] = []
        waiting: list[tuple[int, Rendered | Completion]] = []
        for line in lines:
            try:
                work = self._read(line)
            except ValueError as error:
                out.append(_refused(str(error)))
                continue
            if isinstance(work, bytes):
                out.append(Made(work))
                continue
            waiting.append((len(out), work))
            out.append(None)
            texts += [work.prompt, work.response] if isinstance(work, Completion) else [work.text]
        if texts:
            found = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            pairs = iter(zip(found["input_ids"], found["offset_mapping"], strict=True))
            for at, work in waiting:
                out[at] = self._made(work, pairs)
        return [made for made in out if made is not None]

    def _read(self, line: bytes) -> bytes | Rendered | Completion:
        entry = decode(line)
        if "input_ids" in entry:
            return line if line.endswith(b"\n") else line + b"\n"
        parsed = parse_text(entry)
        if isinstance(parsed, Completion):
            _check_characters(parsed.prompt + parsed.response)
            return parsed
        rendered = self.template.supervise(parsed, last_only=self._last_only)
        _check_characters(rendered.text)
        if not rendered.spans:
            raise ValueError("no turn of the assistant is left with a loss: the chat template drops or rewrites them")
        return rendered

    def _made(self, work: Rendered | Completion, pairs: Iterator[tuple[list[int], list[tuple[int, int]]]]) -> Made:
        from trainer.chat import token_mask

        if isinstance(work, Completion):
            (prompt, _), (response, _) = next(pairs), next(pairs)
            closing = [self.end] if work.ended and self.end is not None and response[-1:] != [self.end] else []
            ids = [*prompt, *response, *closing]
            mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
            return Made(_line({"input_ids": ids, "loss_mask": mask}))
        ids, offsets = next(pairs)
        mask = token_mask(ids, offsets, work.spans, self.ends)
        return Made(_line({"input_ids": list(ids), "loss_mask": mask}), work.skipped)


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a text holds half a character (a lone surrogate)") from None


def _refused(reason: str) -> Made:
    return Made(_line({"refused": reason}), refused=reason)


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _keep_blanks(tokenizer: Any) -> None:
    """Byte-level tokenizers may leave blanks out of a token's place; what adds special tokens is not used here."""
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
