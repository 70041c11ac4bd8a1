"""`python -m trainer evaluate`: tau, losslessness and speed-up of a drafter, in the real speculative loop."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continue every prompt twice, speculatively with the drafter and plainly by the target alone, and compare. "
        "Exit code 0 whatever is found, except with --require-lossless and --least-tau."
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument(
        "--drafter", type=Path, required=True, help="exported drafter, checkpoint, or checkpoints folder"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt, messages or input_ids")
    parser.add_argument("--max-new", type=int, required=True, help="new tokens a prompt, at most")
    parser.add_argument("--limit", type=int, default=None, help="only the first N prompts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda:0 (default cpu)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores, at most 4)")
    parser.add_argument("--require-lossless", action="store_true", help="exit 1 if a single token differs")
    parser.add_argument("--least-tau", type=float, default=None, metavar="T", help="exit 1 if tau is below T")
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")


def main(args: argparse.Namespace) -> int:
    from trainer.cli.guard import told

    with told("the evaluation", "nothing was written"):
        result = _evaluate(args)
    _print(result)
    if args.json:
        print(json.dumps(result))
    failed = []
    if args.require_lossless and not result["lossless"]:
        failed.append("not lossless")
    if args.least_tau is not None and result["tau"] < args.least_tau:
        failed.append(f"tau {result['tau']:.3f} is below {args.least_tau:g}")
    if failed:
        print(f"error: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from trainer.bar import Bar
    from trainer.cli.guard import own_progress_only, share_cores
    from trainer.prompts import end_tokens, read_prompts, tokenize

    found, _ = read_prompts(args.prompts, limit=args.limit)  # before torch: a bad file is told at once
    threads = share_cores(args.threads, 4)  # more threads only wait for each other in forwards this small
    bar = Bar("evaluate", len(found), "prompts")
    bar.update(0, "loading torch, target and drafter")
    import torch

    from trainer.drafter import Drafter
    from trainer.drafter_source import open_source
    from trainer.evaluate import evaluate
    from trainer.target import load_target

    torch.set_num_threads(threads)
    own_progress_only()
    source = open_source(args.drafter)
    dtype = getattr(torch, args.dtype)
    target = load_target(args.target, dtype=dtype, device=args.device)
    drafter = Drafter(source.config)
    drafter.load_state_dict(dict(source.state))
    drafter.to(device=args.device, dtype=dtype).eval()
    room = int(getattr(target.config, "max_position_embeddings", 1 << 31)) - args.max_new
    prompts = tokenize(found, args.target, args.prompts, vocab_size=target.vocab_size, longest=room)
    bar.start()
    try:
        report = evaluate(
            target,
            drafter,
            prompts,
            args.max_new,
            end_tokens(args.target),
            progress=lambda done, _, tau: bar.update(done, f"tau {tau:.2f}"),
        )
    finally:
        bar.close()
    return {
        "schema": 1,
        "kind": "evaluate",
        "drafter": str(source.path),
        "step": source.step,
        "block_size": source.config.block_size,
        **report.to_dict(),
        "speedup_forwards": report.plain_forwards / report.speculative_forwards,
    }


def _print(r: dict[str, Any]) -> None:
    slots = "  ".join(f"{100 * share:.0f}%" for share in r["slot_acceptance"])
    print(f"prompts      {r['prompts']} ({r['tokens']} new tokens)")
    print(f"tau          {r['tau']:.3f} of at most {r['block_size']}")
    print(f"by slot      {slots}")
    if r["lossless"]:
        print("lossless     yes: the target's own text, token for token")
    else:
        first = ", ".join(f"prompt {p} at token {t}" for p, t in r["mismatches"][:5])
        print(f"lossless     NO: {len(r['mismatches'])} of {r['prompts']} outputs differ ({first})")
    print(
        f"forwards     {r['speculative_forwards']} instead of {r['plain_forwards']}: "
        f"{r['speedup_forwards']:.2f} times fewer"
    )
    print(f"seconds      {r['speculative_seconds']:.2f} instead of {r['plain_seconds']:.2f}, here")
