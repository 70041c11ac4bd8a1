"""Pages of docs/kinds/, one a kind, made from playbooks/ (`python -m dflash_ops.collect.pages docs/kinds`).

The playbooks are the source; the pages are never written by hand. `--check` writes nothing and exits 1 where a page is
missing, stale or left over; a test runs it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflash_ops.playbooks import load_documents
from dflash_ops.triage.playbook import Kind, Signature, compile_playbooks

_NOTE = (
    "<!-- made from playbooks/{source} by `python -m dflash_ops.collect.pages docs/kinds`; "
    "edit the playbook, not this page -->"
)
_LINES = 14  # of an example, before it is cut in the middle
_WIDTH = 160
_ROLES = {
    "root": "A cause of its own: it is named before everything that follows from it.",
    "cascade": "A consequence: it is named only where no cause stands in the text.",
    "confirmation": "Word from outside the program (kernel, host, tmux, SSH): it outranks the program's own guesses.",
    "either": "A cause, or a consequence of another error: a cause that stands in the same text is named first.",
    "noise": "No failure by itself: mentioned beside a diagnosis, never one (unless a text below says otherwise).",
    "none": "No failure.",
}
_GRADES = {
    "A": "Yes. The steps of grade A run without asking, at most as often as said for one and the same fault.",
    "B": "Only where the job allows it: steps of grade B run if `policy.allow` of the inventory names them, as often "
    "as said.",
    "N": "No. Nothing is done by itself: you are told, with the command to type.",
    "-": "There is nothing to do.",
}
_STEP = {"A": "by itself", "B": "if allowed", "N": "you decide", "-": ""}
_WHEN = {
    "fx_threads": "several threads share the process (torch up to 2.13)",
    "fx_nesting": "true nesting (one thread, or torch from 2.14 on)",
    "own_overlay_active": "a change of ours is active",
}
_EVIDENCE = {
    "dense_attention_allocation": "the request is larger than the whole device, equals batch x heads x queries x keys "
    "x bytes within 10 %, or has tens of GiB in an attention call",
    "reserved_but_unallocated": "the memory reserved but unallocated would have held the request",
    "memory_held_by_other_process": "the message names another process with a share that matters",
    "collectives_differ": "the ranks of one group name different collectives",
}
_REPOSITORIES = {"pytorch": "pytorch/pytorch", "vllm": "vllm-project/vllm", "nccl": "NVIDIA/nccl"}
_WHERE = {
    "exception": "in an error's own line",
    "frame": "in a frame of a traceback",
    "kernel": "in a line of the kernel log",
    "progress": "in a progress line",
    "summary": "in a launcher's summary",
}


def pages(documents: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """All pages: file name -> Markdown text, `README.md` (the index) among them."""
    documents = list(documents)
    kinds = compile_playbooks(documents).kinds
    titles = {str(d["family"]): str(d.get("title", d["family"])) for d in documents}
    out = {f"{kind.id}.md": _page(kind, titles, kinds) for kind in kinds.values()}
    out["README.md"] = _index(kinds, titles)
    return out


def _index(kinds: Mapping[str, Kind], titles: Mapping[str, str]) -> str:
    lines = [
        _NOTE.format(source=""),
        "# Kinds of failure",
        "",
        f"{len(kinds)} kinds in {len(titles)} families. `dflash-ops triage` names one of them;",
        "`dflash-ops playbooks show KIND` prints its entry.",
        "",
        "Safe: **A** done by itself, **B** done where `policy.allow` names it, **N** never by itself, **-** nothing to",
        "do.",
    ]
    for family in sorted(titles, key=lambda f: titles[f].lower()):
        rows = sorted((k for k in kinds.values() if k.family == family), key=lambda k: k.id)
        if not rows:
            continue
        lines += ["", f"## {titles[family]}", "", "| kind | what | role | safe |", "|---|---|---|---|"]
        lines += [f"| [{k.id}]({k.id}.md) | {_cell(k.title)} | {k.role} | {k.grade} |" for k in rows]
    return "\n".join(lines) + "\n"


def _page(kind: Kind, titles: Mapping[str, str], kinds: Mapping[str, Kind]) -> str:
    lines = [
        _NOTE.format(source=f"{kind.family}.toml"),
        f"# {kind.id}",
        "",
        f"**{kind.title}** · {titles.get(kind.family, kind.family)} · role {kind.role} · safe {kind.grade}"
        " · [all kinds](README.md)",
        "",
        "## What you see",
        "",
    ]
    if kind.signatures:
        lines += ["One of these texts:", ""]
        lines += list(dict.fromkeys(f"- {_signature(s, kind)}" for s in kind.signatures))
    else:
        lines.append("No text of its own: it is the verdict where no failure stands in the text.")
    if kind.predicate:
        lines += ["", f"and: {_EVIDENCE.get(kind.predicate, kind.predicate)}."]
    examples = [str(e.get("text", "")) for e in kind.raw.get("example", ())]
    if examples:
        lines += ["", "For example:", "", *_block(examples[0])]
    lines += ["", "## What it means", "", kind.meaning, "", _ROLES[kind.role]]
    lines += ["", "## What we do", ""]
    lines += _ladder(kind) or ["Nothing."]
    lines += ["", "## Is it safe", "", *_safety(kind)]
    lines += ["", "## Torch versions", "", _versions(kind)]
    others = [e for e in kind.raw.get("counterexample", ()) if e.get("text")]
    if others:
        lines += ["", "## What only looks like it"]
        for other in others:
            name = str(other.get("kind", "healthy"))
            lines += ["", f"This is [{name}]({name}.md):", "", *_block(str(other["text"]))]
    near = _near(kind, kinds)
    if near:
        lines += ["", "## Near to it", ""]
        lines += [f"- [{k.id}]({k.id}.md): {k.title}" for k in near]
    lines += ["", "## References", ""]
    lines += [f"- {_reference(r)}" for r in kind.references] or ["None."]
    return "\n".join(lines) + "\n"


def _signature(s: Signature, kind: Kind) -> str:
    text = _code(s.literal.strip())
    if s.where in _WHERE:
        text += f", {_WHERE[s.where]}"
    if s.all:
        text += ", together with " + " and ".join(_code(a) for a in s.all)
    if s.any:
        text += ", together with " + " or ".join(_code(a) for a in s.any)
    if s.none:
        text += ", without " + " or ".join(_code(a) for a in s.none)
    if s.role and s.role != kind.role:
        text += f" (as {s.role})"
    return text


def _ladder(kind: Kind) -> list[str]:
    lines = []
    for number, step in enumerate(kind.remedies, 1):
        said = _STEP.get(step.grade, "")
        extra = [f"{step.grade}, {said}" if said else step.grade]
        if step.action != "tell":
            extra.append(f"`{step.action}`")
            extra.append("once" if step.limit == 1 else f"at most {step.limit} times")
        if step.when:
            extra.append(f"when {_WHEN.get(step.when, step.when)}")
        if step.proven and step.proven != "reported":
            extra.append(f"shown by `{step.proven}`")
        lines.append(f"{number}. {step.text} *({'; '.join(extra)})*")
        if step.command:
            lines += ["", "   ```sh", *(f"   {part}" for part in step.command.splitlines()), "   ```", ""]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _safety(kind: Kind) -> list[str]:
    lines = [_GRADES[kind.grade]]
    allowed = [r.action for r in kind.remedies if r.grade == "B" and r.action != "tell"]
    if allowed:
        named = ", ".join(f'"{kind.id}:{a}"' for a in dict.fromkeys(allowed))
        lines += ["", f"To allow: `policy.allow = [{named}]`."]
    return lines


def _versions(kind: Kind) -> str:
    if kind.since and kind.until:
        return f"This text exists from {kind.since} to {kind.until}."
    if kind.since:
        return f"This text exists from {kind.since} on."
    if kind.until:
        return f"This text exists up to {kind.until}."
    return "Not bound to a version of torch."


def _near(kind: Kind, kinds: Mapping[str, Kind]) -> list[Kind]:
    """Other kinds that share a literal: the more specific one is named where both would match."""
    own = {s.literal for s in kind.signatures}
    found = [k for k in kinds.values() if k.id != kind.id and own & {s.literal for s in k.signatures}]
    return sorted(found, key=lambda k: (-k.priority, k.id))


def _reference(text: str) -> str:
    match = re.fullmatch(r"([\w.-]+)#(\d+)", text)
    if match and match[1] in _REPOSITORIES:
        return f"[{text}](https://github.com/{_REPOSITORIES[match[1]]}/issues/{match[2]})"
    if text.startswith("docs/"):
        return f"[{text}](../{text.removeprefix('docs/')})"
    return text


def _block(text: str) -> list[str]:
    """An example as a code block: long ones cut in the middle, long lines at the end."""
    rows = [row if len(row) <= _WIDTH else row[: _WIDTH - 4] + " ..." for row in text.strip("\n").splitlines()]
    if len(rows) > _LINES:
        rows = [*rows[: _LINES // 2], f"... ({len(rows) - _LINES} lines) ...", *rows[-(_LINES // 2) :]]
    fence = "````" if any("```" in row for row in rows) else "```"
    return [f"{fence}text", *rows, fence]


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def differences(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """What `--check` finds: a sentence for each page that is missing, stale or left over."""
    found = {path.name for path in folder.glob("*.md")} if folder.is_dir() else set()
    out = [f"{name} is missing" for name in sorted(set(wanted) - found)]
    out += [f"{name} has no kind" for name in sorted(found - set(wanted))]
    both = sorted(found & set(wanted))
    out += [f"{name} is stale" for name in both if (folder / name).read_text(encoding="utf-8") != wanted[name]]
    return out


def main(arguments: list[str] | None = None) -> int:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m dflash_ops.collect.pages", description=about)
    parser.add_argument("folder", type=Path, help="where the pages lie, docs/kinds")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the folder differs")
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    wanted = pages(load_documents())
    stale = differences(folder, wanted)
    if given.check:
        for line in stale:
            print(line)
        return 1 if stale else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    print(f"{len(wanted)} pages, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
