"""What a user installs: the README, the wheel from the sdist, and the site's pages."""

import os
import shutil
import subprocess
import sys
import venv
from html.parser import HTMLParser
from pathlib import Path

from readme import readme

ROOT = Path(__file__).parents[1]

TWO_LINES = """
import importlib.metadata, importlib.util, os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zero_nb import ZeroRedundancyOptimizer
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
print("trained", flush=True)
dist.destroy_process_group()
"""


def test_readme_is_the_index_notebook():
    for path, text in readme().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run `make export`"


def test_wheel_from_the_sdist_trains_in_a_clean_environment(tmp_path):
    def call(*command, **kwargs):
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=600, **kwargs
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    source = tmp_path / "source"
    for name in call(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    call(
        sys.executable, "-m", "build", "--outdir", tmp_path / "dist", source
    )  # the sdist, then the wheel from it
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    script = tmp_path / "train.py"
    script.write_text(TWO_LINES)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    torchrun = [
        tmp_path / "clean" / "bin" / "torchrun",
        "--standalone",
        "--nproc-per-node",
        2,
        script,
    ]
    assert call(*torchrun, cwd=tmp_path, env=env).count("trained") == 2
    assert "train" in call(tmp_path / "clean" / "bin" / "zero-nb", "--help", cwd=tmp_path)
    assert (
        call(python, "-c", "import zero_nb; print(zero_nb.__version__)", cwd=tmp_path).strip()
        == "0.1.0"
    )


class Links(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            self.anchors.add(attrs["id"])
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])


def test_every_notebook_becomes_a_page_whose_links_lead_somewhere(tmp_path, monkeypatch):
    from nbconvert import HTMLExporter
    from nbdev.config import get_config
    from nbdev.serve import proc_nbs

    monkeypatch.chdir(ROOT)
    get_config.cache_clear() if hasattr(get_config, "cache_clear") else None
    cache = Path(proc_nbs(n_workers=1, force=True))
    pages = {
        p.name: Links(HTMLExporter().from_filename(str(p))[0])
        for p in sorted(cache.glob("*.ipynb"))
    }
    assert len(pages) == len(list((ROOT / "nbs").glob("*.ipynb")))
    broken = []
    for name, page in pages.items():
        for link in page.links:
            if link.startswith(("http:", "https:", "mailto:", "data:")):
                continue
            target, _, anchor = link.partition("#")
            target = (target or name).replace(".html", ".ipynb")
            known = target in pages or (ROOT / "nbs" / target).exists()
            if not known or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append((name, link))
    assert not broken


def test_the_sidebar_lists_every_notebook():
    sidebar = (ROOT / "nbs" / "sidebar.yml").read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "nbs").glob("*.ipynb") if p.name not in sidebar] == []


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


def test_a_torch_without_distributed_will_do():
    subprocess.run([sys.executable, "-c", WITHOUT_DISTRIBUTED], check=True)
