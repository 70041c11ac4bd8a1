"""JSON of plain values without the import of `json`: its regular expressions take as long as all of our own modules.

The C parts of the standard library's own `json` are used where they are as we know them, else `json` itself.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SPACE = " \t\r\n"


class _Settings:
    """What the scanner reads of a `json.JSONDecoder`."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012


def _parts() -> tuple[Callable[[str, int], tuple[Any, int]], Callable[[Any, int], tuple[str, ...]]] | None:
    try:
        import _json

        scan = _json.make_scanner(_Settings())  # type: ignore[arg-type]
        encode = _json.make_encoder(None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
        if scan('{"a": [1, "b"]}', 0) == ({"a": [1, "b"]}, 15) and "".join(encode([1, {"a": None}], 0)):
            return scan, encode
    except (ImportError, AttributeError, TypeError, ValueError):
        pass  # another Python
    return None


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is no plain value")


_C = _parts()


def loads(raw: bytes | str) -> Any:
    """A value from its JSON text.

    Raises:
        ValueError: it is none.
    """
    text = (raw if isinstance(raw, str) else raw.decode()).strip(_SPACE)
    if _C is not None:
        try:
            value, end = _C[0](text, 0)
        except StopIteration:
            end = -1
        if end == len(text):
            return value
    import json

    return json.loads(text)


def dumps(value: Any) -> str:
    """Its JSON text: one line of ASCII, no spaces."""
    if _C is not None:
        return "".join(_C[1](value, 0))
    import json

    return json.dumps(value, separators=(",", ":"))
