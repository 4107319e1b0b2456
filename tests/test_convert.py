"""python -m hqarray convert: what it writes, what it refuses in one line, and that it leaves nothing behind."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from rich.console import Console
from test_tensorfile import LIES, good_file, mutate, package, raw

import hqarray as hq
from hqarray import __main__ as command
from hqarray.__main__ import main
from hqarray.interop import convert
from hqarray.interop.safetensors import load, save
from hqarray.testing import assert_bitwise_equal

Capture = pytest.CaptureFixture[str]

RNG = np.random.default_rng(0)
A = RNG.standard_normal((160, 96)).astype(np.float32)
B = RNG.standard_normal((64, 160)).astype(ml_dtypes.bfloat16)
C = RNG.standard_normal((48, 32)).astype(np.float16)
PLAIN: dict[str, Any] = {
    "model.norm.weight": A[0], "model.mlp.up.weight": A, "model.mlp.down.weight": B, "lm_head.weight": C,
    "steps": np.arange(6).reshape(2, 3), "conv": A.reshape(5, 32, 96), "scalar": np.float32(2),
    "old": RNG.standard_normal((8, 8)),
}
WEIGHTS = ("model.mlp.up.weight", "model.mlp.down.weight", "lm_head.weight", "old")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save(tmp_path / "in.safetensors", PLAIN, style="fp8", metadata={"note": "mine"})
    return tmp_path / "in.safetensors"


def run(*arguments: str | Path) -> int:
    return main(["convert", *map(str, arguments)])


def fails(capsys: Capture, *arguments: str | Path) -> str:
    """The one line on stderr of a command that must end with exit code 2 and print nothing else."""
    assert run(*arguments) == 2
    output, error = capsys.readouterr()
    assert output == "" and error.startswith("hqarray: ")
    assert error.endswith("\n") and error.count("\n") == 1, error
    return error


# --- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [("mxfp8", "nvfp4"), ("fp8_e4m3", None), (None, "mxfp6_e2m3"), ("bf16", "fp16")])
def test_weights_are_what_quantize_makes_and_the_rest_is_copied(
    formats: tuple[str | None, str | None], source: Path, tmp_path: Path
) -> None:
    row, column = formats
    options = [f"--{name}={format}" for name, format in (("rowwise", row), ("columnwise", column)) if format]
    assert run(source, tmp_path / "out.safetensors", *options) == 0
    found = load(tmp_path / "out.safetensors")
    assert list(found) == [*WEIGHTS, *(name for name in found if name not in WEIGHTS)] or set(found) == set(PLAIN)
    assert found.metadata == {"note": "mine"}
    for name, array in PLAIN.items():
        if name in WEIGHTS:
            assert_bitwise_equal(found[name], hq.quantize(array, rowwise=row, columnwise=column))
        else:
            assert_bitwise_equal(found[name], np.asarray(array))
    theirs, before = package(tmp_path / "out.safetensors"), package(source)
    for name in set(PLAIN) - set(WEIGHTS):
        assert theirs[name] == before[name]


@pytest.mark.parametrize("style", ["fp8", "fp8_block", "mxfp4", "nvfp4"])
def test_checkpoint_styles_are_written_without_naming_a_format(style: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    assert run(source, target, "--style", style, "--match", "*.weight") == 0
    format = {"fp8": "fp8_e4m3", "fp8_block": "fp8_block_128x128"}.get(style, style)
    found = load(target)
    for name in WEIGHTS[:3]:
        expected = hq.quantize(PLAIN[name], rowwise=format)
        assert_bitwise_equal(found[name].dequantize(), expected.dequantize(dtype=np.float32))
        assert np.array_equal(found[name].rowwise.codes, expected.rowwise.codes)
    assert found["old"].dtype == np.float64
    with safetensors.safe_open(target, "numpy") as file:
        assert file.metadata() == {"format": "pt", "note": "mine"}


def test_match_selects_weights_and_may_be_repeated(source: Path, tmp_path: Path) -> None:
    assert run(source, tmp_path / "o", "--rowwise=mxfp8", "--match=*.up.*", "--match", "lm_head*") == 0
    found = load(tmp_path / "o")
    assert {name for name in found if isinstance(found[name], hq.HybridArray)} == {
        "model.mlp.up.weight", "lm_head.weight"
    }


def test_codes_are_kept_where_the_formats_are_there_and_decoded_where_not(
    source: Path, tmp_path: Path, capsys: Capture
) -> None:
    paths = [tmp_path / f"{i}.safetensors" for i in range(5)]
    options = ["--match", "*.mlp.*"]
    assert run(source, paths[0], "--style=nvfp4", *options) == 0
    assert run(paths[0], paths[1], "--rowwise=nvfp4", *options) == 0
    assert run(paths[1], paths[2], "--style=nvfp4", *options) == 0
    assert package(paths[0]) == package(paths[2]), "a way there and back changes nothing"
    capsys.readouterr()
    assert run(paths[0], paths[3], "--rowwise=nvfp4", "--columnwise=mxfp8", *options) == 0
    assert capsys.readouterr().out.count(" kept ") == 2, "rows as they are, columns quantized from them"
    assert run(paths[0], paths[4], "--rowwise=mxfp4", "--columnwise=mxfp8", *options) == 0
    assert " kept" not in capsys.readouterr().out
    for name, array in load(paths[0]).items():
        if isinstance(array, hq.HybridArray):
            found = load(paths[3])[name]
            values = array.dequantize()
            assert_bitwise_equal(found.rowwise.codes, array.rowwise.codes)
            assert_bitwise_equal(found.columnwise, hq.quantize(values, columnwise="mxfp8").columnwise)
            assert found.derived == "columnwise"
            assert_bitwise_equal(load(paths[4])[name], hq.quantize(values, rowwise="mxfp4", columnwise="mxfp8"))
    assert run(paths[3], paths[4], "--rowwise=nvfp4", "--force", *options) == 0
    assert capsys.readouterr().out.count(" kept") == 2
    assert load(paths[4])["model.mlp.up.weight"].columnwise is None
    assert run(paths[3], paths[4], "--rowwise=nvfp4", "--columnwise=mxfp8", "--force", *options) == 0
    assert load(paths[4])["model.mlp.up.weight"].derived == "columnwise"


def test_quantized_weights_are_decoded_to_float32_and_keep_their_nominal_dtype(tmp_path: Path) -> None:
    x = A.astype(ml_dtypes.bfloat16)
    save(tmp_path / "a", {"w": hq.quantize(x, rowwise="fp8_block_1x128", columnwise="mxfp4")})
    for options, source, columns in ((["--rowwise=mxfp8"], "rowwise", False),
                                     (["--rowwise=mxfp8", "--columnwise=mxfp4"], "columnwise", True)):
        assert run(tmp_path / "a", tmp_path / "b", "--force", *options) == 0
        found, before = load(tmp_path / "b")["w"], load(tmp_path / "a")["w"]
        values = before.dequantize(source=source, dtype=np.float32)
        assert_bitwise_equal(found.rowwise, hq.quantize(values, rowwise="mxfp8").rowwise)
        assert (found.columnwise is not None) == columns == (found.derived == "rowwise")
        assert found.dtype == ml_dtypes.bfloat16
    assert run(tmp_path / "a", tmp_path / "b", "--force", "--rowwise=bf16(dtype=none)") == 0
    assert load(tmp_path / "b")["w"].rowwise.format.name == "bf16"


def test_arrays_that_do_not_match_keep_their_description(source: Path, tmp_path: Path, capsys: Capture) -> None:
    group = hq.grouped_quantize(A, [60, 0, 100], rowwise="mxfp8", columnwise="nvfp4")
    arrays = {"g": group, "h": hq.quantize(A, rowwise="fp8_e4m3"), "w": A}
    save(tmp_path / "a", arrays)
    assert run(tmp_path / "a", tmp_path / "b", "--rowwise=mxfp4", "--match=w") == 0
    found = load(tmp_path / "b")
    for one, other in zip(found["g"], group, strict=True):
        assert_bitwise_equal(one, other)
    assert_bitwise_equal(found["h"], arrays["h"])
    assert_bitwise_equal(found["w"], hq.quantize(A, rowwise="mxfp4"))
    capsys.readouterr()
    assert "'g' is not converted, and style 'mxfp4' cannot hold it" in fails(
        capsys, tmp_path / "a", tmp_path / "c", "--style=mxfp4", "--match=w"
    )


def test_table_names_bytes_and_the_sqnr_that_compare_finds(source: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run(source, tmp_path / "o", "--rowwise=mxfp8", "--columnwise=nvfp4", "--match=*.weight") == 0
    lines = capsys.readouterr().out.splitlines()
    for name in WEIGHTS[:3]:
        (line,) = (line.split() for line in lines if line.startswith(name))
        row = hq.compare(PLAIN[name], "mxfp8")[0].sqnr_db
        column = hq.compare(PLAIN[name].T, "nvfp4")[0].sqnr_db
        assert line[-2:] == [f"{row:.2f}", f"{column:.2f}"]
    assert any(line.startswith("5 copied unchanged") for line in lines)
    size = (tmp_path / "o").stat().st_size / 1024
    assert f"file {source.stat().st_size / 1024:.1f} KiB {size:.1f} KiB" in [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize("format", hq.FORMATS)
def test_sqnr_by_slabs_is_that_of_the_whole(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SLAB", 1)
    x = RNG.standard_normal((300, 131)).astype(np.float32)
    part = hq.quantize(x, rowwise=format).rowwise
    assert part is not None
    assert convert.measure(x, part) == pytest.approx(hq.compare(x, format)[0].sqnr_db, rel=1e-12)
    x[7, 7] = np.nan
    spoilt = hq.quantize(x, rowwise=format).rowwise
    assert spoilt is not None
    lost = format in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "nvfp4", "nvfp4_16x16", "nvfp4_row")
    assert np.isnan(convert.measure(x, spoilt)) == lost


def test_formats_that_round_at_random_are_converted_by_the_seed(tmp_path: Path) -> None:
    format = "nvfp4(rounding=stochastic)"
    save(tmp_path / "a", {"w": A[:64, :64]})
    for name, seed in (("b", "3"), ("c", "3"), ("d", "4")):
        assert run(tmp_path / "a", tmp_path / name, f"--rowwise={format}", f"--seed={seed}") == 0
    first, again, other = ((tmp_path / name).read_bytes() for name in "bcd")
    assert first == again != other
    wanted = hq.quantize(A[:64, :64], rowwise=format, seed=3).rowwise
    assert wanted is not None
    np.testing.assert_array_equal(load(tmp_path / "b")["w"].rowwise.codes, wanted.codes)


def test_long_tables_list_the_worst(tmp_path: Path, capsys: Capture) -> None:
    arrays = {f"w{i:03}": A[:32, :32] + 2.0 ** (i - 20) for i in range(40)}
    arrays["w007"] = np.full((32, 32), np.nan, np.float32)
    save(tmp_path / "a", {name: x.astype(np.float32) for name, x in arrays.items()})
    assert run(tmp_path / "a", tmp_path / "b", "--rowwise=nvfp4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("w0") for line in lines) == convert.SHOWN
    assert any(line.startswith("w007") and line.endswith("nan") for line in lines)
    assert any(line.startswith("16 more, better") for line in lines)


def test_empty_weights_and_an_empty_file(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path / "a", {"w": A[:0], "v": A[:, :0]})
    assert run(tmp_path / "a", tmp_path / "b", "--rowwise=nvfp4", "--columnwise=fp8_block_128x128") == 0
    assert load(tmp_path / "b")["w"].shape == (0, 96)
    capsys.readouterr()
    save(tmp_path / "c", {})
    assert "no 2-D weight" in fails(capsys, tmp_path / "c", tmp_path / "d", "--rowwise=nvfp4")


def test_memory_is_that_of_one_weight(tmp_path: Path) -> None:
    x = RNG.standard_normal((512, 1024)).astype(np.float32)
    save(tmp_path / "a", {f"w{i}": x for i in range(16)})
    tracemalloc.start()
    try:
        made = convert.plan(tmp_path / "a", convert.target("mxfp8", "nvfp4"))
        convert.convert(made, tmp_path / "b")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 28 * x.nbytes, peak / x.nbytes
    assert 16 * x.nbytes * 2 > peak, "all weights in memory would take more than this"


# --- what is refused ----------------------------------------------------------------------------


def test_wrong_options_are_one_line(source: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    for arguments, message in (
        ([], "give rowwise, columnwise or both"),
        (["--rowwise=fp9"], "unknown format 'fp9'"),
        (["--rowwise=nvfp4(rht=1)"], "write rht=true or rht=false"),
        (["--rowwise=nvfp4", "--seed=-1"], "seed=-1 is not from 0 to 2**64 - 1"),
        (["--style=fp8", "--rowwise=mxfp8"], "is mxfp8, and style 'fp8' holds"),
        (["--style=fp8", "--columnwise=fp8_e4m3"], "holds rowwise parts alone"),
        (["--rowwise=mxfp8", "--match=nothing*"], "no 2-D weight of a name like nothing*"),
        (["--style=mxfp4"], "'old' is (8, 8), and style 'mxfp4' needs a last axis of a multiple of 32"),
    ):
        assert message in fails(capsys, source, out, *arguments)
        assert os.listdir(tmp_path) == ["in.safetensors"]
    for arguments in (["convert"], ["convert", str(source)], ["convert", str(source), "o", "--style=fp9"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_what_is_not_converted_is_named_where_nothing_else_is(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path / "a", {"experts": np.zeros((2, 32, 32), np.float32), "ids": np.zeros((4, 4), np.int64)})
    said = fails(capsys, tmp_path / "a", tmp_path / "b", "--rowwise=mxfp8")
    assert "not 2-D are copied alone, as here 'ids' I64 [4, 4], 'experts' F32 [2, 32, 32]" in said
    said = fails(capsys, tmp_path / "a", tmp_path / "b", "--rowwise=mxfp8", "--match=w*")
    assert "no 2-D weight of a name like w*; it holds 'ids', 'experts'" in said


def test_a_folder_is_no_file_to_write(
    source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (Path("."), tmp_path):
        assert "is a directory; name a file in it" in fails(capsys, source, place, "--rowwise=mxfp8", "--force")
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_the_source_is_never_written(source: Path, tmp_path: Path, capsys: Capture) -> None:
    content = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "hard")
    for name in (source, tmp_path / "link", tmp_path / "hard", tmp_path / "." / "in.safetensors"):
        assert "this is the file that is read" in fails(capsys, source, name, "--rowwise=mxfp8", "--force")
    assert source.read_bytes() == content


def test_a_file_that_is_there_needs_force(source: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    assert "--force replaces it" in fails(capsys, source, out, "--rowwise=mxfp8")
    assert out.read_text() == "precious"
    assert run(source, out, "--rowwise=mxfp8", "--force") == 0
    assert len(load(out)) == len(PLAIN)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    capsys.readouterr()
    assert "--force" in fails(capsys, source, tmp_path / "dangling", "--rowwise=mxfp8")


def test_paths_that_cannot_be_are_one_line(source: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "folder").mkdir()
    before = sorted(os.listdir(tmp_path))
    for a, b, message in (
        (tmp_path / "no", tmp_path / "out", "No such file"), (source, tmp_path / "no" / "out", "No such file"),
        (tmp_path / "folder", tmp_path / "out", "directory"), (source, tmp_path / "folder", "there is a file already"),
    ):
        assert message in fails(capsys, a, b, "--rowwise=mxfp8")
    assert "directory" in fails(capsys, source, tmp_path / "folder", "--rowwise=mxfp8", "--force")
    assert sorted(os.listdir(tmp_path)) == before


def test_unknown_conventions_name_the_tensor_and_can_be_left_out(tmp_path: Path, capsys: Capture) -> None:
    header = {"w": {"dtype": "F8_E4M3", "shape": [4, 256], "data_offsets": [0, 1024]},
              "w_scale": {"dtype": "F32", "shape": [4, 1], "data_offsets": [1024, 1040]},
              "v": {"dtype": "F32", "shape": [2, 2], "data_offsets": [1040, 1056]}}
    (tmp_path / "a").write_bytes(raw(header, bytes(1056)))
    line = fails(capsys, tmp_path / "a", tmp_path / "b", "--rowwise=nvfp4")
    assert "'w': no format has codes and scales like" in line
    assert run(tmp_path / "a", tmp_path / "b", "--rowwise=nvfp4", "--match=v") == 0
    assert package(tmp_path / "b")["w_scale"] == ("F32", (4, 1), bytes(16))


@pytest.mark.parametrize("case", LIES)
def test_lying_files_are_one_line_and_leave_nothing(case: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in").write_bytes(LIES[case][0])
    assert str(tmp_path / "in") in fails(capsys, tmp_path / "in", tmp_path / "out", "--rowwise=mxfp8")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("seed", range(4))
def test_mutated_headers_are_converted_or_leave_nothing(seed: int, tmp_path: Path, capsys: Capture) -> None:
    rng = np.random.default_rng(seed)
    header, data = good_file()
    good = 0
    for _ in range(60):
        changed = mutate(rng, mutate(rng, header) if rng.random() < 0.3 else header)
        (tmp_path / "in").write_bytes(raw(changed, data))
        status = run(tmp_path / "in", tmp_path / "out", "--rowwise=mxfp8", "--columnwise=nvfp4")
        output, error = capsys.readouterr()
        if status == 0:
            assert error == "" and package(tmp_path / "out")
            assert "\x1b" not in output
            (tmp_path / "out").unlink()
            good += 1
        else:
            assert status == 2 and error.count("\n") == 1 and "\x1b" not in error and output == ""
        assert os.listdir(tmp_path) == ["in"]
    assert 0 < good < 50


# --- interrupted --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(28, "No space left")], ids=repr)
@pytest.mark.parametrize("force", [False, True])
def test_error_in_the_middle_leaves_what_was_there(
    error: BaseException, force: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    out = tmp_path / "out"
    if force:
        out.write_text("old")
    before = sorted(os.listdir(tmp_path))
    calls = []

    def measure(*_: Any) -> float:
        calls.append(sorted(os.listdir(tmp_path)))
        if len(calls) == 2:
            raise error
        return 1.0

    monkeypatch.setattr(convert, "measure", measure)
    arguments = (source, out, "--rowwise=mxfp8", *(["--force"] if force else []))
    if isinstance(error, MemoryError):
        with pytest.raises(MemoryError):
            run(*arguments)
    else:
        assert run(*arguments) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert len(calls[0]) == len(before) + 1, "a temporary file beside OUT while it is written"
    assert sorted(os.listdir(tmp_path)) == before
    assert not force or out.read_text() == "old"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_the_middle_leaves_nothing(number: int, tmp_path: Path) -> None:
    x = RNG.standard_normal((1024, 4096)).astype(np.float32)
    save(tmp_path / "in", {f"w{i}": x for i in range(40)})
    arguments = [sys.executable, "-m", "hqarray", "convert", "in", "out", "--rowwise=nvfp4", "--columnwise=nvfp4"]
    heard = partial(signal.signal, number, signal.SIG_DFL)  # a shell's job in the background ignores SIGINT
    process = subprocess.Popen(
        arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heard
    )
    try:
        until = time.monotonic() + 60
        while len(os.listdir(tmp_path)) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert process.poll() is None, "it must be in the middle"
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output, error) == (130, b"", b"")
    assert os.listdir(tmp_path) == ["in"]


def test_it_runs_outside_the_main_thread(source: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(run(source, tmp_path / "o", "--rowwise=mxfp8")))
    thread.start()
    thread.join()
    assert statuses == [0]
    assert run(source, tmp_path / "p", "--rowwise=mxfp8") == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("shown", [True, False])
def test_bar_shows_on_a_terminal_while_it_lasts(
    shown: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(command, "PATIENCE", 0 if shown else 60)
    console = Console
    monkeypatch.setattr(command, "Console", lambda **options: console(
        file=screen if options.get("stderr") else io.StringIO(), force_terminal=True, width=80
    ))
    assert run(source, tmp_path / "o", "--rowwise=mxfp8") == 0
    assert ("converting" in screen.getvalue()) == shown
    assert ("100%" in screen.getvalue()) == shown


def test_steps_add_up_to_the_bytes_of_the_source(source: Path, tmp_path: Path) -> None:
    steps: list[int] = []
    made = convert.plan(source, convert.target("mxfp8"))
    convert.convert(made, tmp_path / "o", step=steps.append)
    assert len(steps) == len(PLAIN)
    assert sum(steps) == made.nbytes == sum(np.asarray(x).nbytes for x in PLAIN.values())


def test_names_with_control_codes_do_not_reach_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path / "in", {"w\x1b[2J": A})
    assert run(tmp_path / "in", tmp_path / "out", "--rowwise=mxfp8") == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and "w\ufffd[2J" in output
