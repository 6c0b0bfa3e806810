# Everything sets itself up in .venv; `make test` and `make demo` are all a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=
SEARCHES ?= 5  # times that `make nightly-fuzz` runs the property tests, by chance
TWO := --numprocesses 2 --dist worksteal

NIGHTLY := sglang sglang-loop vllm canary trl tinker tinker-kills envs boards clusters browser lab image native package runs kills pools rates slow numbers faults fuzz mutants

.PHONY: setup demo math calculator poker unit test nightly bench bench-delta soak soak-run image figures staleness-sweep check coverage clean \
	$(NIGHTLY:%=nightly-%)

setup: $(READY)

$(READY): pyproject.toml constraints.txt setup.py tools/lab/pyproject.toml echo2d/native/words.c echo2d/native/kernels.h
	$(PYTHON) -c 'import sys; sys.exit("echo2d needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,plot,dev]' --editable tools/lab
	touch $(READY)

demo: $(READY)
	$(BIN)/echo2d demo $(ARGS)

math: $(READY)
	$(BIN)/python -m examples.math.run $(ARGS)

calculator: $(READY)
	$(BIN)/python -m examples.calculator.run $(ARGS)

poker: $(READY)
	$(BIN)/python -m examples.poker.run $(ARGS)

# Pure decisions: no torch, no socket, no process. At every save.
unit: $(READY)
	@echo "make unit: about 1 minute on two cores"
	$(BIN)/pytest tests/unit $(TWO) $(ARGS)

# At every commit. The real runs come first, because they take longest.
test: $(READY)
	@echo "make test: about 7 minutes on two idle cores, 13 on busy ones"
	$(BIN)/pytest tests/e2e tests/unit tests/shells $(TWO) $(ARGS)

# Parts of the night: each takes at most 20 minutes. docs/reference/testing.md says which one a change needs.
nightly: $(NIGHTLY:%=nightly-%)

nightly-sglang: $(READY)
	bash tools/sglang_cpu/setup.sh
	bash tools/tinker/setup.sh
	$(BIN)/pytest tests/nightly/sglang --ignore=tests/nightly/sglang/test_loop.py -rs --log-level=INFO $(ARGS)

nightly-sglang-loop: $(READY)
	bash tools/sglang_cpu/setup.sh
	$(BIN)/pytest tests/nightly/sglang/test_loop.py -rs --log-level=INFO $(ARGS)

nightly-vllm: $(READY)
	bash tools/vllm_cpu/setup.sh
	bash tools/tinker/setup.sh
	$(BIN)/pytest tests/nightly/vllm -rs --log-level=INFO $(ARGS)

nightly-canary: $(READY)
	$(BIN)/python -m tools.canary $(ARGS)

nightly-trl: $(READY)
	bash tools/trl/setup.sh
	$(BIN)/pytest tests/nightly/trl $(ARGS)

nightly-tinker: $(READY)
	bash tools/tinker/setup.sh
	$(BIN)/pytest tests/nightly/tinker --ignore=tests/nightly/tinker/test_kills.py --ignore=tests/nightly/tinker/test_many_clients.py -rs $(ARGS)

nightly-tinker-kills: $(READY)
	bash tools/tinker/setup.sh
	$(BIN)/pytest tests/nightly/tinker/test_kills.py tests/nightly/tinker/test_many_clients.py -rs $(ARGS)

nightly-envs: $(READY)
	bash tools/envs/setup.sh
	ECHO2D_VERIFIERS=$$(bash tools/envs/setup.sh | tail -1) $(BIN)/pytest tests/nightly/envs -rs --log-cli-level=INFO $(ARGS)

nightly-boards: $(READY)
	bash tools/boards/setup.sh
	ECHO2D_PROMETHEUS=$$(bash tools/boards/setup.sh | tail -1) $(BIN)/pytest tests/nightly/boards $(ARGS)

nightly-clusters: $(READY)
	bash tools/clusters/setup.sh
	ECHO2D_CLUSTERS=$$(bash tools/clusters/setup.sh | tail -1) $(BIN)/pytest tests/nightly/clusters -rs $(ARGS)

nightly-browser: $(READY)
	bash tools/page/setup.sh
	PYTHONPATH=$$(bash tools/page/setup.sh | tail -1) $(BIN)/pytest tests/nightly/browser -rs $(ARGS)

nightly-lab: $(READY)
	$(BIN)/pytest tests/nightly/lab --ignore=tests/nightly/lab/test_image.py --ignore=tests/nightly/lab/test_services.py -rs $(ARGS)

nightly-image: $(READY)
	bash tools/image/setup.sh
	$(BIN)/pytest tests/nightly/lab/test_image.py tests/nightly/lab/test_services.py -rs $(ARGS)

nightly-native: $(READY)
	tools/native_sanitize.sh $(if $(ARGS),$(ARGS),--messages 1000)
	tools/native_wheel.sh

nightly-package: $(READY)
	$(BIN)/pytest tests/nightly/package $(ARGS)

nightly-runs: $(READY)
	$(BIN)/pytest tests/nightly/runs -m "not alone and not soak" $(TWO) $(ARGS)

nightly-kills: $(READY)
	$(BIN)/pytest tests/e2e -m "nightly and not alone" $(TWO) $(ARGS)

nightly-rates: $(READY)
	$(BIN)/pytest tests/nightly/runs tests/shells/runtime -m "alone and not soak" $(ARGS)

nightly-pools: $(READY)
	$(BIN)/pytest tests/nightly/pools --timeout 3600 $(ARGS)

nightly-slow: $(READY)
	$(BIN)/pytest tests/unit tests/shells --ignore=tests/shells/sim/test_faults.py -m "nightly and not alone and not soak" $(TWO) $(ARGS)
	$(BIN)/pytest tests/nightly/research $(TWO) $(ARGS)

nightly-numbers: $(READY)
	$(BIN)/pytest tests/nightly/numbers $(TWO) $(ARGS)

nightly-faults: $(READY)
	$(BIN)/pytest -m "soak or nightly" tests/shells/sim/test_faults.py $(TWO) $(ARGS)

nightly-fuzz: $(READY)
	for i in $$(seq $(SEARCHES)); do $(BIN)/pytest tests/unit/property --hypothesis-profile=search --timeout 0 $(TWO) || exit 1; done

nightly-mutants: $(READY)
	$(BIN)/python tools/mutants.py $(ARGS)

bench: $(READY)
	$(BIN)/python -m echo2d_lab.research.broadcast_table $(ARGS)

bench-delta: $(READY)
	$(BIN)/python -m echo2d_lab.research.rl_updates runs/rl --lr 1e-6
	$(BIN)/python -m echo2d_lab.research.rl_updates runs/rl --lr 3e-6 1e-5 1e-4 --keep 2
	$(BIN)/python -m echo2d_lab.research.delta_table runs/rl

soak: $(READY)
	$(BIN)/pytest -m soak tests/unit tests/shells tests/e2e $(ARGS)

soak-run: $(READY)
	$(BIN)/echo2d bench soak $(ARGS)

image:
	tools/image/build.sh $(ARGS)

staleness-sweep: $(READY)
	$(BIN)/python -m echo2d_lab.research.staleness_sweep $(ARGS)
	$(BIN)/python -m echo2d_lab.research.staleness_sweep --long $(ARGS)

figures: $(READY)
	$(BIN)/python -m echo2d_lab.research.scale_figure $(ARGS)
	$(BIN)/python -m echo2d_lab.research.broadcast_figure
	$(BIN)/python -m echo2d_lab.research.bubble_figure $(if $(RUN),--run)
	$(BIN)/python -m echo2d_lab.research.cost_table
	$(BIN)/python -m echo2d_lab.research.usd_to_accuracy
	$(BIN)/echo2d plan scenarios/mix-rented.toml --map docs/figures/break_even.png

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf .cache/typed && mkdir -p .cache/typed/echo2d
	ln -sfn $(CURDIR)/echo2d/* $(CURDIR)/learner .cache/typed/echo2d/
	$(BIN)/mypy
	$(BIN)/pytest tests/unit/house/test_architecture.py -p no:cacheprovider

coverage: $(READY)
	$(BIN)/pytest --cov --cov-report=term:skip-covered

clean:
	rm -rf .venv .cache runs build dist *.egg-info
