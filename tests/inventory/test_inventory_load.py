"""A whole inventory as objects: defaults, paths, names of every script, overrides for one run."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from inventory_cases import FULL

from dflash_ops.errors import InventoryError, UsageError
from dflash_ops.inventory import Inventory, Job, LocalHost, LxcHost, Node, SecretEnv, SshHost, find_inventory, load
from dflash_ops.inventory.create import create
from dflash_ops.inventory.nodes import parse_rendezvous

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def full(tmp_path: Path) -> Inventory:
    (tmp_path / "inventory.toml").write_text(FULL, "utf-8")
    return load(tmp_path / "inventory.toml")


def one_job(tmp_path: Path, job: str, name: str = "a") -> Job:
    path = tmp_path / "inventory.toml"
    path.write_text(f'[hosts.h]\nkind = "local"\n[jobs.{name}]\nhost = "h"\nroot = "r"\n{job}', "utf-8")
    return load(path).job()


def test_hosts(full: Inventory, tmp_path: Path) -> None:
    assert full.hosts["here"] == LocalHost("here")
    assert full.hosts["gpu"] == LxcHost("gpu", via="proxmox", id=200, python="/usr/bin/python3.11")
    assert full.hosts["proxmox"] == SshHost(
        "proxmox",
        address="192.0.2.6",
        user="root",
        port=2222,
        identity=str(tmp_path / "keys/id"),
        jump=("admin@192.0.2.1:22",),
        known_hosts=str(Path.home() / "kh"),
        sudo=True,
    )
    assert full.host_of(full.job("train")).kind == "lxc"


def test_job_of_the_trainer(full: Inventory, tmp_path: Path) -> None:
    job = full.job()
    assert job.name == "train"
    assert job.root == "/srv/dflash"
    assert job.checkpoints == "/ckpt"
    assert job.secret_env == (SecretEnv("HF_TOKEN"), SecretEnv("KEY", str(tmp_path / "secrets/key")))
    assert job.source == str(tmp_path / "code")
    assert (job.limits.step_s, job.limits.loading_s) == (10.0, 1800.0)
    assert (job.policy.mode, job.policy.allow, job.policy.budgets.attempts_per_hour) == (
        "act",
        ("cuda_oom:smaller_anchors",),
        2,
    )
    assert job.trainer is not None
    assert job.trainer.target_devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4")
    assert job.trainer.drafter_devices == ("cuda:5", "cuda:6", "cuda:7")
    assert {k: dict(v) for k, v in job.trainer.tables.items()} == {
        "target": {"path": "/models/t"},
        "train": {"lr": 1e-3},
    }
    assert job.command is None


def test_job_with_its_own_command(full: Inventory, tmp_path: Path) -> None:
    job = full.job("other")
    assert job.command == ("python3", "train.py", "--out", "{checkpoints}")
    assert job.root == str(tmp_path / "o")
    assert job.checkpoints == str(tmp_path / "o/checkpoints")
    assert job.session == "dflash-other"
    assert job.interpreter == "python3"
    assert job.finished_rc == (0, 7)
    assert job.remedies["loss_fused"].set == {"loss.mode": "eager"}
    assert job.remedies["restart"].args == ("--resume",)
    assert job.remedies["restart"].env == {"R": "1"}


def test_paths_are_relative_to_the_inventory_and_links_stay_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    (real / "inventory.toml").write_text(
        '[hosts.h]\nkind = "local"\n[jobs.a]\nhost = "h"\nroot = "r"\ninterpreter = ".venv/bin/python"\n'
        'trainer = { target_devices = ["cpu"], drafter_devices = ["cpu"] }\n'
    )
    monkeypatch.chdir(tmp_path)
    job = load("link/inventory.toml").job()
    assert job.root == str(tmp_path / "link/r")
    assert job.interpreter == str(tmp_path / "link/.venv/bin/python")


@pytest.mark.parametrize(
    "name", ["größe", "with space", "日本", "it's", 'say \\"x\\"', "a.b:c", "*", "#{pid}", "@x", "$(id)", "a; b;"]
)
def test_any_job_name_gives_a_session_that_tmux_keeps(name: str, tmp_path: Path, tmux_socket: str) -> None:
    job = one_job(tmp_path, 'command = ["true"]\n', f'"{name}"')
    tmux = ["tmux", "-L", tmux_socket, "-f", "/dev/null"]
    subprocess.run([*tmux, "new-session", "-d", "-s", job.session, "sleep 60"], check=True, timeout=20)
    shown = subprocess.run(
        [*tmux, "list-sessions", "-F", "#{session_name}"], check=True, timeout=20, capture_output=True, text=True
    )
    assert shown.stdout.splitlines() == [job.session]
    subprocess.run([*tmux, "has-session", "-t", f"={job.session}"], check=True, timeout=20)


@pytest.fixture
def tmux_socket() -> Iterator[str]:
    name = f"dflash-test-{uuid.uuid4().hex[:8]}"
    yield name
    subprocess.run(["tmux", "-L", name, "kill-server"], check=False, timeout=20, capture_output=True)


def test_paths_and_environment_of_any_script(tmp_path: Path) -> None:
    job = one_job(
        tmp_path,
        'checkpoints = "mit Leerzeichen/ü \'x\'"\ncommand = ["a b", \'"\', "é"]\n'
        'env = { A = "l1\\nl2 \'q\' \\"r\\" ü" }\n',
    )
    assert job.checkpoints.endswith("r/mit Leerzeichen/ü 'x'")
    assert job.command == ("a b", '"', "é")
    assert job.env == {"A": "l1\nl2 'q' \"r\" ü"}


def test_byte_order_mark_and_foreign_line_ends(tmp_path: Path) -> None:
    text = '[hosts.h]\nkind = "local"\n[jobs.a]\nhost = "h"\nroot = "r"\ncommand = ["true"]\n'
    (tmp_path / "i.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load(tmp_path / "i.toml").job().command == ("true",)


# -- which job


def test_the_only_job_needs_no_name(tmp_path: Path) -> None:
    assert one_job(tmp_path, 'command = ["true"]\n').name == "a"


def test_a_job_that_is_not_there_gets_the_nearest_name(full: Inventory) -> None:
    with pytest.raises(UsageError, match="did you mean 'train'") as caught:
        full.job("trian")
    assert "train, other" in caught.value.next


def test_several_jobs_and_no_default(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(FULL.replace('default_job = "train"\n', ""), "utf-8")
    with pytest.raises(UsageError, match="2 jobs") as caught:
        load(path).job()
    assert "default_job" in caught.value.next


# -- overrides


def test_devices_for_one_run(full: Inventory) -> None:
    job = full.job().with_overrides("0,1,2", "cuda:7")
    assert job.trainer is not None
    assert job.trainer.target_devices == ("cuda:0", "cuda:1", "cuda:2")
    assert job.trainer.drafter_devices == ("cuda:7",)
    assert job.overrides == {"target_gpus": "0,1,2", "drafter_gpus": "cuda:7"}
    assert full.job().overrides == {}
    again = full.job().with_overrides("cpu,cpu", "cpu")
    assert again.trainer is not None
    assert again.trainer.target_devices == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("target", "drafter", "what"),
    [
        ("0,1", "1", "cuda:1 cannot be target and drafter"),
        ("5", None, "cuda:5 cannot be"),
        ("", None, "0 targets"),
        (None, ",", "no device"),
        ("0,0", None, "named twice"),
        ("a", None, "'a' is no device"),
        ("3-1", None, "no device"),
    ],
)
def test_devices_that_cannot_be_meant(full: Inventory, target: str | None, drafter: str | None, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        full.job().with_overrides(target, drafter)
    assert what in caught.value.what
    assert caught.value.next


def test_devices_of_a_command_are_not_ours(full: Inventory) -> None:
    with pytest.raises(UsageError, match="own command"):
        full.job("other").with_overrides("0", "1")


def test_values_are_read_as_toml_and_else_as_text(full: Inventory) -> None:
    sets = [
        "train.lr=2e-4", "train.steps=5", "target.path=/models/x y", 'drafter.init_from="a=b"', "loss.reentrant=true",
        "drafter.layer_ids=[1, 2]", "data.path=1979-05-27", "env.A=1", 'env.B="q"', "limits.step_s=5", "grace_s=7",
    ]  # fmt: skip
    job = full.job().with_overrides(sets=sets)
    assert job.trainer is not None
    tables = job.trainer.tables
    assert tables["train"] == {"lr": 2e-4, "steps": 5}
    assert tables["target"] == {"path": "/models/x y"}
    assert tables["drafter"] == {"init_from": "a=b", "layer_ids": [1, 2]}
    assert tables["loss"] == {"reentrant": True}
    assert tables["data"] == {"path": "1979-05-27"}
    assert job.env == {"NCCL_DEBUG": "WARN", "A": "1", "B": "q"}
    assert job.limits.step_s == 5.0
    assert job.grace_s == 7.0
    assert job.overrides["train.lr"] == "2e-4"
    assert "1" not in job.overrides["env.A"]  # by name only: it may be somebody's key
    assert "steps" not in full.job().trainer.tables["train"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train.lr", "no equals sign"),
        ("=3", "no key"),
        ("train lr=3", "no key"),
        ("trian.lr=3", "did you mean 'train.lr'?"),
        ("train=3", "no key 'train'"),
        ("grace_s=-1", "no number above 0"),
        ("grace_s=x", "no number above 0"),
        ("limits.step=1", "did you mean 'step_s'?"),
        ("env.A B=1", "no key"),
        ("env.HF_TOKEN=abc", "is a secret"),
        ("train.lr.x=1", "a value, no table"),
        ("workers.target_devices=[0]", "option of their own"),
        ("host=x", "no key 'host'"),
    ],
)
def test_sets_that_cannot_be_meant(full: Inventory, text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        full.job().with_overrides(sets=[text])
    assert what in caught.value.what
    assert caught.value.next
    assert "abc" not in str(caught.value)


def test_a_value_cannot_smuggle_in_another_key(full: Inventory) -> None:
    job = full.job().with_overrides(sets=["train.objective=1\nother = 2"])
    assert job.trainer is not None
    assert job.trainer.tables["train"]["objective"] == "1\nother = 2"


def test_trainer_keys_cannot_be_set_on_a_command(full: Inventory) -> None:
    with pytest.raises(UsageError, match="no table 'train'"):
        full.job("other").with_overrides(sets=["train.lr=1"])


# -- secrets


def test_secrets_come_from_the_environment_or_a_file(full: Inventory, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key").write_text("k1 \n")
    assert full.job().secrets({"HF_TOKEN": "t1"}) == {"HF_TOKEN": "t1", "KEY": "k1 "}


def test_a_missing_secret_names_the_way_to_give_it(full: Inventory, tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="HF_TOKEN is not set") as caught:
        full.job().secrets({})
    assert "export HF_TOKEN" in caught.value.fix
    with pytest.raises(InventoryError, match="KEY cannot be read"):
        full.job().secrets({"HF_TOKEN": "t1"})


# -- which file


def test_the_file_is_looked_for_upwards_to_home(tmp_path: Path) -> None:
    home, deep = tmp_path / "home", tmp_path / "home/a/b"
    deep.mkdir(parents=True)
    (tmp_path / "inventory.toml").touch()  # above home: another user's business
    own = home / ".config/dflash-ops/inventory.toml"
    environ = {"HOME": str(home)}
    with pytest.raises(InventoryError) as caught:
        find_inventory(None, environ=environ, cwd=deep)
    assert "dflash-ops init" in caught.value.fix
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_inventory(None, environ=environ, cwd=deep) == own
    (home / "a/inventory.toml").touch()
    assert find_inventory(None, environ=environ, cwd=deep) == home / "a/inventory.toml"
    other = tmp_path / "other.toml"
    other.touch()
    assert find_inventory(None, environ={**environ, "DFLASH_INVENTORY": str(other)}, cwd=deep) == other
    assert find_inventory(other, environ={**environ, "DFLASH_INVENTORY": "/none"}, cwd=deep) == other
    with pytest.raises(InventoryError, match="DFLASH_INVENTORY points"):
        find_inventory(None, environ={**environ, "DFLASH_INVENTORY": "/none"}, cwd=deep)


# -- the files that come with us


def test_the_repository_has_a_demo_that_the_trainer_accepts() -> None:
    from dflash_ops.deploy.spec import run_config
    from trainer.config import parse_config

    job = load(REPO / "inventory.toml").job()
    assert job.root == str(REPO / ".dflash/demo")
    assert job.interpreter == str(REPO / ".venv/bin/python")
    config = run_config(job)
    assert config is not None
    import json

    run = parse_config(json.loads(config.json), "inventory.toml")
    assert run.workers.target_devices == ("cpu", "cpu")
    assert run.workers.drafter_devices == ("cpu",)
    assert (run.drafter.block_size, run.drafter.layers, run.data.batch_size) == (8, 2, 8)


def test_the_examples_in_a_new_inventory_load_when_uncommented(tmp_path: Path) -> None:
    made = create(tmp_path / "inventory.toml")
    lines = made.path.read_text("utf-8").splitlines()
    head = lines[:2]
    body = [line[2:] if line.startswith("# ") and ("=" in line or line[2:3] in "[#") else line for line in lines[2:]]
    body = [line for line in body if not line.startswith(("# A ", "# The", "# Any"))]
    (tmp_path / "all.toml").write_text("\n".join([*head, *body]), "utf-8")
    loaded = load(tmp_path / "all.toml")
    assert set(loaded.jobs) == {"demo", "dflash", "other"}
    assert {h.kind for h in loaded.hosts.values()} == {"local", "ssh", "lxc"}


def test_nodes_have_what_the_job_has_unless_they_say_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(
        """
[hosts.a]
kind = "ssh"
address = "192.0.2.11"
[hosts.b]
kind = "ssh"
address = "192.0.2.12"
[jobs.big]
root = "/srv/big"
interpreter = "/opt/venv/bin/python"
env = { A = "1", B = "1" }
[jobs.big.trainer]
target_devices = ["0-4"]
drafter_devices = [5, 6, 7]
train = { steps = 9 }
[[jobs.big.nodes]]
host = "a"
[[jobs.big.nodes]]
host = "b"
root = "/data/big"
drafter_devices = [5]
env = { B = "2" }
""",
        "utf-8",
    )
    loaded = load(path)
    big = loaded.job()
    first, second = big.nodes
    assert (big.host, big.root, big.hosts, big.parts) == ("a", "/srv/big", ("a", "b"), big.nodes)
    assert (first.node, second.node) == (Node(0, 2, "192.0.2.11:29400"), Node(1, 2, "192.0.2.11:29400"))
    assert [n.host for n in big.nodes] == ["a", "b"]
    assert [n.root for n in big.nodes] == ["/srv/big", "/data/big"]
    assert [n.checkpoints for n in big.nodes] == ["/srv/big/checkpoints", "/data/big/checkpoints"]
    assert [n.session for n in big.nodes] == ["dflash-big-0", "dflash-big-1"]
    assert [n.env for n in big.nodes] == [{"A": "1", "B": "1"}, {"A": "1", "B": "2"}]
    assert [n.trainer.drafter_devices for n in big.nodes if n.trainer] == [("cuda:5", "cuda:6", "cuda:7"), ("cuda:5",)]
    assert {n.interpreter for n in big.nodes} == {"/opt/venv/bin/python"}
    assert second.trainer is not None
    assert second.trainer.tables == first.trainer.tables  # type: ignore[union-attr]
    assert loaded.host_of(second).name == "b"

    once = big.with_overrides("0,1", None, ["train.steps=7", "env.C=3"])
    for node in once.nodes:
        assert node.trainer is not None
        assert node.trainer.target_devices == ("cuda:0", "cuda:1")
        assert node.trainer.tables["train"]["steps"] == 7
        assert node.env["C"] == "3"
        assert node.overrides.keys() == {"target_gpus", "train.steps", "env.C"}
    assert big.at_node(1) is second
    with pytest.raises(UsageError, match="nodes 0 to 1"):
        big.at_node(2)


def test_one_node_is_a_job_as_ever_and_local_nodes_meet_on_this_machine(tmp_path: Path) -> None:
    job = one_job(tmp_path, 'command = ["true"]\nnodes = [{ root = "n" }]\n')
    assert job.nodes == ()
    assert job.root == str(tmp_path / "n")
    assert job.node == Node(0, 1, "127.0.0.1:29400")
    with pytest.raises(UsageError, match="one machine only"):
        job.at_node(1)
    two = one_job(tmp_path, 'command = ["true"]\nnodes = [{ root = "n" }, { root = "m" }]\n')
    assert [n.node.rendezvous for n in two.nodes if n.node] == ["127.0.0.1:29400"] * 2


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("192.0.2.11:1", "192.0.2.11:1"),
        ("gpu-a.example", "gpu-a.example:29400"),
        ("[2001:db8::1]", "[2001:db8::1]:29400"),
        ("[2001:db8::1]:065", "[2001:db8::1]:65"),
        ("2001:db8::1", None),
        (":29400", None),
        ("a b:1", None),
        ("-x:1", None),
        ("a:65536", None),
        ("a:", None),
        ("http://a:1", None),
    ],
)
def test_rendezvous(said: str, meant: str | None) -> None:
    assert parse_rendezvous(said) == meant


def test_a_job_that_trains_from_features_needs_no_target(tmp_path: Path) -> None:
    trainer = 'target_devices = []\ndrafter_devices = ["cpu"]\n'
    base = (
        '[hosts.here]\nkind = "local"\n[jobs.main]\nhost = "here"\nroot = "/srv/main"\n[jobs.main.trainer]\n' + trainer
    )
    (tmp_path / "no.toml").write_text(base)
    with pytest.raises(InventoryError, match="there are 0 targets") as caught:
        load(tmp_path / "no.toml")
    assert "trainer.features.path" in str(caught.value)
    (tmp_path / "yes.toml").write_text(base + '[jobs.main.trainer.features]\npath = "/srv/features"\n')
    job = load(tmp_path / "yes.toml").job("main")
    assert job.trainer is not None
    assert (job.trainer.target_devices, job.trainer.drafter_devices) == ((), ("cpu",))
    with pytest.raises(UsageError, match="0 drafters"):
        job.with_overrides(None, "", ())
