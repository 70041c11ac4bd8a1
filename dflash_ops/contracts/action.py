"""What a supervisor may do: one closed list for playbooks, ladders, ledger and effects (docs/supervise.md, Actions).

The rule here: an action that is not in this list does not exist. Nothing of the forbidden things has a name in it, so
that no playbook and no inventory can ask for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Action(str, Enum):
    """Values are the words that playbooks and inventories write."""

    TELL = "tell"
    HOLD = "hold"
    DUMP_STACKS = "dump_stacks"
    RESTART = "restart"
    RESUME_LATEST = "resume_latest"
    RESUME_EARLIER = "resume_earlier"
    FRESH_START_ASIDE = "fresh_start_aside"
    WAIT_MEMORY = "wait_memory"
    WAIT_DISK = "wait_disk"
    WAIT_NETWORK = "wait_network"
    WAIT_LOCK = "wait_lock"
    NEW_PORT = "new_port"
    RAISE_NOFILE = "raise_nofile"
    FRESH_COMPILE_CACHE = "fresh_compile_cache"
    LOSS_REENTRANT = "loss_reentrant"
    LOSS_NONREENTRANT = "loss_nonreentrant"
    LOSS_FUSED = "loss_fused"
    WORKERS_PROCESSES = "workers_processes"
    COMPILE_LOCK = "compile_lock"
    ENV_CHANGE = "env_change"
    SMALLER_ANCHORS = "smaller_anchors"
    EXCLUDE_DEVICE = "exclude_device"
    ROLLBACK_RELEASE = "rollback_release"
    UNDO_OVERLAY = "undo_overlay"
    QUARANTINE_SAMPLE = "quarantine_sample"
    DISABLE_TRACKER = "disable_tracker"
    ADOPT_SESSION = "adopt_session"
    REDEPLOY = "redeploy"
    START_CONTAINER = "start_container"


@dataclass(frozen=True)
class ActionRule:
    """What holds for an action, whatever a playbook says of it.

    Attributes:
        text: what it does, one line.
        floor: its safest possible grade: a playbook may say worse (B, N), never better.
        starts: it ends in a new attempt, so it counts against budget, backoff and the stop rule.
        changes: it adds a layer to the overlay, which can be undone.
        table: a trainer does it in a way of its own: its remedies table must name it.
        side: `inside` the container (the resident), or `outside` (the operator's machine).
    """

    text: str
    floor: str = "A"
    starts: bool = True
    changes: bool = False
    table: bool = False
    side: str = "inside"


def _change(text: str, floor: str = "B", table: bool = True) -> ActionRule:
    return ActionRule(text, floor, changes=True, table=table)


RULES: Mapping[Action, ActionRule] = MappingProxyType(
    {
        Action.TELL: ActionRule("tell a person", starts=False),
        Action.HOLD: ActionRule("do nothing more until a person has looked", starts=False),
        Action.DUMP_STACKS: ActionRule("write down where every worker stands", starts=False),
        Action.RESTART: ActionRule("start again from the newest checkpoint"),
        Action.RESUME_LATEST: ActionRule("start again from the newest one that verifies"),
        Action.RESUME_EARLIER: ActionRule(
            "set newer checkpoints aside and start again from an older one that verifies"
        ),
        Action.FRESH_START_ASIDE: ActionRule("set all checkpoints aside and start from the beginning", "B"),
        Action.WAIT_MEMORY: ActionRule("wait until GPU memory is given back, then start again"),
        Action.WAIT_DISK: ActionRule("wait until there is room on the disk, then start again"),
        Action.WAIT_NETWORK: ActionRule("wait until the network answers, then start again"),
        Action.WAIT_LOCK: ActionRule("wait until another task lets the container go", starts=False, side="outside"),
        Action.NEW_PORT: _change("start again on a free port", "A", table=False),
        Action.RAISE_NOFILE: _change("start again with more open files allowed", "A", table=False),
        Action.FRESH_COMPILE_CACHE: _change("start again with a compile cache of its own", "A", table=False),
        Action.LOSS_REENTRANT: _change("compute the loss with reentrant checkpointing"),
        Action.LOSS_NONREENTRANT: _change("compute the loss with non-reentrant checkpointing"),
        Action.LOSS_FUSED: _change("compute the loss fused, without recomputation"),
        Action.WORKERS_PROCESSES: _change("run each device's worker in a process of its own"),
        Action.COMPILE_LOCK: _change("one lock around everything that may compile"),
        Action.ENV_CHANGE: _change("start again with other environment variables", "A", table=False),
        Action.SMALLER_ANCHORS: _change("fewer anchors a pass, as many in an optimiser step"),
        Action.EXCLUDE_DEVICE: _change("leave one device out and divide the others anew"),
        Action.ROLLBACK_RELEASE: ActionRule("start the release that ran before", "B"),
        Action.UNDO_OVERLAY: ActionRule("take back changes of our own and start again"),
        Action.QUARANTINE_SAMPLE: _change("leave the named sample out"),
        Action.DISABLE_TRACKER: _change("start again without the experiment tracker", "B", table=False),
        Action.ADOPT_SESSION: ActionRule("watch on a trainer that lives without its session", starts=False),
        Action.REDEPLOY: ActionRule("send the release again and start", side="outside"),
        Action.START_CONTAINER: ActionRule("start the container, then the job", "B", side="outside"),
    }
)

#: They start from one given checkpoint: newer ones are set aside, because a trainer takes the newest that it finds.
GOES_BACK = frozenset({Action.RESUME_LATEST, Action.RESUME_EARLIER})

#: Never done by any supervisor, whatever a playbook says (laws of supervision, 6). None of them has an action; these
#: words are looked for in what a playbook or a remedies table would have us run.
FORBIDDEN: tuple[str, ...] = (
    "trust_remote_code",
    "weights_only=False",
    "weights_only=false",
    "gpu-reset",
    "--gpu-reset",
    "nvidia-smi -r",
    "StrictHostKeyChecking=no",
    "reboot",
    "rmmod",
    "modprobe",
    "chmod",
    "chown",
    "rm -r",
    "pkill",
    "killall",
    "pct stop",
    "pct destroy",
)

#: Environment variables that `env_change` may set: allocator, collectives, tokenizers, diagnostics.
ENV_PREFIXES: tuple[str, ...] = (
    "PYTORCH_",
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "TOKENIZERS_",
    "TORCHINDUCTOR_",
    "TRITON_CACHE",
    "WANDB_MODE",
    "CUDA_LAUNCH_BLOCKING",
    "OMP_NUM_THREADS",
    "PYTHONFAULTHANDLER",
    "MASTER_PORT",
)

_ORDER = {"A": 0, "B": 1, "N": 2, "-": 2}


def worse_grade(a: str, b: str) -> str:
    """The less safe of two grades; what is no grade counts as N."""
    worst = max(_ORDER.get(a, 2), _ORDER.get(b, 2))
    return "ABN"[worst]


def forbidden(text: str) -> str | None:
    """The forbidden thing that a text asks for, or None."""
    return next((word for word in FORBIDDEN if word in text), None)
