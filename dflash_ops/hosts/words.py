"""Commands as messages show them: quoted as a shell would need it, and short."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def show(argv: Sequence[str], limit: int = 200) -> str:
    """`argv` as one line that could be typed, cut in the middle where it is long."""
    line = " ".join(shlex.quote(a).replace("\n", "\\n") for a in argv)
    if len(line) <= limit:
        return line
    half = (limit - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
