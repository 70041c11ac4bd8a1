# make demo    from a fresh clone to an evaluated, exported drafter
# make test    everything that CI runs
# make screenshots  the images of the README, from a whole demo in a real tmux
# make golden  the trainer against reference numbers (DFLASH_GOLDEN=DIR for another folder)
# make chaos   every fault of the table in a real supervised trainer: what was seen, done and came of it
# make demo-crash  a night in three minutes: the FX crash named and repaired, a cut checkpoint, a kill
# make bench   all CPU benchmarks, and one table of their ratios with goals (benchmarks/README.md)
# make trainer-chaos  twenty kills of targets and drafters while a run goes on (CHAOS="--seed 7 --schedule ready")
# make docs    docs/cli.md and docs/schemas/all.schema.json anew, from the commands and the schemas
# make lint    ruff, mypy --strict, the import arrows
# make lab     a Proxmox host with containers to play with (Linux, root); make lab-down takes it away
# make venv    only the virtual environment
#
# PYTHON=python3.12     another interpreter (3.11 to 3.13)
# TESTJOBS=4            processes of make test, each with one thread of torch: most tests wait more than they compute
# TORCH=torch==2.13.0   another torch; TORCH_PIP="--index-url URL" picks a CPU build (README, "How large is torch?")

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_PIP ?=
TESTJOBS ?= 4
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv screenshots demo demo-crash test docs golden chaos bench trainer-chaos lint clean lab lab-down lab-packages
.DEFAULT_GOAL := venv

venv: $(STAMP)

$(STAMP): pyproject.toml Makefile .ci/bootstrap
	@bash .ci/bootstrap "$(PYTHON)" "$(VENV)" "$(TORCH)" "$(TORCH_PIP)"
	@touch $@

demo: venv
	@$(BIN)/dflash-ops demo

demo-crash: venv
	@cd tests && PYTHONPATH=.. ../$(BIN)/python -m chaos.night

test: lint lab-packages
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TESTJOBS) --dist worksteal

docs: venv
	@$(BIN)/python -m dflash_ops.cli.reference

screenshots: venv
	@$(BIN)/python docs/screenshots.py

golden: venv
	@$(BIN)/python -m pytest -m golden tests/trainer

chaos: venv lab-packages
	@cd tests && OMP_NUM_THREADS=1 PYTHONPATH=.. ../$(BIN)/python -m chaos

bench: venv
	@$(BIN)/python benchmarks/bench.py

trainer-chaos: venv
	@$(BIN)/python tests/trainer/trainer_chaos.py $(CHAOS)

lab-packages:
	@bash .ci/lab-packages

lab: venv lab-packages
	@cd tests && ../$(BIN)/python -m lab up

lab-down: venv
	@cd tests && ../$(BIN)/python -m lab down

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
