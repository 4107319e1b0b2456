"""Documents: every block is executed, or is the output of a command; every public name has its place in the API."""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_packaging import PYPROJECT, ROOT
from test_readme import update_readme

import hqarray as hq
from hqarray.__main__ import main

DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
             for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCK = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.M | re.S)
OPTIONAL = ("torch", "jax", "matplotlib")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(text) if name == language]


def lacks(body: str) -> str | None:
    """What a Python block needs and is not installed."""
    plots = "matplotlib" if "plot_" in body else ""
    needed = [name for name in OPTIONAL if f"import {name}" in body or name == plots]
    return next((name for name in needed if importlib.util.find_spec(name) is None), None)


# --- Python -------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [name for name, text in DOCUMENTS.items() if blocks(text, "python")])
def test_every_python_block_runs_and_prints_what_its_comments_say(
    document: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the file, in one session, as a reader would type them."""
    if importlib.util.find_spec("matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
    session: dict[str, object] = {}
    for number, text in enumerate(blocks(DOCUMENTS[document], "python")):
        if lacks(text) is not None:
            continue
        exec(compile(text, f"{document}, python block {number}", "exec"), session)
        printed = capsys.readouterr().out
        for comment in re.findall(r"^print\(.*\) +# (.*)$", text, re.M):
            assert comment.removesuffix(" ...") in printed
    if "matplotlib" in sys.modules:
        from matplotlib import pyplot

        pyplot.close("all")


# --- shell --------------------------------------------------------------------------------------


def convert(line: str, folder: Path) -> None:
    from hqarray.interop import safetensors

    weights = {"a.mlp.w": np.ones((32, 64), np.float32), "b": np.ones((32, 64), np.float32)}
    safetensors.save(folder / "IN.safetensors", weights)
    arguments = shlex.split(line)[3:]
    assert main([a if not a.endswith(".safetensors") else str(folder / a) for a in arguments]) == 0
    assert (folder / "OUT.safetensors").exists()


def report(line: str, folder: Path) -> None:
    np.save(folder / "x.npy", np.ones((32, 64), np.float32))
    arguments = shlex.split(line.replace("FILE ...", str(folder / "x.npy")).replace("report.html", f"{folder}/r.html"))
    assert main(arguments[3:]) == 0
    assert (folder / "r.html").read_text().startswith("<!DOCTYPE html>")


def train(line: str, folder: Path) -> None:
    assert main([*shlex.split(line)[3:], "--size", "tiny", "--steps", "2"]) == 0


def kernels(line: str, folder: Path) -> None:
    """One kernel of those that the command takes: all of them are compiled by .ci/run."""
    from test_rawkernels_loader import has_compiler

    from hqarray.rawkernels import __main__ as command

    if not has_compiler():
        return
    with pytest.MonkeyPatch.context() as patch:
        every = command.specialisations
        patch.setattr(command, "specialisations", lambda **options: [k for k in every(**options) if k.main][:1])
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(sys, "argv", shlex.split(line, comments=True)[2:])
        assert command.main() == 0


def install(line: str, folder: Path) -> None:
    """The extras exist, and .ci/run installs them; those of a GPU exist."""
    for extra in re.findall(r"\[([\w,]+)\]", line)[0].split(",") if "[" in line else ():
        assert extra in PYPROJECT["project"]["optional-dependencies"]
        assert extra.startswith("cuda") or re.search(rf"pip install .*\[([\w,]+,)?{extra}[\],]", CI), extra


def in_ci(line: str, folder: Path) -> None:
    assert line in [command.strip() for command in CI.splitlines()]


def on_a_gpu(line: str, folder: Path) -> None:
    """Not run here: what it names is there."""
    for name in re.findall(r"tests/[\w/]+\.py", line):
        assert (ROOT / name).exists()


def built(line: str, folder: Path) -> None:
    assert re.sub(r" \S+$", "", line) in CI  # to another folder


def jupyter(line: str, folder: Path) -> None:
    assert (ROOT / shlex.split(line)[-1]).is_dir()
    if importlib.util.find_spec("jupyterlab"):
        subprocess.run([sys.executable, "-m", "jupyter", "lab", "--version"], check=True, capture_output=True)


SHELL: list[tuple[str, Callable[[str, Path], None]]] = [
    (r"pip install \. && python -m hqarray report|pip install -e .*&& pytest", in_ci),
    (r"pip install .*", install),
    (r"python -m hqarray convert .*", convert),
    (r"python -m hqarray report .*", report),
    (r"python -m hqarray train", train),
    (r"python -m hqarray\.rawkernels.*", kernels),
    (r"pytest -m gpu|compute-sanitizer .*|python tests/benchmarks/.*", on_a_gpu),
    (r"sphinx-build .*", built),
    (r"jupyter lab .*", jupyter),
]
LINES = [(name, line) for name, text in DOCUMENTS.items() for body in blocks(text, "sh") for line in body.splitlines()]


@pytest.mark.parametrize(("document", "line"), LINES, ids=[line[:60] for _, line in LINES])
def test_every_shell_line_works(document: str, line: str, tmp_path: Path, capsys: Any) -> None:
    check = next((check for pattern, check in SHELL if re.fullmatch(pattern, line)), None)
    assert check is not None, f"{document}: nothing executes {line!r}; add how to SHELL"
    check(line, tmp_path)


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_block_is_left_out(document: str) -> None:
    """Python and sh are executed above; text is what a command prints, in a generated part."""
    text = update_readme.PART.sub("", DOCUMENTS[document])
    assert {name for name, _ in BLOCK.findall(text)} <= {"python", "sh", "{toctree}", "{eval-rst}"}
    assert text.count("```") == 2 * len(BLOCK.findall(text))


def test_every_public_name_is_in_the_api() -> None:
    text = DOCUMENTS["docs/api.md"]
    for name in hq.__all__:
        assert re.search(rf"(auto(class|function):: |`)hqarray\.{name}\b", text), name


def test_every_document_and_notebook_is_in_the_index() -> None:
    tree = "\n".join(blocks(DOCUMENTS["docs/index.md"], "{toctree}"))
    for name in DOCUMENTS:
        stem = name.removeprefix("docs/").removesuffix(".md")
        assert stem == "index" or re.search(rf"^(\.\./)?{stem}$", tree, re.M), name
    assert "../notebooks/*" in tree


def conf() -> Any:
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_become_definition_lists() -> None:
    text = "Draw `a * b` of x_.\n\nx, y   (..., k) *float*\n       array\nax     axes\nMore text.\n\n    code"
    assert list(conf().as_restructured(text.splitlines())) == [
        r"Draw ``a * b`` of x\_.", "", "", "``x, y``", r"    (..., k) \*float\*", "    array", "``ax``", "    axes", "",
        "More text.", "", "::", "", "    code",
    ]
