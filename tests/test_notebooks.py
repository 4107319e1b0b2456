"""Every notebook runs without a warning, shows a picture, and shows the texts that are stored in it."""

import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from test_packaging import ROOT

pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = {"05_torch_and_jax": ("torch", "jax")}
RUN = ROOT / "docs" / "run_notebooks.py"


@pytest.fixture
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("run_notebooks", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_what_is_stored_in_it(path: Any) -> None:
    for name in NEEDS.get(path.stem, ()):
        pytest.importorskip(name)
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, str(RUN), "--check", str(path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


def test_there_are_six_and_each_leads_to_the_next() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]
    for path, following in pairwise(NOTEBOOKS):
        assert f"]({following.name})" in path.read_text(encoding="utf-8")


def notebook(*outputs: dict[str, Any]) -> Any:
    return SimpleNamespace(cells=[{"outputs": []}, {"outputs": list(outputs)}])


PICTURE = {"output_type": "display_data", "data": {"image/png": "", "text/plain": "<Figure>"}}


def test_a_warning_and_a_missing_picture_are_complaints(tool: Any) -> None:
    assert list(tool.complaints(notebook(PICTURE))) == []
    warning = {"output_type": "stream", "name": "stderr", "text": "UserWarning: odd\n"}
    assert list(tool.complaints(notebook(warning, PICTURE))) == ["cell 1 warns: UserWarning: odd"]
    assert list(tool.complaints(notebook())) == ["it shows no picture"]


def test_texts_are_compared_and_pictures_are_not(tool: Any) -> None:
    card = {"output_type": "execute_result", "data": {"text/html": '<img src="data:image/png;base64,AAAA">2',
                                                      "text/plain": "part"}}
    printed = {"output_type": "stream", "name": "stdout", "text": "3.7 dB"}
    expected = [(1, '<img src="">2'), (1, "part"), (1, "3.7 dB"), (1, "<Figure>")]
    assert tool.texts(notebook(card, printed, PICTURE)) == expected


def test_a_stale_notebook_is_found_and_rewritten(tool: Any, tmp_path: Any, capsys: Any) -> None:
    import nbformat

    path = tmp_path / "stale.ipynb"
    source = "import matplotlib.pyplot as plt\nprint(1 + 1)\nplt.plot([1, 2]);"
    cell = nbformat.v4.new_code_cell(source, outputs=[nbformat.v4.new_output("stream", name="stdout", text="3\n")])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    assert run(path, "--check") == 1
    assert run(path) == 0
    (first, _) = nbformat.read(path, as_version=4).cells[0].outputs
    assert first["text"] == "2\n"


def run(path: Any, *options: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    command = [sys.executable, str(RUN), *options, str(path)]
    return subprocess.run(command, env=environment, capture_output=True).returncode
