# make demo: set up, train, look.   make test: set up, test.   make check: what CI runs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed-$(shell cksum < requirements.lock | cut -d' ' -f1)

.PHONY: setup demo screenshots test test-slow test-cluster test-machines test-wheel test-with-ray-cluster test-integrations docs torture soak fuzz check lint audit format bench lock tables clean
.PHONY: test-with-integrations test-with-keras test-with-deepspeed test-with-ray test-with-composer test-with-horovod test-contracts test-scripts
.PHONY: environment-integrations environment-keras environment-deepspeed environment-ray environment-composer environment-horovod

setup: $(STAMP)

# uv installs exactly what the lock says, whatever wheels or settings this machine has lying about.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -oE '^uv==[0-9.]+' requirements.lock)"
	$(BIN)/uv --quiet pip sync --require-hashes --compile-bytecode requirements.lock
	$(BIN)/uv --quiet pip install --no-deps --editable .
	$(BIN)/python -m compileall -q platform  # where Python may write no bytecode, every process would compile all of it
	@touch $@

demo: setup
	@$(BIN)/rankzero train experiments/digits.py --nproc 2

# Three at a time: most tests wait for processes. Tests that share an expensive fixture run in one process (tests/support/scheduling.py).
# The frameworks have a command of their own, below.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadscope --ignore tests/frameworks --durations 20

test: setup
	$(PYTEST) -m "not slow and not cluster"

# Long tests: browsers, whole searches, short fault campaigns, 5,000 crash points. `.ci/run slow` runs them.
test-slow: setup
	$(PYTEST) -m slow

# The pictures of pages in the documentation are those that the browser tests take.
screenshots: setup
	RANKZERO_SCREENSHOTS=$(CURDIR)/.screenshots $(BIN)/pytest -m slow tests/cli/commands/test_ui.py
	for image in docs/images/*.png; do cp .screenshots/$${image##*/} $$image; done

# Other machines, on this one; but for Ray's environment no network is needed: networks and containers in namespaces, Debian's Slurm in them,
# a team's store of PostgreSQL and moto's S3, Ray's daemons. Needs root, slurmctld, slurmd, slurm-client, munge, iproute2. Most of the time they wait: make -j2 -O.
test-cluster: test-machines test-with-ray-cluster

test-machines: setup
	$(BIN)/pytest -m cluster --numprocesses 2 --dist loadfile --durations 10

test-with-ray-cluster: environment-ray
	.venv-ray/bin/python -m pytest tests/frameworks/test_ray_search.py --durations 5

# What users install.
test-wheel: setup
	$(BIN)/pytest tests/test_wheel.py

# The adapters against the real frameworks, which are extras. TensorFlow, DeepSpeed, Ray and Composer have environments of their own:
# whoever finds them imports them, too. What needs Debian's openmpi-bin or a C++ compiler says so where it is skipped.
FRAMEWORKS := integrations keras deepspeed ray composer
EXTRAS_integrations := metrics,streams,lightning,transformers,accelerate,ignite
EXTRAS_keras := keras
EXTRAS_deepspeed := deepspeed
EXTRAS_ray := ray
# For Transformers' example in test-scripts, for benchmarks/adapters.py, and for LightningCLI.
PACKAGES_integrations := evaluate tensorboard 'jsonargparse[signatures]'
# No extra: it asks for older versions of these, such as PyTorch below 2.7.1. It runs with those of the lock.
PACKAGES_composer := mosaicml==0.32.1
NEWER_composer := torch|torchvision|pillow|importlib-metadata|packaging|numpy

test-integrations: $(FRAMEWORKS:%=test-with-%)

environment-horovod $(FRAMEWORKS:%=environment-%): environment-%: setup
	grep -E '^[a-z].*==' requirements.lock | sed 's/ \\$$//' > .venv/constraints-$*.txt
	sed -nE '/^($(or $(NEWER_$*),none))==/p' .venv/constraints-$*.txt > .venv/overrides-$*.txt
	$(BIN)/uv --quiet venv --clear --python $(BIN)/python .venv-$*
	$(BIN)/uv --quiet pip install --compile-bytecode --python .venv-$*/bin/python --constraint .venv/constraints-$*.txt \
	    --override .venv/overrides-$*.txt --editable ".[$(EXTRAS_$*)]" $(PACKAGES_$*) hypothesis ipython omegaconf pytest pytest-randomly pytest-timeout

$(FRAMEWORKS:%=test-with-%): test-with-%: environment-%
	.venv-$*/bin/python -m pytest tests/frameworks

# Horovod, compiled for CPUs: five minutes, with Debian's g++ and cmake. Its sources are of 2023, so three words change: PyTorch needs C++20,
# has no torch.torch any more, and finds a CUDA that is not all there.
PACKAGES_horovod := setuptools wheel cloudpickle psutil pyyaml packaging cffi
HOROVOD := .suites/horovod-0.28.1

test-with-horovod: environment-horovod
	PYTHONPATH=tests $(BIN)/python -c 'from frameworks.contracts.suites import *; fetch(Sdist(), "horovod", "0.28.1", Path(".suites"))'
	sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' $(HOROVOD)/CMakeLists.txt $(HOROVOD)/horovod/torch/CMakeLists.txt
	sed -i 's/torch\.torch\./torch./; s/CUDA_HOME is not None/False/' $(HOROVOD)/cmake/Modules/FindPytorch.cmake
	HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 CMAKE_POLICY_VERSION_MINIMUM=3.5 \
	    $(BIN)/uv --quiet pip install --no-build-isolation --no-deps --python .venv-horovod/bin/python ./$(HOROVOD)
	.venv-horovod/bin/python -m pytest tests/frameworks/test_horovod.py

# The frameworks' own tests with our adapters in them. It fetches what no wheel contains: sdists, and clones of two repositories.
# ARGS="ignite --suite lightning=CLONE": some of them, and a clone that is here already.
test-contracts: environment-integrations environment-keras
	PYTHONPATH=tests $(BIN)/python -m frameworks.contracts $(ARGS)

# Training scripts that others wrote, with a few lines of ours: docs/migration.md. It clones five repositories into .suites, by commit.
test-scripts: environment-integrations
	RANKZERO_SCRIPTS=1 .venv-integrations/bin/python -m pytest tests/frameworks/test_scripts.py

# The documentation's site, into site/.
docs: setup
	$(BIN)/mkdocs build --strict

# 500 faults against the real command, two scenarios side by side, and what users are promised of them; then some fuzz.
# About three quarters of an hour: a crowd of twenty has the machine to itself. ARGS="--faults 50 --seed 7": less of it; ARGS="--report FILE": kept.
# First every crash point of a recorded training, and an error at every call.
torture: setup
	PYTHONPATH=tests $(BIN)/python -m crash_points --real
	PYTHONPATH=tests $(BIN)/python -m torture.campaign --fuzz 1000 $(ARGS)

# An hour at full speed, with a server that restarts every five minutes: what grows. ARGS="--minutes 3": less of it.
soak: setup
	$(BIN)/python benchmarks/soak.py $(ARGS)

# Bad input in quantity: config files, key=value, journals, names and values; minutes (FUZZ=1000000: hours).
FUZZ ?= 100000
fuzz: setup
	RANKZERO_FUZZ_CASES=$(FUZZ) $(BIN)/pytest tests/config/test_config_fuzz.py tests/run_store/test_hostile_journals.py \
	    tests/tracking/test_hostile_values.py tests/run_store/test_planted.py

check: lint test

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=platform:tests:benchmarks:benchmarks/gpu:experiments $(BIN)/mypy --explicit-package-bases benchmarks/*.py benchmarks/gpu/*.py tests/torture/*.py tests/torture/scenarios/*.py tests/crash_points/*.py
	$(BIN)/lint-imports
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec deploy/compose.yaml

# Known vulnerabilities of what the lock names; asks the advisory database, so it needs the network and is not part of CI.
audit: setup
	@$(BIN)/uv tool run --quiet --from pip-audit pip-audit --strict --require-hashes --disable-pip --progress-spinner off \
	    --requirement requirements.lock \
	    || { echo "audit: see above: a vulnerability to mend (make lock), or no network, and then nothing is known"; exit 1; }

format: setup
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

# The measured claims; about an hour on an idle machine.
bench: setup
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/many_runs.py
	$(BIN)/python benchmarks/browse.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/turnaround.py
	$(BIN)/python benchmarks/checkpoint_blocking.py
	$(BIN)/python benchmarks/tracking_overhead.py
	$(BIN)/python benchmarks/server_faults.py

# After `make lock` and `make setup` have brought another MLflow: its tables, ready-made.
tables: setup
	rm -f platform/rankzero/mlflow_store/tables/*.sql
	RANKZERO_WRITE_TABLES=1 $(BIN)/pytest tests/mlflow_store/test_ready_tables.py

lock:
	$(BIN)/uv pip compile --quiet --upgrade --universal --generate-hashes --python-version 3.11 --group dev \
	    --custom-compile-command "make lock" pyproject.toml --output-file requirements.lock

clean:
	rm -rf .venv .venv-* .suites .pytest_cache .mypy_cache .ruff_cache
