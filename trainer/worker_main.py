"""`python -m trainer.worker_main`: what a worker process does before it is a target or a drafter.

In this order, since each step protects the next one: it dies with its parent (PDEATHSIG), ignores INT and TERM (the
launcher tells it over its socket when to end), sends stderr to its log, and records its own error. Only then torch is
imported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trainer.channel import Channel, PeerGone
from trainer.errors import TrainerError, tell, write_error_file

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent's main thread ends.

    The parent may have ended before the question was asked: then its pid is not ours any more, and we end too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def be_called(name: str) -> None:
    """What `ps` and `top` show: of a spare its worker's name from the moment on at which it takes its place."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="trainer.worker_main")
    parser.add_argument("role", choices=("target", "reader", "drafter"))
    parser.add_argument("name")
    parser.add_argument("life", type=int)
    parser.add_argument("socket")
    parser.add_argument("parent", type=int)
    parser.add_argument("spare", nargs="?", choices=("spare",), help="it waits for the death of the life before it")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # blocked while the launcher started us
    os.dup2(1, 2)  # one log a worker
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # "where do you stand?": asked before a hung run is ended
    channel = Channel(arguments.socket, arguments.parent)
    try:
        _work(arguments.role, arguments.name, arguments.life, channel)
    except PeerGone:
        return 1
    except TrainerError as error:
        print(tell(error), file=sys.stderr, flush=True)
        return _failed(channel, error, error.exit_code)
    except Exception as error:  # noqa: BLE001  recorded, told, and the process ends with it
        sys.excepthook(type(error), error, error.__traceback__)
        return _failed(channel, error, 1)
    return 0


def _work(role: str, name: str, life: int, channel: Channel) -> None:
    channel.send({"k": "hello", "worker": name, "life": life})
    # Imported before it is told anything: a spare waits here, with all this behind it.
    run: Callable[[Channel, Mapping[str, Any]], None]
    if role == "target":
        from trainer.target_worker import run_target as run
    elif role == "reader":
        from trainer.feature_reader import run_reader as run
    else:
        from trainer.drafter_worker import run_drafter as run
        from trainer.drafter_worker import warm_up

        warm_up()
    setup = channel.receive()
    be_called(name)
    setup["ring_fd"] = channel.take_descriptor()
    if role == "drafter":
        setup["averages_fd"] = channel.take_descriptor()
    run(channel, setup)


def _failed(channel: Channel, error: Exception, code: int) -> int:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        write_error_file(path, error)
    known = isinstance(error, TrainerError)
    what = error.what if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
    message = {"k": "error", "code": code, "known": known, "what": what}
    if isinstance(error, TrainerError):
        message |= {"where": error.where, "next": error.next}
    with contextlib.suppress(PeerGone):  # nobody is left to tell; error.json says it
        channel.send(message)
    return code


if __name__ == "__main__":
    # os._exit: a process group or a CUDA context that is broken must not hold up the end.
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
