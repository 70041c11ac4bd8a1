"""A foreign trainer that saves (with a manifest), resumes from the newest checkpoint, and fails as CONTROL asks.

A file `at<N>-<what>` in CONTROL makes it fail at step N, once: kill, segv, hang, raise:<message>; `always-<what>` each
time, from the step on that stands in it. tests/chaos/faulty.py is this trainer with more ways to fail (CAUSES).
"""

import faulthandler
import hashlib
import json
import os
import pathlib
import signal
import sys
import time

faulthandler.register(signal.SIGUSR2)
control, saves = pathlib.Path(os.environ["CONTROL"]), pathlib.Path(os.environ["SAVE"])
stopping = []
CAUSES, LOSS = globals().get("CAUSES", {}), globals().get("LOSS", [])
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))


def save(step):
    made = saves / f".step-{step:08d}.partial"
    made.mkdir(parents=True, exist_ok=True)
    data = f"state at {step}".encode()
    (made / "w").write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (made / "manifest.json").write_text(json.dumps({"files": {"w": entry}}))
    made.rename(saves / f"step-{step:08d}")
    print(f"saved step={step}", flush=True)


def fail(what):
    print("about to", what, flush=True)
    cause, _, rest = what.partition("=")
    if cause in CAUSES:
        CAUSES[cause](rest)
        return
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        waits_for_ever()
    raise RuntimeError(what.removeprefix("raise:"))


def waits_for_ever():
    while True:
        time.sleep(0.1)


there = sorted(p for p in saves.glob("step-*")) if saves.is_dir() else []
step = 0
if there:
    text = (there[-1] / "w").read_text()
    if not text.startswith("state at "):
        what = "Error while deserializing header: incomplete metadata, file not fully covered"
        raise RuntimeError(f"{what}: {there[-1]}/model.safetensors")
    step = int(text.removeprefix("state at "))
print(f"dflash event=resumed step={step}", flush=True)
total = int(os.environ.get("TOTAL", "100000"))
while step < total and not stopping:
    step += 1
    time.sleep(0.03)
    loss = LOSS[-1] if LOSS else 5 / step
    print(f"it {step:,} of {total:,} loss={loss:.4f}", flush=True)
    for file in list(control.iterdir()):
        at, _, what = file.name.partition("-")
        if at == f"at{step}":
            file.unlink()
            fail(what)
        if at == "always" and step >= int(file.read_text() or 0):
            fail(what)
    if step % 10 == 0:
        save(step)
if stopping:
    save(step)
    sys.exit(3)
