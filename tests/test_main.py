"""The command line: what it prints, and one line and exit code 2 for what it cannot do."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import hqarray as hq
from hqarray import __main__ as command
from hqarray import info
from hqarray.__main__ import main
from hqarray.gemm import ENGINES
from hqarray.rawkernels import catalogue

X = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)

Capture = pytest.CaptureFixture[str]


def fails(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr of a command that must end with exit code 2 and print nothing else."""
    assert main(arguments) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.endswith("\n") and error.count("\n") == 1, error
    assert error.startswith("hqarray: ")
    return error


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hqarray", *arguments], capture_output=True, text=True, **options)


# --- report -------------------------------------------------------------------------------------


def test_report_without_a_file_studies_the_shipped_layers() -> None:
    result = run("report", env={**os.environ, "COLUMNS": "80"})
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for layer in ("layer0.ffn_up: ", "layer3.attn_q: "):
        assert sum(line.startswith(layer) for line in lines) == 1
    for column in ("fprop", "dgrad", "wgrad", "KiB", "engine"):
        assert column in result.stdout
    for name in ("fp8 ", "mxfp8 ", "nvfp4 ", "mxfp4 ", "mxfp8_fp8_block_"):
        assert sum(line.startswith(name) for line in lines) == 2, name


def test_report_writes_json_html_and_the_table(tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "a.npy", X)
    page, numbers = tmp_path / "r.html", tmp_path / "r.json"
    arguments = ["report", str(tmp_path / "a.npy"), "--formats", "mxfp8, nvfp4", "--html", str(page)]
    assert main([*arguments, "--json", str(numbers)]) == 0
    output, error = capsys.readouterr()
    assert "mxfp8" in output and error == ""
    values = json.loads(numbers.read_text())
    assert list(values["matrices"][0]["formats"]) == ["mxfp8", "nvfp4"]
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_json_on_standard_output_is_all_there_is(tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "a.npz", x=X, w=X, dy=X[:, :16])
    assert main(["report", str(tmp_path / "a.npz"), "--formats", "fp8,mxfp8(rule=floor)", "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values["layers"][0]["recipes"]) == ["fp8", "mxfp8(rule=floor)"]
    assert values["layers"][0]["recipes"]["fp8"]["engine"]["fprop"]["reason"]


def test_nothing_on_stderr_when_it_is_no_terminal(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE", 0)
    np.save(tmp_path / "a.npy", X)
    assert main(["report", str(tmp_path / "a.npy")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("patience", "shown"), [(0, True), (60, False)])
def test_bar_appears_on_a_terminal_only_when_it_takes_long(
    patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(command, "PATIENCE", patience)
    monkeypatch.setattr(command, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
    with ExitStack() as stack:
        step = command._Bar(stack, 3)
        for _ in range(3):
            step()
    assert ("quantizing" in screen.getvalue()) == shown


# --- what cannot be read ------------------------------------------------------------------------


def safetensors(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npz_with(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def tensor(shape: object, offsets: object, dtype: object = "F32") -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


class Trap:
    """Unpickling it would raise; it must never happen."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("exit 1",)


LIE = npy(X).replace(b"(16, 32)", b"(99, 99)")
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "truncated npz": ("a.npz", npz(a=X)[:-40], "not a readable npz"),
    "npz cut inside": ("a.npz", npz(a=X)[:300], "not a readable npz"),
    "npz with flipped bytes": ("a.npz", npz(a=X).replace(X.tobytes()[:64], bytes(64)), "not a readable npz"),
    "not a zip": ("a.npz", b"hello", "not a readable npz"),
    "empty npz": ("a.npz", b"", "not a readable npz"),
    "npz of a text": ("a.npz", npz_with("a.npy", b"hello world"), "not an npy file"),
    "npz with a lying header": ("a.npz", npz_with("a.npy", LIE), "not a readable npz"),
    "text named npy": ("a.npy", b"1 2 3\n4 5 6\n", "not an npy file"),
    "empty npy": ("a.npy", b"", "empty file"),
    "truncated npy": ("a.npy", npy(X)[:-8], "not a readable npy"),
    "npy cut in its header": ("a.npy", npy(X)[:20], "not a readable npy"),
    "npy with a lying header": ("a.npy", LIE, "not a readable npy"),
    "npy with a broken header": ("a.npy", npy(X).replace(b"'descr'", b"'d%^cr'"), "not a readable npy"),
    "pickle named npy": ("a.npy", pickle.dumps(Trap()), "not an npy file"),
    "object array": ("a.npy", npy(np.array([[Trap()]], object)), "no 2-D float array"),
    "object array in npz": ("a.npz", npz(a=np.array([[Trap()]], object)), "Python objects (pickle)"),
    "vector": ("a.npy", npy(X[0]), "no 2-D float array in"),
    "integers": ("a.npy", npy(X.astype(int)), "dtype int64"),
    "empty array": ("a.npy", npy(X[:0]), "empty, shape (0, 32)"),
    "npz without arrays": ("a.npz", npz_with("note.txt", b"hi"), "no 2-D float array"),
    "safetensors: empty": ("a.safetensors", b"", "not a safetensors file"),
    "safetensors: text": ("a.safetensors", b"hello, I am a text", "not a safetensors file"),
    "safetensors: header longer than the file": ("a.safetensors", safetensors(b"{}", length=1 << 40), "would be"),
    "safetensors: header is no JSON": ("a.safetensors", safetensors(b"{nope"), "not a readable safetensors"),
    "safetensors: header is no UTF-8": ("a.safetensors", safetensors(b"\xff\xfe"), "not a readable safetensors"),
    "safetensors: header is a list": ("a.safetensors", safetensors(b"[1]"), "not an object"),
    "safetensors: deep header": ("a.safetensors", safetensors(b"[" * 200_000), "not a readable safetensors"),
    "safetensors: more than there is": ("a.safetensors", safetensors(tensor([2, 2], [0, 16]), bytes(8)), "not fit"),
    "safetensors: negative offset": ("a.safetensors", safetensors(tensor([1, 2], [-8, 0]), bytes(8)), "not fit"),
    "safetensors: end before begin": ("a.safetensors", safetensors(tensor([1, 2], [8, 0]), bytes(8)), "not fit"),
    "safetensors: negative shape": ("a.safetensors", safetensors(tensor([-1, -2], [0, 8]), bytes(8)), "not fit"),
    "safetensors: shape is no list": ("a.safetensors", safetensors(tensor(7, [0, 8]), bytes(8)), "not fit"),
    "safetensors: three offsets": ("a.safetensors", safetensors(tensor([1, 2], [0, 8, 9]), bytes(8)), "not fit"),
    "safetensors: entry is a number": ("a.safetensors", safetensors({"x": 7}), "not fit"),
    "safetensors: type is a list": ("a.safetensors", safetensors(tensor([1, 2], [0, 8], []), bytes(8)), "not fit"),
    "safetensors: shape of another size": ("a.safetensors", safetensors(tensor([9, 9], [0, 8]), bytes(8)), "[9, 9]"),
    "another kind": ("weights.pt", b"", "give .npy, .npz or .safetensors"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_gives_one_line_and_exit_code_2(case: str, tmp_path: Path, capsys: Capture) -> None:
    name, content, message = BAD_FILES[case]
    path = tmp_path / name
    path.write_bytes(content)
    line = fails(capsys, "report", str(path))
    assert message in line
    assert str(path) in line


def test_missing_file_folder_and_unreadable_name(tmp_path: Path, capsys: Capture) -> None:
    for suffix in (".npy", ".npz", ".safetensors"):
        assert "No such file" in fails(capsys, "report", str(tmp_path / f"missing{suffix}"))
    (tmp_path / "folder.npy").mkdir()
    assert "folder.npy" in fails(capsys, "report", str(tmp_path / "folder.npy"))
    assert "give .npy" in fails(capsys, "report", "")


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        ("fp9", "unknown recipe or format 'fp9'"),
        ("nvfp5,mxfp8", "did you mean 'nvfp4'"),
        ("", "has an empty name"),
        ("mxfp8,,nvfp4", "has an empty name"),
        ("mxfp8(rule=sideways)", "rule='sideways' is not one of"),
        ("mxfp8(rule=up", "lacks the closing bracket"),
    ],
)
def test_bad_format_name_gives_one_line(formats: str, message: str, capsys: Capture) -> None:
    assert message in fails(capsys, "report", "--formats", formats)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_output_that_cannot_be_written_is_found_before_the_work(
    option: str, tmp_path: Path, capsys: Capture
) -> None:
    missing, file = tmp_path / "no", tmp_path / "file"
    file.write_text("")
    for target, reason in (
        (missing / "x", f"no such folder {missing}"),
        (tmp_path, "it is a folder; name a file in it"),
        (file / "x", f"{file} is no folder"),
    ):
        assert fails(capsys, "report", option, str(target)) == f"hqarray: {target}: cannot be written: {reason}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["report", "--nope"], ["info", "x"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m hqarray" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
@pytest.mark.parametrize(
    "arguments", [["report", "--formats", "fp8"], ["info"], ["report", "--formats", "fp8", "--json", "-"]]
)
def test_closed_pipe_is_silent(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        result = subprocess.run([sys.executable, "-m", "hqarray", *arguments], stdout=closed, stderr=subprocess.PIPE)
    assert result.stderr == b""
    assert result.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
@pytest.mark.parametrize("arguments", [["report", "--formats", "fp8"], ["info"], ["--version"], ["--help"],
                                       ["report", "--formats", "fp8", "--json", "-"]], ids=" ".join)
def test_full_disk_gives_one_line_and_exit_code_2(arguments: list[str]) -> None:
    # argparse swallows what an unbuffered write raises
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hqarray", *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered)
    assert result.stderr == b"hqarray: standard output: No space left on device\n"
    assert result.returncode == 2


@pytest.mark.parametrize(("target", "place"), [("-", "standard output"), ("both.out", "both.out")])
def test_json_and_html_in_one_place_are_refused(
    target: str, place: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = fails(capsys, "report", "--json", target, "--html", target)
    assert line == f"hqarray: --json and --html would both be written to {place}; name another file for one of them\n"
    assert not list(tmp_path.iterdir())


# --- info and version ---------------------------------------------------------------------------


def test_version() -> None:
    assert run("--version").stdout == f"hqarray {hq.__version__}\n"


def test_info_imports_no_framework() -> None:
    code = """
import sys
from hqarray.__main__ import main
main(["info", "--chip", "sm_90"])
print(*sorted({"torch", "jax", "cupy", "nvmath", "safetensors"} & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "\n"


def test_info_names_versions_gpu_library_and_engines(capsys: Capture) -> None:
    assert main(["info", "--chip", "sm_90", "--chip", "sm_100,12.0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  {'numpy':<14} {np.__version__}" in lines
    assert [line for line in lines if line and line[0] not in " 1"] == [
        "Versions", "GPU", "libcublasLt", "Engines of a @ b, by the stored formats of a (row) and b (column)", "NumPy",
        "sm_90", "sm_100", "sm_120",
    ]
    pairs = len(info.storages()) ** 2
    assert f"  f fp32: NumPy: operands decoded to float32, BLAS (all {pairs} pairs)" in lines
    assert max(map(len, lines)) <= 80 or info.cublaslt_libraries()


@pytest.mark.parametrize("chip", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_engine_matrix_shows_every_pair_and_every_reason(chip: tuple[int, int]) -> None:
    engines = info.engine_matrix(chip)
    storages = info.storages()
    assert len(engines) == len(storages) ** 2
    assert sorted(name for names in storages.values() for name in names) == sorted(hq.FORMATS)
    lines = list(info.engine_lines(chip))
    text = " ".join(" ".join(lines).split())
    for engine in engines.values():
        assert f"{info.SYMBOLS[engine.name]} {engine.name}: {engine.reason} (" in text
    rows = lines[1 : 1 + len(storages)]
    symbols = {info.SYMBOLS[name] for name in ENGINES}
    assert all(len(row.split()) == 2 + len(storages) and set(row.split()[2:]) <= symbols for row in rows)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("text", "chip"),
    [("sm_90", (9, 0)), ("sm_90a", (9, 0)), ("90", (9, 0)), ("9.0", (9, 0)), ("sm_100f", (10, 0)), ("SM120", (12, 0))],
)
def test_chip_names(text: str, chip: tuple[int, int]) -> None:
    assert info.parse_chip(text) == chip


def test_chip_below_the_oldest_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(info.parse_chip(arch) for arch in catalogue.ARCHES) == info.OLDEST
    for chip in ("sm_75", "7.0", "sm_61"):
        assert "below sm_80, the oldest that hqarray has kernels for" in fails(capsys, "info", "--chip", chip)
    monkeypatch.setattr(info, "gpus", lambda: ((info.GPU("T4", (7, 5)),), "driver"))
    lines = list(info.info_lines())
    assert lines[lines.index("sm_75") + 1 :] == [
        "  none: below sm_80, the oldest that hqarray has kernels for (sm_75)"
    ]


@pytest.mark.parametrize("chip", ["hopper", "", "sm_", "9", "sm_90x", "sm_9000"])
def test_bad_chip_gives_one_line(chip: str, capsys: Capture) -> None:
    assert "write sm_90, sm_100 or sm_120" in fails(capsys, "info", "--chip", chip)
