"""The inventory that `dflash-ops init` writes: a demo job that works on this machine, and a Proxmox one to fill in."""

from __future__ import annotations

from dflash_ops.inventory.model import quote_key

_TEMPLATE = """\
# What dflash-ops knows: hosts, and the jobs that run on them. Every key: docs/inventory.md.
# Relative paths of a local host are relative to this file.
schema = 1
default_job = "demo"

[hosts.{host_key}]
kind = "local"                      # this machine

# A container on a Proxmox host, reached in one step: ssh to the host, then pct exec.
# [hosts.proxmox]
# kind = "ssh"
# address = "192.0.2.6"
# user = "root"
# identity = "~/.ssh/id_ed25519"    # else the agent and ~/.ssh/config
# # jump = ["admin@192.0.2.1:22"]
#
# [hosts.gpu]
# kind = "lxc"
# via = "proxmox"
# id = 200

# The demo: a tiny target and a drafter for it, on the CPU. `dflash-ops demo` makes its target and its data.
[jobs.demo]
host = {host}
root = {root}
session = "dflash-demo"
interpreter = {interpreter}    # the Python that has torch

[jobs.demo.trainer]
target_devices = ["cpu", "cpu"]     # one process each
drafter_devices = ["cpu"]

[jobs.demo.trainer.target]
path = "target"                     # relative to root, as all paths of the trainer

[jobs.demo.trainer.drafter]
mask_token_id = 259
layers = 2
taps = 3
block_size = 8

[jobs.demo.trainer.data]
path = "data/train.jsonl"
max_length = 160                    # prompts of 64 bytes, responses of 96
batch_size = 8

[jobs.demo.trainer.train]
steps = 500
lr = 3e-3
anchors = 24

[jobs.demo.trainer.checkpoint]
every = 100

# A long run in the container: five GPUs run the target, three train drafters.
# [jobs.dflash]
# host = "gpu"
# root = "/srv/dflash"
# interpreter = "/opt/venv/bin/python"
# env = {{ NCCL_DEBUG = "WARN" }}
# secret_env = ["HF_TOKEN"]          # from your environment; or "HF_TOKEN=file:secrets/hf_token"
# grace_s = 300                     # seconds to save in, after stop
#
# [jobs.dflash.policy]
# allow = ["cuda_oom:smaller_anchors"]   # repairs of grade B; mode = "observe" only says what would be done
#
# [jobs.dflash.trainer]
# target_devices = [0, 1, 2, 3, 4]
# drafter_devices = [5, 6, 7]
#
# [jobs.dflash.trainer.target]
# path = "/models/target"
#
# [jobs.dflash.trainer.drafter]
# mask_token_id = 151669            # a token of the target's vocabulary that no text uses
#
# [jobs.dflash.trainer.data]
# path = "/data/train.jsonl"

# Any other trainer: its command, and how its lines tell progress.
# [jobs.other]
# host = {host}
# root = ".dflash/other"
# command = ["python3", "train.py", "--out", "{{checkpoints}}"]
# progress = 'step (?P<step>\\d+)/(?P<total>\\d+) loss (?P<loss>[0-9.]+)'
# remedies = {{ restart = {{ args = ["--resume"] }} }}
"""


def quote(text: str) -> str:
    """`text` as a TOML basic string."""
    out = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in out) + '"'


def template(host: str = "local", root: str = ".dflash/demo", interpreter: str = ".venv/bin/python") -> str:
    """The text of a new inventory.

    Args:
        host: name of its local host. root, interpreter: the demo job's, as they are to stand there.
    """
    return _TEMPLATE.format(
        host=quote(host), host_key=quote_key(host), root=quote(root), interpreter=quote(interpreter)
    )
