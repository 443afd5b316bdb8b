# Two commands are enough: `make demo` and `make test`. Both make .venv first, which takes minutes once and nothing after.
#
#   CONSTRAINTS  the versions to install: constraints/cpu.txt unless you say otherwise.
#                With a GPU: make test CONSTRAINTS=constraints/cuda.txt   (or export it). Empty: whatever pip likes best.
#   EXTRAS       the extras to install: dev,torch,triton,llamacpp. For instance EXTRAS=dev,torch,vllm.
#   PYTHON       the Python to make .venv with: the first found that is 3.11 or newer.
#   ARGS         more arguments for pytest or for the demo: make test ARGS="tests/policies -x"
#   WORKERS      test processes: one per core and one more, eight at most. 0 runs them in pytest's own.
#   WITHOUT      make test WITHOUT=vllm leaves out the tests over vLLM, and the gigabyte that they install;
#                WITHOUT="vllm ray browser" those over Ray and in a browser, too. So do ARGS, which choose other
#                tests.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

CONSTRAINTS ?= constraints/cpu.txt
EXTRAS ?= dev,torch,triton,llamacpp
ARGS ?=
WITHOUT ?=
# One more than there are cores: many tests wait for processes that are slow to end.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))

PYTHONS := python3 python3.14 python3.13 python3.12 python3.11
IS_NEW_ENOUGH := import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(PYTHONS); do if "$$p" -c "$(IS_NEW_ENOUGH)"; then echo "$$p"; break; fi; done 2>/dev/null)

BIN := .venv/bin
comma := ,
# One stamp for each choice of CONSTRAINTS and EXTRAS: another choice is another environment.
READY := .venv/.ready-$(subst /,_,$(CONSTRAINTS))-$(subst $(comma),_,$(EXTRAS))
BENCH := .cache/bench-env
VLLM := .cache/vllm-env
RAY := .cache/ray-env
DOOR := .cache/door-env
BROWSER := .cache/browser-env
DOCS := .cache/docs-env
SOURCES := .cache/vllm-sources
PYTEST := $(BIN)/python -m pytest
# The tests that have an environment of their own, those of them that `make test` runs, and what it said as it made
# their environments.
APART := vllm-test ray-test browser-test
OTHER_TESTS = $(if $(ARGS),,$(filter-out $(WITHOUT:%=%-test),$(APART)))
INSTALLED := .cache/other-envs.log
# Where pip is seen, it shows how far it is.
QUIET = $(if $(MAKE_TERMOUT),,--quiet)

# No test and no demo fetches a model: what they need they make.
export HF_HUB_OFFLINE := 1

.PHONY: help venv demo serve test main-test other-envs vllm-test ray-test browser-test gpu-test bench bench-env vllm-env vllm-sources ray-env door-env browser-env docs docs-env check check-style check-mypy check-pyright check-docs check-words public-types format wheel clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24
	@echo "With a GPU: add CONSTRAINTS=constraints/cuda.txt"

venv: $(READY)  ## make .venv, as everything else does first

demo: $(READY)  ## serve three models on two engines and watch them swap
	@$(BIN)/python -m examples.demo $(ARGS)

serve: $(READY)  ## serve the demo's models over HTTP, for curl and OpenAI's clients, until Ctrl-C
	@$(BIN)/python -m examples.demo.serve $(ARGS)

# What the other tests need is installed while the first ones run. If it could not be, the reason comes last.
test: $(READY) door-env  ## run every test that needs no GPU
	@mkdir -p $(dir $(INSTALLED)) && : > $(INSTALLED)
	@$(MAKE) --no-print-directory -j 2 main-test $(if $(OTHER_TESTS),other-envs) || { cat $(INSTALLED) >&2; exit 1; }
	@$(foreach left,$(filter-out $(OTHER_TESTS),$(APART)),echo "$(left) is left out."; )true
	@$(if $(OTHER_TESTS),$(MAKE) --no-print-directory -j 2 $(OTHER_TESTS))

main-test:
	@$(PYTEST) -m "not gpu" -n $(WORKERS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder --durations=15 $(ARGS)

other-envs:
	@$(MAKE) --no-print-directory QUIET=--quiet $(OTHER_TESTS:%-test=%-env) > $(INSTALLED) 2>&1

# One thread, so that cores may be forked; what vLLM itself is warned of is not ours.
vllm-test: $(VLLM)/.ready vllm-sources  ## run the tests of the vLLM backend, over the real vLLM for CPUs
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m "not gpu" -o filterwarnings=default \
	    -n 2 --dist=loadfile tests/backends/vllm $(ARGS)

# In one process: all tests share a cluster of three nodes.
ray-test: $(RAY)/.ready  ## run the tests of the Ray backend, over a cluster of three nodes on this machine
	@$(RAY)/bin/python -m pytest -o filterwarnings=default tests/backends/ray $(ARGS)

# Skipped, with the reason, where there is no Chromium. No browser is downloaded.
browser-test: $(BROWSER)/.ready  ## run the tests of the page of a door, in the Chromium of this machine
	@$(BROWSER)/bin/python -m pytest -o filterwarnings=default tests/browser $(ARGS)

gpu-test: $(READY)  ## run the tests that need a CUDA device
	@$(PYTEST) -m gpu $(ARGS)

bench: $(READY) bench-env  ## run the benchmarks, each printing a ratio beside a peer or a limit
	@$(BIN)/python -m benchmarks $(ARGS)

# The peers have an environment of their own, since they may want other versions than we do.
bench-env: $(BENCH)/.ready  ## install the loaders that the benchmarks compare with

vllm-env: $(VLLM)/.ready  ## install vLLM for CPUs, for its tests and for `benchmarks engine`; over a gigabyte

ray-env: $(RAY)/.ready  ## install Ray, for its tests and for `benchmarks remote`; a quarter of a gigabyte

# What calls a door from outside: schemathesis, and OpenAI's client of npm. Tests that lack one say so.
door-env: $(READY)  ## install what tests call a server by: schemathesis, and OpenAI's client of npm
	@cmp --quiet tests/door/clients/requirements.txt $(DOOR)/.requirements \
	    || { test -x $(DOOR)/bin/python || $(BIN)/python -m venv $(DOOR); \
	         $(DOOR)/bin/python -m pip install $(QUIET) --disable-pip-version-check -r tests/door/clients/requirements.txt \
	         && cp tests/door/clients/requirements.txt $(DOOR)/.requirements; } \
	    || echo "schemathesis could not be installed; its tests are left out." >&2
	@cmp --quiet tests/door/clients/package.json $(DOOR)/.package \
	    || { command -v npm > /dev/null && mkdir -p $(DOOR) && cp tests/door/clients/package.json $(DOOR)/ \
	         && npm install --prefix $(DOOR) --no-audit --no-fund --silent \
	         && cp tests/door/clients/package.json $(DOOR)/.package; } \
	    || echo "OpenAI's client of npm could not be installed; its tests are left out." >&2

browser-env: $(BROWSER)/.ready  ## install Playwright, for the tests of the page; a quarter of a gigabyte

# Less than 20 MB of a wheel of hundreds. Without them, one file of the tests over vLLM has less to look at.
vllm-sources: constraints/vllm-sources.txt | $(READY)  ## fetch the Python files of the newest vLLM, to look for what hotswap relies on
	@cmp --quiet $< $(SOURCES)/.of || { $(BIN)/python -m tests.backends.vllm.fetch_sources $< $(SOURCES) && cp $< $(SOURCES)/.of; } \
	    || echo "The sources of the newest vLLM could not be fetched; its names are not checked." >&2

# Two at a time, since each of the type checkers keeps one core busy.
check: $(READY)  ## format, lint, types, layers, words and the site of docs/
	@$(MAKE) --no-print-directory -j 2 check-pyright check-mypy check-style check-docs check-words

check-style: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

check-mypy: $(READY)
	$(BIN)/mypy $(wildcard hotswap tests examples benchmarks)

check-pyright: $(READY)
	$(BIN)/pyright --warnings

# With what the working tree has, whichever tree the environment was made in.
check-docs: $(DOCS)/.ready  ## build the site of docs/ strictly: every page, link, anchor and public name
	@PYTHONPATH=$(CURDIR) NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --clean

check-words: $(DOCS)/.ready  ## look for misspelled words, and for those of docs/hooks/words.txt
	@$(DOCS)/bin/codespell --dictionary=- --dictionary=docs/hooks/words.txt README.md CONTRIBUTING.md CHANGELOG.md Makefile mkdocs.yml benchmarks deploy docs examples hotswap tests

docs: $(DOCS)/.ready  ## serve the site of docs/ at http://127.0.0.1:8001, and build it anew when a page changes
	@PYTHONPATH=$(CURDIR) NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs serve --dev-addr 127.0.0.1:8001 $(ARGS)

docs-env: $(DOCS)/.ready  ## install what builds the site of docs/

public-types: $(READY)  ## measure how completely the public names are typed: fails below 100 %
	@PATH="$(CURDIR)/$(BIN):$$PATH" pyright --verifytypes hotswap --ignoreexternal

format: $(READY)  ## write the code the way `make check` wants it
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

wheel: $(READY)  ## build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:  ## remove .venv and everything the tools leave behind
	rm -rf .venv build dist .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first lines of what makes an environment with $(PYTHON).
define FIND_PYTHON
@test -n "$(PYTHON)" || { echo "hotswap needs Python 3.11 or newer, and none was found as: $(PYTHONS)." \
    "Install one, or name it: make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3" >&2; exit 1; }
endef

# An environment made for another choice, or whose making broke off, has no stamp of this name: it is made anew.
$(READY): pyproject.toml $(CONSTRAINTS)
	$(FIND_PYTHON)
	@echo "Installing hotswap[$(EXTRAS)] into .venv$(if $(CONSTRAINTS), by $(CONSTRAINTS)): minutes, but only once." >&2
	@test -e $@ || { rm -rf .venv && $(PYTHON) -m venv .venv; }
	@$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check \
	    $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[$(EXTRAS)]"
	@$(if $(filter torch,$(subst $(comma), ,$(EXTRAS))),echo "Compiling kernels for this CPU: seconds$(comma) but only once." >&2; \
	    $(BIN)/hotswap warm || echo "They could not be compiled now: the first load compiles them." >&2)
	@touch $@

# The three that it brings along are builds for CUDA, which clash with the torch for CPUs; text needs none of them.
# It needs nothing of .venv, so that it can be made beside it.
$(VLLM)/.vllm: benchmarks/requirements-vllm.txt
	$(FIND_PYTHON)
	@rm -rf $(VLLM) && $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install $(QUIET) --disable-pip-version-check --requirement $<
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Anew when pyproject.toml changes, which names what vLLM loads of hotswap.
$(VLLM)/.ready: $(VLLM)/.vllm pyproject.toml
	@$(VLLM)/bin/python -m pip install $(QUIET) --disable-pip-version-check --editable ".[torch,testing,llamacpp]" \
	    gguf psutil pytest-timeout pytest-xdist
	@touch $@

# With a torch of its own, so that nothing of .venv is pinned by Ray.
$(RAY)/.ready: pyproject.toml $(CONSTRAINTS) | $(READY)
	@test -x $(RAY)/bin/python || $(BIN)/python -m venv $(RAY)
	@$(RAY)/bin/python -m pip install $(QUIET) --disable-pip-version-check \
	    $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[torch,testing,ray]" psutil pytest-timeout
	@touch $@

$(BROWSER)/.ready: pyproject.toml $(CONSTRAINTS) | $(READY)
	@test -x $(BROWSER)/bin/python || $(BIN)/python -m venv $(BROWSER)
	@$(BROWSER)/bin/python -m pip install $(QUIET) --disable-pip-version-check \
	    $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable ".[door,testing]" \
	    "playwright>=1.50" "axe-playwright-python>=0.1.8" pytest-timeout
	@touch $@

# Mermaid draws the diagrams. Where npm cannot bring it, the site shows them as text.
$(DOCS)/.ready: pyproject.toml constraints/docs.txt $(CONSTRAINTS) | $(READY)
	@test -x $(DOCS)/bin/python || $(BIN)/python -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install $(QUIET) --disable-pip-version-check \
	    $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --constraint constraints/docs.txt --editable ".[docs]"
	@test -e $(DOCS)/mermaid/dist/mermaid.min.js \
	    || { command -v npm > /dev/null && mkdir -p $(DOCS)/mermaid && (cd $(DOCS)/mermaid \
	         && tar -xzf "$$(npm pack --silent mermaid@11.12.2)" --strip-components=1 package/dist/mermaid.min.js \
	         && rm mermaid-*.tgz); } \
	    || echo "Mermaid could not be fetched; the site shows diagrams as text." >&2
	@touch $@

# One after the other: a peer that cannot be installed here leaves the others, and the report says that it is missing.
$(BENCH)/.ready: benchmarks/requirements.txt $(CONSTRAINTS) | $(READY)
	@rm -rf $(BENCH) && $(BIN)/python -m venv $(BENCH)
	@grep -Ev '^(#|$$)' $< | while read -r peer; do \
	    $(BENCH)/bin/python -m pip install $(QUIET) --disable-pip-version-check \
	        $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) "$$peer" </dev/null \
	        || echo "$$peer could not be installed; it is left out." >&2; done
	@touch $@
