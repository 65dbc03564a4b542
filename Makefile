# Every command of the project. `make` alone lists them; each target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_NEWEST ?= .venv-newest
VENV_GRAMMAR ?= .venv-grammar
VENV_QUANTIZED ?= .venv-quantized
VENV_SPECULATORS ?= .venv-speculators
VENV_BROWSER ?= .venv-browser
VENV_RAY ?= .venv-ray
VENV_HARNESS ?= .venv-harness
WORKERS ?= 2
ARGS ?=

TARGET := models/reference-target
DRAFTER := models/falcon-reference
PROMPTS := $(foreach set,gsm8k humaneval mt_bench,benchmarks/prompts/$(set).jsonl)
RESULTS := benchmarks/results
DECODINGS := greedy temperature-1 temperature-0.7-top-p-0.9 repetition-penalty
SIXTEEN := greedy temperature-1 temperature-0.7-top-p-0.9
SAMPLING := temperature-0.7 temperature-1 temperature-0.7-top-p-0.9 temperature-1.5-min-p top-k-50 typical-p-0.9 top-h-0.4 \
	epsilon-eta sampling-repetition-penalty watermark synth-id guidance-1.5
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARITY = $(BIN)/falcon-spec parity --target $(TARGET) --drafter $(DRAFTER)
READY_OLDEST := $(VENV_OLDEST)/.ready
READY_NEWEST := $(VENV_NEWEST)/.ready
READY_GRAMMAR := $(VENV_GRAMMAR)/.ready
READY_QUANTIZED := $(VENV_QUANTIZED)/.ready
READY_SPECULATORS := $(VENV_SPECULATORS)/.ready
READY_BROWSER := $(VENV_BROWSER)/.ready
READY_RAY := $(VENV_RAY)/.ready
READY_HARNESS := $(VENV_HARNESS)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-families test-training test-commands test-benchmarks test-docs test-all test-oldest test-newest test-beyond test-grammar \
	test-quantized test-speculators test-browser test-ray test-harness test-static test-gpu test-pretend test-slow lint check fix bench bench-gpu docs
MAKEFLAGS += --no-print-directory

help: ## List the commands.
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-23s%s\n", $$1, $$2 }'

demo: $(READY) ## Write the same text with and without the drafter, and show the speed of both.
	@$(BIN)/falcon-spec generate --target $(TARGET) --drafter $(DRAFTER) --prompts examples/prompts.jsonl --compare $(ARGS)

# The tests of one lane (`pyproject.toml` says what each holds). Processes run side by side with one thread each: more threads would
# fight over the same cores.
define lane
@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m $(1) $(ARGS)
endef

test: $(READY) ## Run the tests that a change waits for: the algorithms, and one text from end to end.
	$(call lane,unit)

test-families: $(READY) ## Run the tests of every model family, drafter and option.
	$(call lane,families)

test-training: $(READY) ## Run the tests that train.
	$(call lane,training)

test-commands: $(READY) ## Run the tests of the command line, conversion and the Hub.
	$(call lane,commands)

test-benchmarks: $(READY) ## Run the tests of what measures and of what shows the figures.
	$(call lane,benchmarks)

test-docs: $(READY) ## Run what the pages show, and the examples.
	$(call lane,docs)

test-all: $(READY) ## Run the tests of all these lanes on the newest known-good versions.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# What does not depend on the version of Transformers is left to the newest one, on the same torch: the algorithms on tensors and in
# fixed shapes, how each drafter drafts (that it loads, trains, drafts and is saved is tested on both), the tuner, losses and what is
# read and written without a model, exports and the table of conversion (that each format converts and drafts is tested on both),
# commands beyond training and decoding, runs and processes that are killed, pages and figures, the house; MTP layers, which the oldest
# has for fewer models; and the random trials.
tests-of = $(addprefix $(1)/test_,$(addsuffix .py,$(2)))
NEWEST_ALONE := tests/core tests/trials tests/generation/tuning tests/drafters/mtp tests/drafters/tree_drafting tests/training/objectives \
	$(call tests-of,tests,cli extending layering layout measure_house provenance public_api) \
	$(call tests-of,tests/generation,compiled_target packed_linear verifier verifier_sharp_pairs) \
	$(call tests-of,tests/generation/static,acceptance captured compile graph leaving meta scoring state) \
	$(foreach kind,diffuspec eagle easyspec falcon lookahead medusa,$(call tests-of,tests/drafters/$(kind),generator)) \
	$(foreach kind,diffuspec eagle easyspec lookahead medusa,$(call tests-of,tests/drafters/$(kind),lossless)) \
	$(call tests-of,tests/drafters/diffuspec,denoising draft_length draft_probs fixed_shapes lattice path_search proxy) \
	$(call tests-of,tests/drafters/easyspec,several_processes fixed_shapes) $(call tests-of,tests/drafters/falcon,paper_tree recurrence) \
	$(call tests-of,tests/convert,export formats published_dflash_refusals source table target_facts) \
	$(call tests-of,tests/commands,calibrate doctor mask_view parity step train_adapters train_looks train_recipes trees written_paths) \
	$(call tests-of,tests/training,answers checkpoints endpoint feature_cache losses mask_coverage recipes run_plan throughput)

test-oldest: $(READY_OLDEST) ## Run the tests on the oldest supported Transformers.
	@OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(VENV_OLDEST)/bin/python -m pytest -n $(WORKERS) $(addprefix --ignore ,$(NEWEST_ALONE)) \
		-m "unit or families or training or commands" $(ARGS)

# What depends on the packages that `pip install .` brings today: the call of the demo, the loop, one of each family and drafter, a run
# of the trainer, saving.
WHAT_PIP_BRINGS := $(call tests-of,tests,lossless saved_drafters transformers_versions) \
	$(call tests-of,tests/generation,architectures call loop model_kwargs output patch pipelines) \
	$(call tests-of,tests/training,trainer lora dataset) $(call tests-of,tests/hub,custom_generate saved_folders)
define what-pip-brings
@$(VENV_NEWEST)/bin/falcon-spec generate --target $(TARGET) --drafter $(DRAFTER) --prompts examples/prompts.jsonl --limit 1 --compare
@OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(VENV_NEWEST)/bin/python -m pytest -n $(WORKERS) $(WHAT_PIP_BRINGS) -m "unit or training or commands" $(ARGS)
endef

test-newest: $(READY_NEWEST) ## Run what depends on other packages with those that `pip install .` brings today.
	$(what-pip-brings)

test-beyond: $(READY_NEWEST) ## Run the same with the newest releases of all, also those that this package does not allow yet.
	@$(VENV_NEWEST)/bin/python -m pip install -q --upgrade torch transformers huggingface_hub accelerate datasets peft
	@$(VENV_NEWEST)/bin/python -m pip install -q --no-deps -e .
	$(what-pip-brings)

test-grammar: $(READY_GRAMMAR) ## Run the tests with xgrammar and outlines.
	@OMP_NUM_THREADS=1 $(VENV_GRAMMAR)/bin/python -m pytest -m grammar tests/generation $(ARGS)

test-quantized: $(READY_QUANTIZED) ## Run the tests with targets quantised by torchao and bitsandbytes.
	@OMP_NUM_THREADS=1 $(VENV_QUANTIZED)/bin/python -m pytest -m quantized tests/generation tests/training $(ARGS)

test-speculators: $(READY_SPECULATORS) ## Run the tests of exported drafters with speculators.
	@OMP_NUM_THREADS=1 $(VENV_SPECULATORS)/bin/python -m pytest -m speculators tests/convert $(ARGS)

test-browser: $(READY_BROWSER) ## Run the tests that open pages in Chromium.
	@OMP_NUM_THREADS=1 $(VENV_BROWSER)/bin/python -m pytest -m browser tests/evaluation tests/lab tests/examples tests/test_examples.py $(ARGS)

test-ray: $(READY_RAY) ## Run the test that serves with Ray.
	@OMP_NUM_THREADS=1 $(VENV_RAY)/bin/python -m pytest -m ray tests/test_examples.py $(ARGS)

test-harness: $(READY_HARNESS) ## Run the tests with EleutherAI's evaluation harness.
	@OMP_NUM_THREADS=1 $(VENV_HARNESS)/bin/python -m pytest -m harness tests/examples tests/test_examples.py $(ARGS)

test-static: $(READY) ## Run the tests of texts and drafters in fixed shapes, as on a GPU, but uncaptured.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --static tests/generation tests/drafters tests/trials tests/test_lossless.py $(ARGS)

# A machine with a GPU often has no index to install from. Its own Python serves, if it has what these tests import.
test-gpu: ## Run the tests that need a CUDA device; without an environment, with the machine's own Python if that can.
	@if test ! -e $(READY) && $(PYTHON) -c 'import jaxtyping, peft, pytest, torch, transformers' 2>/dev/null; then \
		PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ARGS); \
	else \
		$(MAKE) $(READY) && $(BIN)/python -m pytest -m gpu $(ARGS); \
	fi

test-pretend: $(READY) ## Capture every drafter's step on a device that pretends to be CUDA; needs g++.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m pretend tests/pretend $(ARGS)

test-slow: $(READY) ## Run the tests that take longer than a few seconds.
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY) ## Check format, style and types.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint test ## What must pass before a commit: format, style, types, and the tests of the first lane.

fix: $(READY) ## Repair format and style, and render the notebook.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python tools/notebook.py

bench: $(READY) ## Measure parity and speed of the embedded pair, and render the figures into README and docs; resumes.
	@$(PARITY) --prompts $(PROMPTS) --output $(RESULTS)/parity.json \
		--decodings $(DECODINGS)
	@$(PARITY) --prompts benchmarks/prompts/parity.jsonl --output $(RESULTS)/parity_greedy.json
	@$(PARITY) --prompts $(PROMPTS) --limit 12 --max_new_tokens 64 --output $(RESULTS)/parity_sampling.json --decodings $(SAMPLING)
	@$(PARITY) --prompts $(PROMPTS) --limit 34 --max_new_tokens 64 --output $(RESULTS)/parity_bfloat16.json --dtype bfloat16 --decodings $(SIXTEEN)
	@$(PARITY) --prompts $(PROMPTS) --limit 15 --max_new_tokens 64 --output $(RESULTS)/parity_float16.json --dtype float16 --decodings $(SIXTEEN)
	@$(PARITY) --prompts $(PROMPTS) --limit 12 --max_new_tokens 64 --output $(RESULTS)/parity_static.json --step static --tune \
		--decodings $(SIXTEEN) sampling-repetition-penalty
	@$(PARITY) --prompts $(PROMPTS) --limit 10 --max_new_tokens 64 --output $(RESULTS)/parity_bfloat16_static.json --dtype bfloat16 --step static \
		--decodings $(SIXTEEN)
	@$(BIN)/falcon-spec bench --target $(TARGET) --methods $(DRAFTER) --prompts $(PROMPTS) --output $(RESULTS)/speed.json \
		--limit 25 $(ARGS)
	@$(BIN)/python -m benchmarks.batches
	@$(BIN)/python -m benchmarks.verifiers
	@$(BIN)/python -m benchmarks.architectures
	@$(BIN)/python -m benchmarks.tree_cost
	@$(BIN)/python -m benchmarks.walk
	@$(BIN)/python -m benchmarks.report
	@$(BIN)/python -m lab.result_pages $(RESULTS)/speed.json
	@$(BIN)/python tools/hub_cards.py

bench-gpu: $(READY) ## Measure the captured step on a GPU for ten minutes, and render the figures into docs/gpu.md; resumes.
	@$(BIN)/python -m benchmarks.gpu --minutes 10 $(ARGS)
	@$(BIN)/python -m benchmarks.report
	@$(BIN)/python tools/figures.py

# Material announces its successor in each build; the variable keeps that out of the log, where warnings stand.
docs: $(READY) ## Draw the figures, and build the documentation into site/.
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@$(BIN)/python tools/figures.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(BIN)/python -m pytest -q -m site tests/test_site.py $(ARGS)

# An environment is made anew when its Python is missing or too old, and updated when a pin or a dependency changed.
define install
	@$(1)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || $(PYTHON) -m venv --clear $(1)
	@echo "Installing into $(1): some minutes on a fresh machine."
	@$(1)/bin/python -m pip install -q -c $(2) -e '.[dev,$(3)]'
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt,train)

$(READY_OLDEST): pyproject.toml constraints-oldest.txt
	$(call install,$(VENV_OLDEST),constraints-oldest.txt,train)

# As pip chooses, but for torch, whose newest build may be for other machines.
$(READY_NEWEST): pyproject.toml constraints.txt
	@rm -rf $(VENV_NEWEST)
	@$(PYTHON) -m venv $(VENV_NEWEST)
	@grep '^torch==' constraints.txt > $(VENV_NEWEST)/torch.txt
	@echo "Installing into $(VENV_NEWEST): some minutes on a fresh machine."
	@$(VENV_NEWEST)/bin/python -m pip install -q -c $(VENV_NEWEST)/torch.txt -e '.[dev,train]'
	@touch $@

$(READY_GRAMMAR): pyproject.toml constraints.txt
	$(call install,$(VENV_GRAMMAR),constraints.txt,grammar)

$(READY_QUANTIZED): pyproject.toml constraints.txt
	$(call install,$(VENV_QUANTIZED),constraints.txt,quantized)

# speculators brings packages for pictures and sound, whose builds for CUDA keep Transformers from starting on a torch without it.
$(READY_SPECULATORS): pyproject.toml constraints-speculators.txt
	$(call install,$(VENV_SPECULATORS),constraints-speculators.txt,speculators)
	@$(VENV_SPECULATORS)/bin/python -m pip uninstall -q -y torchaudio torchvision

$(READY_BROWSER): pyproject.toml constraints.txt
	$(call install,$(VENV_BROWSER),constraints.txt,browser)

$(READY_RAY): pyproject.toml constraints.txt
	$(call install,$(VENV_RAY),constraints.txt,ray)

$(READY_HARNESS): pyproject.toml constraints.txt
	$(call install,$(VENV_HARNESS),constraints.txt,harness)
