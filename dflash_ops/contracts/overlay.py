"""overlay.json: config changes kept between attempts, one layer an action, so that any of them can be taken back.

A remedies table says how a trainer does what an action asks for; `supervise.remedies.concrete` makes a layer of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar


@dataclass(frozen=True)
class Way:
    """How one trainer does one action.

    `set`: config keys and their values, handed over as arguments `--set KEY=VALUE`; `scale`: config keys whose present
    value (RemedyTable.values) is multiplied; `env`: variables; `args`: arguments added at the end.
    """

    set: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemedyTable:
    """A job's remedies: action -> way. `values` = config values in force, by dotted key; `reasons` = action -> why this
    trainer has no way for it (`one process a device is what it always does`)."""

    ways: dict[str, Way] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """One change with its reason. `id` is that of the decision that made it; `nofile` raises the soft limit."""

    id: str
    action: str
    kind: str = ""
    fingerprint: str = ""
    t: float = 0.0
    reason: str = ""
    set: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    nofile: int | None = None


@dataclass(frozen=True)
class Overlay:
    """All layers, oldest first; a later one wins where two say something of the same key."""

    SCHEMA: ClassVar[int] = 1

    layers: tuple[Layer, ...] = ()
    schema: int = 1

    def without(self, ids: Iterable[str]) -> Overlay:
        gone = set(ids)
        return replace(self, layers=tuple(x for x in self.layers if x.id not in gone))

    def with_layer(self, layer: Layer | None) -> Overlay:
        """With one more layer on top; the same id is never there twice."""
        if layer is None:
            return self
        return replace(self, layers=(*(x for x in self.layers if x.id != layer.id), layer))

    @property
    def set(self) -> dict[str, Any]:
        return {k: v for layer in self.layers for k, v in layer.set.items()}

    @property
    def env(self) -> dict[str, str]:
        return {k: v for layer in self.layers for k, v in layer.env.items()}

    @property
    def args(self) -> tuple[str, ...]:
        """Words of all layers; two layers that add the same words add them once."""
        return tuple(word for words in dict.fromkeys(layer.args for layer in self.layers) for word in words)

    @property
    def nofile(self) -> int | None:
        return max((x.nofile for x in self.layers if x.nofile is not None), default=None)
