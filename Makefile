# Everything sets itself up in .venv; `make test` and `make demo` are all a newcomer needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=
SEARCHES ?= 20  # times that a soak runs the property tests, by chance

.PHONY: setup demo math calculator poker test lab sglang-test trl-example envs-test boards-test browser-test staleness-sweep bench bench-delta soak soak-run image figures mutants check coverage native-sanitize native-wheel clean

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

test: $(READY)
	$(BIN)/pytest --numprocesses 2 $(ARGS)
	$(BIN)/pytest -m "e2e and alone" $(ARGS)
	$(BIN)/pytest -m "e2e and not alone" --numprocesses 2 --dist worksteal $(ARGS)

lab: $(READY)
	$(BIN)/pytest -m lab $(ARGS)

bench: $(READY)
	$(BIN)/python -m echo2d_lab.research.broadcast_table $(ARGS)

bench-delta: $(READY)
	$(BIN)/python -m echo2d_lab.research.rl_updates runs/rl --lr 1e-6
	$(BIN)/python -m echo2d_lab.research.rl_updates runs/rl --lr 3e-6 1e-5 1e-4 --keep 2
	$(BIN)/python -m echo2d_lab.research.delta_table runs/rl

soak: $(READY)
	$(BIN)/pytest -m soak $(ARGS)
	for i in $$(seq $(SEARCHES)); do $(BIN)/pytest tests/unit/property --hypothesis-profile=search --timeout 0 || exit 1; done

soak-run: $(READY)
	$(BIN)/echo2d bench soak $(ARGS)

image:
	tools/image/build.sh $(ARGS)

sglang-test: $(READY)
	bash tools/sglang_cpu/setup.sh
	$(BIN)/pytest -m sglang tests/nightly/sglang -rs --log-level=INFO $(ARGS)

trl-example: $(READY)
	bash tools/trl/setup.sh
	$(BIN)/pytest -m trl tests/nightly/trl $(ARGS)

envs-test: $(READY)
	bash tools/envs/setup.sh
	ECHO2D_VERIFIERS=$$(bash tools/envs/setup.sh | tail -1) $(BIN)/pytest -m envs tests/nightly/envs -rs --log-cli-level=INFO $(ARGS)

boards-test: $(READY)
	bash tools/boards/setup.sh
	ECHO2D_PROMETHEUS=$$(bash tools/boards/setup.sh | tail -1) $(BIN)/pytest -m boards tests/nightly/boards $(ARGS)

browser-test: $(READY)
	bash tools/page/setup.sh
	PYTHONPATH=$$(bash tools/page/setup.sh | tail -1) $(BIN)/pytest -m browser tests/nightly/browser -rs $(ARGS)

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

mutants: $(READY)
	$(BIN)/python tools/mutants.py $(ARGS)

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf .cache/typed && mkdir -p .cache/typed/echo2d
	ln -s $(CURDIR)/echo2d/* $(CURDIR)/learner .cache/typed/echo2d/
	$(BIN)/mypy
	$(BIN)/pytest tests/unit/house/test_architecture.py

native-sanitize: $(READY)
	tools/native_sanitize.sh $(ARGS)

native-wheel: $(READY)
	tools/native_wheel.sh

coverage: $(READY)
	$(BIN)/pytest --cov --cov-report=term:skip-covered

clean:
	rm -rf .venv .cache runs build dist *.egg-info
