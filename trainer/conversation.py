"""What a line of text data says, whatever dialect it is written in: turns with roles, or a prompt and its response.

`{"messages": [{"role", "content"}]}`, ShareGPT's `{"conversations": [{"from", "value"}]}` (`system` may stand beside
it), or `{"prompt", "response"}` as plain text. What cannot be trained raises ValueError with the reason, for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: ShareGPT's names, and names that are used in their place.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
#: Fields in which servers and data sets keep what the model thought; templates read one or the other.
REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Turns in an order that chat templates know, up to and with the last one of the assistant.

    Attributes:
        messages: dicts with role and content (text) at least. tools: as chat templates take them.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class Completion:
    """Plain text without a template. ended: the response is whole, so an end token follows it."""

    prompt: str
    response: str
    ended: bool = True


def is_text(entry: Mapping[str, Any]) -> bool:
    """Whether a line has to be tokenised before it is trained."""
    return "input_ids" not in entry and any(k in entry for k in ("messages", "conversations", "prompt"))


def parse_text(entry: Mapping[str, Any]) -> Conversation | Completion:
    """
    Raises:
        ValueError: with the reason.
    """
    given = [k for k in ("messages", "conversations", "prompt") if k in entry]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ValueError(f"needs one of messages, conversations, prompt with response, input_ids; it has {found}")
    if given == ["prompt"]:
        prompt, response, ended = entry["prompt"], entry.get("response"), entry.get("ended", True)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt is no text, or empty")
        if not isinstance(response, str) or not response:
            raise ValueError("response is no text, or empty" if "response" in entry else "a prompt without a response")
        if not isinstance(ended, bool):
            raise ValueError("ended is neither true nor false")
        return Completion(prompt, response, ended)
    return Conversation(answered(read_turns(entry, given[0])), read_tools(entry.get("tools")))


def read_turns(entry: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The turns under "messages" or "conversations", with the roles and the text content that templates know.

    Raises:
        ValueError: with the reason; names the turn.
    """
    turns = entry[key]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key} is no list, or empty")
    messages = [_turn(i, turn) for i, turn in enumerate(turns, start=1)]
    if key == "conversations" and entry.get("system"):
        if not isinstance(entry["system"], str):
            raise ValueError("system is no text")
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": entry["system"]})
    check_order(messages)
    return messages


def answered(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The turns up to the last one of the assistant.

    Raises:
        ValueError: there is none.
    """
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if last < 0:
        raise ValueError("no turn of the assistant: nothing to train")
    return tuple(messages[: last + 1])


def check_order(messages: list[dict[str, Any]]) -> None:
    """
    Raises:
        ValueError: names the first turn that cannot stand where it stands, or that is empty.
    """
    before: str | None = None
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        calls = bool(message.get("tool_calls"))
        wrong = (
            (role in ("system", "developer") and before is not None)
            or (role == "user" and before == "user")
            or (role == "assistant" and before in (None, "start", "assistant"))
            or (role == "tool" and before not in ("calls", "tool"))
        )
        if wrong:
            after = {None: "at the beginning", "start": "after the system's turn", "calls": "after a tool call"}.get(
                before, f"after one of the {before}"
            )
            raise ValueError(f"turn {number} is the {role}'s, {after}")
        thought = any(message.get(k) for k in REASONING)
        if role in ("user", "assistant") and not message["content"].strip() and not calls and not thought:
            raise ValueError(f"turn {number} ({role}) is empty")
        before = "start" if role in ("system", "developer") else "calls" if calls else role


def _turn(number: int, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} is no object")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"turn {number}: the role {role!r} is unknown (known are {', '.join(ROLES)})")
    kept = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    calls = kept.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
            raise ValueError(f"turn {number}: tool_calls is no list of objects")
        if ROLES[role] != "assistant":
            raise ValueError(f"turn {number}: tool_calls in a turn of the {ROLES[role]}")
        if not calls:
            del kept["tool_calls"]
    for name in REASONING:
        if name in kept and not isinstance(kept[name], str):
            raise ValueError(f"turn {number}: {name} is no text")
    return {**kept, "role": ROLES[role], "content": text_of(number, content, empty_ok=bool(calls))}


def text_of(number: int, content: Any, *, empty_ok: bool) -> str:
    """Content as one text: itself, or the text parts of a list joined.

    Raises:
        ValueError: images and other parts, or no text at all.
    """
    if isinstance(content, str):
        return content
    if content is None and empty_ok:
        return ""
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"turn {number} holds a part of type {kind!r}: only text can be trained")
            parts.append(part["text"])
        return "".join(parts)
    raise ValueError(f"turn {number}: the content is {'missing' if content is None else type(content).__name__}")


def read_tools(tools: Any) -> tuple[dict[str, Any], ...] | None:
    """What stands under "tools"; None if nothing does.

    Raises:
        ValueError: it is no list of objects, nor the JSON text of one.
    """
    if isinstance(tools, str):  # many data sets keep the list as a text of JSON
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"tools is no JSON: {error}") from None
        except RecursionError:
            raise ValueError("tools is no JSON that can be read: nested too deeply") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise ValueError("tools is no list of objects")
    return tuple(tools)
