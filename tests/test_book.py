"""The book around its chapters: order, navigation, glossary."""

import json
import re
from collections import Counter
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
NBS = ROOT / "nbs"
MOST_CELLS = 40
MOST_LINES = 400  # of code: neither blank nor a comment, in exported and other cells


def chapters() -> list[str]:
    """Give the notebooks by their paths below `nbs`."""
    found = (p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    return sorted(str(p.relative_to(NBS)) for p in found)


def prose(chapter: str) -> list[str]:
    """Give the markdown cells of a notebook."""
    cells = json.loads((NBS / chapter).read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]


def pages(entry: str | dict) -> list[str]:
    """Give the pages of an entry of the sidebar, in its order."""
    if isinstance(entry, str):
        return [entry]
    return [page for inner in entry["contents"] for page in pages(inner)]


def sidebar() -> list[str]:
    text = (NBS / "sidebar.yml").read_text(encoding="utf-8")
    return pages(yaml.safe_load(text)["website"]["sidebar"])


def test_the_sidebar_is_in_reading_order_and_lists_each_notebook_once():
    listed = sidebar()
    assert sorted(listed) == sorted([*chapters(), "reference.md"])
    rooms = list(dict.fromkeys(Path(page).parent.name for page in listed))
    first = ["", "start", "guides", "comm", "plan", "optim", "backward", "join", "checkpoint"]
    assert rooms[: len(first)] == first
    body = listed[: listed.index("differences.ipynb")]  # what follows is the appendix
    for room in first[1:]:
        numbered = [page for page in body if page.startswith(f"{room}/")]
        assert numbered == sorted(numbered), room


def test_each_chapter_of_a_room_has_a_number_of_its_own():
    numbers = Counter(chapter.partition("_")[0] for chapter in chapters() if "/" in chapter)
    assert [number for number, count in numbers.items() if count > 1] == []


def test_the_index_lists_the_pages_in_the_order_of_the_sidebar():
    text = "\n".join(prose("index.ipynb"))
    rows = re.findall(r"^\| \[([\w/]+)\]\(\1\.ipynb\) \|", text, re.M)
    listed = [page for page in sidebar() if page != "reference.md"]  # which is no notebook
    assert ["index.ipynb", *(f"{row}.ipynb" for row in rows)] == listed


def test_the_navigation_bar_leads_to_pages():
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    entries = site["navbar"]["left"]
    known = {*chapters(), "reference.md"}
    assert entries and all(entry["text"] and entry["href"] in known for entry in entries)


def test_each_page_leads_to_its_notebook():
    """Quarto puts the address together from the repository's, `repo-subdir` and the page's path."""
    site = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]
    assert {"edit", "source", "issue"} == set(site["repo-actions"])
    assert ROOT / site["repo-subdir"] == NBS
    assert "`make lab`" in site["page-footer"]["center"]
    assert re.search(
        r"^lab:.*\n(\t.*\n)*\t.*jupyter lab nbs$", (ROOT / "Makefile").read_text(), re.M
    )


def glossary() -> list[str]:
    """Give the anchors of the words, in their order."""
    (table,) = (cell for cell in prose("start/00_why.ipynb") if 'id="glossary"' in cell)
    rows = table[table.index('id="glossary"') :]
    return re.findall(r'^\| <a id="([\w-]+)"></a>\*\*', rows, re.M)


def test_chapters_link_words_of_the_glossary_once():
    words = glossary()
    assert len(words) == len(set(words)) == 20
    places = {*words, "glossary", "allreduce", "decide", "map"}
    linked = set()
    for chapter in chapters():
        found = re.findall(r"\]\([./\w]*00_why\.ipynb#([\w-]+)\)", "\n".join(prose(chapter)))
        assert set(found) <= places, chapter
        assert len(found) == len(set(found)), (chapter, sorted(found))
        linked |= set(found)
    assert {"rank", "bucket", "shard", "all-gather", "reduce-scatter"} <= linked


# How the words are written; the adverb "even" is told from the other only where it is in italics.
WRITTEN = {word: word.replace("-", " ") for word in ("world-size", "process-group", "group-rank")}
WRITTEN |= {
    word: f"{word.replace('-', ' ')}s?" for word in ("full-state-dict", "sharded-state-dict")
}
WRITTEN |= {word: f"{word}s?" for word in ("rank", "span", "shard", "plan", "bucket", "broadcast")}
WRITTEN |= {word: f"{word}s?" for word in ("all-reduce", "reduce-scatter", "all-gather")}
WRITTEN |= {
    "param-group": "param(?:eter)? groups?",
    "optimizer-state": "optimizer state(?! dict)",
    "master-copy": "master cop(?:y|ies)",
    "activations": "activations",
    "even": r"\*even\*",
    "reshard": "reshard",
}
LONGEST_FIRST = sorted(WRITTEN.items(), key=lambda item: -len(item[1]))
NAMED = "|".join(f"(?P<{word.replace('-', '_')}>{text})" for word, text in LONGEST_FIRST)
WORD = re.compile(rf"(?<![\w*/.-])(?:{NAMED})(?![\w/(-])", re.I)
LINK = re.compile(r"\[[^\]]*\]\([./\w]*00_why\.ipynb#([\w-]+)\)")
# Code, links, tags, titles and the heads of tables hold no link of their own.
CLOSED = re.compile(
    r"(?s:```.*?```)|`+[^`\n]*`+|!?\[[^\]]*\]\([^)]*\)|<[^>\n]+>|^[#>].*$|https?://\S+"
    r"|^\|.*\|\n\|[-:| ]+\|$",
    re.M,
)


def written_before_linked(text: str) -> list[str]:
    """Give the words of the glossary that a text writes before it links them, or without a link."""
    linked = {m[1]: m.start() for m in LINK.finditer(text)}
    closed = [m.span() for m in CLOSED.finditer(text)]
    found = []
    for m in WORD.finditer(text):
        word = str(m.lastgroup).replace("_", "-")
        if not any(start < m.end() and m.start() < stop for start, stop in closed) and (
            m.start() < linked.get(word, len(text))
        ):
            found.append(word)
    return sorted(set(found))


def test_words_are_found_where_they_are_written():
    assert set(WRITTEN) == set(glossary())
    link = "[rank](../start/00_why.ipynb#rank)"
    assert written_before_linked(f"Each {link} owns what a rank needs.") == []
    assert written_before_linked(f"A rank is a {link}; `plan`, per-rank.\n## Plans") == ["rank"]
    assert written_before_linked("The full state dict of a group rank") == [
        "full-state-dict",
        "group-rank",
    ]


def test_a_word_of_the_glossary_is_linked_where_a_page_first_writes_it():
    wanted = [chapter for chapter in chapters() if chapter != "start/00_why.ipynb"]  # has them
    found = {chapter: written_before_linked("\n\n".join(prose(chapter))) for chapter in wanted}
    assert len(wanted) > 90 and {name: words for name, words in found.items() if words} == {}


def test_each_chapter_names_the_line_by_hand_that_it_replaces():
    cells = json.loads((NBS / "start/01_by_hand.ipynb").read_text(encoding="utf-8"))["cells"]
    typed = "\n".join("".join(c["source"]) for c in cells if c["source"][0] == "# by_hand.py\n")
    listed = sidebar()
    built = listed[listed.index("comm/01_ranks.ipynb") : listed.index("apps/12_ratios.ipynb")]
    assert len(built) > 35
    for chapter in built:
        first = prose(chapter)[0]
        found = re.findall(r"replaces the line `([^`]+)` of \[ZeRO by hand\]\(\.\./start/01", first)
        assert len(found) == 1 and found[0] in typed, (chapter, found)


REPLACING = ("comm", "plan", "optim", "backward", "join", "checkpoint", "verify")
DRAWING = ("plan/23_draw", "plan/24_timelines", "plan/25_charts", "plan/26_player")


def test_the_page_says_which_chapters_replace_a_line():
    """Only a page that says it in its first lines, and each of those that are said to."""
    line = re.compile(r"replaces the line `[^`]+` of \[ZeRO by hand\]\(\.\./start/01")
    replacing = {c for c in chapters() if line.search(prose(c)[0])}
    drawing = {f"{name}.ipynb" for name in DRAWING}
    assert replacing == {c for c in chapters() if c.split("/")[0] in REPLACING} - drawing
    said = "\n".join(prose("start/01_by_hand.ipynb")).split("## Which chapter replaces which line")
    about = said[1].partition("| line of")[0]
    assert re.findall(r"`(\w+)`", about) == [*REPLACING, "apps"]
    assert re.findall(r"\]\(\.\./(plan/\w+)\.ipynb\)", about) == [DRAWING[0], DRAWING[-1]]


def size(chapter: str) -> tuple[int, int]:
    """Count the cells and the lines of code of a notebook."""
    cells = json.loads((NBS / chapter).read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    lines = [line for line in map(str.strip, code.splitlines()) if line and line[0] != "#"]
    return len(cells), len(lines)


def test_a_chapter_is_short_enough_to_read_at_once():
    sizes = {chapter: size(chapter) for chapter in chapters()}
    longer = {c: n for c, n in sizes.items() if n[0] > MOST_CELLS or n[1] > MOST_LINES}
    assert not longer, f"split these (cells, lines of code), at most {MOST_CELLS} and {MOST_LINES}"


def test_links_to_code_do_not_move():
    """A branch moves on, and what a sentence says of its code is then not there any more."""
    moving = re.compile(
        r"https://github\.com/(?!zero-nb/)[\w.-]+/[\w.-]+/(?:blob|tree)/(?:main|master)/"
    )
    assert [(c, m[0]) for c in chapters() for t in prose(c) for m in moving.finditer(t)] == []
