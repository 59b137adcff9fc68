"""What a user installs: the README, and the wheel from the sdist."""

import ast
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import zero_nb

ROOT = Path(__file__).parents[1]

TWO_LINES = """
import importlib.metadata, importlib.util, os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zero_nb import ZeroRedundancyOptimizer
from zero_nb.checkpoint.sharded import load_sharded, save_sharded
installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
assert not installed & {"nbdev", "execnb", "jupyterlab", "ipython", "pytest", "matplotlib", "rich"}, installed
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
losses = []
for step in range(20):
    optimizer.zero_grad()
    loss = (model(torch.eye(64)) - torch.eye(64)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
state = sum(v.numel() for s in optimizer.optim.state.values() for v in s.values() if v.dim())
assert state == 64 * 65, state  # half of two floats for each of 64 * 64 + 64 parameters
save_sharded("checkpoint", model, optimizer)  # by way of NumPy
load_sharded("checkpoint", model, optimizer)
print("trained", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.daily
def test_readme_is_the_index_notebook():
    from readme import readme  # imports nbconvert, with 30 MB that every rank would be forked with

    for path, text in readme().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run `make export`"


@pytest.mark.daily
def test_the_reference_is_what_the_package_says():
    from reference import made

    for path, text in made().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run `make export`"


def required(*names: str) -> dict[str, metadata.Distribution]:
    """Give the distributions installed here that these need, themselves included, by name."""
    found, asked = {}, [Requirement(name) for name in names]
    while asked:
        requirement = asked.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower() not in found:
            found[requirement.name.lower()] = metadata.distribution(requirement.name)
            needs = found[requirement.name.lower()].requires or []
            asked += [Requirement(need) for need in needs]
    return found


def environment(path: Path, distributions: Iterable[metadata.Distribution]) -> Path:
    """Make an environment that has links to some installed distributions and nothing else; give its
    interpreter. Neither an index nor a copy of torch is needed."""
    venv.create(path, with_pip=False)
    (site,) = path.glob("lib/python*/site-packages")
    links = dict[str, Path]()  # some distributions share a folder, such as those of CUDA
    for distribution in distributions:
        tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
        links |= {top: Path(distribution.locate_file(top)) for top in tops}
    for top, there in links.items():
        (site / top).symlink_to(there)
    return path / "bin" / "python"


def call(*command, **kwargs) -> str:
    """Run a command without this environment's variables; give its output."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {k: v for k, v in os.environ.items() if k not in ours} | {"OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env, **kwargs)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.daily
def test_wheel_from_the_sdist_trains_in_a_clean_environment(tmp_path):
    source = tmp_path / "source"
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(lambda name: (ROOT / name).exists(), listed.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    builder = environment(tmp_path / "builder", required("build", "setuptools").values())
    # the sdist, then the wheel from it, with nothing but what pyproject.toml says they need
    call(builder, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source)
    made = sorted((tmp_path / "dist").iterdir())
    (wheel,) = (file for file in made if file.suffix == ".whl")
    assert len(made) == 2
    call(sys.executable, "-m", "twine", "check", "--strict", *made)  # as an index will read them
    (own,) = metadata.distributions(path=[str(wheel)])
    needs = [need for need in own.requires if "extra ==" not in need]
    python = environment(tmp_path / "clean", required(*needs).values())
    pip = [sys.executable, "-m", "pip", "--python", python]
    call(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel)
    call(*pip, "check")  # what it needs is there, in versions that it allows
    script = tmp_path / "train.py"
    script.write_text(TWO_LINES)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    assert call(python, *torchrun, script, cwd=tmp_path).count("trained") == 2
    assert "train" in call(tmp_path / "clean" / "bin" / "zero-nb", "--help", cwd=tmp_path)
    version = call(python, "-c", "import zero_nb; print(zero_nb.__version__)", cwd=tmp_path)
    assert version.strip() == "0.1.0"


WITHOUT_DISTRIBUTED = """
import importlib, importlib.abc, sys

class Without(importlib.abc.MetaPathFinder):
    # what a build of torch without distributed lacks, taken away just before it is looked for
    def find_spec(self, name, path, target=None):
        if name != "torch.distributed": return None
        import torch._C
        for gone in ("_c10d_init", "_distributed_c10d", "_rpc_init", "_dist_autograd_init"):
            if hasattr(torch._C, gone): delattr(torch._C, gone)

sys.meta_path.insert(0, Without())
import torch
assert not torch.distributed.is_available()
import zero_nb
for name in zero_nb.__all__: getattr(zero_nb, name)
assert "torch.distributed.rpc" not in sys.modules or not torch.distributed.is_available()
layer = torch.nn.Linear(4, 4)
optimizer = zero_nb.ZeroRedundancyOptimizer(layer.parameters(), torch.optim.AdamW, lr=0.1)  # a group of one
layer(torch.ones(1, 4)).sum().backward()
optimizer.step()
calls = [lambda: zero_nb.Group(object()), lambda: zero_nb.record()]
calls += [lambda: zero_nb.simulate(4), lambda: zero_nb.run(2, print)]
for call in calls:
    try: call()
    except (ValueError, RuntimeError) as error: assert "built without" in str(error), error
    else: raise AssertionError("no error")
"""


@pytest.mark.daily
def test_a_type_checker_may_import_every_public_name():
    """PEP 484: of what a typed package imports, only `x as x` is offered to others; mypy --strict
    says so where `__all__` is computed."""
    tree = ast.parse((ROOT / "zero_nb" / "__init__.py").read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    found = [alias for line in block.body for alias in line.names]
    assert [alias.name for alias in found] == [alias.asname for alias in found]
    assert sorted(alias.name for alias in found) == sorted(zero_nb.__all__)


def test_a_torch_without_distributed_will_do():
    subprocess.run([sys.executable, "-c", WITHOUT_DISTRIBUTED], check=True)
