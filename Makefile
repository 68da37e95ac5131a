# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/demo
DOCS_VENV ?= .venv-docs
SITE ?= build/site
GATE ?= runs/smoke
export OMP_NUM_THREADS = 1
# pip would compile 13,000 modules, of which 3,000 are used; they are compiled when they are first imported, and kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs gate browser test matrix all-tests lint slow bench clean

$(VENV)/installed: pyproject.toml setup.py constraints.txt harness/core/native.c
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(VENV)/bin/leakgauge run demo --out $(OUT)

# The site needs nothing of leakgauge but its sources, so it has an environment of its own.
$(DOCS_VENV)/installed: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --no-compile --disable-pip-version-check --requirement constraints-docs.txt
	touch $@

docs: $(DOCS_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs --quiet build --strict --site-dir $(SITE)
	$(DOCS_VENV)/bin/python .ci/check_site.py $(SITE)

# Whether any defense leaks more than the target branch's baselines/smoke.json says; see docs/ci.md. Only what the code
# changed runs. CHECK takes more options, such as CHECK="--target REF".
gate: $(VENV)/installed
	rm -rf $(GATE)
	$(VENV)/bin/leakgauge gate smoke --out $(GATE) --baseline baselines/smoke.json $(CHECK)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The tests of the report in a browser want Debian's Chromium; without it they are skipped and say so.
browser:
	@command -v chromium > /dev/null || { \
	  root=; test "$$(id -u)" = 0 || root="sudo -n"; \
	  get="timeout 300 $$root env DEBIAN_FRONTEND=noninteractive apt-get -qq"; \
	  { $$get update && $$get install -y --no-install-recommends chromium; } > /dev/null 2>&1 \
	  && command -v chromium > /dev/null || echo "chromium could not be installed: the tests in a browser are skipped"; }

test: lint browser
	$(VENV)/bin/pytest -n 2 --dist worksteal -rs

# The rows of long tables that `make test` leaves out.
matrix: $(VENV)/installed
	$(VENV)/bin/pytest -n 2 --dist worksteal -rs -m "matrix and not slow and not gpu"

# Both at once: what a module's tests share is made once, and no process waits twice for another one. CI runs this.
all-tests: lint browser
	$(VENV)/bin/pytest -n 2 --dist worksteal -rs -m "not slow and not gpu"

slow: $(VENV)/installed
	$(VENV)/bin/pytest -n 2 --dist worksteal -m slow

# All rows, half an hour on two quiet cores, written to benchmarks/bench.json, docs/performance.md and docs/scale.md.
# QUICK=1: some small rows, compared with that file; fails on a ratio that got 1.3 times worse.
bench: $(VENV)/installed
	$(VENV)/bin/python benchmarks/bench.py $(if $(QUICK),--quick)

clean:
	rm -rf $(VENV) $(DOCS_VENV) runs build *.egg-info
