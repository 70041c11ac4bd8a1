"""Responses by an OpenAI-compatible server that serves the target: many at a time, each asked until it is there.

Answers are written as they come, each with the line of its prompt, and flushed to disk: a killed call loses what was
under way and nothing else. The same command goes on from there and asks again for what is missing, bad answers
included. When all have been asked, the file is put into the prompts' order.

Of a conversation every turn of the assistant is written anew, one after the other, each after the new ones before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import ConfigError, DataError
from trainer.openai_client import BadAnswer, Client, Server, Stopped
from trainer.output_file import heal, lock
from trainer.prompts import Prompt, read_prompts
from trainer.regenerate import Plan

#: Bad answers whose reasons are kept; the others are only counted.
NAMED = 20
#: Seconds in which all threads end after their sockets were cut.
_JOIN_S = 10.0


@dataclass(frozen=True)
class Sampling:
    """What the server is asked with. template_options: for the chat template, such as enable_thinking."""

    model: str
    max_new: int
    temperature: float = 0.0
    top_p: float | None = None
    seed: int | None = None
    template_options: dict[str, Any] = field(default_factory=dict)

    def body(self, chat: bool) -> dict[str, Any]:
        out: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_new,
            "temperature": self.temperature,
            "stream": False,
        }
        if self.top_p is not None:
            out["top_p"] = self.top_p
        if self.seed is not None:
            out["seed"] = self.seed
        if chat and self.template_options:
            out["chat_template_kwargs"] = self.template_options
        return out


@dataclass
class Outcome:
    """What a call did.

    Attributes:
        plan: as found at the start. made: answers of this call. bad: kind -> how many.
        named: the first bad ones, with file and line.
    """

    plan: Plan
    made: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)


def regenerate_from_server(
    server: Server,
    sampling: Sampling,
    prompts_file: Path,
    out: Path,
    *,
    concurrency: int = 32,
    max_bad: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    anew: bool = False,
    planned: Callable[[Plan], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Asks the server for every response that `out` does not hold yet.

    Each line of `out` is `{"line": n, "messages": [...]}`, or `{"line": n, "prompt": text, "response": text}`, with the
    0-based line n of the prompt: training data as docs/data.md has them. `out` + ".from.json" says what it was made
    from.

    Args:
        concurrency: requests at a time. max_bad: more bad answers are an error; None: one in a hundred, at least ten.
        limit, skip_bad, anew, planned: as `regenerate` has them.
        progress: called after each answer with (lines in the file, tokens of this call so far).

    Raises:
        ConfigError: arguments, key, model, an output that is busy or of another origin.
        DataError: bad prompts, too many bad answers. TrainerError: the server cannot be reached. OSError: the disk.
    """
    server.check()
    if sampling.max_new < 1 or concurrency < 1:
        raise ConfigError(f"max-new is {sampling.max_new}, concurrency is {concurrency}", "--max-new, --concurrency")
    found, skipped = read_prompts(prompts_file, limit=limit, skip_bad=skip_bad)
    refused = _refused(found, prompts_file)
    if refused and not skip_bad:
        raise DataError(refused[0], "", "take these prompts out, or leave them out with --skip-bad")
    usable = [p for p in found if _why_not(p) is None]
    origin = {
        "schema": 1,
        "prompts": hashlib.sha256(prompts_file.read_bytes()).hexdigest(),
        "count": len(usable),
        **sampling.body(chat=True),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab+") as file:
        lock(file, out)
        _, replaced = heal(file, out, origin, anew)
        there = _there(file, {p.line - 1: p for p in usable}, out)
        plan = Plan(out, len(usable), len(there), (*skipped, *refused), replaced)
        if planned is not None:
            planned(plan)
        outcome = Outcome(plan)
        missing = [p for p in usable if p.line - 1 not in there]
        if missing:
            most = max(10, len(usable) // 100) if max_bad is None else max_bad
            _Asking(server, sampling, missing, prompts_file, most, outcome).run(file, concurrency, progress)
        _put_in_order(file, out)  # also of a call that failed in this very step
    return outcome


def _why_not(prompt: Prompt) -> str | None:
    """Why no server can answer it."""
    if prompt.input_ids is not None:
        return "token ids, and servers take text"
    if any(m.get("tool_calls") or m["role"] == "tool" for m in prompt.turns or ()):
        return "tool calls: what a tool answered belongs to the old call"
    return None


def _refused(found: Sequence[Prompt], file: Path) -> list[str]:
    return [f"{file}:{p.line}: {why}" for p in found if (why := _why_not(p)) is not None]


def _there(file: BinaryIO, prompts: dict[int, Prompt], out: Path) -> set[int]:
    """Lines of the prompts that have an answer in the file.

    Raises:
        DataError: a line that is no answer to its prompt, or a second one.
    """
    file.seek(0)
    found: set[int] = set()
    for number, raw in enumerate(file, start=1):
        try:
            entry = json.loads(raw)
            line = entry["line"]
            fits = line in prompts and line not in found and _asked(entry) == _asked_of(prompts[line])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            fits = False
        if not fits:
            raise DataError(
                "this line is no answer to a prompt, or a second one",
                f"{out}:{number}",
                "remove the line, or the file, and call it again",
            )
        found.add(line)
    return found


def _asked(entry: dict[str, Any]) -> Any:
    if "prompt" in entry:
        return entry["prompt"]
    return [(m["role"], m["content"]) for m in entry["messages"] if m["role"] != "assistant"]


def _asked_of(prompt: Prompt) -> Any:
    if prompt.text is not None:
        return prompt.text
    return [(m["role"], m["content"]) for m in prompt.turns or () if m["role"] != "assistant"]


def _put_in_order(file: BinaryIO, out: Path) -> None:
    """Sorts the lines by their prompt, beside and renamed: the file is whole at any moment."""
    file.seek(0)
    lines = file.readlines()
    ordered = sorted(lines, key=lambda raw: int(json.loads(raw)["line"]))
    if ordered == lines:
        return
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with beside.open("wb") as opened:
            opened.writelines(ordered)
            opened.flush()
            os.fsync(opened.fileno())
        beside.rename(out)
    finally:
        beside.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Told:
    """What a thread hands over: an answered line, or a fault."""

    prompt: Prompt | None
    entry: dict[str, Any] | None = None
    tokens: int = 0
    fault: Exception | None = None


class _Asking:
    """Threads that ask, and one place that writes."""

    def __init__(
        self,
        server: Server,
        sampling: Sampling,
        prompts: Sequence[Prompt],
        prompts_file: Path,
        max_bad: int,
        outcome: Outcome,
    ) -> None:
        self._server, self._sampling, self._file_name = server, sampling, prompts_file
        self._prompts = iter(prompts)
        self._count = len(prompts)
        self._max_bad, self._outcome = max_bad, outcome
        self._stop = threading.Event()
        self._taking = threading.Lock()
        self._told: queue.Queue[_Told] = queue.Queue()

    def run(self, file: BinaryIO, concurrency: int, progress: Callable[[int, int], None] | None) -> None:
        """Until every prompt has an answer or a reason; raises what ends the work early."""
        clients = [Client(self._server, self._stop) for _ in range(min(concurrency, self._count))]
        threads = [threading.Thread(target=self._serve, args=(c,), daemon=True) for c in clients]
        for thread in threads:
            thread.start()
        tokens = 0
        try:
            for _ in range(self._count):
                told = self._told.get()  # every request has its deadline, so every prompt is told in the end
                if told.fault is not None and not isinstance(told.fault, BadAnswer):
                    raise told.fault
                if told.entry is None:
                    self._bad(told)
                else:
                    file.write(json.dumps(told.entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                    self._outcome.made += 1
                    tokens += told.tokens
                if progress is not None:
                    progress(self._outcome.plan.done + self._outcome.made, tokens)
        finally:
            self._stop.set()
            for client in clients:
                client.close()
            end = time.monotonic() + _JOIN_S
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))

    def _bad(self, told: _Told) -> None:
        assert told.prompt is not None and isinstance(told.fault, BadAnswer)
        outcome = self._outcome
        outcome.bad[told.fault.kind] += 1
        if len(outcome.named) < NAMED:
            outcome.named.append(f"{self._file_name}:{told.prompt.line}: {told.fault}")
        count = outcome.bad.total()
        if count > self._max_bad:
            kinds = ", ".join(f"{n} {kind}" for kind, n in outcome.bad.most_common())
            raise DataError(
                f"{count} bad answers ({kinds}), {self._max_bad} allowed:\n  " + "\n  ".join(outcome.named[:5]),
                self._server.url,
                "look at the server and at --max-new; the same command asks again for what is missing, "
                "--max-bad allows more",
            )

    def _serve(self, client: Client) -> None:
        try:
            while not self._stop.is_set():
                with self._taking:
                    prompt = next(self._prompts, None)
                if prompt is None:
                    return
                try:
                    entry, tokens = self._answer(client, prompt)
                except BadAnswer as fault:
                    self._told.put(_Told(prompt, fault=fault))
                else:
                    self._told.put(_Told(prompt, entry, tokens))
        except Stopped:
            return
        except Exception as fault:  # noqa: BLE001  raised again in the main thread, which would wait for ever without it
            self._told.put(_Told(None, fault=fault))
        finally:
            with contextlib.suppress(OSError):
                client.close()

    def _answer(self, client: Client, prompt: Prompt) -> tuple[dict[str, Any], int]:
        """The finished line, and how many tokens it took."""
        line = prompt.line - 1
        if prompt.text is not None:
            answer = client.complete(prompt.text, self._sampling.body(chat=False))
            return {"line": line, "prompt": prompt.text, "response": answer.text}, answer.tokens
        tools = {"tools": list(prompt.tools)} if prompt.tools else {}
        body = {**self._sampling.body(chat=True), **tools}
        written: list[dict[str, Any]] = []
        tokens = 0
        turns = list(prompt.turns or ())
        if turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant"})
        for turn in turns:
            if turn["role"] != "assistant":
                written.append({"role": turn["role"], "content": turn["content"]})
                continue
            # Thoughts of earlier turns are not sent: templates cut them out, and some servers refuse the field.
            answer = client.chat([{"role": m["role"], "content": m["content"]} for m in written], body)
            tokens += answer.tokens
            new = {"role": "assistant", "content": answer.text}
            written.append(new if answer.thoughts is None else {**new, "reasoning_content": answer.thoughts})
        return {"line": line, "messages": written, **tools}, tokens
