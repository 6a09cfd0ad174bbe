.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
NAME ?= laptop
SETUP := .venv/.ready
PEERS := .venv/.bench-ready
BENCHES := loss attention step breakdown decode trace startup roofline

.PHONY: help setup check test repro verdicts doctor profile knobs measured ablate bench bench-pipeline bench-check performance kill-test mend clean forget

help: ## show what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

setup: $(SETUP) ## make .venv with everything in it, once

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

check: $(SETUP) ## lint, format, types and the direction of imports
	ruff check .
	ruff format --check .
	lint-imports
	pyright --warnings

test: $(SETUP) ## run the tests
	OMP_NUM_THREADS=1 python -m pytest -q -n 2

repro: $(SETUP) ## run the pipeline: only what changed runs
	python stages/mend.py
	dvc repro || { python stages/report.py; exit 1; }
	@echo "The page of this run is reports/index.html; make verdicts prints what it judges."

verdicts: $(SETUP) ## print the verdicts of the reports; fails when one says fail or is of another run
	python stages/print_verdicts.py

doctor: $(SETUP) ## try the first test of every symptom on your own run; name the first that fails
	python stages/doctor.py

profile: $(SETUP) ## write params.yaml from a profile: make profile NAME=ci|markov|ablation|laptop|cpu_small|gpu_343m
	python stages/compose_profile.py --name $(NAME)

knobs: $(SETUP) ## write docs/knobs.md from the models of params.yaml
	python stages/list_knobs.py

measured: $(SETUP) ## copy the figures of reports/ into docs/measured/, where the docs cite them
	python stages/take_snapshot.py

ablate: $(SETUP) ## run what an ablation still lacks, and write its table: make ablate ID=name
	python stages/mend.py
	python stages/ablate.py --id $(ID)

$(PEERS): $(SETUP) # what the benches compare with
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

bench: $(PEERS) ## measure the parts side by side with the best, outside the pipeline
	for name in $(BENCHES); do python bench/$$name.py || exit; done

bench-pipeline: $(SETUP) ## measure the whole pipeline from scratch beside the revision before it was made fast; half an hour
	python bench/pipeline.py

bench-check: $(SETUP) ## hold what make bench found against bench/bounds.yaml; fails when a bound is missed
	python bench/check.py

performance: $(SETUP) ## copy what make bench found into docs/, and write the tables of docs/performance.md
	python stages/write_performance.py

kill-test: $(SETUP) ## kill trainings and DVC again and again; the bytes must be a straight run's
	python bench/kill_test.py --kills 20
	python bench/kill_test.py --kills 20 --temp

mend: $(SETUP) ## put right what a killed DVC left behind; make repro does it by itself
	python stages/mend.py

clean: ## remove caches; reports, data and the states of trainings stay
	rm -rf .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

forget: $(SETUP) ## remove the states of trainings in .work that nobody holds
	python stages/clear_runs.py
