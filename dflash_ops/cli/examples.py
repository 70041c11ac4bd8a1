"""One example of each command, for docs/cli.md."""

from __future__ import annotations

from collections.abc import Mapping

#: Command as it is typed (`checkpoints list`) -> a line that works with a job `main` on a host `gpu`.
EXAMPLES: Mapping[str, str] = {
    "init": "dflash-ops init --root /srv/demo",
    "doctor": "dflash-ops doctor main",
    "deploy": "dflash-ops deploy main --replace --resume --set train.lr=3e-4",
    "status": "dflash-ops status main --watch",
    "logs": "dflash-ops logs main -f --worker drafter0",
    "stop": "dflash-ops stop main --grace 120 --reason 'the room is cooled again on Monday'",
    "rebalance": "dflash-ops rebalance main --plan",
    "releases": "dflash-ops releases main",
    "rollback": "dflash-ops rollback main --plan",
    "checkpoints list": "dflash-ops checkpoints list main",
    "checkpoints verify": "dflash-ops checkpoints verify main --step 400",
    "checkpoints aside": "dflash-ops checkpoints aside main --newer-than 400 --reason 'loss went up'",
    "checkpoints restore": "dflash-ops checkpoints restore main",
    "adopt": "dflash-ops adopt gpu --session train",
    "enable": "dflash-ops enable main",
    "attach": "dflash-ops attach main",
    "triage": "dflash-ops triage --job main --explain",
    "incidents list": "dflash-ops incidents list main",
    "incidents show": "dflash-ops incidents show 3 main",
    "incidents reset": "dflash-ops incidents reset main --reason 'mended the data'",
    "supervise": "dflash-ops supervise --all",
    "report": "dflash-ops report main --all-attempts -o run.html",
    "exporter": "dflash-ops exporter --listen 127.0.0.1:9400",
    "playbooks list": "dflash-ops playbooks list",
    "playbooks show": "dflash-ops playbooks show fx_dynamo_conflict",
    "playbooks lint": "dflash-ops playbooks lint my-playbooks",
    "playbooks test": "dflash-ops playbooks test my-playbooks/own.toml",
    "demo": "dflash-ops demo --quick",
}
