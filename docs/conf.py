"""Sphinx: the documents, the notebooks with their stored outputs, and the docstrings.

    sphinx-build -W -c docs . build/docs

The folder of the sources is the root, so that the links between README.md, docs/ and notebooks/ lead somewhere both
here and where the repository is browsed. Notebooks are not run: docs/run_notebooks.py does that, and a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import hqarray

project = "hqarray"
version = release = hqarray.__version__
author = copyright = "the hqarray authors"

extensions = ["sphinx.ext.autodoc", "myst_nb"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "notebooks/*.ipynb", "hqarray/data/README.md"]
exclude_patterns = [".*", "build", "dist", "tests", "rawkernels", "interop", "**.egg-info"]

html_theme = "furo"
html_title = f"hqarray {version}"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]
html_copy_source = False

nb_execution_mode = "off"
myst_heading_anchors = 4

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

FIELD = re.compile(r"(?P<name>\S+(?:, \S+)*) {2,}(?P<text>\S.*)")
"""A line of a docstring that names a parameter, a result or an attribute: "x  (..., k) float array"."""


def as_restructured(lines: list[str]) -> Iterator[str]:
    """A docstring as reStructuredText: fields as a definition list, what is indented as it is, the rest as text."""
    for is_blank, block in groupby(lines, lambda line: not line.strip()):
        if is_blank:
            yield ""
            continue
        paragraph = list(block)
        if all(line.startswith("    ") for line in paragraph):
            yield from ("::", "", *paragraph)
            continue
        inside = False
        for line in paragraph:
            field = FIELD.fullmatch(line) if not line.startswith(" ") else None
            if field:
                yield from (*(() if inside else ("",)), f"``{field['name']}``", f"    {as_text(field['text'])}")
                inside = True
            elif line.startswith(" "):
                yield f"    {as_text(line.strip())}" if inside else as_text(line.strip())
            else:
                yield from ("", as_text(line)) if inside else (as_text(line),)
                inside = False


def as_text(line: str) -> str:
    """A line without marks of its own: what stands between backquotes becomes code, all else what it says."""
    code_and_text = line.split("`")
    if len(code_and_text) % 2 == 0:
        return re.sub(r"([\\*`|_])", r"\\\1", line)
    return "".join(
        f"``{piece}``" if i % 2 else re.sub(r"([\\*|_])", r"\\\1", piece) for i, piece in enumerate(code_and_text)
    )


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = list(as_restructured(list(lines)))


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", process_docstring)
