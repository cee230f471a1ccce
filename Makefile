# Thin: what the README names. Everything runs in .venv, made from envs/lock.txt.
PYTHON ?= $(shell command -v python3.11 || echo python3)
CORES ?= all
TESTERS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-lock.txt
SNAKEMAKE := $(PY) -m snakemake --cores $(CORES)
export PYTHONPATH := workflow

.PHONY: run demo wide table bench test families test-system lint format preflight _venv

run: preflight
	$(SNAKEMAKE)
	@$(PY) -m kvgate ask

demo: preflight
	$(SNAKEMAKE) --configfile config/demo.yaml
	@$(PY) -m kvgate ask --configfile config/demo.yaml

wide: preflight
	$(SNAKEMAKE) --configfile config/wide.yaml

table: $(STAMP)
	@$(PY) -m kvgate table

bench: preflight
	$(PY) -m kvgate bench

# Every test but those that need system packages, which it names; those that compile with the real toolkit too.
# A worker takes whole files: their fixtures are shared.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(TESTERS) --dist loadfile -rs --durations=15

# tests/FAMILIES.md: which decoder families work, or with NAMES="llama mpt" the rows of these.
families: $(STAMP)
	@OMP_NUM_THREADS=1 PYTHONPATH=workflow:tests $(PY) tests/census.py $(NAMES)

# Installs the system packages (Debian, root), then runs the tests that need them.
test-system: $(STAMP)
	tests/system/install
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(TESTERS) --dist loadfile -rs --durations=15 --system -m system

lint: $(STAMP)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m snakefmt --check Snakefile workflow/rules

format: $(STAMP)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(PY) -m snakefmt Snakefile workflow/rules

preflight: $(STAMP)
	@$(PY) -m kvgate preflight

# First whether the lock can be installed here at all; then one make at a time.
$(STAMP): envs/lock.txt
	@$(PYTHON) -I workflow/kvgate/tools/preflight.py
	@flock .venv.lock $(MAKE) --no-print-directory _venv

# A copy of the lock, written last: an interrupted installation has none and starts over.
_venv:
	@if cmp -s envs/lock.txt $(STAMP) && $(PY) -c ''; then touch $(STAMP); else \
	  echo "installing envs/lock.txt into $(VENV) (1.6 GB, some minutes)" && \
	  rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && \
	  $(PY) -m pip install -qq --disable-pip-version-check --no-deps -r envs/lock.txt && \
	  echo "$(CURDIR)/workflow" > $$($(PY) -c 'import site; print(site.getsitepackages()[0])')/kvgate.pth && \
	  cp envs/lock.txt $(STAMP).part && mv $(STAMP).part $(STAMP); fi
