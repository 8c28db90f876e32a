# Everything runs from a virtual environment that make builds; only make and Python 3.11+ are needed.
#
#   STACK=v100    torch 2.10 and triton 3.6, the newest default wheels for a V100 (in .venv-v100)
#   PYTHON=...    the Python to build the environment with
#   OUT=...       the folder of `make study` (results/acceptance) or of `make notebooks` (where they are)
#   ARGS=...      more options for `page4 acceptance` or notebooks/execute.py, for example ARGS="--quick"

STACK  ?= default
PYTHON ?= python3
OUT    ?=
ARGS   ?=

VENV   := .venv$(if $(filter-out default,$(STACK)),-$(STACK))
BIN    := $(VENV)/bin
INPUTS := pyproject.toml setup.py $(wildcard constraints/*.txt)
PARTS  := kernels kvcache model spec_decode experiments

.DEFAULT_GOAL := help
.PHONY: help study test test-gpu lint sm70 notebooks clean
.DELETE_ON_ERROR:

help:
	@echo "make study       measure MTP acceptance against context length with the shipped checkpoint"
	@echo "make test        run the tests"
	@echo "make test-gpu    run the tests of kernels and of decode steps on a GPU, over every shape and format"
	@echo "make lint        run ruff and mypy"
	@echo "make sm70        compile the kernels for a V100 and others, and check their machine code; needs no GPU"
	@echo "make notebooks   execute the notebooks, so that they show the studies in experiments/results"
	@echo "make clean       remove the environments and caches; results/ stays"
	@echo "Options: STACK=v100, PYTHON=python3.12, OUT=FOLDER, ARGS=\"--quick\" (see the Makefile)"

study: $(VENV)/.installed
	@$(BIN)/page4 acceptance $(if $(OUT),--out "$(OUT)") $(ARGS)

test: $(VENV)/.installed-test .sm70/.installed
	@$(BIN)/pytest -n 2

# Eight processes keep the CPU cores busy with compiling; the GPU waits for them.
test-gpu: $(VENV)/.installed-test
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "make test-gpu needs a GPU that PyTorch can use; make test runs the kernels on the CPU" >&2; exit 2; }
	@$(BIN)/pytest -n 8 tests/kernels tests/model/test_backends.py tests/spec_decode/test_decode_step.py \
	  tests/spec_decode/test_lossless_gpu.py tests/spec_decode/test_prefix_gpu.py

# page4.* are the top folders under another name; the links let mypy find them by that name.
lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .mypy/page4 && for part in $(PARTS); do ln -sfn ../../$$part .mypy/page4/$$part; done
	$(BIN)/mypy $(PARTS:%=-p page4.%)

sm70: $(VENV)/.installed .sm70/.installed
	@$(BIN)/page4 sm70 check

notebooks: $(VENV)/.installed-notebooks
	@$(BIN)/python notebooks/execute.py $(if $(OUT),--out "$(OUT)") $(ARGS)

clean:
	rm -rf .venv .venv-* .sm70 .cache/sm70 .mypy .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/.python: | constraints/$(STACK).txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "page4 needs Python 3.11 or newer; \`$(PYTHON)\` is not. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) || \
	  { echo "Cannot create $(VENV): is the venv module of $(PYTHON) installed (Debian: python3-venv)?" >&2; exit 1; }
	@touch $@

constraints/$(STACK).txt:
	@echo "Unknown STACK=$(STACK); choose one of: default v100" >&2; exit 1

$(VENV)/.installed: $(VENV)/.python $(INPUTS)
	@echo "Installing page4 into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints/$(STACK).txt -e .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	@echo "Installing the $* packages into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints/$(STACK).txt -e ".[$*]"
	@touch $@

# Nothing but Triton is unpacked: its processes take all else from the environment.
.sm70/.installed: constraints/sm70.txt | $(VENV)/.python
	@echo "Unpacking Triton 3.6, which compiles for a V100, into .sm70 (about 200 MB, once)"
	@rm -rf .sm70 && mkdir .sm70
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target .sm70 -r $<
	@touch $@
