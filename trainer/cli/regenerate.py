"""`python -m trainer regenerate`: the target's own responses, as training data."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.regenerate import Plan

#: Options of one of the two ways; with the other they are refused.
_LOCAL = ("target", "batch", "dtype", "device", "threads")
_SERVER = ("model", "api_key_env", "concurrency", "timeout", "retries", "max_bad", "temperature", "top_p", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Let the target answer every prompt and write training data for a drafter, on this machine (--target) or by an "
        "OpenAI-compatible server that serves it (--server). A killed call is continued by the same command; a "
        "finished one does nothing."
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSON lines with prompt, messages, conversations or input_ids"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--max-new", type=int, required=True, help="new tokens of a response, at most")
    parser.add_argument("--limit", type=int, default=None, help="only the first N prompts")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad prompt lines out instead of refusing them")
    parser.add_argument(
        "--anew", action="store_true", help="empty an output that was made from something else, instead of refusing it"
    )
    parser.add_argument(
        "--template-options", metavar="JSON", help="""for the chat template: '{"enable_thinking": false}'"""
    )
    parser.add_argument("--json", action="store_true", help="the last line of the output is a JSON object")
    local = parser.add_argument_group("on this machine, greedily; of a conversation the last turn")
    local.add_argument("--target", help="folder of the target, or its hub id")
    local.add_argument("--batch", type=int, help="responses made at a time (default 64)")
    local.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default float32")
    local.add_argument("--device", help="such as cpu or cuda:0 (default cpu)")
    local.add_argument("--threads", type=int, help="CPU threads (default: all cores, at most 8)")
    server = parser.add_argument_group("by a server; of a conversation all turns")
    server.add_argument("--server", metavar="URL", help="such as http://host:8000/v1")
    server.add_argument("--model", help="the target's name there")
    server.add_argument("--api-key-env", metavar="VAR", help="environment variable that holds the key")
    server.add_argument("--concurrency", type=int, help="requests at a time (default 32)")
    server.add_argument("--timeout", type=float, metavar="S", help="seconds for one request (default 600)")
    server.add_argument("--retries", type=int, help="tries after the first (default 6)")
    server.add_argument(
        "--max-bad", type=int, help="bad answers allowed (default: one in a hundred prompts, at least 10)"
    )
    server.add_argument("--temperature", type=float, help="default 0")
    server.add_argument("--top-p", type=float)
    server.add_argument("--seed", type=int)


def main(args: argparse.Namespace) -> int:
    from trainer.cli.guard import told

    start = time.monotonic()
    if (args.target is None) == (args.server is None):
        raise ConfigError("exactly one of --target and --server is needed", "regenerate", "name who is to answer")
    strangers = [
        f"--{n.replace('_', '-')}" for n in (_SERVER if args.target else _LOCAL) if getattr(args, n) is not None
    ]
    if strangers:
        way = "--target" if args.target else "--server"
        raise ConfigError(f"{', '.join(strangers)} means nothing with {way}", "regenerate", "leave it out")
    shown = _Shown()
    with told("writing the responses", "the same command goes on from here"), shown.bar.alive():
        record = (_local if args.target else _server)(args, shown)
    plan = shown.plan
    assert plan is not None
    missing = plan.total - plan.done - record["made"]
    verb = "found" if plan.done == plan.total else "wrote"
    print(f"{verb} {plan.total - missing} responses in {plan.out}" + (f", {missing} are missing" if missing else ""))
    if args.json:
        head = {"schema": 1, "kind": "regenerate", "out": str(plan.out), "responses": plan.total - missing}
        seconds = round(time.monotonic() - start, 3)
        print(json.dumps({**head, **record, "skipped": len(plan.skipped), "seconds": seconds}))
    return 0


class _Shown:
    """What is said on the way, and the plan that was heard."""

    def __init__(self) -> None:
        from trainer.bar import Bar

        self.plan: Plan | None = None
        self.bar = Bar("responses", 0, "prompts", text="reading the prompts")
        self._working: float | None = None

    def planned(self, plan: Plan, first: str) -> None:
        self.plan = plan
        for fault in plan.skipped:
            self.bar.say(f"left out: {fault}")
        if plan.replaced:
            self.bar.say(f"made anew: {plan.out} was made from something else")
        if 0 < plan.done < plan.total:
            self.bar.say(f"going on: {plan.done} of {plan.total} responses are there")
        if plan.done < plan.total:
            self.bar.phase("responses", plan.total, "prompts", done=plan.done)
            self.bar.update(plan.done, first)

    def progress(self, done: int, tokens: int) -> None:
        now = time.monotonic()
        if self._working is None:
            self._working = now
            self.bar.start()
        self.bar.update(done, f"{tokens / (now - self._working):.0f} tok/s" if now > self._working else "")


def _local(args: argparse.Namespace, shown: _Shown) -> dict[str, Any]:
    from trainer.chat import read_options
    from trainer.cli.guard import own_progress_only, share_cores
    from trainer.hub import target_folder
    from trainer.regenerate import regenerate

    def planned(plan: Plan) -> None:
        shown.planned(plan, "loading torch and the target")
        if plan.done < plan.total:
            threads = share_cores(args.threads or 0, 8)
            import torch  # only now: a finished file needs none of it

            torch.set_num_threads(threads)
            own_progress_only()

    plan = regenerate(
        target_folder(args.target),
        args.prompts,
        args.out,
        max_new=args.max_new,
        batch=64 if args.batch is None else args.batch,
        dtype=args.dtype or "float32",
        device=args.device or "cpu",
        limit=args.limit,
        skip_bad=args.skip_bad,
        anew=args.anew,
        template_options=read_options(args.template_options, "--template-options"),
        planned=planned,
        progress=shown.progress,
        loading=shown.bar.weights,
    )
    for fault in plan.skipped[len(shown.plan.skipped) if shown.plan else 0 :]:
        shown.bar.say(f"left out: {fault}")
    shown.plan = plan
    return {"made": plan.total - plan.done}


def _server(args: argparse.Namespace, shown: _Shown) -> dict[str, Any]:
    from trainer.chat import read_options
    from trainer.openai_client import Server
    from trainer.regenerate_server import Sampling, regenerate_from_server

    if not args.model:
        raise ConfigError("--model is missing", "regenerate", "name the target as the server does (see its /v1/models)")
    given = {n: getattr(args, n) for n in ("temperature", "top_p", "seed") if getattr(args, n) is not None}
    options = read_options(args.template_options, "--template-options")
    limits = {
        name: value for name, value in (("timeout_s", args.timeout), ("retries", args.retries)) if value is not None
    }
    outcome = regenerate_from_server(
        Server(args.server, _key(args.api_key_env), **limits),
        Sampling(args.model, args.max_new, template_options=options, **given),
        args.prompts,
        args.out,
        concurrency=32 if args.concurrency is None else args.concurrency,
        max_bad=args.max_bad,
        limit=args.limit,
        skip_bad=args.skip_bad,
        anew=args.anew,
        planned=lambda plan: shown.planned(plan, f"asking {args.model}"),
        progress=shown.progress,
    )
    for fault in outcome.named:
        shown.bar.say(f"bad answer: {fault}")
    if outcome.bad.total():
        shown.bar.say("the same command asks again for the missing ones")
    return {"made": outcome.made, "bad": dict(outcome.bad)}


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if key is None:
        raise ConfigError(f"there is no variable {variable} in the environment", "--api-key-env", "export it first")
    return key.strip()
