"""`python -m trainer regenerate`: the target's own responses, as training data."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Let the target answer every prompt greedily and write training data for a drafter. A killed call is "
        "continued by the same command; a finished one does nothing."
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt, messages or input_ids")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--max-new", type=int, required=True, help="new tokens of a response, at most")
    parser.add_argument("--batch", type=int, default=64, help="responses made at a time (default 64)")
    parser.add_argument("--limit", type=int, default=None, help="only the first N prompts")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad prompt lines out instead of refusing them")
    parser.add_argument(
        "--anew", action="store_true", help="empty an output that was made from something else, instead of refusing it"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda:0 (default cpu)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all cores, at most 8)")
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")


def main(args: argparse.Namespace) -> int:
    from trainer.bar import Bar
    from trainer.cli.guard import own_progress_only, share_cores, told
    from trainer.regenerate import Plan, regenerate

    start = time.monotonic()
    working: float | None = None
    bar: Bar | None = None

    def planned(plan: Plan) -> None:
        nonlocal bar
        for fault in plan.skipped:
            print(f"left out: {fault}", file=sys.stderr)
        if plan.replaced:
            print(f"made anew: {plan.out} was made from something else", file=sys.stderr)
        if 0 < plan.done < plan.total:
            print(f"going on: {plan.done} of {plan.total} responses are there", file=sys.stderr)
        if plan.done < plan.total:
            bar = Bar("responses", plan.total, "prompts", done=plan.done)
            bar.update(plan.done, "loading torch and the target")
            threads = share_cores(args.threads, 8)
            import torch  # only now: a finished file needs none of it

            torch.set_num_threads(threads)
            own_progress_only()

    def progress(done: int, tokens: int) -> None:
        nonlocal working
        assert bar is not None
        now = time.monotonic()
        if working is None:
            working = now
            bar.start()
        bar.update(done, f"{tokens / (now - working):.0f} tok/s" if now > working else "")

    with told("writing the responses", "the same command goes on from here"):
        try:
            plan = regenerate(
                args.target,
                args.prompts,
                args.out,
                max_new=args.max_new,
                batch=args.batch,
                dtype=args.dtype,
                device=args.device,
                limit=args.limit,
                skip_bad=args.skip_bad,
                anew=args.anew,
                planned=planned,
                progress=progress,
            )
        finally:
            if bar is not None:
                bar.close()
    reused = plan.done == plan.total
    print(f"{'found' if reused else 'wrote'} {plan.total} responses in {plan.out}")
    if args.json:
        record = {
            "schema": 1,
            "kind": "regenerate",
            "out": str(plan.out),
            "responses": plan.total,
            "made": plan.total - plan.done,
            "skipped": len(plan.skipped),
            "seconds": round(time.monotonic() - start, 3),
        }
        print(json.dumps(record))
    return 0
