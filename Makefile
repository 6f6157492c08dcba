# Two commands for a fresh machine with Python >= 3.11 and make:
#   make quickstart   installs into .venv, records demonstrations, trains a policy, measures it, writes a report
#   make test         the same .venv plus the development tools; lint, type check and the whole test suite
# Each step leaves a stamp, so a second run starts where there is something to do.
#
#   PYTHON=...        the interpreter to make .venv with (default: the first of python3.11+ on the PATH)
#   PIP_ARGS=...      more arguments for pip, such as an index with CPU builds of torch
#   PYTEST_ARGS=...   more arguments for pytest, such as -k packing

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help quickstart test lint typecheck crosscheck clean

comma := ,
VENV := .venv
BIN := $(VENV)/bin
CROSS := .venv-crosscheck
GL_PACKAGES := libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri
RUN := runs/quickstart

# pip's output goes to a file; what it fails with is shown, without the addresses of the indexes it asked.
define pip_install
$(1) -m pip install --disable-pip-version-check --no-input $(PIP_ARGS) $(2) >$(VENV)/pip.log 2>&1 || { \
  grep -v '^WARNING' $(VENV)/pip.log | tail -n 6 | sed -E 's#[a-z]+://[^ ]+#(address)#g' >&2; \
  echo "pip failed; all of its output is in $(VENV)/pip.log" >&2; exit 1; }
endef

# The first interpreter that starts and is new enough; a pyenv shim may be on the PATH and not start.
find_python = $(or $(PYTHON),$(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done))

help:
	@sed -n 's/^# \?//p' Makefile | head -8
	@echo "also: make lint, make typecheck, make crosscheck (against LeRobot itself, Python 3.12), make clean"

$(VENV)/.made:
	@python="$(find_python)"; \
	if [ -z "$$python" ]; then echo "No Python >= 3.11 found: install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "Making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV) || { echo "python -m venv failed (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing lightning-embodied with its wandb and sim extras (a few minutes the first time)"
	@$(call pip_install,$(BIN)/python,-c constraints.txt -e '.[wandb$(comma)sim]')
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Installing the development tools"
	@$(call pip_install,$(BIN)/python,-c constraints.txt -e '.[wandb$(comma)sim$(comma)models$(comma)fp8$(comma)onnx$(comma)ray$(comma)dev]')
	@touch $@

# MuJoCo draws without a display through EGL or OSMesa; where neither works, Mesa's EGL is two small packages away.
$(VENV)/.rendering: $(VENV)/.installed
	@if ! $(BIN)/python -m lightning_embodied.cli.rendering; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing $(GL_PACKAGES)"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(GL_PACKAGES); } \
	      >$(VENV)/apt.log 2>&1 || { echo "apt-get failed; its output is in $(VENV)/apt.log" >&2; exit 1; }; \
	    $(BIN)/python -m lightning_embodied.cli.rendering; \
	  else \
	    echo "MuJoCo cannot draw on this machine. Type this, then make again:" >&2; \
	    echo "  sudo apt-get install -y $(GL_PACKAGES)" >&2; exit 1; \
	  fi; \
	fi
	@touch $@

quickstart: $(VENV)/.rendering
	@echo
	@echo "From demonstrations to a measured success rate, in four ordinary commands."
	@echo "A simulated Sawyer arm (Meta-World, MuJoCo physics) has three tasks, each asked for in English."
	@echo
	@echo "1/4  Scripted experts record demonstrations as a LeRobot v3.0 dataset: parquet, mp4, exact statistics."
	@echo "     Only successful episodes are kept."
	@if [ -f data/metaworld/meta/info.json ]; then echo "     data/metaworld is there already: kept"; \
	else $(BIN)/lightning-embodied collect --config configs/collect_metaworld.yaml; fi
	@echo
	@echo "2/4  A small flow-matching policy learns from them with a stock Lightning Trainer."
	@echo "     It reads image, instruction, robot state and, for speed, the simulator's object state."
	@$(BIN)/lightning-embodied fit --config configs/quickstart.yaml --trainer.default_root_dir $(RUN)
	@echo
	@echo "3/4  It drives the arm from initial states it has not seen, next to the expert and an untrained policy."
	@$(BIN)/lightning-embodied evaluate --checkpoint $(RUN) --config configs/evaluate_metaworld.yaml
	@echo
	@echo "4/4  Everything on one page: data, configuration, curves, success table, a video of each task."
	@$(BIN)/lightning-embodied report --run_dir $(RUN)
	@echo
	@echo "Open $(RUN)/report.html in a browser. For your own data: README.md, 'Your own data'."

test: lint typecheck $(VENV)/.rendering
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

# callbacks/, strategies/ and configs/ are part of the package but lie beside it: mypy sees them where they import from.
typecheck: $(VENV)/.dev
	@rm -rf .typecheck && mkdir -p .typecheck/lightning_embodied
	@for entry in $$PWD/lightning_embodied/*; do ln -s "$$entry" .typecheck/lightning_embodied/; done
	@for room in callbacks strategies configs; do ln -s "$$PWD/$$room" .typecheck/lightning_embodied/; done
	@MYPYPATH=.typecheck $(BIN)/mypy -p lightning_embodied

$(CROSS)/.installed: $(VENV)/.made
	@python3.12 --version >/dev/null 2>&1 || { echo "make crosscheck needs python3.12: LeRobot does" >&2; exit 1; }
	@echo "Installing LeRobot into $(CROSS) (several gigabytes)"
	@python3.12 -m venv $(CROSS)
	@$(call pip_install,$(CROSS)/bin/python,'lerobot[dataset$(comma)diffusion$(comma)smolvla]' -e .)
	@touch $@

# The pinned environment writes datasets, LeRobot's reads them and compares every value; its policies train in LeRobot's.
crosscheck: $(VENV)/.installed $(CROSS)/.installed
	@rm -rf $(CROSS)/datasets
	@$(BIN)/python tests/crosscheck/lerobot_reads_ours.py write $(CROSS)/datasets
	@$(CROSS)/bin/python tests/crosscheck/lerobot_reads_ours.py compare $(CROSS)/datasets
	@rm -rf $(CROSS)/policies
	@$(CROSS)/bin/python tests/crosscheck/lerobot_policies.py $(CROSS)/policies

clean:
	rm -rf $(VENV) $(CROSS) .typecheck build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
