#!/usr/bin/python3 -IS
"""A stand-in for Proxmox's pct: its commands, messages, exit codes and habits, over lxc-attach, -start and -stop.

It finds its machine by the link `machine` beside it. Files in FOLDER/knobs change its ways: `delay` (seconds before
it does anything), `noise` (perl's words about locales: `auto` or `always`), `locked` (the lock file cannot be had, with
the seconds until it gives up), `race` (exec finds no init pid). Each call is written to FOLDER/pct.calls.
"""

# A call of pct is timed, and pathlib takes longer to import than all of this to run.
# ruff: noqa: PTH100, PTH115, PTH118, PTH120, PTH208
import os
import subprocess
import sys
import time

HERE = os.readlink(os.path.join(os.path.dirname(os.path.abspath(__file__)), "machine"))
LXC = os.path.join(HERE, "lxc")
PVE = os.path.join(HERE, "pve")
NOISE = """\
perl: warning: Setting locale failed.
perl: warning: Please check that your locale settings:
\tLANGUAGE = (unset),
\tLC_ALL = (unset),
\tLANG = "de_DE.UTF-8"
    are supported and installed on your system.
perl: warning: Falling back to the standard locale ("C").
"""


def knob(name: str) -> str | None:
    try:
        with open(os.path.join(HERE, "knobs", name)) as file:
            return file.read().strip()
    except OSError:
        return None


def die(text: str, code: int = 255) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(code)


def config(number: str) -> dict[str, str]:
    try:
        with open(os.path.join(PVE, number + ".conf")) as file:
            pairs = [line.rstrip("\n").partition(": ") for line in file]
    except OSError:
        die(f"Configuration file 'nodes/pve/lxc/{number}.conf' does not exist", 2)
    return {key: value for key, _, value in pairs}


def lxc(tool: str, number: str, *rest: str) -> list[str]:
    return [tool, "-P", LXC, "-n", number, *rest]


def running(number: str) -> bool:
    """As the real one: the container's command socket stands in /proc/net/unix, an abstract name of this namespace."""
    with open("/proc/net/unix") as file:
        return f"@{LXC}/{number}/command\n" in file.read()


def check_lock(number: str) -> None:
    lock = config(number).get("lock")
    if lock:
        die(f"CT is locked ({lock})")
    if (seconds := knob("locked")) is not None:
        path = f"/run/lock/lxc/pve-config-{number}.lock"
        sys.stderr.write("trying to acquire lock...\n")
        sys.stderr.flush()
        time.sleep(float(seconds or 10))
        die(f"can't lock file '{path}' - got timeout", 4)


def utf8() -> bool:
    said = os.environ.get("LC_ALL") or os.environ.get("LANG") or "C"
    return said.lower().endswith(("utf-8", "utf8"))


def passed(argument: bytes) -> bytes:
    """Without a UTF-8 locale every byte that is not ASCII becomes U+FFFD."""
    if utf8():
        return argument
    return b"".join(bytes((c,)) if c < 128 else b"\xef\xbf\xbd" for c in argument)


def do_exec(number: str, words: list[bytes]) -> None:
    while words and words[0].startswith(b"-") and words[0] != b"--":
        if words.pop(0) == b"--keep-env" and (not words or words[0] in (b"0", b"1")):
            words = words[1:]
    if words and words[0] == b"--":
        words = words[1:]
    if not words:
        die("400 not enough arguments\npct exec <vmid> [<extra-args>] [OPTIONS]")
    config(number)
    if not running(number):
        die(f"container '{number}' not running!")
    if knob("race") is not None:
        die(
            f"lxc-attach: {number}: attach.c: get_attach_context: 405 Connection refused - Failed to get init pid\n"
            f"lxc-attach: {number}: attach.c: lxc_attach: 1474 Connection refused - Failed to get attach context",
            1,
        )
    # older versions lose an argument that has a newline in it
    arguments = [passed(w) for w in words if b"\n" not in w]
    os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"
    attach = lxc("/usr/bin/lxc-attach", number, "--")
    os.execv(attach[0], [os.fsencode(a) for a in attach] + arguments)


def do_status(number: str) -> None:
    config(number)
    print("status:", "running" if running(number) else "stopped")


def do_list() -> None:
    print(f"{'VMID':<10} {'Status':<10} {'Lock':<12} Name")
    for name in sorted(os.listdir(PVE)):
        number = name.partition(".")[0]
        said = config(number)
        state = "running" if running(number) else "stopped"
        print(f"{number:<10} {state:<10} {said.get('lock', ''):<12} {said.get('hostname', '')}")


def do_config(number: str) -> None:
    for key, value in sorted(config(number).items()):
        print(f"{key}: {value}")


def do_start(number: str) -> None:
    config(number)
    check_lock(number)
    if running(number):
        die(f"CT {number} already running")
    done = subprocess.run(lxc("lxc-start", number), capture_output=True, text=True)
    if done.returncode != 0:
        die(f"startup for container '{number}' failed\n{done.stderr}")


def do_stop(number: str, *, kill: bool, words: list[str]) -> None:
    config(number)
    check_lock(number)
    if not running(number):
        die(f"CT {number} not running")
    options = dict(zip(words[::2], words[1::2], strict=False))
    seconds = options.get("--timeout", options.get("-timeout", "60"))
    hard = kill or options.get("--forceStop", "0") == "1"
    how = ["-k"] if kill else ["-t", seconds] + ([] if hard else ["--nokill"])
    done = subprocess.run(lxc("lxc-stop", number, *how), capture_output=True, text=True)
    if running(number):
        die(f"command 'lxc-stop -n {number} --nokill --timeout {seconds}' failed: exit code {done.returncode or 1}")


def do_push(number: str, source: str, target: str) -> None:
    """As the real one, it ends with 0 also when it fails."""
    config(number)
    if not running(number):
        die("can only push files to a running CT")
    with open(source, "rb") as file:
        subprocess.run(
            lxc("lxc-attach", number, "--", "sh", "-c", 'cat > "$1"', "sh", target),
            stdin=file,
            stderr=subprocess.DEVNULL,
        )


def do_pull(number: str, source: str, target: str) -> None:
    config(number)
    if not running(number):
        die("can only pull files from a running CT")
    with open(target, "wb") as file:
        subprocess.run(lxc("lxc-attach", number, "--", "cat", source), stdout=file, stderr=subprocess.DEVNULL)


def main() -> None:
    os.environ.pop("LC_CTYPE", None)  # this Python sets it where there is no locale; perl does not
    raw = [os.fsencode(a) for a in sys.argv[1:]]
    words = sys.argv[1:]
    noise = knob("noise")
    if noise == "always" or (noise == "auto" and os.environ.get("LC_ALL") != "C.UTF-8"):
        sys.stderr.write(NOISE)
        sys.stderr.flush()
    if os.geteuid() != 0:
        die("please run as root")
    with open(os.path.join(HERE, "pct.calls"), "ab") as file:
        file.write(b"%.3f\t%s\n" % (time.time(), b"\x1f".join(raw).replace(b"\n", b"\\n")))
    delay = knob("delay")
    if delay:
        time.sleep(float(delay))
    if not words:
        die("ERROR: no command specified", 255)
    command, rest = words[0], words[1:]
    if command == "list":
        do_list()
        return
    if not rest or not rest[0].isdigit():
        die("400 not enough arguments" if not rest else "400 Parameter verification failed.\nvmid: invalid format")
    number = rest[0]
    if command == "exec":
        do_exec(number, raw[2:])
    elif command == "status":
        do_status(number)
    elif command == "config":
        do_config(number)
    elif command == "start":
        do_start(number)
    elif command == "stop":
        do_stop(number, kill=True, words=[])
    elif command == "shutdown":
        do_stop(number, kill=False, words=rest[1:])
    elif command == "push":
        do_push(number, rest[1], rest[2])
    elif command == "pull":
        do_pull(number, rest[1], rest[2])
    else:
        die(f"ERROR: unknown command 'pct {command}'")


if __name__ == "__main__":
    main()
