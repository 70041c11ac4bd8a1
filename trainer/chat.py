"""Where the assistant's words stand in the text that a chat template makes of a conversation. Never guessed.

Templates rewrite turns: thoughts of earlier turns are cut out, blanks trimmed, system turns dropped. So a second
rendering, with a tag in the place of each of the assistant's texts, tells where the template puts them; the tags are
then replaced by the texts, and the result has to be the first rendering, character for character. If it is not, the
sample is refused with a reason.

A turn's loss begins where `add_generation_prompt` ends, if what lies between there and the text is what the model
itself writes (blanks, the opening of its thoughts); it ends with the text, and with the end token if that follows at
once. A template with `{% generation %}` marks is believed, after the same check.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainer.conversation import REASONING, Conversation
from trainer.errors import ConfigError

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
#: The day that templates read which write today's date: tokens must not depend on when they were made.
DAY = datetime(2026, 1, 1)


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a rendering. `whole`: a turn as a whole, to be cut behind its last end token."""

    start: int
    end: int
    whole: bool = False


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. skipped: turns of the assistant without loss, since the template left them out or they
    could not be told apart."""

    text: str
    spans: tuple[Span, ...]
    skipped: int = 0


def own_template(tokenizer: Any) -> str | None:
    """A tokenizer's own chat template (the one named "default" of several), None if it has none."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("default")
    return str(found) if found else None


def read_options(text: str | None, where: str) -> dict[str, Any]:
    """What a template is called with, from its JSON; {} for None. `where`: the key or option that holds it.

    Raises:
        ConfigError: it is no JSON object.
    """
    if text is None:
        return {}
    example = """for example '{"enable_thinking": false}'"""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{text[:200]!r} is no JSON: {error}", where, example) from None
    if not isinstance(options, dict):
        raise ConfigError(f"{text[:200]!r} is no JSON object", where, example)
    return options


class ChatTemplate:
    """A tokenizer's chat template with its options.

    Args:
        tokenizer: of transformers. template: Jinja text. options: what the template is called with besides.
        where: its place, for messages.

    Raises:
        ConfigError: the template cannot be parsed.
    """

    def __init__(self, tokenizer: Any, template: str, options: Mapping[str, Any], where: str) -> None:
        try:
            from jinja2 import TemplateSyntaxError
        except ImportError as error:
            raise ConfigError(
                f"chat templates need jinja2: {error}", where, "install the extra dflash-ops[trainer]"
            ) from error

        self._tokenizer = tokenizer
        self._template = _stop_the_clock(template)
        self._options = dict(options)
        self.marked = _MARKS.search(template) is not None
        try:
            self.render([{"role": "user", "content": "a"}], prompt=True)
        except ValueError as error:  # a template may well refuse this conversation, but not be misspelt
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ConfigError(f"the chat template cannot be parsed: {error.__cause__}", where, "mend it") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, prompt: bool = False
    ) -> str:
        """The conversation as text; with `prompt` up to where the assistant begins to write.

        Raises:
            ValueError: the template refuses it.
        """
        return self._render(messages, tools, prompt, marks=False)[0]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, prompt: bool, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(m) for m in messages]],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self._tokenizer.special_tokens_map, **self._options},
            )
        except _REFUSALS as error:
            raise ValueError(f"the chat template cannot render it: {type(error).__name__}: {error}") from error
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        texts, indices = rendered
        return texts[0], [(int(a), int(b)) for a, b in indices[0]] if marks else []

    def supervise(self, conversation: Conversation, *, last_only: bool = False) -> Rendered:
        """The text, and where its loss is.

        Raises:
            ValueError: the template refuses the conversation, or changes its texts beyond following.
        """
        messages, tools = conversation.messages, conversation.tools
        text = self.render(messages, tools)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        wanted = turns[-1:] if last_only else turns
        places = self._places(text, messages, tools)
        spans: list[Span] = []
        if self.marked:
            for turn, span in self._marked(text, places, messages, tools):
                if turn in wanted:
                    spans.append(span)
            return Rendered(text, tuple(spans), max(0, len(wanted) - len(spans)))
        for turn in wanted:
            found = self._span(turn, text, places.get(turn, []), messages, tools)
            if found is not None:
                spans.append(found)
        return Rendered(text, tuple(spans), len(wanted) - len(spans))

    def _places(
        self, text: str, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None
    ) -> dict[int, list[_Place]]:
        """Turn -> where its thoughts and its words stand in `text`, proven."""
        tag = _unused_tag(text, messages)
        tagged, words = [], {}
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                tagged.append(message)
                continue
            shadow, parts = _shadow(message, f"{tag}{i}")
            tagged.append(shadow)
            words.update({name: (i, kind, value) for name, (kind, value) in parts.items()})
        pieces = re.split(f"({tag}[0-9]+[tw]Z)", self.render(tagged, tools))
        out: list[str] = []
        at = 0
        found: dict[int, list[_Place]] = {}
        seen: set[str] = set()
        newest = -1
        for piece in pieces:
            if piece in words:
                turn, kind, value = words[piece]
                if piece in seen:
                    raise ValueError(f"the chat template writes turn {turn + 1} twice")
                if turn < newest:
                    raise ValueError(f"the chat template moves turn {turn + 1} behind a later one")
                seen.add(piece)
                newest = turn
                found.setdefault(turn, []).append(_Place(at, at + len(value), kind == "t"))
                piece = value
            out.append(piece)
            at += len(piece)
        if "".join(out) != text:
            raise ValueError("the chat template changes the assistant's texts in a way that cannot be followed")
        return found

    def _span(
        self,
        turn: int,
        text: str,
        places: Sequence[_Place],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
    ) -> Span | None:
        if messages[turn].get("tool_calls"):
            # What stands around the call is the template's own, so only a turn that is one whole piece is taken.
            start = self._prefix(text, messages[:turn], tools)
            end = self._prefix(text, messages[: turn + 1], tools, prompt=False)
            if start is not None and end is not None and start < end and all(start <= p.start for p in places):
                return Span(start, end, whole=True)
        if not places:
            return None
        first, last = places[0], places[-1]
        begin = first.start
        if first.thought or text[:begin][-1:].isspace():
            opening = self._prefix(text, messages[:turn], tools)
            if opening is not None and opening <= begin and (first.thought or not text[opening:begin].strip()):
                begin = opening
        return Span(begin, last.end)

    def _prefix(
        self, text: str, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, *, prompt: bool = True
    ) -> int | None:
        """Length of the beginning of `text` that the first turns make; None if they are written differently alone."""
        try:
            beginning = self.render(messages, tools, prompt=prompt)
        except ValueError:
            return None
        return len(beginning) if text.startswith(beginning) else None

    def _marked(
        self,
        text: str,
        places: Mapping[int, Sequence[_Place]],
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
    ) -> list[tuple[int, Span]]:
        """The template's own marks, each with the turn whose words lie in it."""
        again, marks = self._render(messages, tools, False, marks=True)
        if again != text:
            raise ValueError("the chat template gives another text with its generation marks than without")
        out: list[tuple[int, Span]] = []
        for start, end in marks:
            inside = [t for t, ps in places.items() if any(start <= p.start and p.end <= end for p in ps)]
            if len(inside) == 1:
                out.append((inside[0], Span(start, end)))
            elif inside or text[start:end].strip():
                calls = [i for i, m in enumerate(messages) if m.get("tool_calls") and i not in places]
                if inside or not calls:
                    raise ValueError(
                        "the template's generation marks lie elsewhere than on single turns of the assistant"
                    )
        return out


@dataclass(frozen=True)
class _Place:
    start: int
    end: int
    thought: bool


#: What a template that meets a shape it does not expect may raise besides Jinja's own errors.
_REFUSALS = (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError)


def _shadow(message: Mapping[str, Any], tag: str) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """The message with tags in the place of its thoughts (t) and words (w), blanks around them kept; and what each
    tag stands for."""
    shadow, parts = dict(message), {}
    thought, words = f"{tag}tZ", f"{tag}wZ"

    def swap(value: str, name: str, kind: str) -> str:
        core = value.strip()
        if not core:
            return value
        parts[name] = (kind, core)
        return value.replace(core, name, 1)

    content = message["content"]
    head, close, tail = content.partition("</think>")
    before, opened, thoughts = head.partition("<think>")
    split = close and "</think>" not in tail and "<think>" not in thoughts + tail and not before.strip()
    if split and opened:
        shadow["content"] = before + opened + swap(thoughts, thought, "t") + close + swap(tail, words, "w")
    else:
        shadow["content"] = swap(content, words, "w")
    for name in REASONING:
        # The same thoughts under two names are one tag: a template reads one of them.
        if message.get(name) and parts.get(thought, ("t", message[name].strip()))[1] == message[name].strip():
            shadow[name] = swap(message[name], thought, "t")
    return shadow, parts


def _unused_tag(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A word that occurs nowhere, the same for the same sample."""
    everything = text + repr(messages)
    for attempt in range(1000):
        tag = "Q" + hashlib.blake2b(f"{attempt}{text}".encode("utf-8", "replace"), digest_size=8).hexdigest() + "X"
        if tag not in everything:
            return tag
    raise ValueError("no tag could be found that the text does not hold")


def _stop_the_clock(template: str) -> str:
    """The template with a calendar that stands still, where it asks for today's date."""
    formats = sorted({found[1] for found in _CLOCK.findall(template)})
    if not formats:
        return template
    cases = "".join(
        f"{{% {'if' if i == 0 else 'elif'} format == {form!r} %}}{DAY.strftime(form)}" for i, form in enumerate(formats)
    )
    # Jinja drops one newline behind a block: a template that begins with one would lose it.
    return (
        "{% macro strftime_now(format) %}"
        + cases
        + "{% endif %}{% endmacro %}"
        + "\n" * template.startswith("\n")
        + template
    )


def token_mask(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span], ends: Collection[int]
) -> list[int]:
    """1 for each token that lies wholly within a span, and for an end token right behind one.

    Args:
        ids, offsets: tokens and their characters [start, end). spans: ascending. ends: ids of end tokens.
    """
    mask = [0] * len(ids)
    at = 0
    for span in spans:
        while at < len(ids) and offsets[at][0] < span.start:
            at += 1
        inside = []
        while at < len(ids) and offsets[at][1] <= span.end:
            start, end = offsets[at]
            if start < end:  # a token without characters is the tokenizer's own
                inside.append(at)
            at += 1
        if span.whole:
            closing = max((i for i in inside if ids[i] in ends), default=None)
            inside = [] if closing is None else [i for i in inside if i <= closing]
        elif inside and at < len(ids) and ids[at] in ends and offsets[at][0] == span.end == offsets[inside[-1]][1]:
            inside.append(at)
        for i in inside:
            mask[i] = 1
    return mask
