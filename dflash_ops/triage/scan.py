"""Bytes in chunks of any size -> the few lines worth reading. Memory does not grow with the input.

A block of text is folded: lower case, digits and everything above ASCII removed. Millions of log lines fold to a few
templates, and a template is judged once: does it hold one of the needles? Only lines near a template that does, and
the end of the text, reach the slow stages. Blocks are cut by offsets in the stream, never by the caller's chunks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

BLOCK = 1 << 18
BEFORE = 80  # lines kept before a hit: progress before the error, the head of a traceback
AFTER = 160  # lines kept after a hit: the rest of a message, progress after the error
TAIL = 1200  # the end of the text is always read
HEAD = 60  # and so is its beginning: versions, the launcher's line
MAX_LINES = 24_000  # of kept lines; the middle goes first
MAX_REPEATS = 3_000  # hits of one template
MAX_LINE = 6_000  # bytes of one line that reach the slow stages
_TEMPLATES = 60_000
_WORDS = 200_000  # remembered words
_GRAM = 3

_DELETE = (
    bytes(range(0x0A)) + bytes(range(0x0B, 0x0D)) + bytes(range(0x0E, 0x20)) + b"0123456789" + bytes(range(0x7F, 0x100))
)
_FOLD = bytes(b + 32 if 65 <= b <= 90 else (10 if b == 13 else b) for b in range(256))
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|[ -/]*[0-Z\\^-~])")
_COMMON = frozenset(b"ing ion ent ate rro ror err ail led ile tio and the not est".split())
_WORD = re.compile(rb"[a-z_]{3,}")

#: Needles that every text is searched for, whatever the playbooks say: the grammar of errors.
STRUCTURE = (
    "traceback (most recent call last)",
    '  file "',
    "error: ",
    "exception: ",
    "error:root:",
    "fatal python error",
    "most recent call first",
    "terminate called",
    "what():",
    "exit code",
    "exitcode",
    "exited with",
    "exit status",
    "signal",
    "killed",
    "aborted",
    "core dumped",
    "==== dflash-ops attempt",
    "exception in thread",
    "exception ignored",
    "py_callstack",
    "keyboardinterrupt",
    "original exception was",
)
_MARKER = re.compile(rb"==== dflash-ops attempt (\d+) release (\S+) (\S+) ====")


def fold(data: bytes) -> bytes:
    """The template of `data`: what is left when case, digits, colours and non-ASCII are gone."""
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    return data.translate(_FOLD, _DELETE)


class Needles:
    """Literals, searched in folded text through the words of the text: a set lookup instead of hundreds of searches.

    Each literal is filed under one run of letters. Where the literal itself bounds the run, a text that holds the
    literal holds the run as a word; else some word of the text contains it. What a word leads to is remembered.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        self.folded = [fold(literal.encode("utf-8", "replace").replace(b"\n", b" ")) for literal in literals]
        self._by_word: dict[bytes, list[int]] = {}
        self._by_gram: dict[bytes, list[tuple[bytes, int]]] = {}
        self._always: list[int] = []
        self._leads: dict[bytes, tuple[int, ...]] = {}
        for index, needle in enumerate(self.folded):
            runs = list(_WORD.finditer(needle))
            inside = [m.group() for m in runs if m.start() > 0 and m.end() < len(needle)]
            longest = max((m.group() for m in runs), key=len, default=b"")
            if inside and len(max(inside, key=len)) * 2 >= len(longest):
                self._by_word.setdefault(max(inside, key=len), []).append(index)
            elif len(longest) >= _GRAM:
                self._by_gram.setdefault(min(_grams(longest), key=_everyday), []).append((longest, index))
            else:
                self._always.append(index)
        self._hot: set[bytes] = set()

    def find(self, template: bytes) -> list[int]:
        """Indices of the literals that stand in a folded text (a line, or many lines)."""
        folded = self.folded
        found = {i for i in self._always if folded[i] in template}
        words = set(_WORD.findall(template))
        for word in words.difference(self._leads):
            self._learn(word)
        for word in words & self._hot:
            found.update(i for i in self._leads[word] if i not in found and folded[i] in template)
        return sorted(found)

    def _learn(self, word: bytes) -> None:
        if len(self._leads) > _WORDS:
            self._leads.clear()
            self._hot.clear()
        ids = list(self._by_word.get(word, ()))
        for gram in self._by_gram.keys() & _grams(word):
            ids += [i for run, i in self._by_gram[gram] if run in word]
        self._leads[word] = tuple(ids)
        if ids:
            self._hot.add(word)


def _grams(data: bytes) -> set[bytes]:
    return {data[i : i + _GRAM] for i in range(len(data) - _GRAM + 1)}


def _everyday(gram: bytes) -> tuple[bool, bytes]:
    return gram in _COMMON, gram


class Scan:
    """Feed chunks, then `lines()`: (number, bytes, joins-a-gap) of the lines kept of the last attempt."""

    def __init__(self, needles: Needles) -> None:
        self._needles = needles
        self._buffer = bytearray()
        self._clean: set[bytes] = set()
        self._dirty: dict[bytes, int] = {}
        self._kept: deque[tuple[int, bytes]] = deque()
        self._head_kept: list[tuple[int, bytes]] = []
        self._recent: deque[tuple[int, bytes]] = deque()  # (number of first line, block) for contexts and the tail
        self._next = 1
        self._after = HEAD
        self._part = False
        self.total_lines = 0
        self.total_bytes = 0
        self.attempt: dict[str, str] | None = None

    def feed(self, chunk: bytes) -> None:
        self.total_bytes += len(chunk)
        self._buffer += chunk
        start = 0
        while len(self._buffer) - start >= BLOCK:
            cut = self._buffer.rfind(b"\n", start, start + BLOCK) + 1
            if cut <= start:
                cut = self._buffer.rfind(b"\r", start, start + BLOCK) + 1
            if cut <= start:
                cut = start + BLOCK
            self._block(bytes(self._buffer[start:cut]))
            start = cut
        if start:
            del self._buffer[:start]

    def close(self) -> None:
        if self._buffer:
            self._block(bytes(self._buffer))
            self._buffer.clear()
        tail: list[tuple[int, bytes]] = []
        for first, block in reversed(self._recent):
            lines = _split(block)
            tail = [(first + i, line) for i, line in enumerate(lines)] + tail
            if len(tail) >= TAIL:
                break
        last = self._kept[-1][0] if self._kept else (self._head_kept[-1][0] if self._head_kept else 0)
        for number, line in tail[-TAIL:]:
            if number > last:
                self._kept.append((number, line))
        self.total_lines = self._next - 1 + (1 if self._part else 0)

    def lines(self) -> list[tuple[int, bytes, bool]]:
        """Kept lines in order; the flag says that lines are missing before this one."""
        out: list[tuple[int, bytes, bool]] = []
        before: int | None = None
        for number, line in [*self._head_kept, *self._kept]:
            out.append((number, line, before is not None and number > before + 1))
            before = number
        return out

    def _keep(self, number: int, line: bytes) -> None:
        newest = self._kept[-1][0] if self._kept else (self._head_kept[-1][0] if self._head_kept else 0)
        if number < newest or (number == newest and not self._part):
            return
        if len(line) > MAX_LINE:
            line = self._shorten(line)
        if len(self._head_kept) < MAX_LINES // 2:
            self._head_kept.append((number, line))
            return
        self._kept.append((number, line))
        if len(self._kept) > MAX_LINES // 2:
            self._kept.popleft()

    def _shorten(self, line: bytes) -> bytes:
        """Of an endless line: its beginning, the parts that hit, and its end."""
        folded = fold(line)
        if not self._needles.find(folded):
            last = line.rstrip(b"\r").rfind(b"\r") + 1
            return line[last:][-MAX_LINE // 2 :] if last else line[: MAX_LINE // 4] + line[-MAX_LINE // 4 :]
        kept: list[bytes] = []
        hits: dict[bytes, bool] = {}
        parts = [p for p in re.split(rb"\r+", line) if p.strip()]
        for part in parts:
            for window in _windows(part):
                template = fold(window)
                if template not in hits:
                    hits[template] = bool(self._needles.find(template))
                if hits[template]:
                    kept.append(window)
            if len(kept) > 64:
                del kept[24:-24]
        if parts and (not kept or kept[-1] is not parts[-1]):
            kept.append(parts[-1][-MAX_LINE:])
        return b"\r".join(kept[:24] + kept[24:][-24:])

    def _hit(self, template: bytes) -> bool:
        if template in self._clean:
            return False
        count = self._dirty.get(template)
        if count is None:
            if not self._needles.find(template):
                if len(self._clean) >= _TEMPLATES:
                    self._clean.clear()
                self._clean.add(template)
                return False
            count = 0
            if len(self._dirty) >= _TEMPLATES:
                self._dirty.clear()
        self._dirty[template] = count + 1
        return count < MAX_REPEATS

    def _block(self, block: bytes) -> None:
        first = self._next
        folded = fold(block)
        fresh = set(folded.split(b"\n")).difference(self._clean)
        hit = not fresh.isdisjoint(self._dirty)
        fresh.difference_update(self._dirty)
        present = [self._needles.folded[i] for i in self._needles.find(b"\n".join(fresh))] if fresh else []
        if len(self._clean) + len(fresh) > _TEMPLATES:
            self._clean.clear()
        if present:
            hit = True
            self._clean.update(t for t in fresh if not any(needle in t for needle in present))
        else:
            self._clean.update(fresh)
        width = 0 if hit else _wrap_width(block)
        if hit or width:
            self._walk(first, block, width or _wrap_width(block))
        elif self._after > 0:
            for i, line in enumerate(_split(block)[: self._after]):
                self._keep(first + i, line)
            self._after = max(0, self._after - max(1, block.count(b"\n")))
        count = block.count(b"\n")
        self._next = first + count
        self._part = not block.endswith(b"\n")
        self._recent.append((first, block))
        while len(self._recent) > 2 and sum(b.count(b"\n") for _, b in list(self._recent)[1:]) >= TAIL:
            self._recent.popleft()
        while len(self._recent) > 8:
            self._recent.popleft()

    def _walk(self, first: int, block: bytes, width: int) -> None:
        lines = _split(block)
        after = self._after
        kept_to = -1
        for i, line in enumerate(lines):
            probe = line
            if width and len(line) == width:
                j = i + 1
                while j < len(lines) and len(probe) < 4 * width:
                    probe += lines[j]
                    if len(lines[j]) != width:
                        break
                    j += 1
            hit = any(self._hit(template) for template in fold(probe).split(b"\n"))
            if hit:
                if b"==== dflash-ops attempt" in line and (marker := _MARKER.search(line)):
                    self._restart(marker)
                    kept_to = i - 1
                if kept_to < i - 1:
                    self._before(first, lines, i, kept_to)
                self._keep(first + i, line)
                kept_to = i
                after = AFTER
            elif after > 0:
                after -= 1
                self._keep(first + i, line)
                kept_to = i
        self._after = after

    def _before(self, first: int, lines: list[bytes], i: int, kept_to: int) -> None:
        start = max(kept_to + 1, i - BEFORE)
        missing = BEFORE - (i - start) if kept_to < 0 else 0
        if missing > 0 and start == 0 and self._recent:
            number, block = self._recent[-1]
            earlier = _split(block)
            for k in range(max(0, len(earlier) - missing), len(earlier)):
                self._keep(number + k, earlier[k])
        for k in range(start, i):
            self._keep(first + k, lines[k])

    def _restart(self, marker: re.Match[bytes]) -> None:
        """A new attempt begins: what stood before is another story."""
        self._kept.clear()
        self._head_kept.clear()
        self._recent.clear()
        self._dirty.clear()
        number, release, at = (g.decode("ascii", "replace") for g in marker.groups())
        self.attempt = {"attempt": number, "release": release, "t": at}


def _windows(part: bytes) -> list[bytes]:
    """A part in pieces short enough to be read, overlapping so that no text is cut in all of them."""
    if len(part) <= MAX_LINE:
        return [part]
    step = MAX_LINE * 3 // 4
    return [part[at : at + MAX_LINE] for at in range(0, len(part), step)]


def _split(block: bytes) -> list[bytes]:
    lines = block.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines


def _wrap_width(block: bytes) -> int:
    """Width at which a whole block seems to be wrapped, else 0: no line is longer and many are just as long."""
    sizes = [len(line) for line in block.split(b"\n") if line.isascii()]  # of others bytes are no columns
    top = max(sizes, default=0)
    if not 40 <= top <= 400:
        return 0
    return top if sizes.count(top) * 25 >= len(sizes) and sizes.count(top) >= 2 else 0
