# Every target sets up what it needs in .venv, and does so only once.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
export CROWDML_DATA
# One thread a process: the tests run in as many processes as there are cores.
export OPENBLAS_NUM_THREADS ?= 1
# Compiled modules are kept: the tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
# Deno asks nobody for a newer version, and keeps what it compiled where the rest is kept.
export DENO_NO_UPDATE_CHECK := 1
export DENO_DIR ?= $(CURDIR)/.cache/deno
# A file's tests share its servers and compiled loops, so they run in one process. One process more than there are
# cores: tests of live devices wait for each other.
WORKERS := $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist loadfile --durations 20
QUICK  := not slow and not kill and not postgres and not browser

.PHONY: demo test test-all figures screenshots bench mutants mutants-deep record lint docs clean

demo: $(READY)
	@$(VENV)/bin/crowdml demo

test: $(READY)
	@$(PYTEST) -m "$(QUICK)"

test-all: $(READY)
	@XLA_FLAGS= $(PYTEST) -m "slow or kill or postgres or browser"
	@XLA_FLAGS= $(PYTEST) -m "$(QUICK)" tests/sim tests/models tests/privacy
	@$(MAKE) -s mutants > /dev/null
	@$(MAKE) -s lint

figures: $(READY)
	@$(VENV)/bin/crowdml reproduce --all --out out/figures

screenshots: $(READY)
	@$(RUN) tests/portal/screens.py out/screenshots
	@$(RUN) -m pytest -n 0 -m "browser and not postgres" tests/portal/test_operator_path.py >&2

bench: $(READY)
	@$(VENV)/bin/crowdml bench sim

mutants: $(READY)
	@$(RUN) tests/mutants/run.py

# Every comparison of the code that privacy rests on, taken away in turn: by hand, an hour or two.
mutants-deep: $(READY)
	@$(RUN) tests/mutants/deep.py

# Bit for bit, on this machine: the sources before the core moved, and those here.
record: $(READY)
	@$(RUN) tests/record/compare.py

lint: $(READY)
	@$(VENV)/bin/ruff check src tests >&2
	@$(VENV)/bin/ruff format --check -q src tests >&2
	@$(VENV)/bin/basedpyright --level error >&2
	@$(VENV)/bin/oxlint --quiet src/crowdml/web tests/web >&2
	@$(VENV)/bin/deno fmt --check --quiet >&2
	@$(VENV)/bin/deno check --quiet src/crowdml/web tests/web >&2

docs: $(READY)
	@$(RUN) -m pytest tests/docs -m "not slow"

clean:
	rm -rf $(VENV) .cache out build src/*.egg-info

# A new pyproject.toml or constraints.txt sets up again; otherwise nothing is done. Set-up talks on stderr.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; about a minute)..." >&2
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV) >&2
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" >&2
	@touch $(READY)
