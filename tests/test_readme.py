"""The README: every generated part is what its command makes, the two commands are CI's; blocks: test_documents.py."""

import re
import sys
from pathlib import Path

import pytest
from test_packaging import ROOT

import hqarray as hq

sys.path.insert(0, str(ROOT / "docs"))
try:
    import update_readme
finally:
    sys.path.pop(0)

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
PARTS = [match["what"] for match in update_readme.PART.finditer(README)]


@pytest.mark.parametrize("what", PARTS)
def test_generated_part_is_up_to_date(what: str) -> None:
    (part,) = (match[0] for match in update_readme.PART.finditer(README) if match["what"] == what)
    assert part == update_readme.updated(part), "run python docs/update_readme.py"


def test_tables_name_every_format_and_recipe() -> None:
    assert {"formats", "recipes", "python -m hqarray report", "docs/training.json"} == set(PARTS)
    for name in (*hq.FORMATS, *hq.RECIPES):
        assert f"\n| `{name}` |" in README


@pytest.mark.parametrize(
    "command", ["pip install . && python -m hqarray report", 'pip install -e ".[test]" && pytest']
)
def test_the_two_commands_are_the_ones_that_ci_runs(command: str) -> None:
    assert (("sh", f"{command}\n")) in BLOCKS
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert command in lines


@pytest.mark.parametrize("document", ["README.md", "CHANGELOG.md", "docs/decisions.md", "hqarray/data/README.md"])
def test_files_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / document).parent.joinpath(target).exists(), target
    for name in re.findall(r"`((?:hqarray|docs|tests|rawkernels|interop|\.ci)/[\w./]*)`", text):
        assert (ROOT / name).exists(), name
    assert "/work/" not in text


def test_wrong_table_would_be_noticed() -> None:
    stale = "<!-- generated: formats -->\n| `fp9` |\n<!-- end -->"
    assert update_readme.updated(stale) != stale
    assert Path(update_readme.README) == ROOT / "README.md"
