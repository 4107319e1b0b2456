"""Checkpoints in several files: converted and reported as their files are alone, in bounded memory, by processes."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hqarray import __main__ as command
from hqarray import processes
from hqarray.indexfile import Index, index_in
from hqarray.interop import convert
from hqarray.interop.convert_index import convert_index, plan_index
from hqarray.interop.safetensors import load, save
from hqarray.processes import WorkerDied, in_processes
from hqarray.tensorfile import FileError
from hqarray.testing import assert_bitwise_equal

RNG = np.random.default_rng(0)
FILES = {
    "model-1-of-3.safetensors": {"a.weight": RNG.standard_normal((64, 96)).astype(np.float32), "a.norm": np.ones(5)},
    "model-2-of-3.safetensors": {"b.weight": RNG.standard_normal((33, 64)).astype(np.float16)},
    "model-3-of-3.safetensors": {"ids": np.arange(4)},
}
INDEX = "model.safetensors.index.json"


def write_index(folder: Path, where: object, **rest: object) -> Path:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1, "by": "me"}, "weight_map": where, **rest}))
    return folder / INDEX


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, arrays in FILES.items():
        save(folder / name, arrays, style="fp8")
    return write_index(folder, {tensor: name for name, arrays in FILES.items() for tensor in arrays}, extra=[1])


def run(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("as_folder", [False, True], ids=["index", "folder"])
def test_files_of_an_index_become_what_each_becomes_alone(source, tmp_path, capsys, jobs, as_folder):
    out = tmp_path / "out"
    given = source.parent if as_folder else source
    assert run("convert", given, out, "--rowwise=mxfp8", "--columnwise=nvfp4", f"--jobs={jobs}") == 0
    said = capsys.readouterr().out
    assert "a.weight" in said and "b.weight" in said and "2 copied unchanged" in said
    for name in FILES:
        alone = tmp_path / name
        made = convert.plan(source.parent / name, convert.target("mxfp8", "nvfp4"))
        convert.convert(made, alone)
        assert alone.read_bytes() == (out / name).read_bytes()
    written = Index.open(out / INDEX)  # holds what the files hold
    assert set(written.names) == set(FILES) and written.rest["extra"] == [1]
    total = sum(t.end - t.begin for name in FILES for t in load(out / name).file.tensors.values())
    assert written.rest["metadata"] == {"total_size": total, "by": "me"}
    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "model", "out"])
    loaded = load(out)
    assert list(loaded) == ["a.weight", "a.norm", "b.weight", "ids"] and len(loaded) == 4
    assert_bitwise_equal(loaded["b.weight"], load(out / "model-2-of-3.safetensors")["b.weight"])
    assert "4 arrays in 3 files" in repr(loaded) and loaded["ids"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_report_of_an_index_is_that_of_its_files(source, capsys, jobs):
    assert run("report", source, "--formats=mxfp8,nvfp4", "--json=-", f"--jobs={jobs}") == 0
    whole = json.loads(capsys.readouterr().out)
    files = [source.parent / name for name in FILES]
    assert run("report", *files, "--formats=mxfp8,nvfp4", "--json=-") == 0
    alone = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in whole["matrices"]] == ["a.weight", "b.weight"]
    for a, b in zip(whole["matrices"], alone["matrices"], strict=True):
        assert {**a, "source": ""} == {**b, "source": ""}


def test_the_report_of_the_librarys_own_layers_is_the_same_by_processes(capsys):
    reports = []
    for jobs in (1, 2):
        assert run("report", "--formats=mxfp8", "--json=-", f"--jobs={jobs}") == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]


def test_memory_is_that_of_one_weight_however_many_files_there_are(tmp_path, capsys):
    x = RNG.standard_normal((512, 1024)).astype(np.float32)
    folder = tmp_path / "large"
    folder.mkdir()
    where = {}
    for i in range(20):
        save(folder / f"{i}.safetensors", {f"w{i}": x, f"v{i}": x})
        where |= {f"w{i}": f"{i}.safetensors", f"v{i}": f"{i}.safetensors"}
    index, target = write_index(folder, where), convert.target("mxfp8", "nvfp4")
    peaks = {}
    tracemalloc.start()
    try:
        opened = Index.open(index)
        convert_index(opened, plan_index(opened, target), target, tmp_path / "out")
        peaks["convert"] = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert run("report", index, "--formats=mxfp8,nvfp4", "--json=-") == 0
        peaks["report"] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    capsys.readouterr()
    assert max(peaks.values()) < 28 * x.nbytes < 40 * x.nbytes, {k: v / x.nbytes for k, v in peaks.items()}


# --- what is refused ----------------------------------------------------------------------------


def fails(capsys, *arguments):
    assert run(*arguments) == 2
    output, error = capsys.readouterr()
    assert output == "" and error.startswith("hqarray: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(("change", "message"), [
    (lambda where: where | {"c": "model-9.safetensors"}, "model-9.safetensors: No such file"),
    (lambda where: where | {"c": "../model-1-of-3.safetensors"}, "not in its own folder"),
    (lambda where: where | {"c": "/etc/passwd"}, "not in its own folder"),
    (lambda where: where | {"c": "model-1-of-3.safetensors"}, "'c' is not in it"),
    (lambda where: {k: v for k, v in where.items() if k != "a.norm"}, "'a.norm' is in it, but not in the index"),
    (lambda where: [1], "no weight_map of names"), (lambda where: {"a": 1}, "no weight_map of names"),
])
def test_an_index_that_lies_is_one_line_and_nothing_is_written(source, tmp_path, capsys, change, message):
    where = {tensor: name for name, arrays in FILES.items() for tensor in arrays}
    write_index(source.parent, change(where))
    assert message in fails(capsys, "convert", source, tmp_path / "out", "--rowwise=mxfp8")
    assert message in fails(capsys, "report", source)
    assert os.listdir(tmp_path) == ["model"]


def test_what_cannot_be_an_index_is_one_line(source, tmp_path, capsys):
    out = tmp_path / "out"
    source.write_text("{")
    assert "not a readable index" in fails(capsys, "convert", source, out, "--rowwise=mxfp8")
    (source.parent / "other.index.json").write_text("{}")
    assert "holds 2 indices; name one of model.safetensors.index.json" in fails(
        capsys, "convert", source.parent, out, "--rowwise=mxfp8")
    assert index_in(tmp_path) is None and index_in(source) == source
    assert "--jobs 0: 1 or more" in fails(capsys, "convert", source, out, "--rowwise=mxfp8", "--jobs=0")


def test_a_name_in_two_files_is_refused(tmp_path):
    scales = np.ones((1, 1), np.float32)
    codes = np.zeros((128, 128), np.uint8)
    save(tmp_path / "x.safetensors", {"w": codes, "w_scale_inv": scales}, style="fp8")
    blocks = {"w_blocks": codes.reshape(128, 8, 16), "w_scales": codes[:, :8]}
    save(tmp_path / "y.safetensors", blocks, style="fp8")
    where = {"w": "x", "w_scale_inv": "x", "w_blocks": "y", "w_scales": "y"}
    index = write_index(tmp_path, {tensor: f"{name}.safetensors" for tensor, name in where.items()})
    with pytest.raises(FileError, match=r"'w' is in x.safetensors and in y.safetensors"):
        load(index)


def test_a_folder_that_is_there_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert "a new folder" in fails(capsys, "convert", source, tmp_path / "out", "--rowwise=mxfp8", "--force")
    assert "is the file that is read" in fails(capsys, "convert", source, source, "--rowwise=mxfp8")
    assert "no 2-D weight" in fails(capsys, "convert", source, tmp_path / "new", "--rowwise=mxfp8", "--match=none")
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]


def test_a_weight_in_two_files_is_refused_by_name(tmp_path, capsys):
    save(tmp_path / "x.safetensors", {"w": np.zeros((128, 128), np.uint8).view("i1")})
    save(tmp_path / "y.safetensors", {"w_scale_inv": np.ones((1, 1), np.float32)})
    index = write_index(tmp_path, {"w": "x.safetensors", "w_scale_inv": "y.safetensors"})
    error = fails(capsys, "convert", index, tmp_path / "out", "--rowwise=mxfp8")
    assert set(load(index)) == {"w", "w_scale_inv"}
    assert "'w' is in x.safetensors and its scales 'w_scale_inv' in y.safetensors" in error


def test_a_tensor_that_would_be_in_two_files_is_refused(tmp_path, capsys):
    x = np.ones((128, 128), np.float32)
    save(tmp_path / "x.safetensors", {"w": x})
    save(tmp_path / "y.safetensors", {"w_scale_inv": x})
    index = write_index(tmp_path, {"w": "x.safetensors", "w_scale_inv": "y.safetensors"})
    error = fails(capsys, "convert", index, tmp_path / "out", "--style=fp8_block", "--match=w")
    assert "a tensor 'w_scale_inv' would be in x.safetensors and in y.safetensors; rename one" in error
    assert not (tmp_path / "out").exists()


def test_several_files_become_a_folder_and_errors_name_it(source, tmp_path, capsys):
    assert "becomes a folder" in fails(capsys, "convert", source, tmp_path / "out.safetensors", "--rowwise=mxfp8")
    error = fails(capsys, "convert", source, tmp_path / "not" / "there", "--rowwise=mxfp8")
    assert f"{tmp_path / 'not' / 'there'}: No such file" in error and ".tmp" not in error


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says which processes are there")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_workers_end_with_the_process_that_asked(number, tmp_path):
    program = ("import signal, sys; sys.path[:0] = sys.argv[1:]; from test_indexfile import linger\n"
               "from hqarray.processes import in_processes\n"
               "if __name__ == '__main__':\n"
               "    signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
               "    list(in_processes(linger, [(sys.argv[2],)] * 2, 2))\n")
    (tmp_path / "main.py").write_text(program)
    process = subprocess.Popen([sys.executable, str(tmp_path / "main.py"), str(Path(__file__).parent), str(tmp_path)])
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(workers) == 2 and all(map(alive, workers))
    number = getattr(signal, number)
    if number == signal.SIGTERM:
        os.kill(workers[0], signal.SIGSTOP)  # it does not hear that it is to end
    process.send_signal(number)
    process.wait(30)
    while any(map(alive, workers)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(alive, workers))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says which processes are stopped")
def test_a_worker_that_does_not_hear_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "GRACE", 0.2)
    worker = multiprocessing.get_context("spawn").Process(target=linger, args=(tmp_path,))
    worker.start()
    os.kill(worker.pid, signal.SIGSTOP)
    until = time.monotonic() + 60
    while state(worker.pid) != "T" and time.monotonic() < until:
        time.sleep(0.01)
    processes._end([worker])
    assert worker.exitcode == -signal.SIGKILL


def linger(folder):
    """A worker's work, which takes longer than the test."""
    Path(folder, f"{os.getpid()}.pid").touch()
    time.sleep(300)


def state(pid):
    """Of a process, as ps says it; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return None


def alive(pid):
    return state(pid) not in (None, "Z")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_that_breaks_halfway_leaves_nothing(source, tmp_path, jobs, monkeypatch):
    target = convert.target("mxfp8")
    index = Index.open(source)
    plans = plan_index(index, target)
    (source.parent / "model-2-of-3.safetensors").write_bytes(b"cut")  # after it was looked at
    with pytest.raises(FileError, match="model-2-of-3"):
        convert_index(index, plans, target, tmp_path / "out", jobs=jobs)
    assert os.listdir(tmp_path) == ["model"]


def test_a_process_that_is_killed_is_an_error_and_no_hang():
    with pytest.raises(WorkerDied, match="give fewer jobs"):
        list(in_processes(os._exit, [(3,), (3,)], 2))
    assert list(in_processes(divmod, [(7, 2), (9, 4)], 2)) == [(3, 1), (2, 1)]
    assert list(in_processes(divmod, [], 4)) == []
