"""Broken inventories. A line that ends in `#!` is one that a fault must name; a new case needs no code."""

from __future__ import annotations

#: A whole one, with most keys.
FULL = """\
schema = 1
default_job = "train"

[hosts.here]
kind = "local"

[hosts.proxmox]
kind = "ssh"
address = "192.0.2.6"
user = "root"
port = 2222
identity = "keys/id"
jump = ["admin@192.0.2.1:22"]
known_hosts = "~/kh"
sudo = true

[hosts.gpu]
kind = "lxc"
via = "proxmox"
id = 200
python = "/usr/bin/python3.11"

[jobs.train]
host = "gpu"
root = "/srv/dflash/"
interpreter = "/opt/venv/bin/python"
session = "train"
socket = "other"
checkpoints = "/ckpt"
env = { NCCL_DEBUG = "WARN" }
secret_env = ["HF_TOKEN", "KEY=file:secrets/key"]
grace_s = 300
history_limit = 1000
source = "code"
limits = { step_s = 10 }
policy = { mode = "act", allow = ["cuda_oom:smaller_anchors"], budgets = { attempts_per_hour = 2 } }

[jobs.train.trainer]
target_devices = [0, 1, "2-4"]
drafter_devices = ["cuda:5", 6, "7"]
train = { lr = 1e-3 }
[jobs.train.trainer.target]
path = "/models/t"

[jobs.other]
host = "here"
root = "o"
command = ["python3", "train.py", "--out", "{checkpoints}"]
progress = 'step (?P<step>\\d+)'
finished_rc = [0, 7]
[jobs.other.remedies]
loss_fused = { set = { "loss.mode" = "eager" } }
restart = { args = ["--resume"], env = { R = "1" } }
"""

HOST = '[hosts.here]\nkind = "local"\n'
JOB = '[jobs.a]\nhost = "here"\nroot = "a"\n'
RUNS = 'command = ["true"]\n'
TRAINER = "[jobs.a.trainer]\ntarget_devices = [0]\ndrafter_devices = [1]\n"

#: name -> (text, for each fault in order: key, a part of what, a part of the fix)
CASES: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "unknown key at the top": (
        "shema = 1 #!\n" + HOST,
        [("shema", "unknown key", "did you mean `schema`?")],
    ),
    "unknown table at the top": ("[host.here] #!\nkind = 'local'\n", [("host", "unknown key", "`hosts`")]),
    "unknown key of a host": (HOST + 'pyhton = "x" #!\n', [("hosts.here.pyhton", "unknown key", "`python`")]),
    "unknown key of a job": (
        HOST + JOB + RUNS + 'intepreter = "x" #!\n',
        [("jobs.a.intepreter", "unknown key", "did you mean `interpreter`?")],
    ),
    "a key that is like no other": (
        HOST + JOB + RUNS + "zzz = 1 #!\n",
        [("jobs.a.zzz", "unknown key", "remove it; known here: host")],
    ),
    "unknown key of the trainer": (
        HOST + JOB + TRAINER + "[jobs.a.trainer.trian] #!\nlr = 1\n",
        [("jobs.a.trainer.trian", "unknown key", "`train`")],
    ),
    "unknown keys of limits, policy and budgets": (
        HOST + JOB + RUNS + "limits.step = 3 #!\n[jobs.a.policy]\nmood = 'act' #!\nbudgets = { per_hour = 1 } #!\n",
        [
            ("jobs.a.limits.step", "unknown", "`step_s`"),
            ("jobs.a.policy.mood", "unknown", "`mode`"),
            ("jobs.a.policy.budgets.per_hour", "unknown", "attempts_per_hour"),
        ],
    ),
    "schema of the wrong type": ('schema = "1" #!\n' + HOST, [("schema", "schema must be 1", "schema = 1")]),
    "newer schema hides all else": ("schema = 2 #!\nnonsense = 1\n", [("schema", "of schema 2", "newer dflash-ops")]),
    "wrong types": (
        HOST
        + "[jobs.a]\nhost = 3 #!\nroot = ['x'] #!\ngrace_s = '60' #!\nhistory_limit = true #!\ncommand = 'true' #!\n",
        [
            ("jobs.a.host", "must be a string, not an integer (3)", 'host = "NAME"'),
            ("jobs.a.root", "must be a string, not a list", "root = "),
            ("jobs.a.grace_s", "must be a number", "grace_s = 60"),
            ("jobs.a.history_limit", "must be an integer, not a boolean", "history_limit = 50000"),
            ("jobs.a.command", "must be a list", "["),
        ],
    ),
    "tables that are none": (
        "hosts = 3 #!\njobs = [] #!\n",
        [("hosts", "must be a table", "[hosts]"), ("jobs", "must be a table", "[jobs]")],
    ),
    "a host that is no table": ('[hosts] #\nhere = "local" #!\n', [("hosts.here", "must be a table", "[hosts.here]")]),
    "a list with a wrong element": (
        HOST + JOB + 'command = [\n  "python3",\n  3, #!\n]\n',
        [("jobs.a.command[1]", "element 2 is an integer", "command")],
    ),
    "no host named": (HOST + "[jobs.a] #!\nroot = 'a'\n" + RUNS, [("jobs.a", "has no host", 'host = "here"')]),
    "host that is not there": (
        HOST + "[jobs.a]\nhost = 'hear' #!\nroot = 'a'\n" + RUNS,
        [("jobs.a.host", "no host 'hear'; did you mean 'here'?", "here")],
    ),
    "no host at all": (JOB.replace("\nroot", " #!\nroot") + RUNS, [("jobs.a.host", "no host 'here'", "[hosts.here]")]),
    "a job of a host with a fault blames the host only": (
        '[hosts.here]\nkind = "lokal" #!\n' + JOB + RUNS,
        [("hosts.here.kind", "unknown kind 'lokal'; did you mean 'local'?", '"local", "ssh" or "lxc"')],
    ),
    "host without a kind": ("[hosts.here] #!\n", [("hosts.here", "no kind", 'kind = "local"')]),
    "ssh without an address": ("[hosts.p] #!\nkind = 'ssh'\n", [("hosts.p", "no address", "192.0.2.6")]),
    "ssh address with a user in it": (
        "[hosts.p]\nkind = 'ssh'\naddress = 'root@192.0.2.6' #!\n",
        [("hosts.p.address", "is no address", 'address = "192.0.2.6" and user = "root"')],
    ),
    "ssh port that is none": (
        "[hosts.p]\nkind = 'ssh'\naddress = '192.0.2.6'\nport = 70000 #!\n",
        [("hosts.p.port", "between 1 and 65535", "22")],
    ),
    "ssh option as a jump": (
        "[hosts.p]\nkind = 'ssh'\naddress = '192.0.2.6'\njump = ['a', '-oProxyCommand=x'] #!\n",
        [("hosts.p.jump[1]", "no host to jump over", "user@host:port")],
    ),
    "key of another kind": (HOST + "address = '192.0.2.6' #!\n", [("hosts.here.address", "unknown key", "kind")]),
    "lxc without via and id": (
        "[hosts.c] #!\nkind = 'lxc'\n",
        [("hosts.c", "no via", "via"), ("hosts.c", "no id", "pct list")],
    ),
    "lxc via nobody": (
        "[hosts.c]\nkind = 'lxc'\nvia = 'p' #!\nid = 200\n",
        [("hosts.c.via", "via 'p', which is no host", "[hosts.NAME]")],
    ),
    "lxc through itself": (
        "[hosts.c]\nkind = 'lxc'\nvia = 'c' #!\nid = 200\n",
        [("hosts.c.via", "through itself: c -> c", "ssh or local")],
    ),
    "lxc in a circle": (
        "[hosts.b]\nkind = 'lxc'\nvia = 'c' #!\nid = 200\n[hosts.c]\nkind = 'lxc'\nvia = 'b' #!\nid = 201\n"
        "[jobs.a]\nhost = 'b'\nroot = '/a'\ncommand = ['true']\n"
        "[jobs.z]\nhost = 'c'\nroot = '/a'\ncommand = ['true']\n",
        [("hosts.b.via", "b -> c -> b", ""), ("hosts.c.via", "c -> b -> c", "")],
    ),
    "relative paths on another machine": (
        "[hosts.p]\nkind = 'ssh'\naddress = '192.0.2.6'\npython = 'bin/python' #!\n"
        "[jobs.a]\nhost = 'p'\nroot = 'a' #!\ninterpreter = '.venv/bin/python' #!\ncommand = ['true']\n",
        [
            ("hosts.p.python", "relative path", "whole path"),
            ("jobs.a.root", "no whole path: 'a'", "on host p, beginning with /"),
            ("jobs.a.interpreter", "relative path", "host p"),
        ],
    ),
    "no root": (HOST + "[jobs.a] #!\nhost = 'here'\n" + RUNS, [("jobs.a", "has no root", 'root = ".dflash/a"')]),
    "root of the machine": (HOST + "[jobs.a]\nhost = 'here'\nroot = '/' #!\n" + RUNS, [("jobs.a.root", "is /", "")]),
    "empty root": (HOST + "[jobs.a]\nhost = 'here'\nroot = ' ' #!\n" + RUNS, [("jobs.a.root", "is empty", "root")]),
    "control character in a path": (
        HOST + '[jobs.a]\nhost = "here"\nroot = "a\\nb" #!\n' + RUNS,
        [("jobs.a.root", "U+000A", "take it out")],
    ),
    "nothing to run": (
        HOST + JOB.replace("[jobs.a]", "[jobs.a] #!"),
        [("jobs.a", "nothing to run", "[jobs.a.trainer]")],
    ),
    "trainer and command": (
        HOST + JOB + "command = ['true'] #!\n" + TRAINER,
        [("jobs.a.command", "a trainer and a command", "keep one")],
    ),
    "empty command": (HOST + JOB + "command = [] #!\n", [("jobs.a.command", "empty", '["python3", "train.py"]')]),
    "command as one string": (
        HOST + JOB + "command = ['python3 train.py'] #!\n",
        [("jobs.a.command", "no shell", '["python3", "train.py"]')],
    ),
    "NUL in a command": (HOST + JOB + 'command = ["a", "\\u0000"] #!\n', [("jobs.a.command[1]", "U+0000", "")]),
    "0 targets": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = [] #!\ndrafter_devices = [0]\n",
        [("jobs.a.trainer.target_devices", "0 targets", "at least one")],
    ),
    "0 drafters": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = [0]\ndrafter_devices = [] #!\n",
        [("jobs.a.trainer.drafter_devices", "0 drafters", "at least one")],
    ),
    "no devices named": (
        HOST + JOB + "[jobs.a.trainer] #!\n",
        [
            ("jobs.a.trainer", "target_devices is missing", "target_devices = "),
            ("jobs.a.trainer", "drafter_devices is missing", "drafter_devices = "),
        ],
    ),
    "overlapping devices": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = ['0-4']\ndrafter_devices = ['cuda:4', 'cuda:5'] #!\n",
        [("jobs.a.trainer.drafter_devices", "cuda:4 cannot be target and drafter", "take cuda:4 out")],
    ),
    "one GPU twice in a role": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = [0, 'cuda:0'] #!\ndrafter_devices = [1]\n",
        [("jobs.a.trainer.target_devices", "cuda:0 is named twice", "once")],
    ),
    "drafters of two kinds": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = [0]\ndrafter_devices = [1, 'cpu'] #!\n",
        [("jobs.a.trainer.drafter_devices", "cannot average", "one kind")],
    ),
    "no device": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = [0,\n'gpu1', #!\n]\ndrafter_devices = [true] #!\n",
        [
            ("jobs.a.trainer.target_devices[1]", "'gpu1' is no device", "cuda:N"),
            ("jobs.a.trainer.drafter_devices[0]", "True is no device", "cuda:N"),
        ],
    ),
    "several words that are no device": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = [\n'gpu1', #!\n0,\n'x', #!\n]\ndrafter_devices = [1]\n",
        [
            ("jobs.a.trainer.target_devices[0]", "'gpu1' is no device", "cuda:N"),
            ("jobs.a.trainer.target_devices[2]", "'x' is no device", "cuda:N"),
        ],
    ),
    "several faults of the roles": (
        HOST + JOB + "[jobs.a.trainer]\ntarget_devices = [0, 0] #!\ndrafter_devices = [0, 'cpu'] #!\n",
        [
            ("jobs.a.trainer.target_devices", "cuda:0 is named twice", "once"),
            ("jobs.a.trainer.drafter_devices", "cuda:0 cannot be target and drafter", "take cuda:0 out"),
            ("jobs.a.trainer.drafter_devices", "cannot average", "one kind"),
        ],
    ),
    "devices in the trainer's own table": (
        HOST + JOB + TRAINER + "workers = { target_devices = [3] } #!\n",
        [("jobs.a.trainer.workers.target_devices", "does not belong", "one table up")],
    ),
    "bad regex": (
        HOST + JOB + RUNS + "progress = '(?P<step>' #!\n",
        [("jobs.a.progress", "no regular expression", "")],
    ),
    "regex without a step": (
        HOST + JOB + RUNS + "progress = 'x' #!\n",
        [("jobs.a.progress", "no group named step", "?P")],
    ),
    "regex with an unknown group": (
        HOST + JOB + RUNS + "progress = '(?P<step>.)(?P<foo>.)' #!\n",
        [("jobs.a.progress", "unknown groups: foo", "loss")],
    ),
    "exit codes": (HOST + JOB + RUNS + "finished_rc = [0, 300] #!\n", [("jobs.a.finished_rc", "0 to 255", "[0]")]),
    "keys of a command beside a trainer": (
        HOST + JOB + "finished_rc = [0] #!\n" + TRAINER,
        [("jobs.a.finished_rc", "own command", "remove it")],
    ),
    "unknown remedy": (
        HOST + JOB + RUNS + '[jobs.a.remedies]\nrestarts = { args = ["-r"] } #!\n',
        [("jobs.a.remedies.restarts", "did you mean 'restart'?", "restart, new_port")],
    ),
    "remedy that says nothing": (
        HOST + JOB + RUNS + "remedies.loss_fused = {} #!\n",
        [("jobs.a.remedies.loss_fused", "says nothing", "args")],
    ),
    "remedy with an unknown way": (
        HOST + JOB + RUNS + '[jobs.a.remedies]\nrestart = { args = ["-r"], arg = 1 } #!\n',
        [("jobs.a.remedies.restart.arg", "unknown key", "`args`")],
    ),
    "remedy that is no table": (
        HOST + JOB + RUNS + "remedies.restart = 3 #!\n",
        [("jobs.a.remedies.restart", "must be a table", "args")],
    ),
    "remedy that hides what is never done by itself": (
        HOST + JOB + RUNS + '[jobs.a.remedies]\nloss_fused = { args = ["--trust_remote_code"] } #!\n',
        [("jobs.a.remedies.loss_fused", "never done by itself", "by hand")],
    ),
    "ladders": (
        HOST + JOB + RUNS + "[jobs.a.policy]\n"
        'quiet = ["Loss spike"] #!\n'
        "[jobs.a.policy.ladders]\n"
        'cuda_oom = ["wait_memory", "smaller_anchor"] #!\n'
        'fx_dynamo_conflict = ["loss_reentrant"] #!\n'
        '"What?" = ["restart"] #!\n'
        '0123456789abcdef = ["loss_reentrant"]\n',
        [
            ("jobs.a.policy.quiet[0]", "is no kind", "playbooks list"),
            ("jobs.a.policy.ladders.cuda_oom[1]", "did you mean 'smaller_anchors'?", "docs/supervise.md"),
            ("jobs.a.policy.ladders.fx_dynamo_conflict[0]", "grade B", "fx_dynamo_conflict:loss_reentrant"),
            ('jobs.a.policy.ladders."What?"', "no kind and no fingerprint", "16 hex digits"),
        ],
    ),
    "notify": (
        HOST + JOB + RUNS + '[jobs.a.policy]\nnotify = "mailto://u:secret@192.0.2.9" #!\ncooldown_s = -1 #!\n',
        [("jobs.a.policy.notify", "no whole path", "config file"), ("jobs.a.policy.cooldown_s", "", "")],
    ),
    "allow": (
        HOST + JOB + RUNS + '[jobs.a.policy]\nallow = ["*:restart", "cuda_oom:explode"] #!\n',
        [
            ("jobs.a.policy.allow[0]", "no kind:action", "kind:action"),
            ("jobs.a.policy.allow[1]", "no action 'explode'", "docs/supervise.md"),
        ],
    ),
    "environment": (
        HOST + JOB + RUNS + '[jobs.a.env]\nA = 1 #!\n"B C" = "x" #!\nD = true #!\n',
        [
            ("jobs.a.env.A", "must be a string, not an integer (1)", 'A = "1"'),
            ('jobs.a.env."B C"', "no name for a variable", "letters"),
            ("jobs.a.env.D", "must be a string", 'D = "true"'),
        ],
    ),
    "secrets": (
        HOST
        + JOB
        + RUNS
        + 'env = { T = "x" }\nsecret_env = [\n"T", #!\n"U=hunter2", #!\n"V", "V", #!\n"W=file:", #!\n]\n',
        [
            ("jobs.a.secret_env[0]", "in env and in secret_env", "no place"),
            ("jobs.a.secret_env[1]", "must not stand in the inventory", '"U=file:PATH"'),
            ("jobs.a.secret_env[3]", "named twice", "once"),
            ("jobs.a.secret_env[4]", "must not stand", "file:PATH"),
        ],
    ),
    "session names that tmux reads otherwise": (
        HOST
        + JOB
        + RUNS
        + 'session = "a.b:c" #!\n'
        + JOB.replace("jobs.a", "jobs.b").replace('"a"', '"b"')
        + RUNS
        + 'session = "-x" #!\n',
        [
            ("jobs.a.session", "it holds . :", 'session = "a_b_c"'),
            ("jobs.b.session", "begins or ends", 'session = "x"'),
        ],
    ),
    "socket that is a path": (
        HOST + JOB + RUNS + 'socket = "/tmp/x" #!\n',
        [("jobs.a.socket", "tmux socket", "short")],
    ),
    "two jobs in one root": (
        HOST + JOB + RUNS + '[jobs.b]\nhost = "here"\nroot = "./x/../a" #!\n' + RUNS,
        [("jobs.b.root", "jobs a and b have the same root", "of its own")],
    ),
    "two jobs in one session": (
        HOST + JOB + RUNS + 'session = "s"\n[jobs.b]\nhost = "here"\nroot = "b"\nsession = "s" #!\n' + RUNS,
        [("jobs.b.session", "same tmux session", 'session = "s-2"')],
    ),
    "two names of one machine": (
        HOST + "[hosts.also]\nkind = 'local'\n" + JOB + RUNS + '[jobs.b]\nhost = "also"\nroot = "a" #!\n' + RUNS,
        [("jobs.b.root", "same root", "")],
    ),
    "job names": (
        HOST
        + '[jobs."-x"] #!\nhost = "here"\nroot = "a"\ncommand = ["true"]\n[jobs." y"] #!\nhost = "here"\nroot = "b"\n'
        'command = ["true"]\n[jobs."z/z"] #!\nhost = "here"\nroot = "c"\ncommand = ["true"]\n',
        [
            ("jobs.-x", "option", "letters"),
            ('jobs." y"', "blank", "letters"),
            ('jobs."z/z"', "slash", "letters"),
        ],
    ),
    "default job that is not there": (
        'default_job = "b" #!\n' + HOST + JOB + RUNS,
        [("default_job", "names no job", "one of its jobs: a")],
    ),
    "policy": (
        HOST + JOB + RUNS + "[jobs.a.policy]\nmode = 'acts' #!\nallow = ['restart'] #!\n"
        "budgets = { attempts_per_hour = 6, backoff_s = 0, backoff_cap_s = 1 } #!\n",
        [
            ("jobs.a.policy.mode", "did you mean 'act'?", '"observe" or "act"'),
            ("jobs.a.policy.allow[0]", "no kind:action", "kind:action"),
            ("jobs.a.policy.budgets.attempts_per_hour", "between 0 and 5", "5"),
            ("jobs.a.policy.budgets.backoff_s", "above 0", "5"),
            ("jobs.a.policy.budgets.backoff_cap_s", "below backoff_s", "or more"),
        ],
    ),
    "limits": (
        HOST + JOB + RUNS + "limits = { step_s = -1, slow_factor = 2 } #!\n",
        [("jobs.a.limits.step_s", "above 0", "300"), ("jobs.a.limits.slow_factor", "at most 1", "0.5")],
    ),
    "dates": (
        HOST + JOB + TRAINER + "train = { a = [\n1979-05-27, #!\n] }\nloss.b = 07:32:00 #!\n",
        [
            ("jobs.a.trainer.train.a[0]", "is a date", '"1979-05-27"'),
            ("jobs.a.trainer.loss.b", "is a date", '"07:32:00"'),
        ],
    ),
    "numbers beyond all bounds": (
        HOST + JOB + RUNS + "grace_s = 1" + 400 * "0" + " #!\nhistory_limit = 1" + 400 * "0" + " #!\n",
        [("jobs.a.grace_s", "at most 86400", "60"), ("jobs.a.history_limit", "between", "50000")],
    ),
    "no number": (HOST + JOB + RUNS + "grace_s = nan #!\n", [("jobs.a.grace_s", "nan", "60")]),
    "nodes that are none": (
        HOST + "[jobs.a]\nhost = 'here'\nroot = 'a'\n" + RUNS + "nodes = ['here'] #!\n"
        "[jobs.b]\nhost = 'here'\nroot = 'b'\n" + RUNS + "nodes = [] #!\n",
        [("jobs.a.nodes[0]", "must be a table, not a string", "nodes = ["), ("jobs.b.nodes", "0 nodes", "remove it")],
    ),
    "a node without what it needs": (
        HOST + "[jobs.a]\n" + RUNS + "[[jobs.a.nodes]] #!\n[[jobs.a.nodes]]\nhost = 'hear' #!\nroot = 'b'\n",
        [
            ("jobs.a.nodes[0]", "has no host", 'host = "here"'),
            ("jobs.a.nodes[0]", "has no root", "root ="),
            ("jobs.a.nodes[1].host", "no host 'hear'; did you mean 'here'?", "here"),
        ],
    ),
    "a fault of the job is told once, not for each node": (
        HOST + JOB + RUNS + "interpreter = 3 #!\n[[jobs.a.nodes]]\nroot = 'x'\n[[jobs.a.nodes]]\nroot = 'y'\n",
        [("jobs.a.interpreter", "must be a string", "interpreter = ")],
    ),
    "nodes of one machine with one root or session": (
        HOST + JOB.rstrip() + " #!\n" + RUNS + "[[jobs.a.nodes]]\n[[jobs.a.nodes]]\n"
        "[jobs.b]\nhost = 'here'\nsession = 's' #!\n" + RUNS + "nodes = [{ root = 'x' }, { root = 'y' }]\n",
        [
            ("jobs.a.root", "nodes 0 and 1 of job a have the same root", "each node a root of its own"),
            ("jobs.b.session", "nodes 0 and 1 of job b have the same tmux session", 's-2"'),
        ],
    ),
    "devices of nodes": (
        HOST
        + "[jobs.a]\nhost = 'here'\n[jobs.a.trainer]\ntarget_devices = [0, 1]\n"
        + "[[jobs.a.nodes]]\nroot = 'a'\ndrafter_devices = [1] #!\n"
        + "[[jobs.a.nodes]] #!\nroot = 'b'\n"
        + "[[jobs.a.nodes]]\nroot = 'c'\ndrafter_devices = ['x'] #!\n",
        [
            ("jobs.a.nodes[0].drafter_devices", "node 0: cuda:1 cannot be target and drafter", "take cuda:1 out"),
            ("jobs.a.nodes[1]", "node 1 of job a has no drafter_devices", "[jobs.a.trainer]"),
            ("jobs.a.nodes[2].drafter_devices[0]", "'x' is no device", "GPU numbers"),
        ],
    ),
    "no devices for all nodes": (
        HOST
        + "[jobs.a]\nhost = 'here'\n[jobs.a.trainer]\ntarget_devices = [] #!\ndrafter_devices = [1]\n"
        + "[[jobs.a.nodes]]\nroot = 'a'\ntarget_devices = [0]\n[[jobs.a.nodes]]\nroot = 'b'\n"
        + "[jobs.b]\nhost = 'here'\nnodes = [{ root = 'c' }]\n[jobs.b.trainer]\n"
        + "target_devices = []\ndrafter_devices = [] #!\nfeatures = { path = '/f' }\n"
        + "[jobs.c]\nhost = 'here'\nnodes = [{ root = 'd' }]\n"
        + "[jobs.c.trainer]\ntarget_devices = ['x'] #!\ndrafter_devices = [1]\n",
        [
            ("jobs.a.trainer.target_devices", "node 1: there are 0 targets", "at least one device"),
            ("jobs.b.trainer.drafter_devices", "node 0: there are 0 drafters", "at least one device"),
            ("jobs.c.trainer.target_devices[0]", "'x' is no device", "GPU numbers"),
        ],
    ),
    "drafters of two kinds on two nodes": (
        HOST + JOB.replace('root = "a"\n', "") + TRAINER + "[[jobs.a.nodes]]\nroot = 'a'\n"
        "[[jobs.a.nodes]]\nroot = 'b'\ndrafter_devices = ['cpu'] #!\n",
        [("jobs.a.nodes[1].drafter_devices", "of node 0 are on GPUs, those of node 1 on the CPU", "one kind")],
    ),
    "devices of a node that runs a command": (
        HOST + JOB + RUNS + "nodes = [{ drafter_devices = [0] }] #!\n",
        [("jobs.a.nodes[0].drafter_devices", "unknown key", "host, root")],
    ),
    "a secret in a node's env": (
        HOST + JOB + RUNS + "secret_env = ['KEY']\nnodes = [{ env = { KEY = 'x' } }] #!\n",
        [("jobs.a.nodes[0].env", "KEY is in env and in secret_env", "take it out")],
    ),
    "an interpreter of a node beside a venv": (
        HOST + JOB + RUNS + "venv = { lock = 'l' }\nnodes = [{ interpreter = '/x' }] #!\n",
        [("jobs.a.nodes[0].interpreter", "not both", "keep one")],
    ),
    "an adopted job with nodes": (
        HOST + JOB + "adopted = true\nnodes = [{}] #!\n",
        [("jobs.a.nodes", "one session on one machine", "adopt each")],
    ),
    "a rendezvous that is none": (
        HOST + JOB + RUNS + "rendezvous = '192.0.2.1:0' #!\nnodes = [{}]\n",
        [("jobs.a.rendezvous", "no HOST:PORT", "192.0.2.11:29400")],
    ),
    "a rendezvous without nodes": (
        HOST + JOB + RUNS + "rendezvous = '192.0.2.1:1' #!\n",
        [("jobs.a.rendezvous", "belongs to a job with nodes", "remove it")],
    ),
    "a rendezvous that nobody can know": (
        HOST + "[hosts.p]\nkind = 'ssh'\naddress = '192.0.2.6'\n[hosts.c]\nkind = 'lxc'\nvia = 'p'\nid = 200\n"
        "[jobs.a]\nroot = '/a'\n" + RUNS + "nodes = [{ host = 'c' }, { host = 'p' }] #!\n"
        "[jobs.b]\nroot = '/b'\n" + RUNS + "nodes = [{ host = 'here' }, { host = 'p' }] #!\n",
        [("jobs.a.nodes", "node 0 is on a container", "host c"), ("jobs.b.nodes", "on this machine", "host here")],
    ),
}
