"""What a regular expression cannot say about a match: True, False, or None where the text does not tell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from dflash_ops.triage.case import Case
from dflash_ops.triage.types import Finding

_UNITS = {
    "B": 1.0,
    "bytes": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 1024.0,
    "MiB": 1024.0**2,
    "GiB": 1024.0**3,
    "TiB": 1024.0**4,
}
_SIZE = r"(\d[\d,]*(?:\.\d+)?)\s*([KMGT]i?B|bytes|B)\b"
_TRIED = re.compile(r"[Tt]ried to allocate\s+" + _SIZE)
_CAPACITY = re.compile(r"total capac(?:i)?ty of\s+" + _SIZE + r"|" + _SIZE + r" total capacity")
_FREE = re.compile(r"of which\s+" + _SIZE + r"\s+is free|;\s*" + _SIZE + r" free")
_PROCESS = re.compile(r"[Pp]rocess (\d+) has\s+" + _SIZE + r" memory in use")
_THIS = re.compile(r"this process has\s+" + _SIZE + r" memory in use")
_ALLOCATED = re.compile(r"allocated memory\s+" + _SIZE + r" is allocated by PyTorch|" + _SIZE + r" already allocated")
_RESERVED = re.compile(_SIZE + r" is reserved by PyTorch but unallocated")
_RESERVED_TOTAL = re.compile(_SIZE + r" reserved in total")
_ATTENTION = re.compile(r"attention|attn|sdpa|\bqk\b|scores?\b.*matmul|softmax", re.IGNORECASE)
_NOT_ATTENTION = re.compile(
    r"cross_entropy|logsumexp|log_softmax|entropy|lm_head|logits|optim|\.step\(|all_gather|load_state_dict|from_pretrained|embedding",
    re.IGNORECASE,
)
_WATCHDOG = re.compile(
    r"(?:\[(?:PG[^\]]*?GUID (?P<pg>[\w()]+)[^\]]*?|PG (?P<pg2>\d+)[^\]]*?)?[Rr]ank (?P<rank>\d+)\])"
    r"?[^\[]{0,40}Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?"
)
#: Collectives whose size must be the same on every rank.
_SAME_SIZE = frozenset(("ALLREDUCE", "BROADCAST", "ALLGATHER", "REDUCE_SCATTER"))
_GONE = re.compile(
    r"exitcode\s*:?\s*-?\d+|died with|Connection (?:reset|closed) by peer|Broken pipe"
    r"|remote process (?:exited|exiting)|peer \w+ (?:died|lost|exited)|"
    r"Signal \d+ \(SIG|failed \(exitcode|NCCL communicator was aborted|socket.*closed",
    re.IGNORECASE,
)


def size(match: re.Match[str] | None) -> float | None:
    """Bytes of a size match (the first pair of groups that is filled)."""
    if match is None:
        return None
    groups = [g for g in match.groups() if g is not None]
    for number, unit in itertools.pairwise(groups):
        if unit in _UNITS:
            try:
                return float(number.replace(",", "")) * _UNITS[unit]
            except ValueError:
                return None
    return None


def _message(finding: Finding) -> str:
    return finding.record.text


def dense_attention_allocation(finding: Finding, case: Case) -> bool | None:
    text = _message(finding)
    tried = size(_TRIED.search(text))
    if tried is None:
        return None
    finding.facts["tried_bytes"] = tried
    frames = [f for s in finding.record.segments for f in s.frames]
    near = "\n".join(f"{f.function} {f.code}" for f in frames[-6:])
    attention = bool(_ATTENTION.search(near)) or any("attention" in f.path.lower() for f in frames[-4:])
    other = bool(_NOT_ATTENTION.search("\n".join(f"{f.function} {f.code}" for f in frames[-2:])))
    shapes = list(case.shapes())
    given = case.context.get("attention_shape")
    if isinstance(given, (list, tuple)) and len(given) == 4:
        shapes.append((int(given[0]), int(given[1]), int(given[2]), int(given[3])))
    for shape in shapes[:200]:
        product = 1.0
        for n in shape:
            product *= n
        for width in (1, 2, 4):
            want = product * width
            # "328 GB" is told for 320 GiB: units are mixed up by people and by tools
            if want > 2**30 and any(
                abs(t - want) <= 0.1 * want for t in (tried, tried / 1e9 * 2**30, tried / 2**30 * 1e9)
            ):
                finding.why.append(
                    f"the request equals a dense {list(shape)} matrix of {width}-byte numbers within 10 %"
                )
                return True
    capacity = size(_CAPACITY.search(text))
    if capacity is not None and tried > capacity and not (other and not attention):
        finding.why.append("one request is larger than the whole device: no batch does that, a dense score matrix does")
        return True
    if (
        tried >= 20 * 2**30
        and (attention or case.says("flex_attention called without torch.compile()", "recompile_limit"))
        and not other
    ):
        finding.why.append("tens of GiB in one request of an attention call")
        return True
    if tried >= 120 * 2**30 and capacity is None and not other:
        finding.why.append("one request of more than any device's memory")
        return True
    return False


def reserved_but_unallocated(finding: Finding, case: Case) -> bool | None:
    text = _message(finding)
    tried, capacity = size(_TRIED.search(text)), size(_CAPACITY.search(text))
    idle = size(_RESERVED.search(text))
    if idle is None:
        total, used = size(_RESERVED_TOTAL.search(text)), size(_ALLOCATED.search(text))
        idle = total - used if total is not None and used is not None else None
    if idle is None or tried is None:
        return None
    return idle >= tried and idle >= 0.1 * (capacity or idle * 10)


def memory_held_by_other_process(finding: Finding, case: Case) -> bool | None:
    text = _message(finding)
    by_pid = {m.group(1): amount for m in _PROCESS.finditer(text) if (amount := size(m)) is not None}
    held = list(by_pid.values())
    if not held:
        return False if size(_TRIED.search(text)) is not None else None
    if _THIS.search(text) is None:
        if len(held) < 2:
            return False  # the only process named is our own, seen from outside the container
        own = (size(_ALLOCATED.search(text)) or 0.0) + (size(_RESERVED.search(text)) or 0.0)
        held.remove(min(held, key=lambda h: abs(h - own)))
    capacity = size(_CAPACITY.search(text)) or 0.0
    tried = size(_TRIED.search(text)) or 0.0
    others = sum(held)
    if others >= max(2**30, 0.05 * capacity, min(tried, 0.2 * capacity)):
        finding.why.append(f"other processes hold {others / 2**30:.1f} GiB of this device")
        return True
    return False


def collectives_differ(finding: Finding, case: Case) -> bool | None:
    """Ranks of one group that timed out in different collectives. Several groups without a name cannot be compared."""
    if "mismatch between collectives" in finding.record.text.lower():
        return True
    compared = False
    for ranks in _watchdogs(case).values():
        if len(ranks) < 2 or any(len(calls) != 1 for calls in ranks.values()):
            continue
        compared = True
        first = {rank: calls[0] for rank, calls in ranks.items()}
        ops, numbers = {c[0] for c in first.values()}, {c[1] for c in first.values()}
        numels = {c[2] for c in first.values() if c[2] is not None}
        if len(ops) > 1 or len(numbers) > 1 or (len(numels) > 1 and ops & _SAME_SIZE):
            said = ", ".join(f"rank {r}: {c[0]} #{c[1]}" for r, c in sorted(first.items()))
            finding.why.append(f"ranks wait in different collectives: {said}")
            return True
    return False if compared else None


def _watchdogs(case: Case) -> dict[str, dict[int, list[tuple[str, str, str | None]]]]:
    """For each group and rank the calls that its watchdog named: (collective, sequence number, size)."""
    seen: dict[str, dict[int, list[tuple[str, str, str | None]]]] = {}
    for text in case.texts:
        for line in text.lines:
            if "Watchdog caught" not in line.text or (match := _WATCHDOG.search(line.text)) is None:
                continue
            rank = int(match["rank"]) if match["rank"] is not None else line.rank
            if rank is None:
                continue
            calls = seen.setdefault(match["pg"] or match["pg2"] or "", {}).setdefault(rank, [])
            call = (match["op"], match["seq"], match["numel"])
            if call not in calls:
                calls.append(call)
    return seen


def peer_lost(finding: Finding, case: Case) -> bool | None:
    return any(_GONE.search(line.text) for text in case.texts for line in text.lines) or None


def error_outlived(finding: Finding, case: Case) -> bool | None:
    return finding.outlived


def fx_threads(finding: Finding, case: Case) -> bool | None:
    version = case.torch_version()
    if version is not None and version >= (2, 14):
        return False
    if case.context.get("threads") is not None:
        return bool(case.context["threads"]) or None
    if any(
        f.path.endswith("threading.py") or "_bootstrap_inner" in f.function
        for s in finding.record.segments
        for f in s.frames
    ):
        return True
    return (
        True
        if "Exception in thread" in finding.record.title or case.says("Exception in thread Thread-", "(_worker)")
        else None
    )


def fx_nesting(finding: Finding, case: Case) -> bool | None:
    version = case.torch_version()
    if version is not None and version >= (2, 14):
        return True
    frames = [f for s in finding.record.segments for f in s.frames]
    if any(
        "utils/checkpoint.py" in f.path
        and f.function in ("unpack_hook", "recompute_fn", "_run_fn_with_dynamo_disabled")
        for f in frames
    ):
        return None if fx_threads(finding, case) else True
    if any(
        "make_fx" in f.function or "proxy_tensor.py" in f.path or f.path.endswith("fx/_symbolic_trace.py")
        for f in frames
    ):
        return True
    return False if fx_threads(finding, case) else None


def leaves_differ(finding: Finding, case: Case) -> bool | None:
    """An exception group whose leaves are of different kinds (the judge reads the kinds of its record's findings)."""
    if finding.record.form != "group":
        return None
    leaves = [s for s in finding.record.segments if s.exception and "Group" not in s.exception]
    kinds = {
        f.kind.id
        for f in case.findings
        if f.record is finding.record and f.segment in leaves and f.kind.id != finding.kind.id
    }
    unknown = [s for s in leaves if not any(f.segment is s for f in case.findings)]
    return len(kinds) != 1 or bool(unknown)


def own_overlay_active(finding: Finding, case: Case) -> bool | None:
    active = case.context.get("overlay")
    return bool(active) if active is not None else None


PREDICATES: dict[str, Callable[[Finding, Case], bool | None]] = {
    f.__name__: f
    for f in (
        dense_attention_allocation,
        reserved_but_unallocated,
        memory_held_by_other_process,
        collectives_differ,
        peer_lost,
        error_outlived,
        fx_threads,
        fx_nesting,
        leaves_differ,
        own_overlay_active,
    )
}
