# `make demo` and `make test` are all that a fresh machine needs; both work in .venv.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check
NVCC = command -v nvcc >/dev/null || test -x "$${CUDA_HOME:-/nowhere}/bin/nvcc"

CXX_FILES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

.PHONY: demo test lint format bench bench-models bench-cpu clean

demo: .venv/.demo
	$(BIN)/python tools/build.py cpu
	@if ($(NVCC)) && nvidia-smi -L >/dev/null 2>&1; then $(BIN)/python tools/build.py cuda; fi
	$(BIN)/python -m short_conv_transformers.demo

# The CUDA variant is built and its machine code checked on every machine, with or without a GPU.
test: .venv/.test .venv/.nvcc
	$(BIN)/python tools/build.py all
	$(BIN)/python -m pytest -n $(JOBS)

lint: .venv/.test
	$(BIN)/pre-commit run --all-files

format: .venv/.test
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

bench: .venv/.bench
	$(BIN)/python tools/build.py all
	$(BIN)/python benchmarks/benchmark_conv1d.py

bench-models: .venv/.bench
	$(BIN)/python tools/build.py all
	$(BIN)/python benchmarks/bench_models.py

bench-cpu: .venv/.bench
	$(BIN)/python tools/build.py cpu
	$(BIN)/python benchmarks/bench_cpu.py

clean:
	rm -rf build .cmake

.venv/bin/python:
	$(PYTHON) -m venv .venv

# typeseg holds real trained weights; its own runtime is not needed to read them.
.venv/.test: pyproject.toml | .venv/bin/python
	@echo "installing what the tests need into .venv"
	@$(PIP) -e '.[test]'
	@$(PIP) --no-deps typeseg==0.2.7
	@touch $@

.venv/.demo .venv/.bench: .venv/.%: pyproject.toml | .venv/bin/python
	@echo "installing what the $* needs into .venv"
	@$(PIP) -e '.[$*]'
	@touch $@

.venv/.nvcc: pyproject.toml | .venv/bin/python
	@$(NVCC) || $(PIP) -e '.[cuda-build]'
	@touch $@
