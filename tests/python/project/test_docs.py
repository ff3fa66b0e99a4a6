"""What the documents name is there: pages, headings, files, functions, variables, public names."""

import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pydist
from pydist import _native

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# Folders that documents name files of.
TREES = ("csrc/", "pydist/", "tests/", "bench/", "docs/", "examples/", "third_party/")

sys.path.insert(0, str(DOCS))

import test_layering  # noqa: E402
import write_variables  # noqa: E402


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    """Without the blocks of code, whose brackets are no links."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings, as the host of the sources makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`([\w./]+)`", page.read_text()):
        if name.startswith(TREES):
            assert (ROOT / name).exists(), name


def functions_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yields (function, file) for each that a row of a table, or `name` in `file`, places."""
    text = page.read_text()
    yield from re.findall(r"`(\w+)` in\s+`((?:csrc|pydist)/[\w./]+)`", text)
    for line in text.splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        if len(cells) >= 3 and cells[2] and all("/" in name for name in cells[2]):
            for function in cells[1]:
                files = [f for f in cells[2] if defines(f, function)]
                yield function, files[0] if files else cells[2][0]


def defines(file: str, name: str) -> bool:
    """Whether the file holds the function or class itself, not a mere call."""
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        return re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE) is not None
    head = rf"^\s*(?!return\b)((struct|class) {name}\b|[\w:<>,*& \[\]]*[\w>*&\]] [\w:]*\b{name}\()"
    return re.search(head, text, re.MULTILINE) is not None


LIFE = DOCS / "life-of-a-gradient.md"


def test_the_life_of_a_gradient_names_functions_that_are_there() -> None:
    placed = dict(functions_of(LIFE))
    assert {"arriving", "land", "note_complete", "launch", "close_round", "settle"} <= set(placed)
    assert [(name, file) for name, file in placed.items() if not defines(file, name)] == []


def test_the_picture_names_the_functions_of_its_page() -> None:
    svg = (DOCS / "pictures" / "life-of-a-gradient.svg").read_text()
    code = html.unescape(" ".join(re.findall(r'<text class="code"[^>]*>([^<]+)<', svg)))
    names = set(re.findall(r"\b[a-z]\w*(?= |,|$)", code))
    # Operations, and torch's and the hook's own functions.
    foreign = {"all_reduce", "reduce_scatter", "step", "start"}
    assert len(names) > 25
    assert {name for name in names - foreign if f"`{name}`" not in LIFE.read_text()} == set()


def test_the_glossary_is_in_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), flags=re.MULTILINE)
    words = rows[1:]
    assert len(words) > 40
    assert words == sorted(words, key=str.lower)


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
    site = (DOCS / "index.rst").read_text().split()
    assert {page for page in pages if page.removesuffix(".md") not in site} == set()


@pytest.mark.parametrize(
    ("folder", "layers"),
    [("csrc", test_layering.CPP_LAYERS), ("pydist", test_layering.PYTHON_LAYERS)],
    ids=["csrc", "pydist"],
)
def test_the_readme_lists_the_layers_in_their_order(folder: str, layers: tuple[str, ...]) -> None:
    section = (ROOT / "README.md").read_text().split("\n## Where things are\n")[1]
    table = section.split(f"\n`{folder}/`, low to high")[1].split("\n\n")[1]
    rows = re.findall(r"^\| (`[^|]+) \|", table, flags=re.MULTILINE)
    listed = [name.removesuffix(".py") for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert listed == [layer for layer in layers if layer in listed]
    folders = {path.name for path in (ROOT / folder).glob("[!_]*/")}
    assert folders - set(listed) == set()


def test_the_reference_holds_every_public_name() -> None:
    reference = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.rst"))
    modules = {"backends", "checkpoint", "metrics", "nn", "testing", "__version__"}
    documented = re.findall(
        r"^\.\. auto(?:function|class|exception):: (?:pydist\.)?(\w+)$", reference, re.M
    )
    assert set(pydist.__all__) - modules - set(documented) == set()


def test_the_table_of_variables_is_what_the_engine_declares() -> None:
    page = write_variables.PAGE.read_text()
    assert page == write_variables.written(page), "run make stubs"


def test_every_variable_that_is_read_is_declared() -> None:
    declared = {name for name, *_ in _native.environment_variables()}
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cc", ".h"}]
    read: set[str] = set()
    for path in [*sources, *(ROOT / "pydist").rglob("*.py")]:
        read |= set(re.findall(r'["\'](PYDIST_[A-Z_]+)["\'=]', path.read_text()))
    assert read - declared == set()
    assert declared <= read
