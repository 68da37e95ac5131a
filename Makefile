# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/demo
DOCS_VENV ?= .venv-docs
SITE ?= build/site
GATE ?= runs/smoke
export OMP_NUM_THREADS = 1
# Without compiled files each process of the tests compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs gate browser test matrix lint slow benchmarks clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(VENV)/bin/leakgauge run demo --out $(OUT)

# The site needs nothing of leakgauge but its sources, so it has an environment of its own.
$(DOCS_VENV)/installed: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement constraints-docs.txt
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

# The rows of long tables that `make test` leaves out; CI runs both.
matrix: $(VENV)/installed
	$(VENV)/bin/pytest -n 2 --dist worksteal -rs -m "matrix and not slow and not gpu"

slow: $(VENV)/installed
	$(VENV)/bin/pytest -n 2 --dist worksteal -m slow

benchmarks: $(VENV)/installed
	for name in local_training clipping matching inversion scale encoders large; do $(VENV)/bin/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf $(VENV) $(DOCS_VENV) runs build *.egg-info
