# Everything runs in a virtual environment of the project's own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL_DIR ?= out/smollm2
EXTRA ?= cpu
# A process per core, up to four: each of them exports models, which takes memory.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

.DELETE_ON_ERROR:
.PHONY: help demo test lint bench clean

help:
	@echo "make demo   set up, export SmolLM2-135M, answer a question with it, and eight in one batch"
	@echo "make test   set up and run the tests"
	@echo "make bench  set up and measure: one sequence, many prompts, decode steps, quantized weights, cache layouts; writes docs/benchmarks.md"
	@echo "make lint   set up and check style and types"

$(READY): pyproject.toml setup.py constraints.txt $(wildcard tools/*.py) $(wildcard backends/mlx/csrc/*.cpp)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch and ExecuTorch (some minutes)"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch executorch "setuptools>=77"
	@echo "installing executorch-mlx"
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[$(EXTRA),llm,dev]"
	touch $@

$(MODEL_DIR)/model.pte: $(READY)
	$(BIN)/python -m executorch_mlx.examples.llm.export_llm --model smollm2 --output-dir $(MODEL_DIR)

demo: $(MODEL_DIR)/model.pte
	$(BIN)/python -m executorch_mlx.examples.llm.run_llm --model-dir $(MODEL_DIR) \
		--prompt "What is the capital of France?" --max-new-tokens 40
	$(BIN)/python -m executorch_mlx.examples.llm.run_llm_batched --model-dir $(MODEL_DIR) \
		--prompts examples/llm/prompts.txt --max-new-tokens 40

# The cache core is measured as it is tested: each branch of it is taken by some test.
test: $(READY)
	$(PYTEST) --dist loadfile --ignore=test/extension
	$(PYTEST) --dist worksteal test/extension --cov=extension/llm/cache --cov-branch --cov-fail-under=100 \
		--cov-report=term-missing:skip-covered

# Type checkers do not follow the mapping from executorch_mlx to the repository's root, so they read an installed copy.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy --namespace-packages --explicit-package-bases -p executorch_mlx

bench: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[$(EXTRA),llm,dev,bench]"
	$(BIN)/python test/bench/single_sequence.py --docs docs
	$(BIN)/python test/bench/many_prompts.py --docs docs
	$(BIN)/python test/bench/decode.py --docs docs
	$(BIN)/python test/bench/quantized_weights.py --docs docs
	$(BIN)/python test/bench/cache_layouts.py --docs docs

clean:
	rm -rf build dist out *.egg-info
