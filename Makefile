# Every target sets itself up: .venv, dependencies, the C++ core. `make help` lists the targets.
.DEFAULT_GOAL := help
PYTHON_BIN := .venv/bin/python
.PHONY: help setup demo test compare lint clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## make .venv with all dependencies (quick when nothing changed)
	@tools/setup.sh

demo: setup  ## train the quickstart policy with verl GRPO and rhyme; prints and draws what drafting does
	@$(PYTHON_BIN) -m examples.quickstart.demo

test: setup  ## run all tests
	@$(PYTHON_BIN) -m pytest -q

compare: setup  ## the demo's run with rhyme, with rhyme undrafted and with verl's own vllm rollout, in one table
	@$(PYTHON_BIN) -m benchmarks.verl_rollouts

lint: setup  ## ruff and mypy
	@$(PYTHON_BIN) -m ruff check . && $(PYTHON_BIN) -m ruff format --check . && $(PYTHON_BIN) -m mypy

clean:  ## remove build products and runs, keep .venv
	@rm -rf build dist runs *.egg-info rhyme_verl/*.so
