PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# spinning OpenMP threads cost a shared machine far more than they gain an idle one
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint bench gallery results

$(VENV)/.demo: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## install and make one picture with the bundled model
	$(BIN)/sglang generate --prompt "a red apple" --seed 42 --output-path out --output-file-name demo

test: $(VENV)/.test  ## the CPU suite
	$(BIN)/python test/run_suite.py --suite base-a-test-cpu

lint: $(VENV)/.test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: $(VENV)/.test  ## kernel benchmarks (needs an NVIDIA GPU)
	$(BIN)/python benchmark/run_kernels.py

gallery: $(VENV)/.demo  ## the contact sheet of the README
	$(BIN)/python tools/bundled_model/gallery.py --output docs/gallery.png

results: $(VENV)/.demo  ## rewrite the result tables of the documents from benchmark/results
	$(BIN)/python benchmark/print_results.py --write README.md docs/performance.md docs/scaling.md
