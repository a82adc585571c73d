# `make` lists the targets. ARGS="train.max_steps=100" adds settings, RECIPE=recipes/... picks a recipe.
PYTHON ?= python3
PY := .venv/bin/python
CONSTRAINTS ?= constraints.txt
# pip would compile everything, which is half of its time; Python keeps what it compiles when a module is imported, unless told not to.
PIP_INSTALL = $(PY) -m pip install $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) -c $(CONSTRAINTS)
BASE_RECIPE = $(if $(RECIPE),$(RECIPE),recipes/default/base.yaml)
MID_RECIPE = $(if $(RECIPE),$(RECIPE),recipes/default/mid.yaml)

# A test that hangs fails, under its name and with the stack of each thread, before CI runs out of its time.
HANGS = -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true --max-worker-restart 2

# A variable that no target reads would be ignored without a word.
KNOWN := RECIPE ARGS PLAN PYTHON CONSTRAINTS
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
UNKNOWN := $(filter-out $(KNOWN),$(GIVEN))
$(if $(UNKNOWN),$(error unknown: $(UNKNOWN). What can be set, in capitals: \
RECIPE=recipes/x/y.yaml ARGS="key=value ..." PLAN=benchmarks/x/plan.yaml PYTHON=python3.12 CONSTRAINTS=file.txt))

# What only some targets read would be ignored by the others.
READ_RECIPE := base mid sft inspect validate explain
READ_PLAN := bench
$(foreach name,RECIPE PLAN,$(if $(filter command,$(origin $(name))),\
$(foreach goal,$(filter-out $(READ_$(name)) install dev,$(MAKECMDGOALS)),$(error make $(goal) does not read $(name), which is for: $(READ_$(name)). See make help))))
$(if $(RECIPE),,$(foreach goal,$(filter inspect validate,$(MAKECMDGOALS)),$(error make $(goal) needs RECIPE=recipes/.../sft.yaml)))

.DEFAULT_GOAL := help
.PHONY: help install dev test lint smoke lora base mid sft eval chat inspect report export doctor bench validate explain lab patterns toolkit

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile
	@echo '  RECIPE=recipes/x/y.yaml picks a recipe, ARGS="train.max_steps=100" changes settings.'

install: .venv/.installed ## .venv with what running needs, in the tested versions; runs by itself when needed

dev: .venv/.installed-dev ## the same with what tests and lint need; they run it by themselves

.venv/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "sftkit needs Python 3.11 or newer. Name one: make install PYTHON=python3.12" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PIP_INSTALL) -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

test: dev ## the tests; ARGS="-m slow": those that take minutes; ARGS="-m gpu": those of a GPU
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(HANGS) $(ARGS)

lint: dev ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

smoke: install ## base, mid, SFT and evaluation with a tiny model
	$(PY) scripts/run_chain.py recipes/smoke $(ARGS)

lora: install runs/smoke/mid/LATEST ## a first adapter: LoRA on the model of make smoke, in a minute on two cores
	$(PY) -m sftkit.launch scripts/chat_sft.py recipes/smoke/lora.yaml $(ARGS)

runs/smoke/mid/LATEST: | install
	$(PY) scripts/run_chain.py recipes/smoke

base: install ## pretrain a small model (recipes/default/base.yaml)
	$(PY) -m sftkit.launch scripts/base_train.py $(BASE_RECIPE) $(ARGS)

mid: install ## mid-training: all tokens of a mixture (recipes/default/mid.yaml)
	$(PY) -m sftkit.launch scripts/mid_train.py $(MID_RECIPE) $(ARGS)

sft: install ## the whole chain to a chat model; with RECIPE=... chat SFT only
ifdef RECIPE
	$(PY) -m sftkit.launch scripts/chat_sft.py $(RECIPE) $(ARGS)
else
	$(PY) scripts/run_chain.py recipes/default $(ARGS)
endif

eval: install ## measure a run: make eval ARGS="runs/x/sft mmlu gsm8k --data DIR"; alone: the newest, by its recipe
	$(PY) scripts/evaluate.py $(ARGS)

chat: install ## talk to the newest run
	$(PY) scripts/chat.py $(ARGS)

inspect: install ## look at data and costs before training: make inspect RECIPE=... ARGS="--preview 5"
	$(PY) scripts/inspect_data.py $(RECIPE) $(ARGS)

export: install ## a folder for transformers, vLLM, llama.cpp: make export ARGS="runs/x/sft --out exported/sft"
	$(PY) scripts/export.py $(ARGS)

doctor: install ## what this machine lacks, and what would be slow
	$(PY) scripts/doctor.py

report: install ## a page about a run: make report ARGS="runs/x/sft --against runs/y/sft"; alone: the newest
	$(PY) scripts/report.py $(ARGS)

validate: install ## does compiling pay, and change nothing? make validate RECIPE=... ARGS="--processes 1 4"
	$(PY) scripts/validate_compile.py $(RECIPE) $(ARGS)

bench: install ## measure the training step: make bench PLAN=benchmarks/h200_step/plan.yaml
	$(PY) -m labs.bench $(if $(PLAN),$(PLAN),benchmarks/smoke_plan.yaml) $(ARGS)

explain: install ## what the compiler makes of a model: make explain RECIPE=... ARGS=--bisect or --kernels; alone: ARGS=--labs
	$(PY) -m labs.explain $(RECIPE) $(ARGS)

lab: install ## every strategy of compiling that this machine can measure, and the tables of labs/compile_lab.md
	$(PY) -m labs.lab $(ARGS)

patterns: install ## a small model in every layout of 2 and 4 processes of this CPU: what each holds, sends, waits for; labs/patterns/README.md
	$(PY) -m labs.patterns --out benchmarks/patterns/results/results.json $(ARGS)
	$(PY) -m labs.pages labs/patterns/README.md

toolkit: install ## the graph engine with each set of passes at debug size, on two processes of this CPU
	$(PY) -m labs.bench benchmarks/graph_engine/plan.yaml $(ARGS)
