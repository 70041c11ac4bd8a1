"""Where each key of a TOML text stands: path -> 1-based line.

tomllib gives values without positions. This scanner reads only as much of the grammar as positions need, and only
texts that tomllib has accepted already, so it need not judge them: dotted and quoted keys, tables, arrays of tables,
inline tables, arrays over several lines, all four kinds of string.
"""

from __future__ import annotations

import tomllib

Path = tuple[str | int, ...]


def key_lines(text: str) -> dict[Path, int]:
    """Lines of every key, table and array element of `text`, which must be valid TOML.

    A table that only appears as part of others (`[a.b]` makes `a`) stands where it is first named.
    """
    return _Scanner(text.replace("\r\n", "\n")).scan()


def value_spans(text: str) -> dict[Path, tuple[int, int]]:
    """Where each key's value stands in `text` (valid TOML without `\\r\\n`): path -> (begin, end)."""
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.spans


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """Line of `path`, or of the nearest thing around it that stands in the text."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.arrays: dict[Path, int] = {}
        self.spans: dict[Path, tuple[int, int]] = {}

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while True:
            self._skip(newlines=True)
            if self.at >= len(self.text):
                return self.lines
            if self._peek("[["):
                self.at += 2
                table = self._header(array=True)
            elif self._peek("["):
                self.at += 1
                table = self._header(array=False)
            else:
                self._pair(table)

    # -- structure

    def _header(self, *, array: bool) -> Path:
        line = self._line()
        keys = self._dotted_key()
        self.at += 2 if array else 1
        path: Path = ()
        for number, key in enumerate(keys):
            path = (*path, key)
            self.lines.setdefault(path, line)
            last = number == len(keys) - 1
            if last and array:
                self.arrays[path] = self.arrays.get(path, -1) + 1
                path = (*path, self.arrays[path])
                self.lines[path] = line
            elif path in self.arrays:  # [a.b] under [[a]] speaks of the newest a
                path = (*path, self.arrays[path])
            if last and not array:
                self.lines[path] = line  # its own header is a better place than where it was implied
        # A new element starts with no arrays below it.
        if array:
            self.arrays = {p: n for p, n in self.arrays.items() if p[: len(path)] != path}
        return path

    def _pair(self, table: Path) -> None:
        line = self._line()
        path = table
        for key in self._dotted_key():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self._skip()
        self.at += 1  # the equals sign
        self._skip()
        begin = self.at
        self._value(path)
        self.spans[path] = (begin, self.at)

    def _value(self, path: Path) -> None:
        if self._peek('"') or self._peek("'"):
            self._string()
        elif self._peek("["):
            self._array(path)
        elif self._peek("{"):
            self._inline(path)
        else:
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def _array(self, path: Path) -> None:
        self.at += 1
        index = 0
        while True:
            self._skip(newlines=True)
            if self._peek("]"):
                self.at += 1
                return
            if self._peek(","):
                self.at += 1
                continue
            self.lines[(*path, index)] = self._line()
            self._value((*path, index))
            index += 1

    def _inline(self, path: Path) -> None:
        self.at += 1
        while True:
            self._skip(newlines=True)
            if self._peek("}"):
                self.at += 1
                return
            if self._peek(","):
                self.at += 1
                continue
            self._pair(path)

    # -- tokens

    def _dotted_key(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip()
            if self._peek('"') or self._peek("'"):
                keys.append(self._string())
            else:
                start = self.at
                while self.text[self.at] not in " \t.=]":
                    self.at += 1
                keys.append(self.text[start : self.at])
            self._skip()
            if not self._peek("."):
                return keys
            self.at += 1

    def _string(self) -> str:
        """Move behind a string; its value (needed for quoted keys only)."""
        start = self.at
        quote = self.text[self.at]
        if self._peek(quote * 3):
            self.at += 3
            while not self._peek(quote * 3):
                self.at += 2 if quote == '"' and self._peek("\\") else 1
            self.at += 3
            while self._peek(quote):  # up to two quotes may stand directly before the closing three
                self.at += 1
        else:
            self.at += 1
            while self.text[self.at] != quote:
                self.at += 2 if quote == '"' and self._peek("\\") else 1
            self.at += 1
        raw = self.text[start : self.at]
        return raw[1:-1] if "\\" not in raw or quote == "'" else str(tomllib.loads(f"k = {raw}")["k"])

    def _skip(self, *, newlines: bool = False) -> None:
        """Move over blanks; with `newlines` also over line ends and comments."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t" or (newlines and char == "\n"):
                self.at += 1
            elif newlines and char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1
