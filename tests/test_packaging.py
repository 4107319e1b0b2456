"""What is built is what is in the tree: packages, symlinks, wheel and sdist."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import hqarray

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("rawkernels", "interop")


def python(*arguments: str, cwd: Path, **env: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean clone; a copy where this is not a git checkout."""
    folder = tmp_path_factory.mktemp("source") / "hqarray"
    if (ROOT / ".git").exists() and shutil.which("git"):
        cloned = subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], capture_output=True, text=True)
        if cloned.returncode == 0:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    hidden = shutil.ignore_patterns(".git", ".ci", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".venv*")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=hidden)
    return folder


def build(kind: str, tree: Path, out: Path) -> Path:
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
    python("-W", "ignore", "-c", code, str(out), cwd=tree)
    (built,) = out.iterdir()
    return built


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


def shipped(tree: Path) -> Iterator[tuple[str, str]]:
    """(path in the tree, path in the wheel) of everything that must be installed."""
    for folder, target in (("hqarray", "hqarray"), *((name, f"hqarray/{name}") for name in LINKED)):
        for path in (tree / folder).rglob("*"):
            inside = path.relative_to(tree / folder).as_posix()
            if folder == "hqarray" and inside.split("/")[0] in LINKED:
                continue
            wanted = path.suffix in (".py", ".cu", ".cuh") or path.name == "py.typed" or inside.startswith("data/")
            if wanted and path.is_file() and "__pycache__" not in path.parts:
                yield f"{folder}/{inside}", f"{target}/{inside}"


@pytest.mark.parametrize("name", LINKED)
def test_package_inside_hqarray_is_a_relative_link_to_the_folder(name: str) -> None:
    link = ROOT / "hqarray" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name / "__init__.py").is_file()


def test_package_list_names_every_folder_with_modules() -> None:
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    folders = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert set(folders) >= {"hqarray", *(f"hqarray.{name}" for name in LINKED)}
    found = set()
    for package, folder in (("hqarray", "hqarray"), *((f"hqarray.{name}", name) for name in LINKED)):
        for module in (ROOT / folder).rglob("*.py"):
            inside = module.parent.relative_to(ROOT / folder).parts
            if not (folder == "hqarray" and inside and inside[0] in LINKED):
                found.add(".".join((package, *inside)))
    assert sorted(listed) == sorted(found)


def test_version_is_the_same_everywhere() -> None:
    assert PYPROJECT["project"]["version"] == hqarray.__version__
    released = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released
    assert released[1] == hqarray.__version__


def test_wheel_holds_every_module_and_data_file_and_nothing_else(tree: Path, wheel: Path) -> None:
    expected = {target for _, target in shipped(tree)}
    assert "hqarray/data/linear_layers.npz" in expected
    assert wheel_names(wheel) == expected
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_sdist_holds_every_source_and_builds_the_same_wheel(
    tree: Path, wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    tests = {path.relative_to(tree).as_posix() for path in (tree / "tests").rglob("*.py")}
    wanted = {source for source, _ in shipped(tree)} | tests
    assert wanted | {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names
    (unpacked,) = tmp_path.iterdir()
    assert wheel_names(build("wheel", unpacked, tmp_path / "wheel")) == wheel_names(wheel)


def test_building_a_wheel_warns_of_nothing(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree", symlinks=True, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "tree")
    code = "from setuptools import build_meta as b; b.build_wheel('out')"
    run = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], cwd=tmp_path / "tree", capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr and "absent from" not in run.stderr, run.stderr


def test_wheel_runs_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = str(tmp_path / "site")
    code = "import hqarray, hqarray.rawkernels, hqarray.interop; print(hqarray.__file__, hqarray.rawkernels.__file__)"
    files = python("-c", code, cwd=tmp_path, PYTHONPATH=site).split()
    assert all(file.startswith(site) for file in files)
    assert python("-m", "hqarray", "--version", cwd=tmp_path, PYTHONPATH=site) == f"hqarray {hqarray.__version__}"


def test_nothing_in_the_project_points_to_a_folder_outside_it() -> None:
    for path in (ROOT / "hqarray").rglob("*"):
        if path.is_symlink():
            assert path.resolve().is_relative_to(ROOT.resolve())
