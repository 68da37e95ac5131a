# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/demo
export OMP_NUM_THREADS = 1

.PHONY: demo test lint slow benchmarks clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(VENV)/bin/leakgauge run demo --out $(OUT)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/pytest -n 2 --dist worksteal

slow: $(VENV)/installed
	$(VENV)/bin/pytest -n 2 --dist worksteal -m slow

benchmarks: $(VENV)/installed
	for name in local_training clipping matching inversion scale encoders; do $(VENV)/bin/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf $(VENV) runs build *.egg-info
