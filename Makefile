PYTHON ?= python3
BIN := .venv/bin
PYTEST := python -m pytest -n auto --dist worksteal
UV := $(BIN)/uv
# uv ignores pip's settings. If they name a local folder of wheels, pass it on: it may hold a CPU-only build of torch.
ifndef UV_FIND_LINKS
export UV_FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
endif
# uv installs no bytecode. Python must be free to write it, or every process compiles all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Versions of torch and triton that PyTorch releases together.
PAIRS := 2.11.0-3.6.0 2.13.0-3.7.1 2.14.1-3.8.0 2.15.0-3.9.0

.PHONY: demo docs test test-all lint test-slow test-distributed test-benchmarks test-trainers test-stub test-stub-oldest gate golden studies test-release release-check hub-kernel pairs test-newest test-processors
demo: .venv/ready
	$(BIN)/gspo train

# Linters, the type checker, and every test that is not marked slow: under 8 minutes on two idle cores.
test: lint
	$(BIN)/python -m pytest -m "not slow" tests/distributed
	$(BIN)/$(PYTEST) -m "not slow" --ignore tests/trainers --ignore tests/benchmarks --ignore tests/distributed \
		--ignore tests/release --ignore tests/stub

# Everything that runs without a GPU: an hour more, with the installation of the environments.
test-all: test test-slow test-distributed test-benchmarks test-stub test-stub-oldest test-release test-trainers

# Seeded faults, the compile gate of every architecture, long runs, and 100 examples of each property.
test-slow: .venv/ready
	$(BIN)/$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=long \
		--ignore tests/trainers --ignore tests/benchmarks --ignore tests/distributed --ignore tests/stub \
		--ignore tests/release

# Sharded heads and sequences on up to eight processes: the cases that `make test` leaves out. No xdist, because all
# cases share one set of processes.
test-distributed: .venv/ready
	$(BIN)/python -m pytest -m slow tests/distributed

test-benchmarks: .venv/ready
	$(BIN)/$(PYTEST) tests/benchmarks

# Triton's launcher on a stub of the CUDA driver, with the pinned and with the oldest supported Triton.
test-stub: .venv/ready
	$(BIN)/python -m pytest tests/stub

test-stub-oldest: .venv/ready
	test -d build/triton-3.6.0 || $(UV) pip install -q --no-deps --target build/triton-3.6.0 triton==3.6.0
	PYTHONPATH=build/triton-3.6.0 $(BIN)/python -m pytest tests/stub

# Build wheel and source distribution, install the wheel by name, and load the hub's layout with the `kernels` package.
test-release: build/release/ready
	build/release/bin/python -m pytest tests/release

# What a release still lacks: the public address, the date in CHANGELOG.md, or results of the present code.
release-check: .venv/ready
	$(BIN)/python .ci/release_check.py

# The layout of the Hugging Face kernels hub, in build/hub.
hub-kernel:
	$(PYTHON) .ci/hub_kernel.py build/hub

# The documentation site, build/site/index.html. Warnings, such as a broken link, are errors. `make test` also builds it.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

.venv/ready: Makefile pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(UV) || $(BIN)/pip install -q uv
	$(UV) pip install -q -p .venv -c constraints.txt -e '.[dev,bench,trl,lora,trackers,docs]'
	touch $@

# Tests against the real trainers, each in its own virtual environment. `build/peers` has all the trainers that can be
# installed together: `build/peers/bin/gspo bench` compares them.
test-trainers: .venv/ready build/trl-1.15.0/ready build/verl/ready build/zero3/ready build/megatron/ready build/swift/ready
	$(BIN)/$(PYTEST) tests/trainers
	build/trl-1.15.0/bin/$(PYTEST) -m "not slow" tests/trainers/test_trl.py tests/trainers/test_trl_zero_advantage.py
	build/verl/bin/$(PYTEST) tests/trainers/test_verl_main_ppo.py tests/trainers/test_verl_*.py
	build/zero3/bin/$(PYTEST) tests/trainers/test_zero3.py tests/trainers/test_trl_zero_advantage.py -k zero3
	build/megatron/bin/python -m pytest tests/trainers/test_megatron.py tests/trainers/test_skyrl.py tests/trainers/test_openrlhf.py
	build/megatron/bin/python -m pytest tests/trainers/test_examples.py -k megatron
	build/swift/bin/$(PYTEST) tests/trainers/test_ms_swift.py

build/trl-1.15.0/ready: NEEDS = '.[test,trl]' trl==1.15.0
build/verl/ready: NEEDS = '.[test,verl]' megatron-core==0.16.1 cachetools fastapi msgspec pyzmq uvicorn TransferQueue
build/zero3/ready: NEEDS = '.[test,trl]' peft deepspeed==0.19.8
# OpenRLHF has wheels for Python 3.10 to 3.12 only.
build/megatron/ready: NEEDS = '.[test,megatron]' megatron-core==0.16.1 && $(UV) pip install -q -p $(@D) --no-deps skyrl==0.3.0 openrlhf==0.11.2
build/swift/ready: NEEDS = '.[test]' ms-swift==4.6.0 msgspec
build/release/ready: NEEDS = '.[test,release]' 'setuptools>=77'
build/peers/ready: NEEDS = '.[bench,trl,verl]' trl==1.16.0 cachetools fastapi msgspec pyzmq uvicorn TransferQueue
# The interpreter of Triton 3.6 does not work with NumPy 2.4.
build/pair-%/ready: NEEDS = '.[test]' $(join torch== triton==,$(wordlist 2,3,$(subst -, ,$*))) $(if $(filter %-3.6.0,$*),'numpy<2.4')
build/newest/ready: NEEDS = '.[dev,bench,trl,lora,trackers,docs]' --upgrade

# Packages with the version of constraints.txt.
PINNED = torch|triton|transformers
build/verl/ready build/peers/ready build/swift/ready: PINNED = torch|triton
build/newest/ready $(PAIRS:%=build/pair-%/ready): PINNED = none
build/%/ready: .venv/ready
	test -x build/$*/bin/python || $(UV) venv -q --seed -p $(BIN)/python build/$*
	sed -nE '/^($(PINNED))==/p' constraints.txt > build/$*/constraints.txt
	$(UV) pip install -q -p build/$* -c build/$*/constraints.txt -e $(NEEDS)
	touch $@

# Each of PAIRS in its own environment: the checks of `gspo doctor`, the compile gate, and the launcher on the stub. CI
# runs them every week.
pairs: $(PAIRS:%=pair-%)
$(PAIRS:%=pair-%): pair-%: build/pair-%/ready
	OPENBLAS_CORETYPE=Sandybridge TRITON_INTERPRET=1 build/pair-$*/bin/gspo doctor
	cd tests && ../build/pair-$*/bin/python -m helpers.compile_gate
	build/pair-$*/bin/python -m pytest tests/stub

# `make test` with the packages that an installation without constraints gets. CI runs it every week.
test-newest: build/newest/ready
	$(MAKE) test BIN=build/newest/bin

# The numeric tests with the instructions of other processors, with one and with two threads. This takes hours; CI runs it
# every week.
PROCESSORS := default avx2 mkl onednn
default := ATEN_CPU_CAPABILITY=default
avx2 := ATEN_CPU_CAPABILITY=avx2
mkl := MKL_CBWR=COMPATIBLE
onednn := ONEDNN_MAX_CPU_ISA=SSE41
# Idle threads sleep: ranks with two threads each would otherwise wait for one another.
ON_PROCESSOR = env $($*) OMP_WAIT_POLICY=passive GSPO_TEST_THREADS=$$threads $(BIN)/python -m pytest -m "not slow"
test-processors: $(PROCESSORS:%=test-processor-%)
test-processor-%: .venv/ready
	failed=0; for threads in 1 2; do \
		$(ON_PROCESSOR) tests/distributed || failed=1; \
		$(ON_PROCESSOR) -n auto --dist worksteal tests/math tests/api tests/backends tests/integrations || failed=1; \
	done; exit $$failed

# The compile gate with the oldest and the newest Triton. `make test-slow` runs it with the pinned one.
gate: gate-3.6.0 gate-newest
gate-%: .venv/ready
	rm -rf build/triton-$*
	$(UV) pip install -q --no-deps --target build/triton-$* triton$(if $(filter newest,$*),,==$*)
	cd tests && PYTHONPATH=../build/triton-$* ../$(BIN)/python -m helpers.compile_gate

# The trainings of docs/benchmarks.md, one after another on one core: about two hours.
studies: .venv/ready
	for study in dense rounding long teachers; do $(BIN)/gspo compare --study $$study || exit 1; done
	cp runs/compare/*-cpu.json benchmarks/results/
	$(BIN)/python -m gspo_kernels.benchmarks report

# Rewrite the golden counts, the figure and the tables of README.md and docs/: 5 minutes.
golden: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m faults.costs
	PYTHONPATH=tests $(BIN)/python tests/backends/test_compile_gate.py
	$(BIN)/python -m gspo_kernels.benchmarks report
