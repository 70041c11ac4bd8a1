"""A foreign trainer: prints its own progress lines and does what files in the folder CONTROL ask for."""

import os
import pathlib
import signal
import subprocess
import sys
import time

control = pathlib.Path(os.environ["CONTROL"])
if "ignore-term" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "save-on-term" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
if "workers" in sys.argv:  # one in our session, one in its own; both keep our output open
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, int(sys.argv[1])); time.sleep(300)"
    for own in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(int("ignore-term" in sys.argv))], start_new_session=own
        )
        print("worker", child.pid)
for step in range(1, 100_000):
    print(f"it {step:,} of 100,000 loss={5 / step:.4f}")
    for file in control.iterdir():
        name = file.name
        if name == "crash":
            raise RuntimeError("crash on request")
        if name.startswith("exit"):
            sys.exit(int(name[4:]))
        if name == "flood":
            file.unlink()
            for _ in range(300):
                print("x" * 9999)
        while name == "quiet" and file.exists():
            time.sleep(0.05)
    time.sleep(0.05)
