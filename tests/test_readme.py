"""Every number of the README is one of a stored measurement, of the metadata, or of a test."""

import json
import re
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zero_nb
from zero_nb import run
from zero_nb.apps.reports import BenchmarkReport
from zero_nb.apps.tables import rows
from zero_nb.apps.workloads import benchmark_models

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
OURS = ("zero1-gradview", "zero1-overlap", "zero2", "zero2-interleaved")
ASIDE = (  # what has no numbers of ours: code, its output, comments, and where links lead
    (r"^```.*?^```$", ""),
    (r"^    .*$", ""),
    (r"<!--.*?-->", ""),
    (r"!\[[^\]]*\]\([^)]*\)", ""),
    (r"\[([^\]]*)\]\([^)]*\)", r"\1"),
    (r"`\w+=[^`\n]*`", ""),  # an argument
    (r"`([^`\n]*)`", r"\1"),
)
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)*(?!\w)")
TIME = "iteration / better ddp"
PEAK = "peak / better ddp"
ENDS = r"(\d\.\d\d) to (\d\.\d\d)"


def text() -> str:
    found = (ROOT / "README.md").read_text(encoding="utf-8")
    for pattern, instead in ASIDE:
        found = re.sub(pattern, instead, found, flags=re.S | re.M if "```" in pattern else re.M)
    return found


def stored(name: str) -> dict:
    return json.loads((NBS / "benchmark" / name).read_text(encoding="utf-8"))


@cache
def at_four() -> dict[tuple[str, str], dict]:
    """Give what the benchmark has stored of four ranks, by model and variant."""
    page = (NBS / "benchmark/report.json").read_text(encoding="utf-8")
    report = BenchmarkReport.from_json(page)
    return {(row["model"], row["variant"]): row for row in rows(report) if row["ranks"] == 4}


def ratio(model: str, variant: str, key: str) -> str:
    value = at_four()[model, variant][key]
    return "-" if value is None else f"{getattr(value, 'median', value):.2f}"


def span(model: str, key: str, ways: tuple[str, ...]) -> list[str]:
    models = ("linear", "gpt") if model == "large" else (model,)
    found = [ratio(m, f"{name}{way}", key) for m in models for name in OURS for way in ways]
    return [min(found), max(found)]


def part_of_default(what: str) -> str:
    """Give what DDP with its gradients in buckets takes of DDP as it comes."""
    value = at_four()["linear", "ddp"][f"{what} / better ddp"]
    return f"{1 / float(getattr(value, 'median', value)):.2f}"


def words_of(notebook: str) -> str:
    return (NBS / notebook).read_text(encoding="utf-8")


def settings(key: str) -> str:
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"][key]


def real_ranks() -> str:
    """Give the most ranks that a test or a chapter starts."""
    paths = [*(ROOT / "tests").glob("*.py"), *NBS.rglob("*.ipynb")]
    texts = (path.read_text(encoding="utf-8") for path in paths)
    started = [
        int(n) for one in texts for n in re.findall(r"(?<![.\w])run\((\d+), (?!\w+, backend)", one)
    ]
    return str(max(started))


def simulated_ranks() -> str:
    page = (ROOT / "tests/test_faults_agreement.py").read_text(encoding="utf-8")
    return f"{max(int(n) for n in re.findall(r'simulate.([0-9_]+)', page)):,}"


def tests_on_a_gpu() -> list[str]:
    """Give their number as the page of that run says it, which has no other source."""
    return re.findall(r"(\d+) tests that need a GPU pass", words_of("apps/28_on_a_gpu.ipynb"))


def lines_by_hand() -> list[str]:
    found = re.search(r"ZeRO-1 and ZeRO-2 in (\d+) lines", words_of("start/01_by_hand.ipynb"))
    return [found[1]]  # which test_by_hand counts


def beside_ddps_bytes() -> list[str]:
    """Give the bytes of padding on three ranks, and DDP's, as a chapter asserts them."""
    page = words_of("guides/02_which_mode.ipynb")
    padding = re.search(r"test_eq\(sorted\(padding\.values\(\)\), \[([\d, ]+)\]\)", page)[1]
    plain = re.search(r"test_eq\(plain, ([\d_]+)\)", page)[1]
    return [*dict.fromkeys(padding.split(", ")), f"{int(plain):,}"]


def kills() -> list[str]:
    """Give how many ranks were killed on how many ranks, if no loss is another one."""
    found = stored("surviving.json")
    assert found["largest gap to the same ranks without kills"] == 0
    worlds = dict.fromkeys(str(life["ranks"]) for life in found["lives"])
    return [str(found["kills"]), *worlds]


def torch_of(machine: dict[str, str]) -> list[str]:
    return [re.match(r"\d+\.\d+", machine["torch"])[0]]


def gathers_again() -> float:
    """Train with FSDP2 as it comes, and with DDP; give what was sent over DDP's bytes."""
    sent = []
    for shard in (False, True):
        group = zero_nb.record()
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        if shard:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in model:
                fully_shard(layer, mesh=mesh)
        call = (
            fully_shard(model, mesh=mesh)
            if shard
            else nn.parallel.DistributedDataParallel(model, process_group=group)
        )
        for _ in range(3):
            with group.recording() as log:
                call(torch.ones(2, 64)).sum().backward()
        sent.append(log.wire)
    return float(sent[1] / sent[0])


def of_fsdp2() -> list[str]:
    return [f"{run(2, gathers_again)[0]:.1f}"]


def after_backward() -> list[str]:
    return [f"{float(ratio('gpt', 'zero1-gradview', 'wire / ddp')):g}"]


BOTH = ("", "-messages")
CLAIMS = [  # a pattern of the text, and what its groups must be
    (r"then sends ([\d.]+) times DDP's bytes", after_backward),
    (r"on three (\d+) or (\d+) bytes beside DDP's ([\d,]+):", beside_ddps_bytes),
    (rf"By messages our modes take {ENDS} of DDP's time", lambda: span("large", TIME, BOTH[1:])),
    (r"(\d+) kills on (\d) and (\d) ranks in turn changed no loss", kills),
    (r"with torch ([\d.]+) and gloo", lambda: torch_of(stored("report.json")["machine"])),
    (r"on up to (\d+) real ranks", lambda: [real_ranks()]),
    (r"up to ([\d,]+) simulated ranks", lambda: [simulated_ranks()]),
    (r"On one H100 \(torch ([\d.]+)\)", lambda: torch_of(stored("gpu/host.json")["machine"])),
    (r"Python ([\d.]+) or later", lambda: [settings("min_python")]),
    (r"torch ([\d.]+) or later", lambda: re.findall(r"torch>=([\d.]+)", settings("requirements"))),
    (r"and sends ([\d.]+) times DDP's bytes\. Its peak", of_fsdp2),
    (r"clips at a norm of (1)\)", lambda: ["1"]),  # DeepSpeed's, by the link there
    (
        r"that option alone takes (\d\.\d\d) of the time and (\d\.\d\d) of the resident memory of DDP",
        lambda: [part_of_default(what) for what in ("iteration", "resident")],
    ),
    (rf"a thousand of them our modes took {ENDS} of the better", lambda: span("small", TIME, BOTH)),
    (rf"their peak memory was {ENDS} of its", lambda: span("small", PEAK, BOTH)),
    (rf"their resident memory {ENDS}", lambda: span("small", "resident / better ddp", BOTH)),
    (r"(\d+) tests that need a GPU passed", tests_on_a_gpu),
    (r"work, in (\d+) lines on torch", lines_by_hand),
]
NAMES = re.compile(  # numbers that are names, or say what a page is about and not what was measured
    r"keeps 1/N|line at 1:|ZeRO-[12]|stage [12]\b|Apache-2\.0|on 4 ranks, resume on 2|how do [\d,]+ ranks find out"
    r"|what do 200 small collectives cost|what would 1,024 ranks send|a rank of 1,024 have to do"
    r"|how do 256 MiB pass through 1 MiB of it"
)


@pytest.mark.parametrize(("pattern", "found"), CLAIMS, ids=[pattern for pattern, _ in CLAIMS])
def test_a_number_of_the_readme_is_the_one_that_was_measured(pattern, found):
    said = re.findall(pattern, text())
    assert said and {(one,) if isinstance(one, str) else one for one in said} == {tuple(found())}


def test_the_readme_has_no_other_numbers():
    """A new one needs a claim above: where it was measured, or what says so."""
    page = re.sub(r"^\|.*·.*\|$", "", text(), flags=re.M)  # what was measured has a test of its own
    known = [m.span() for pattern, _ in CLAIMS for m in re.finditer(pattern, page)]
    known += [m.span() for m in NAMES.finditer(page)]
    others = [m for m in NUMBER.finditer(page) if not any(a <= m.start() < b for a, b in known)]
    assert [page[max(0, m.start() - 40) : m.end() + 20] for m in others] == []


PEERS = {"torch": "torch's class", "fsdp2": "FSDP2", "fairscale": "fairscale"}
PEERS |= {"deepspeed": "DeepSpeed ZeRO-1"}
PEERS |= {"torch-view": "torch's class, with its bucket view"}
PEERS |= {"zero1": "zero_nb zero1 as in the lines above, shared memory"}


def test_the_table_of_the_readme_is_that_of_the_stored_report():
    sides = dict(PEERS)
    for variant, mode in zip(OURS, ("zero1", *OURS[1:]), strict=True):
        sides[variant] = f"zero_nb {mode}, shared memory"
        sides[f"{variant}-messages"] = f"zero_nb {mode}, messages"
    keys = ["state / fair share", "wire / ddp", TIME, "resident / better ddp", PEAK]
    lines = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*·.*\|$", text(), re.M)]
    both = lambda variant, key: " · ".join(ratio(m, variant, key) for m in ("linear", "gpt"))
    assert sorted(lines) == sorted(
        [side, *(both(variant, key) for key in keys)] for variant, side in sides.items()
    )


def test_the_words_for_models_and_machine_are_right():
    sizes = {name: model.sizes for name, model in benchmark_models().items()}
    words = text()
    assert "linear is twenty large layers; gpt has two thirds of its parameters in its" in words
    assert len(sizes["linear"]) == 2 * 20 and 0.6 < max(sizes["gpt"]) / sum(sizes["gpt"]) < 0.7
    assert "a third model of a thousand small parameters" in words and len(sizes["small"]) == 1000
    assert "at four ranks, on two CPU cores" in words
    assert stored("report.json")["machine"]["cores"] == "2"
