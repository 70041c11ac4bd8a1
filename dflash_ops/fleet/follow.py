"""Streams that last: what each job says each second, over links that fail and come back.

The rule here: what is shown always says how old it is, by the clock of the job's own machine; an old snapshot never
looks new, and a link that is gone is said, at the latest after IDLE_S of silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_ops.client import Seen

#: `connecting`: nothing was heard yet; `live`: it speaks; `lost`: it does not, and the next try is awaited;
#: `retrying`: a try is under way; `over`: the stream was asked to end with the job, and it has.
Link = Literal["connecting", "live", "lost", "retrying", "over"]

#: Seconds of silence after which a link counts as lost: the other side says something at least every 2 s.
IDLE_S = 12.0


@dataclass(frozen=True)
class Look:
    """What is known of one job (or of one node of it) at this moment.

    Attributes:
        seen: the newest that was heard, None while nothing was.
        age_s: how old that is now, seconds: its age when it was sent, by its machine's clock, and the time since.
        link: see `Link`. lost_since: when the link was lost (this machine's clock, since the epoch).
        error: why, in one line. tries: attempts to come back since then.
    """

    seen: Seen | None = None
    age_s: float | None = None
    link: Link = "connecting"
    lost_since: float | None = None
    error: str = ""
    tries: int = 0
