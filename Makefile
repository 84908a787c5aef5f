# Two commands do all the set-up: `make ppo` and `make test`.
PYTHON ?= python3
RUN = .venv/bin/python

.PHONY: ppo test clean

ppo: .venv/ready
	$(RUN) ppo.py 10 0.05

test: .venv/ready-dev
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/ready-dev: requirements-dev.txt .venv/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv
