"""Which frames are the user's: everything outside libraries, the interpreter and generated code."""

from __future__ import annotations

import re
from functools import lru_cache

from dflash_ops.triage.types import Frame, Record, Segment

_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|__pypackages__)/"
    r"|(?:^|/)lib(?:64)?/python\d[\d.]*/|(?:^|/)python\d\.\d+/(?:runpy|threading|multiprocessing|concurrent|asyncio|importlib)"
    r"|/python\d[\d.]*/(?:runpy|threading|contextlib|functools)\.py$"
    r"|(?:^|/)transformers_modules/|\.egg/|^<frozen |^<template>|^<string>$|^<unknown>$"
    r"|^<eval_with_key>|^<(?:__array_function__|decorator|attrs|cython)"
    r"|\.(?:pyx|pxi|pxd|cpp|cc|cu|h)$|torchinductor_|/torch_compile_debug/|/tmp/tmp\w+/(?:\w{2}/)?c\w{20,}\.py"
    r"|(?:^|/)bin/[\w-]+$|(?:^|/)(?:Python\d+|(?:ana|mini)conda3?(?:/envs/[^/]+)?)/lib/[a-z_]+"
    r"|(?:^|/)(?:torch|pytorch)/(?:_[a-z]\w*|nn|optim|autograd|distributed|utils|cuda|fx|jit|amp|multiprocessing|serialization|functional|random|storage|hub|export|backends|ao|func|accelerator|library|overrides|testing|csrc)(?:/|\.py$|$)"
    r"|(?:^|/)(?:transformers/src/transformers|src/transformers|deepspeed/(?:runtime|launcher|comm|ops)|accelerate/src/accelerate|pytorch_lightning|lightning/pytorch|lightning_fabric|datasets/src/datasets)/"
    r"|^/usr/lib/|^/usr/share/|(?:^|/)(?:runpy|threading)\.py$|(?:^|/)multiprocessing/(?:process|spawn|pool|popen_\w+|connection|queues|context)\.py$"
)


@lru_cache(maxsize=4096)
def is_user(path: str) -> bool:
    """Whether a frame's file is the user's own. `path` as the traceback prints it."""
    return _LIBRARY.search(path.replace("\\", "/")) is None


def deepest_user(segment: Segment) -> Frame | None:
    """The user's frame nearest to the error, None where all frames are library code."""
    frames = segment.frames if segment.reverse else list(reversed(segment.frames))
    return next((frame for frame in frames if frame.user), None)


def user_frame(record: Record, segment: Segment | None) -> Frame | None:
    """The user's frame for a record: of the segment that holds the cause, else of the nearest segment that has one."""
    if segment is not None and (found := deepest_user(segment)) is not None:
        return found
    order = list(record.segments)
    if segment is not None and segment in order:
        at = order.index(segment)
        order = order[at + 1 :] + list(reversed(order[:at]))
    for other in order:
        if (found := deepest_user(other)) is not None:
            return found
    return None
