"""`python -m trainer evaluate`: tau, losslessness and speed-up of a drafter, in the real speculative loop."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.evaluate import Report
    from trainer.prompts import Prompt

_NAMED = 10


@dataclass
class PromptSet:
    """A named file of prompts; `ids` once they are tokenised, each with the line it came from."""

    name: str
    file: Path
    prompts: list[Prompt]
    ids: list[list[int]]
    lines: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue every prompt twice, speculatively with the drafter and plainly by the target alone, and compare. "
        "Exit code 1 if a single token differs (but for --allow-mismatch), or with --least-tau."
    )
    parser.add_argument("--target", required=True, help="folder of the target, or its hub id")
    parser.add_argument(
        "--drafter", type=Path, required=True, help="exported drafter, checkpoint, or checkpoints folder"
    )
    parser.add_argument(
        "--prompts",
        action="append",
        required=True,
        metavar="[NAME=]PATH",
        help="JSON lines with prompt, messages or input_ids, or a folder of such *.jsonl; may be given several times",
    )
    parser.add_argument("--max-new", type=int, required=True, help="new tokens a prompt, at most")
    parser.add_argument("--limit", type=int, default=None, help="only the first N prompts of each file")
    parser.add_argument("--skip-bad", action="store_true", help="leave out prompts that cannot be used, and say which")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda:0 (default cpu)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores, at most 4)")
    parser.add_argument("--allow-mismatch", action="store_true", help="exit 0 although outputs differ (low precision)")
    parser.add_argument("--least-tau", type=float, default=None, metavar="T", help="exit 1 if tau is below T")
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")


def main(args: argparse.Namespace) -> int:
    from trainer.cli.guard import told
    from trainer.errors import ConfigError

    for option, value in (("--max-new", args.max_new), ("--limit", args.limit)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: at least 1", option)
    with told("the evaluation", "nothing was written"):
        result = _evaluate(args)
    _print(result)
    if args.json:
        print(json.dumps(result))
    failed = []
    if not result["lossless"] and not args.allow_mismatch:
        failed.append(f"not lossless: {len(result['mismatches'])} of {result['prompts']} outputs differ")
    if args.least_tau is not None and result["tau"] < args.least_tau:
        failed.append(f"tau {result['tau']:.3f} is below {args.least_tau:g}")
    if failed:
        print(f"error: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def prompt_sets(given: Sequence[str], limit: int | None, skip_bad: bool) -> tuple[list[PromptSet], list[str]]:
    """The sets that --prompts names, and what is wrong with lines left out.

    Raises:
        ConfigError: no such file, a folder without *.jsonl, a name twice. DataError: bad lines.
    """
    from trainer.errors import ConfigError
    from trainer.prompts import read_prompts

    files: list[tuple[str, Path]] = []
    for text in given:
        name, equals, rest = text.partition("=")
        path = Path(text) if not equals or Path(text).exists() else Path(rest)
        name = name if equals and path != Path(text) else ""
        if path.is_dir():
            inside = sorted(path.glob("*.jsonl"))
            if not inside:
                raise ConfigError("the folder has no *.jsonl", str(path), "name a file of prompts, or another folder")
            files += [(f"{name}/{file.stem}" if name else file.stem, file) for file in inside]
        else:
            files.append((name or path.stem, path))
    names = [name for name, _ in files]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ConfigError(
            f"two prompt sets are called {twice[0]!r}", "--prompts", "give them names: --prompts NAME=PATH"
        )
    sets, skipped = [], []
    for name, file in files:
        found, bad = read_prompts(file, limit=limit, skip_bad=skip_bad)
        skipped += bad
        sets.append(PromptSet(name, file, found, [], []))
    return sets, skipped


def _tokenised(sets: list[PromptSet], target: Path, vocab_size: int, longest: int, skip_bad: bool) -> list[str]:
    """Fills `ids` and `lines`; what is wrong with the prompts left out.

    Raises:
        DataError: prompts that cannot be used, all of them named (ten at most); or a set without any left.
    """
    from trainer.errors import DataError
    from trainer.prompts import tokenize, unusable_prompts

    bad: list[str] = []
    for one in sets:
        faults: list[str] = []
        ids = tokenize(one.prompts, target, one.file, vocab_size=vocab_size, longest=longest, bad=faults)
        kept = [(i, p.line) for i, p in zip(ids, one.prompts, strict=True) if i]
        one.ids, one.lines = [i for i, _ in kept], [line for _, line in kept]
        bad += faults
        if not kept and skip_bad:
            raise DataError("no prompt of this file can be used", str(one.file), "\n  ".join(faults[:_NAMED]))
    if bad and not skip_bad:
        raise unusable_prompts(bad, "--prompts")
    return bad


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from trainer.bar import Bar
    from trainer.cli.guard import own_progress_only, share_cores
    from trainer.prompts import end_tokens

    sets, skipped = prompt_sets(args.prompts, args.limit, args.skip_bad)  # before torch: a bad file is told at once
    total = sum(len(one.prompts) for one in sets)
    threads = share_cores(args.threads, 4)  # more threads only wait for each other in forwards this small
    bar = Bar("evaluate", total, "prompts")
    with bar.alive():
        bar.update(0, "loading torch, target and drafter")
        import torch

        from trainer.drafter import Drafter
        from trainer.drafter_source import open_source
        from trainer.evaluate import evaluate, merged, warm_up
        from trainer.hub import target_folder
        from trainer.target import load_target

        torch.set_num_threads(threads)
        own_progress_only()
        source = open_source(args.drafter)
        dtype = getattr(torch, args.dtype)
        folder = target_folder(args.target)
        bar.update(0, "loading the target")
        target = load_target(folder, dtype=dtype, device=args.device, progress=bar.weights)
        bar.update(0, "loading the drafter")
        drafter = Drafter(source.config)
        drafter.load_state_dict(dict(source.state))
        drafter.to(device=args.device, dtype=dtype).eval()
        room = int(getattr(target.config, "max_position_embeddings", 1 << 31)) - args.max_new
        skipped += _tokenised(sets, folder, target.vocab_size, room, args.skip_bad)
        ends = end_tokens(folder)
        warm_up(target, drafter, sets[0].ids[0], args.max_new)
        bar.start()
        reports, done, tokens, tau = [], 0, 0, 0.0

        def each(new: int) -> None:
            nonlocal tokens
            tokens += new
            bar.update(done, f"{tokens} tokens  tau {tau:.2f}")

        def progress(finished: int, _: int, now: float) -> None:
            nonlocal tau, done
            tau, done = now, before + finished
            bar.update(done, f"{tokens} tokens  tau {tau:.2f}")

        for one in sets:
            before = done
            reports.append(evaluate(target, drafter, one.ids, args.max_new, ends, progress=progress, each=each))
    return {
        "schema": 1,
        "kind": "evaluate",
        "drafter": str(source.path),
        "step": source.step,
        **merged(reports).to_dict(),
        "mismatches": [m for one, r in zip(sets, reports, strict=True) for m in _places(one, r)],
        "sets": [
            {"name": one.name, "file": str(one.file), **report.to_dict(), "mismatches": _places(one, report)}
            for one, report in zip(sets, reports, strict=True)
        ],
        "skipped": skipped,
    }


def _places(one: PromptSet, report: Report) -> list[dict[str, Any]]:
    """Mismatches with the set and the line of their prompt."""
    return [
        {
            "set": one.name,
            "file": str(one.file),
            "line": one.lines[m.prompt],
            "position": m.position,
            "speculative": m.speculative,
            "plain": m.plain,
            "gap": m.gap,
        }
        for m in report.mismatches
    ]


def _print(r: dict[str, Any]) -> None:
    if len(r["sets"]) > 1:
        width = max(len(s["name"]) for s in (*r["sets"], {"name": "together"}))
        print(f"{'set':{width}}  prompts  tokens    tau  forwards  tok/s  plain  times  lossless")
        for s in (*r["sets"], {**r, "name": "together"}):
            print(
                f"{s['name']:{width}}  {s['prompts']:7d}  {s['tokens']:6d}  {s['tau']:5.2f}"
                f"  {s['speedup_forwards']:7.2f}x"
                f"  {s['speculative_tokens_per_s']:5.0f}  {s['plain_tokens_per_s']:5.0f}  {s['speedup']:4.2f}x"
                f"  {'yes' if s['lossless'] else 'NO'}"
            )
        print()
    print(f"prompts      {r['prompts']} ({r['tokens']} new tokens)")
    for text in r["skipped"][:_NAMED]:
        print(f"left out     {text}")
    if len(r["skipped"]) > _NAMED:
        print(f"left out     and {len(r['skipped']) - _NAMED} more")
    print(f"tau          {r['tau']:.3f} of at most {r['block_size']}")
    print(f"slots 1..k   {_shares(r['slot_acceptance'])}   (all of them accepted)")
    print(f"slot k       {_shares(r['slot_conditional'])}   (where those before it were)")
    if r["lossless"]:
        print("lossless     yes: the target's own text, token for token")
    else:
        print(f"lossless     NO: {len(r['mismatches'])} of {r['prompts']} outputs differ")
        for m in r["mismatches"][:_NAMED]:
            gap = "" if m["gap"] is None else f"; the target's logits of them are {m['gap']:.3g} apart"
            print(
                f"  {m['file']}:{m['line']}: new token {m['position']} is {_token(m['speculative'])}, "
                f"plainly {_token(m['plain'])}{gap}"
            )
    print(
        f"forwards     {r['speculative_forwards']} instead of {r['plain_forwards']}: "
        f"{r['speedup_forwards']:.2f} times fewer"
    )
    print(
        f"tokens/s     {r['speculative_tokens_per_s']:.1f} against {r['plain_tokens_per_s']:.1f} plainly: "
        f"{r['speedup']:.2f} times ({r['speculative_seconds']:.2f} s, {r['plain_seconds']:.2f} s, here)"
    )


def _shares(values: Sequence[float | None]) -> str:
    return "  ".join("-" if share is None else f"{100 * share:.0f}%" for share in values)


def _token(token: int | None) -> str:
    return "none (it had ended)" if token is None else str(token)
