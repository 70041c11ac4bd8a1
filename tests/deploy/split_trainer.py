"""A stand-in for the bundled trainer, as a source folder of its own: same commands, lines, records and exit codes.

It has stages of known length and no tensors, so that a start takes a tenth of a second: batches a second are
min(targets / FILL, drafters / STEP), times what `odd.json` in the job's root says of a split.
"""

from __future__ import annotations

from pathlib import Path

FILL, STEP = 0.060, 0.036
BLOCK, CONTEXT = 1000, 1500

MAIN = f"""\
import json, os, signal, sys, time, tomllib
FILL, STEP, BLOCK, CONTEXT = {FILL}, {STEP}, {BLOCK}, {CONTEXT}
words = sys.argv[1:]
at = lambda name, default=None: words[words.index(name) + 1] if name in words else default
here = os.environ["HERE"]

def read(path):
    with open(path, "rb") as file:
        return json.load(file) if path.endswith(".json") else tomllib.load(file)

def note(path, **said):
    with open(here + "/" + path, "a") as file:
        file.write(json.dumps(said) + "\\n")

if words[0] == "check":
    needs = dict(target_bytes_per_worker=1 << 20, drafter_bytes_per_worker=1 << 20, ring_bytes=1 << 16,
                 ring_dir="/dev/shm", average_bytes=1 << 16, checkpoint_bytes=1 << 16)
    print(json.dumps(dict(ok=True, errors=[], notes=[], needs=needs)))
    sys.exit(0)
if words[0] == "smoke":
    note("gates", split=at("--targets") + "+" + at("--drafters"), devices=at("--devices"))
    if os.path.exists(here + "/gate_fails"):
        print("RuntimeError: no such split"); sys.exit(1)
    print(json.dumps(dict(schema=1, kind="smoke", steps=4, not_exercised=[])))
    sys.exit(0)

config = read(at("--config"))
targets, drafters = (len(config["workers"][k + "_devices"]) for k in ("target", "drafter"))
split = f"{{targets}}+{{drafters}}"
every = config["train"]["average_every"]
folder, out = at("--checkpoints"), at("--out")
os.makedirs(folder, exist_ok=True)
saved = sorted(n for n in os.listdir(folder) if n.startswith("step-"))
state = read(f"{{folder}}/{{saved[-1]}}/state.json") if saved else dict(step=0, batches=0)
print(f"dflash event=resumed step={{state['step']}}/9999 path={{folder}}", flush=True)
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
step, batches, last = state["step"], state["batches"], time.monotonic()
print("dflash stage=stepping k=1 n=1 what=drafters", flush=True)

def save():
    place = f"{{folder}}/step-{{step:08d}}"
    os.makedirs(place, exist_ok=True)
    with open(place + "/state.json", "w") as file:
        json.dump(dict(step=step, batches=batches), file)
    print(f"dflash event=checkpoint step={{step}} path={{place}}", flush=True)

begun, done, due = step, 0, last
while step < 9999:
    odd = read(here + "/odd.json").get(split, 1.0) if os.path.exists(here + "/odd.json") else 1.0
    if isinstance(odd, str) and step >= begun + 2:
        if odd == "hang":
            time.sleep(1000)
        if odd == "nan":
            save(); print("the loss is nan", flush=True); sys.exit(4)
        raise RuntimeError(odd)
    rate = min(targets / FILL, drafters / STEP) * (odd if isinstance(odd, float) else 1.0)
    due += drafters / rate * (0.98 if done % 2 else 1.02)
    time.sleep(max(0.0, due - time.monotonic()))
    now = time.monotonic()
    step, batches, done, wall, last = step + 1, batches + drafters, done + 1, now - last, now
    got = drafters / wall
    busy = [min(0.999, got * s / n) for s, n in ((FILL, targets), (STEP, drafters))]
    def share(k):
        return dict(wait=1 - busy[k], compute=busy[k], copy=0.0, sync=0.0, life=0)
    workers = {{f"target{{i}}": share(0) for i in range(targets)}}
    workers |= {{f"drafter{{i}}": share(1) for i in range(drafters)}}
    record = dict(
        schema=1, t=time.time(), step=step, total=9999, epoch=batches / 1e4, loss=4.0 / step, acc=0.5, tau=2.0,
        block_tok_s=got * BLOCK, ctx_tok_s=got * CONTEXT, ring_ready=1, ring_slots=2 * (targets + drafters), lr=1e-3,
        grad_norm=1.0, eta_s=(9999 - step) * wall, life=0, samples=batches * 4, empty=0, workers=workers)
    with open(out + "/metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\\n")
    print(f"dflash step={{step}}/9999 epoch=0 loss={{4.0 / step:.4f}} block_tok_s={{got * BLOCK:.0f}}", flush=True)
    if stop:
        print("dflash event=stop_requested signal=SIGTERM", flush=True)
        time.sleep(float(open(here + "/slow_stop").read()) if os.path.exists(here + "/slow_stop") else 0.0)
        save()
        note("ends", step=step, batches=batches, split=split)
        sys.exit(3)
"""

#: What preflight imports, in versions that the trainer knows: the real ones take seconds.
STUBS = {
    "torch": "2.13.0", "transformers": "5.0.0", "safetensors": "0.6.0", "tokenizers": "0.22.0", "jinja2": "3.1.6",
    "numpy": "2.1.0",
}  # fmt: skip


def write_source(folder: Path) -> Path:
    """The folder that a job names as `source`."""
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer/__init__.py").write_text("")
    (folder / "trainer/__main__.py").write_text(MAIN)
    for name, version in STUBS.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "torch/__init__.py").write_text(
        '__version__ = "2.13.0"\nclass version: cuda = None\nclass cuda: is_available = staticmethod(lambda: False)\n'
    )
    return folder
