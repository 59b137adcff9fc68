# Two commands: `make train` runs the main job, `make test` runs every check. Both set up what they need in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
unexport PYTHONDONTWRITEBYTECODE # hundreds of interpreters would compile the same modules

.PHONY: help train bench link surviving test quick notebooks pytest browser lint export site lab clean

help: ## what the targets do
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: export OMP_NUM_THREADS ?= 1
train: $(VENV)/.ready ## train a small GPT on two local ranks beside plain DDP, in every mode; results in runs/train (ARGS="--steps 50" passes options)
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m zero_nb.apps.train $(ARGS)

bench: $(VENV)/.ready ## compare with plain DDP and other optimizers at full size (about two hours, 16 GB); what apps/24_benchmark shows is in nbs/benchmark
	$(BIN)/python -m zero_nb.apps.bench --out nbs/benchmark $(ARGS)

link: $(VENV)/.ready ## the same between two network namespaces joined by 1 Gbit/s (root, 20 minutes); nbs/benchmark/two_machines.sh does it between two machines
	$(BIN)/python tests/link.py $(ARGS)

surviving: $(VENV)/.ready ## kill the ranks of a job 21 times and compare its losses with an unbroken run's (15 minutes); what guides/09_surviving shows is in nbs/benchmark
	$(BIN)/python tests/surviving.py $(ARGS)

test: lint notebooks pytest ## what CI checks on a day; costly tests and notebooks take turns by day, all run with ZERO_NB_ALL=1

quick: $(VENV)/.ready ## under a minute: plans, style, and what every mode sends, computes and calls (tests/test_golden.py)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not whole" tests/test_golden.py tests/test_style.py tests/test_house.py tests/test_plans.py tests/test_policies.py tests/test_buckets.py tests/test_schedule.py

notebooks: $(VENV)/.ready ## execute the notebooks of the day, and compare what they show with what is stored
	$(BIN)/python tests/notebooks.py

pytest: $(VENV)/.ready browser ## the test suite
	$(BIN)/python -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile --no-loadscope-reorder # one more than cores: ranks often wait for each other

browser: ## what the site's pages and the explorer are tested in: installs Debian's chromium where there is no browser and apt-get may be used
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	skip() { echo "no browser: $$1; the tests in a real one will be skipped" >&2; exit 0; }; \
	command -v apt-get >/dev/null || skip "chromium is not installed, and there is no apt-get"; \
	root=; [ "$$(id -u)" = 0 ] || { root="sudo -n"; $$root true 2>/dev/null || skip "chromium is not installed, and apt-get needs root"; }; \
	install() { $$root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; }; \
	echo "installing chromium"; install 2>/dev/null || { $$root apt-get update -qq && install; } || skip "apt-get cannot install chromium"

lint: $(VENV)/.ready ## ruff and mypy
	$(BIN)/ruff format --check --quiet nbs tests setup.py zero_nb/__init__.py
	$(BIN)/ruff check nbs zero_nb tests setup.py
	$(BIN)/mypy

export: $(VENV)/.ready ## write zero_nb/ and the README from the notebooks, and clean the notebooks
	$(BIN)/ruff format --quiet nbs tests setup.py zero_nb/__init__.py
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/python tests/readme.py

site: $(VENV)/.ready ## build the site in _docs, with Quarto
	PYTHONPATH=tests $(BIN)/nbdev_docs

lab: $(VENV)/.ready ## open the notebooks, signed as this machine's own: JupyterLab shows no figure of others
	@$(BIN)/jupyter trust nbs/*.ipynb nbs/*/*.ipynb > /dev/null
	$(BIN)/jupyter lab nbs

clean: ## remove what the other targets made
	rm -rf $(VENV) _proc _docs dist build runs *.egg-info

# torch goes first and alone: a CPU build the machine offers is taken before anything else asks for torch.
$(VENV)/.ready: settings.ini setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "zero_nb needs Python 3.10 or later, this is " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
