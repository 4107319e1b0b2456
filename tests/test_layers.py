"""Who imports whom: the layers of the package, and what `import hqarray` loads."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_packaging import LINKED, PYPROJECT, ROOT

BANNED = PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"]
EXEMPT = [path for path, rules in PYPROJECT["tool"]["ruff"]["lint"]["per-file-ignores"].items() if "TID253" in rules]
SOURCES = sorted(
    path
    for folder in ("hqarray", *LINKED)
    for path in (ROOT / folder).rglob("*.py")
    if not any(part in LINKED for part in path.relative_to(ROOT).parts[1:])
)


def run(code: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )


LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def test_layers_hold() -> None:
    result = run(LINT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_contract_names_the_edges_that_go_up() -> None:
    (contract,) = PYPROJECT["tool"]["importlinter"]["contracts"]
    assert contract["ignore_imports"] == [
        "hqarray.arrays -> hqarray.ops", "hqarray.grouped -> hqarray.grouped_ops", "hqarray.ops -> hqarray.grouped_ops"
    ]
    assert contract["exhaustive"]


@pytest.mark.parametrize(
    ("module", "line"),
    [("formats", "from . import layout"), ("ops", "from . import explore"), ("explore", "from . import interop"),
     ("gemm", "from .ops import matmul"), ("recipes", "from .layout import Array")],
)
def test_layers_catch_an_import_that_goes_up(module: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hqarray", tmp_path / "hqarray", ignore=shutil.ignore_patterns("__pycache__", "data"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "hqarray" / f"{module}.py"
    source.write_text(source.read_text() + f"\n{line}\n")
    result = run(LINT, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"hqarray.{module} -> " in result.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_imports_a_framework_when_it_is_loaded(path: Path) -> None:
    """The rule that ruff's banned-module-level-imports states, checked without ruff, with ruff's exceptions."""
    source = path.read_text()
    lines = source.splitlines()
    if path.relative_to(ROOT).as_posix() in EXEMPT:
        return
    for node in ast.parse(source).body:  # TYPE_CHECKING blocks are not at this level
        if "noqa: TID253" in lines[node.lineno - 1]:
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        loaded = {name.partition(".")[0] for name in names} & set(BANNED)
        assert not loaded, f"{path.name}:{node.lineno} imports {loaded} at module level"


def loaded_by(code: str) -> set[str]:
    """Top-level modules in sys.modules, the standard library's left out."""
    result = run(f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})")
    assert result.returncode == 0, result.stderr
    return {name for name in result.stdout.split() if name not in sys.stdlib_module_names}


def test_import_hqarray_loads_numpy_and_ml_dtypes_only() -> None:
    extra = loaded_by("import hqarray") - loaded_by("import numpy, ml_dtypes")
    assert extra == {"hqarray"}


def test_quantizing_multiplying_and_comparing_load_nothing_more() -> None:
    code = """
import numpy as np, hqarray as hq
x = np.ones((4, 32), np.float32)
hx = hq.quantize(x, rowwise="mxfp8", columnwise="nvfp4")
hx @ hx.T, hx.dequantize(), repr(hx), hx._repr_html_()
hq.compare(x, ["mxfp8"]).to_dict(), hq.compare(x, "nvfp4")._repr_html_()
"""
    assert loaded_by(code) - loaded_by("import numpy, ml_dtypes") == {"hqarray"}
