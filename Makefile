# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-output/tiny-llama

.PHONY: setup demo test slow lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/converter convert examples/tiny-gpt2 $(DEMO) --overwrite
	$(BIN)/python examples/generate.py examples/tiny-gpt2 $(DEMO)

test: setup
	$(BIN)/python -m pytest

# Minutes: virtual environments with transformers 4.57 and with DeepSpeed, real checkpoints, figures.
slow: $(VENV)/.real $(VENV)-old/.ready $(VENV)-zero/.ready
	CONVERTER_OLD_PYTHON=$(VENV)-old/bin/python CONVERTER_ZERO_PYTHON=$(VENV)-zero/bin/python \
		$(BIN)/python -m pytest -m slow

$(VENV)/.real: $(VENV)/.ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,real]'
	touch $@

$(VENV)-old/.ready:
	$(PYTHON) -m venv $(VENV)-old
	$(VENV)-old/bin/pip install --quiet torch==2.13.0 'transformers==4.57.*'
	touch $@

$(VENV)-zero/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-zero
	$(VENV)-zero/bin/pip install --quiet --constraint constraints.txt --editable '.[deepspeed]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV)-old $(VENV)-zero demo-output build *.egg-info
