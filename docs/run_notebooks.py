"""Run the notebooks and store what they show in them.

    python docs/run_notebooks.py [NOTEBOOK ...]          rewrites their outputs
    python docs/run_notebooks.py --check [NOTEBOOK ...]  exit code 1 where a text is out of date

A notebook that warns, or shows no picture, is an error. Pictures are not compared: their bytes are matplotlib's.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image
from traitlets.config import Config

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

TIMEOUT = 120
"""Seconds that a cell may take."""

COLORS = 64
"""Of a stored picture: enough for lines, text and a heat map."""

IMAGE_DATA = re.compile(r"data:image/png;base64,[^\"]*")


def run(path: Path) -> Any:
    """The notebook with the outputs of a fresh kernel of this Python."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    with TemporaryDirectory() as folder:  # of its sockets: over TCP the kernel warns that others can listen
        config = Config(KernelManager=Config(transport="ipc", ip=f"{folder}/kernel"))
        NotebookClient(
            notebook, config=config, timeout=TIMEOUT, record_timing=False, coalesce_streams=True, resources=resources
        ).execute()
    for _, output in outputs(notebook):
        if "image/png" in output.get("data", {}):
            output["data"]["image/png"] = smaller(output["data"]["image/png"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},  # the rest is the version of the Python that ran it
    }
    return notebook


def smaller(picture: str) -> str:
    """A PNG in base64 with at most COLORS colours: a third of the bytes."""
    image = Image.open(BytesIO(base64.b64decode(picture))).convert("RGB")
    file = BytesIO()
    image.quantize(COLORS).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")


def outputs(notebook: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            yield number, output


def texts(notebook: Any) -> list[tuple[int, str]]:
    """Everything shown as text or HTML, with the number of its cell; images in HTML left out."""
    shown = []
    for number, output in outputs(notebook):
        if output["output_type"] == "stream":
            shown.append((number, output["text"]))
        for kind, text in sorted(output.get("data", {}).items()):
            if kind.startswith("text/"):
                shown.append((number, IMAGE_DATA.sub("", text)))
    return shown


def complaints(notebook: Any) -> Iterator[str]:
    """What is wrong with a notebook that ran without an error."""
    for number, output in outputs(notebook):
        if output.get("name") == "stderr":
            yield f"cell {number} warns: {output['text'].strip()}"
    if not any("image/png" in output.get("data", {}) for _, output in outputs(notebook)):
        yield "it shows no picture"


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    paths = [Path(a) for a in arguments if a != "--check"] or sorted(NOTEBOOKS.glob("*.ipynb"))
    status = 0
    for path in paths:
        stored = texts(nbformat.read(path, as_version=4))
        notebook = run(path)
        found = list(complaints(notebook))
        shown = texts(notebook)
        if check and shown != stored:
            new = next((a for a, b in zip(shown, stored, strict=False) if a != b), "another number of outputs")
            found.append(f"out of date, run python docs/run_notebooks.py; it shows now: {new}")
        for complaint in found:
            print(f"{path.name}: {complaint}", file=sys.stderr)
        status |= bool(found)
        if not check:
            text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
            path.write_text(text + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
