"""Names of tmux sessions and sockets: one rule for the inventory that takes them and the resident that uses them."""

from __future__ import annotations

#: What tmux would read as something else than a name: separators of a target or a command, formats, patterns.
_NO_SESSION = frozenset(".:;#\\*?[]{}=@$%!")

#: Bytes: a socket becomes a file in tmux's own folder, under a limit of about 100 for the whole path.
_SOCKET_LIMIT = 60


def session_fault(name: str) -> str | None:
    """Why tmux would not keep this name, or not find it again; None if it would."""
    if bad := sorted(_NO_SESSION & set(name)):
        return f"it holds {' '.join(bad)}"
    if not name or name.startswith(("-", "+", "~")) or name != name.strip():
        return "it begins or ends with a sign that tmux reads otherwise"
    return None if name.isprintable() else "it holds a sign that cannot be printed"


def session_name(text: str) -> str:
    """The text with `_` for what tmux would not take."""
    return "".join("_" if c in _NO_SESSION else c for c in text.strip().lstrip("-+~"))


def socket_fault(name: str) -> str | None:
    """Why this cannot be the name of a tmux socket (`tmux -L`), or None."""
    if not name or "/" in name or name.startswith(("-", ".")) or not name.isprintable():
        return "it is no plain name"
    return "it is too long" if len(name.encode()) > _SOCKET_LIMIT else None
