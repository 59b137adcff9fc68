"""Pictures: well-formed, small, in the reader's colours; and the explorer, by hand and in a real browser."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from common.browser import needs_browser, new_page
from common.param_lists import param_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_nb.plan.balancing import balanced, mixed
from zero_nb.plan.charts import (
    KINDS,
    RANKS,
    draw_estimates,
    draw_moves,
    draw_ranks,
    explore,
    explorer,
)
from zero_nb.plan.comparison import compare
from zero_nb.plan.draw import Svg, colour, draw_buckets, draw_shards, short
from zero_nb.plan.estimated import PLANNED
from zero_nb.plan.estimates import estimate
from zero_nb.plan.models import MODELS, find_model
from zero_nb.plan.packing import pack
from zero_nb.plan.policies import even, greedy
from zero_nb.plan.schedule import METHODS, Bar, Event, make_schedule, play
from zero_nb.plan.span_moves import moves
from zero_nb.plan.specs import ParamSpec
from zero_nb.plan.states import OPTIMIZERS
from zero_nb.plan.timelines import Stretch, draw_stretches, draw_timeline, read_trace

quick = settings(max_examples=40, deadline=None)
NS = "{http://www.w3.org/2000/svg}"
PHONE = 342  # pixels that a page leaves to a picture where the screen has 390


def well_formed(picture: Svg) -> ET.Element:
    """Parse a picture, and check what holds for every one of them."""
    root = ET.fromstring(str(picture))
    assert root.tag == NS + "svg" and root.get("aria-label") and root.get("fill") == "currentColor"
    assert not {"white", "#fff", "#ffffff", "black", "#000", "#000000"} & {
        value.lower() for e in root.iter() for value in e.attrib.values()
    }
    for rect in root.iter(NS + "rect"):
        x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
        assert (
            w > 0
            and h >= 0
            and -0.01 <= x <= picture.width + 0.2
            and x + w <= picture.width + 1
            and y + h <= picture.height + 0.5
        )
    for text in root.iter(NS + "text"):
        assert (
            0 <= float(text.get("x")) <= picture.width
            and 0 <= float(text.get("y")) <= picture.height
        )
        size = float(text.get("font-size", root.get("font-size")))
        assert size * min(1, PHONE / picture.width) >= 9, text.text
    assert len(str(picture)) < 50_000
    return root


def texts(root):
    return " ".join(t.text or "" for t in root.iter(NS + "text"))


@quick
@given(
    param_lists(),
    st.sampled_from([1, 2, 9, 16, 17, 1000]),
    st.sampled_from([even, greedy, balanced, mixed]),
)
def test_shards_are_drawn_for_any_plan(specs, world_size, policy):
    assert f"{world_size} ranks" in texts(well_formed(draw_shards(policy(specs, world_size))))


@quick
@given(param_lists(), st.sampled_from([1, 2, 9, 300]), st.sampled_from([even, greedy]))
def test_buckets_are_drawn_for_any_plan(specs, world_size, policy):
    plan = pack([p for p in specs if p.numel < 20_000], world_size, policy=policy)
    assert f"{len(plan.buckets)} buckets" in texts(well_formed(draw_buckets(plan)))


@quick
@given(param_lists(), st.sampled_from([1, 3, 64, 200]), st.sampled_from([1, 4, 100]))
def test_moves_are_drawn_for_any_two_plans(specs, before, after):
    found = moves(even(specs, before), greedy(specs, after))
    assert (
        well_formed(draw_moves(found, before, after)).get("aria-label")
        == f"{sum(m.numel for m in found)} elements move"
    )


@pytest.mark.parametrize("mode", METHODS)
def test_timelines_show_every_collective(mode):
    bars = play(make_schedule(3, mode), lambda e: 1.0)
    root = well_formed(draw_timeline(bars))
    tips = [t.text for t in root.iter(NS + "title")]
    assert all(
        any(tip.startswith(f"{c}:") for tip in tips) for c in make_schedule(3, mode).collectives
    )
    assert well_formed(draw_timeline(())) is not None


@pytest.mark.parametrize(
    ("start", "stop"), [(-1.0, 2.0), (2.0, 1.0), (0.0, float("nan")), (0.0, float("inf"))]
)
def test_a_timeline_does_not_run_backwards(start, stop):
    with pytest.raises(ValueError, match="0:RS must start at 0 s or later and stop after that"):
        draw_timeline([Bar(Event("backward", "RS", 0), start, stop)])


def trace(*events, **more):
    """Write a trace as torch.profiler does; an event is (category, name, thread or stream, start
    and duration in microseconds)."""
    timed = [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "tid": line,
            "ts": 1e6 + ts,
            "dur": dur,
            "args": {"stream": line},
        }
        for cat, name, line, ts, dur in events
    ]
    return json.dumps(
        {"traceEvents": [{"ph": "M", "name": "process_name"}, *timed, {"ph": "i", "ts": 5}], **more}
    )


def test_a_profile_of_a_gpu_has_a_line_for_each_stream_and_no_operators():
    found = read_trace(
        trace(
            ("cpu_op", "aten::mm", 1, 0, 90),
            ("kernel", "sm90_sgemm", 7, 20, 40),
            ("kernel", "void multi_tensor_apply_kernel<FusedAdam>", 20, 50, 10),
            ("kernel", "ncclDevKernel_ReduceScatter_Sum_f32", 24, 60, 30),
            ("gpu_memcpy", "Memcpy DtoD", 7, 70, 5),
            ("cuda_runtime", "x", 1, 0, 9),
        )
    )
    assert [(s.line, s.kind) for s in found] == [
        ("stream 7", "compute"),
        ("stream 7", "copy"),
        ("stream 20", "step"),
        ("stream 24", "collective"),
    ]
    assert [(round(s.start * 1e6), round(s.stop * 1e6)) for s in found] == [
        (0, 40),
        (50, 55),
        (30, 40),
        (40, 70),
    ]


def test_a_profile_of_a_cpu_has_a_line_for_each_thread_and_the_outer_operators():
    found = read_trace(
        trace(
            ("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 2, 0, 60),
            ("cpu_op", "aten::mm", 2, 10, 40),
            ("cpu_op", "aten::resolve_conj", 2, 12, 1),
            ("user_annotation", "Optimizer.step#AdamW.step", 2, 50, 20),
            ("cpu_op", "aten::_fused_adamw_", 2, 52, 10),
            ("cpu_op", "aten::linear", 1, 5, 4),
            ("cpu_op", "aten::addmm", 1, 6, 2),
        )
    )
    assert [(s.line, s.name, s.kind) for s in found] == [
        ("thread 1", "aten::linear", "compute"),
        ("thread 2", "aten::mm", "compute"),
        ("thread 2", "aten::_fused_adamw_", "step"),
    ]


def test_profiles_are_drawn():
    assert read_trace('{"traceEvents": []}') == [] and well_formed(draw_stretches([]))
    many = [Stretch("stream 7", "gemm<&>", i * 1e-6, i * 1e-6 + 5e-7) for i in range(5000)]
    svg = well_formed(draw_stretches([*many, Stretch("stream 20", "FusedAdam", 2e-3, 3e-3)]))
    bars = [r for r in svg.iter(NS + "rect") if r.find(NS + "title") is not None]
    assert (
        len(bars) == 2 and "5000 x gemm<&>" in bars[1].find(NS + "title").text
    )  # what lies closer than half a pixel is one
    assert float(bars[0].get("width")) == pytest.approx(float(bars[1].get("width")) / 5, rel=0.01)
    names = [
        t for t in svg.iter(NS + "text") if t.get("text-anchor") == "end" and float(t.get("y")) < 70
    ]
    assert [t.text for t in names] == ["stream 7", "stream 20"]
    assert all(float(t.get("x")) >= 6.2 * len(t.text) for t in names)  # as wide as a letter is


def test_bars_are_as_long_as_bytes():
    found = compare("gpt2-xl").estimates
    widths = {}
    for rect in well_formed(draw_estimates(found, memory=16e9)).iter(NS + "rect"):
        if (title := rect.find(NS + "title")) is not None:
            widths[title.text.rsplit(" ", 2)[0]] = float(rect.get("width"))
    assert widths["ddp: state"] == pytest.approx(2 * widths["ddp: parameters"], rel=1e-3)
    assert {name.split(": ")[1] for name in widths} <= set(KINDS)
    bold = [
        t.text
        for t in ET.fromstring(str(draw_estimates(found, memory=16e9))).iter(NS + "text")
        if t.get("font-weight") == "bold"
    ]
    assert bold == ["ddp: 23.2 GiB"]


def test_curves_go_from_left_to_right_and_labels_do_not_collide():
    curves = {s: [(n, estimate("gpt2", "adamw", n, s).total) for n in (1, 4, 16)] for s in PLANNED}
    root = well_formed(draw_ranks(curves, memory=1e9))
    assert len(list(root.iter(NS + "polyline"))) == len(PLANNED)
    ends = sorted(
        float(t.get("y"))
        for t in root.iter(NS + "text")
        if any((t.text or "").startswith(f"{s}: ") for s in PLANNED)
    )
    assert len(ends) == len(PLANNED) and all(b - a >= 11 for a, b in pairwise(ends))
    well_formed(draw_ranks({"one": [(8, 5.0)]}))


def test_names_cannot_break_a_picture():
    specs = [ParamSpec("<script>&\"'", (100,)), ParamSpec("b]]>", (100,))]
    root = well_formed(draw_buckets(pack(specs, 2)))
    assert any("<script>&\"'" in (t.text or "") for t in root.iter(NS + "title"))


def test_a_saved_picture_stands_alone(tmp_path):
    path = draw_shards(even(find_model("gpt2")[1], 4)).save(tmp_path / "plan.svg")
    text = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in text and ET.fromstring(text).tag == NS + "svg"
    assert "<style>" not in str(
        draw_shards(even(find_model("gpt2")[1], 4))
    )  # a style in a notebook would colour the whole page


def test_small_functions():
    assert (
        len({colour(i, 10) for i in range(10)}) == 10
        and len({colour(i, 64) for i in range(64)}) > 60
    )
    assert [short(n) for n in (0, 999, 1500, 2e6)] == ["0", "999", "1.5 k", "2 M"]


@pytest.mark.parametrize("method", PLANNED)
def test_every_setting_of_the_explorer_is_a_picture(method):
    for model in MODELS:
        well_formed(explore(model, "adamw", method, 64, dtype="bfloat16"))
    for optimizer in OPTIMIZERS:
        well_formed(explore("gpt2", optimizer, method, RANKS[-1], bucket_cap_mb=1))


def test_the_explorer_follows_its_controls():
    pytest.importorskip("ipywidgets")
    box = explorer()
    controls, picture = box.children[0].children, box.children[1]
    for control in controls:
        before, index = picture.value, control.index
        control.index = len(control.options) - 1 if index == 0 else 0
        assert picture.value != before, control.description
        control.index = index
        assert picture.value == before


def test_the_explorer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r"pip install 'zero_nb\[notebook\]'"):
        explorer()


def contrast(colours):
    """Compare the luminance of two colours such as `rgb(1, 2, 3)`; 4.5 is what WCAG asks of text."""

    def light(colour):
        parts = [int(n) / 255 for n in re.findall(r"\d+", colour)[:3]]
        return sum(
            w * (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4)
            for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    low, high = sorted(map(light, colours))
    return (high + 0.05) / (low + 0.05)


BACKGROUND = """element => {
    for (; element; element = element.parentElement) {
        const colour = getComputedStyle(element).backgroundColor
        if (!/, 0\\)$/.test(colour)) return colour
    }
    return "rgb(255, 255, 255)"
}"""


@needs_browser("opens a picture in a real browser")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_saved_picture_is_read_in_both_themes(tmp_path, theme):
    draw_estimates(compare("gpt2").estimates, "2GB").save(tmp_path / "plan.svg")
    with new_page(color_scheme=theme) as page:
        page.goto(f"file://{tmp_path}/plan.svg")
        text = page.locator("text").first
        ink, paper = text.evaluate("e => getComputedStyle(e).fill"), text.evaluate(BACKGROUND)
        assert contrast((ink, paper)) > 4.5 and (contrast((paper, "rgb(0, 0, 0)")) < 4.5) == (
            theme == "dark"
        )


def test_a_notebook_that_runs_as_a_script_draws_its_figures_as_it_would(tmp_path):
    script = (
        "from zero_nb.plan.draw import show_figures_as_svg\nshow_figures_as_svg()\nprint('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
