"""The safetensors format: the safetensors package reads what we write and the other way, and lies are found."""

import json
import os
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hqarray.tensorfile import TYPES, FileError, Planned, TensorFile, type_name, writing

RNG = np.random.default_rng(0)
WITH_DTYPE = [name for name, kind in TYPES.items() if kind.dtype is not None]
SHAPES = [(), (0,), (7,), (3, 5), (0, 3), (2, 3, 4), (1, 1, 1, 8)]


def random_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Every code of a small type among them, NaN and -0 included."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    stored = RNG.integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8)
    return stored.view(dtype).reshape(shape)


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    planned = {name: Planned(type_name(array.dtype, name), array.shape) for name, array in arrays.items()}
    with writing(path, planned, metadata or {}) as put:
        for name in reversed(arrays):
            put(name, arrays[name])


def package(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the safetensors package finds in a file."""
    found = safetensors.deserialize(path.read_bytes())
    return {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in found}


def ours(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    file = TensorFile.open(path)
    return {name: (tensor.type, tensor.shape, file.stored(name).tobytes()) for name, tensor in file.tensors.items()}


# --- both ways ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITH_DTYPE)
def test_package_reads_every_type_that_we_write(kind: str, tmp_path: Path) -> None:
    dtype = TYPES[kind].dtype
    assert dtype is not None
    arrays = {f"{kind}{shape}": random_bytes(dtype, shape) for shape in SHAPES}
    arrays["one byte before"] = np.ones(1, np.uint8)
    path = tmp_path / "a.safetensors"
    write(path, arrays, {"a": "é\n"})
    expected = {name: (type_name(a.dtype, name), a.shape, a.tobytes()) for name, a in arrays.items()}
    assert package(path) == expected
    assert ours(path) == expected
    with safetensors.safe_open(path, "numpy") as opened:
        assert opened.metadata() == {"a": "é\n"} == TensorFile.open(path).metadata
    file = TensorFile.open(path)
    for name, array in arrays.items():
        read = file.array(name)
        assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert read.flags.aligned and not read.flags.writeable


@pytest.mark.parametrize("kind", WITH_DTYPE)
def test_we_read_every_type_that_the_package_writes(kind: str, tmp_path: Path) -> None:
    dtype = TYPES[kind].dtype
    assert dtype is not None
    arrays = {f"x{shape}": random_bytes(dtype, shape) for shape in SHAPES}
    path = tmp_path / "a.safetensors"
    specs = {
        name: safetensors.TensorSpec(
            dtype=dtype.name, shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }
    path.write_bytes(safetensors.serialize(specs, {"k": "v"}))
    assert ours(path) == package(path)
    assert {entry[0] for entry in package(path).values()} == {kind}, "the package has another name for this dtype"
    file = TensorFile.open(path)
    assert file.metadata == {"k": "v"}
    for name, array in arrays.items():
        assert (file.array(name).dtype, file.array(name).tobytes()) == (dtype, array.tobytes())


def test_torch_opens_float8_and_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    codes = np.arange(256, dtype=np.uint8)
    for kind, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        numpy_dtype = TYPES[kind].dtype
        assert numpy_dtype is not None
        write(tmp_path / "a.safetensors", {"x": codes.view(numpy_dtype)})
        tensor = load_file(tmp_path / "a.safetensors")["x"]
        assert tensor.dtype == dtype
        assert tensor.view(torch.uint8).tolist() == codes.tolist()
        save_torch({"x": tensor}, tmp_path / "b.safetensors")
        assert ours(tmp_path / "b.safetensors")["x"] == (kind, (256,), codes.tobytes())


def strided(kind: str, x: np.ndarray) -> np.ndarray:
    return {"transposed": x.T, "columns": x[:, ::2], "reversed": x[::-1], "big-endian": x.astype(">f4"),
            "scalar": x[0, 0].reshape(()), "broadcast": np.broadcast_to(x[:1], x.shape)}[kind]


@pytest.mark.parametrize("kind", ["transposed", "columns", "reversed", "big-endian", "scalar", "broadcast"])
def test_strided_arrays_are_written_in_c_order_in_chunks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hqarray.tensorfile.CHUNK", 100)
    x = strided(kind, RNG.standard_normal((37, 22)).astype(np.float32))
    write(tmp_path / "a.safetensors", {"x": x})
    assert package(tmp_path / "a.safetensors")["x"] == ("F32", x.shape, x.astype("<f4").tobytes())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
    st.tuples(st.sampled_from(WITH_DTYPE), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=6,
))
def test_any_set_of_tensors_passes_both_ways(plan: dict[str, tuple[str, tuple[int, ...]]], tmp_path: Path) -> None:
    arrays = {name: random_bytes(TYPES[kind].dtype, shape) for name, (kind, shape) in plan.items()}  # type: ignore[arg-type]
    path = tmp_path / "a.safetensors"
    write(path, arrays)
    expected = {name: (type_name(a.dtype, name), a.shape, a.tobytes()) for name, a in arrays.items()}
    assert package(path) == expected
    assert ours(path) == expected


# --- lies ---------------------------------------------------------------------------------------


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ENTRY = json.dumps(tensor([2], [0, 8]))
LIES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "not a safetensors file"),
    "7 bytes": (bytes(7), "not a safetensors file"),
    "header longer than the file": (raw(b"{}", length=3), "3 bytes of 10"),
    "header of 2^63 bytes": (raw(b"{}", length=1 << 63), "not a safetensors file"),
    "no JSON": (raw(b"{nope"), "not a readable safetensors file"),
    "no UTF-8": (raw(b'{"\xff": 1}'), "not a readable safetensors file"),
    "byte order mark": (raw(b"\xef\xbb\xbf{}"), "not a readable safetensors file"),
    "lone surrogate": (raw(b'{"\\ud800": ' + ENTRY.encode() + b"}", bytes(8)), "not a readable safetensors file"),
    "list": (raw([]), "not an object"),
    "deep": (raw(b"[" * 200_000), "not a readable safetensors file"),
    "huge number": (raw(b'{"x": {"shape": [1' + b"0" * 9999 + b"]}}"), "not a readable safetensors file"),
    "name twice": (raw(f'{{"x": {ENTRY}, "x": {ENTRY}}}'.encode(), bytes(8)), "names 'x' twice"),
    "field twice": (raw(b'{"x": {"dtype": "U8", "dtype": "U8", "shape": [], "data_offsets": [0, 1]}}', b"a"), "twice"),
    "metadata is a list": (raw({"__metadata__": []}), "map of texts"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "map of texts"),
    "entry is a number": (raw({"x": 7}), "'x'"),
    "entry without a type": (raw({"x": {"shape": [], "data_offsets": [0, 0]}}), "'x'"),
    "truncated data": (raw({"x": tensor([2], [0, 8])}, bytes(7)), "does not fit the file (7 bytes"),
    "offset beyond the file": (raw({"x": tensor([2], [8, 16])}, bytes(8)), "does not fit"),
    "negative offset": (raw({"x": tensor([2], [-8, 0])}, bytes(8)), "does not fit"),
    "end before begin": (raw({"x": tensor([2], [8, 0])}, bytes(8)), "does not fit"),
    "offset is a float": (raw({"x": tensor([2], [0.0, 8])}, bytes(8)), "does not fit"),
    "offset is true": (raw({"x": tensor([1], [0, True], "U8")}, bytes(1)), "does not fit"),
    "three offsets": (raw({"x": tensor([2], [0, 4, 8])}, bytes(8)), "does not fit"),
    "negative shape": (raw({"x": tensor([-1, -2], [0, 8])}, bytes(8)), "does not fit"),
    "shape is a text": (raw({"x": tensor("2", [0, 8])}, bytes(8)), "does not fit"),
    "shape is an object": (raw({"x": tensor({}, [0, 4])}, bytes(4)), "does not fit"),
    "too few bytes": (raw({"x": tensor([3], [0, 8])}, bytes(8)), "F32 [3] in 8 bytes"),
    "too many bytes": (raw({"x": tensor([1], [0, 8])}, bytes(8)), "F32 [1] in 8 bytes"),
    "size that overflows": (raw({"x": tensor([1 << 33, 1 << 33], [0, 8])}, bytes(8)), "in 8 bytes"),
    "half a byte": (raw({"x": tensor([3], [0, 1], "F4")}, bytes(1)), "F4 [3] in 1 bytes"),
    "type with a control code": (raw({"x": tensor([2], [0, 8], "\x1b[2J")}, bytes(8)), "does not fit"),
    "type is a list": (raw({"x": tensor([2], [0, 8], [])}, bytes(8)), "does not fit"),
    "overlap": (raw({"x": tensor([2], [0, 8]), "y": tensor([2], [4, 12])}, bytes(12)), "'y' overlaps"),
    "same bytes": (raw({"x": tensor([2], [0, 8]), "y": tensor([2], [0, 8])}, bytes(8)), "overlaps"),
    "hole": (raw({"x": tensor([2], [4, 12])}, bytes(12)), "'x' leaves a hole"),
    "data of nobody": (raw({"x": tensor([2], [0, 8])}, bytes(9)), "1 bytes at the end"),
}


@pytest.mark.parametrize("case", LIES)
def test_lying_file_gives_one_error_that_names_it(case: str, tmp_path: Path) -> None:
    content, message = LIES[case]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError) as caught:
        TensorFile.open(path)
    assert message in str(caught.value).replace("what does not", "does not")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)  # a hole: takes no disk
    with pytest.raises(FileError, match="100000001 bytes of 200000000"):
        TensorFile.open(path)


@pytest.mark.parametrize(("shape", "count"), [([0, 1 << 70], 0), ([0] + [1 << 62] * 3, 0), ([1] * 100, 1)])
def test_shape_that_numpy_lacks_is_an_error_of_that_tensor(shape: list[int], count: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({"x": tensor(shape, [0, 4 * count])}, bytes(4 * count)))
    file = TensorFile.open(path)
    with pytest.raises(FileError, match="'x' of shape"):
        file.array("x")


def test_type_that_is_not_known_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw({"x": tensor([5], [0, 3], "I4"), "y": tensor([4], [3, 5], "F4")}, b"abcde"))
    file = TensorFile.open(path)
    assert [file.stored(name).tobytes() for name in "xy"] == [b"abc", b"de"]
    for name in "xy":
        with pytest.raises(NotImplementedError, match=f"{name!r} is"):
            file.array(name)


def good_file() -> tuple[dict[str, Any], bytes]:
    header = {
        "__metadata__": {"format": "pt"}, "a": tensor([2, 3], [0, 24]), "b": tensor([4], [24, 32], "BF16"),
        "c": tensor([0], [32, 32]), "d": tensor([4, 2], [32, 40], "F8_E4M3"), "e": tensor([], [40, 41], "U8"),
    }
    return header, RNG.integers(0, 256, 41, np.uint8).tobytes()


NUMBERS = [0, 1, -1, 2, 8, 24, 40, 41, 42, 1 << 31, 1 << 63, (1 << 64) + 24, 0.5, None, True, "8", [], {}, [[]]]


def mutate(rng: np.random.Generator, value: Any) -> Any:
    """A JSON value with one thing in it changed, dropped or doubled."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[int(rng.integers(len(keys)))]
        changed = value.copy()
        if rng.random() < 0.15:
            del changed[key]
        else:
            changed[key] = mutate(rng, value[key])
        return changed
    if isinstance(value, str) and rng.random() < 0.7:
        return str(rng.choice(["F32", "F16", "F8_E5M2", "F4", "I4", "U8", "", "F64", "\x1b[2J"]))
    return NUMBERS[int(rng.integers(len(NUMBERS)))]


def same_as_the_package(path: Path) -> bool:
    """Whether a file is refused. We must refuse what the package refuses and read what it reads, with two exceptions:

    it refuses types that it does not know, whose bytes we keep, and takes the last of two fields of one name.
    """
    try:
        theirs: Any = package(path)
    except safetensors.SafetensorError:
        theirs = None
    try:
        found = ours(path)
    except FileError as error:
        assert "\n" not in str(error)
        assert theirs is None or "twice" in str(error), error
        return True
    if any(kind not in TYPES for kind, _, _ in found.values()):
        assert theirs is None
    else:
        assert theirs == found
    return False


@pytest.mark.parametrize("seed", range(8))
def test_mutated_headers_are_refused_or_read_as_the_package_reads_them(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    header, data = good_file()
    path, refused = tmp_path / "a.safetensors", 0
    for _ in range(150):
        changed = header
        for _ in range(int(rng.integers(1, 3))):
            changed = mutate(rng, changed)
        path.write_bytes(raw(changed, data))
        refused += same_as_the_package(path)
    assert 75 < refused < 150


@pytest.mark.parametrize("seed", range(8))
def test_flipped_and_cut_bytes_are_refused_or_read_as_the_package_reads_them(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(100 + seed)
    whole = raw(*good_file())
    path, refused = tmp_path / "a.safetensors", 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            content[int(rng.integers(len(content) - 41))] = int(rng.integers(256))
        if rng.random() < 0.3:
            content = content[: int(rng.integers(len(content)))]
        path.write_bytes(content)
        refused += same_as_the_package(path)
    assert refused > 75


# --- all or nothing -----------------------------------------------------------------------------

X = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
PLAN = {"x": Planned("F32", (2, 3))}


def interrupted(path: Path, error: BaseException, before: Callable[[Any], None]) -> None:
    with pytest.raises(type(error)), writing(path, PLAN, {}) as put:
        before(put)
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), ValueError("x"), MemoryError()], ids=repr)
@pytest.mark.parametrize("there", [False, True])
def test_interrupted_writing_leaves_what_was_there(error: BaseException, there: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if there:
        path.write_text("old")
    for before in (lambda put: None, lambda put: put("x", X["x"])):
        interrupted(path, error, before)
        assert os.listdir(tmp_path) == (["a.safetensors"] if there else [])
        assert not there or path.read_text() == "old"


def test_interrupt_as_the_file_is_opened_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*arguments: Any) -> None:
        open(*arguments).close()
        raise KeyboardInterrupt

    monkeypatch.setattr("hqarray.tensorfile.open", opened, raising=False)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.safetensors", X)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_names_the_file_and_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "a.safetensors", X)
    assert caught.value.filename == str(tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


def test_writing_replaces_only_where_it_may(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, X)
    with pytest.raises(FileExistsError), writing(path, PLAN, {}, replace=False):
        raise AssertionError("it must not begin")
    with pytest.raises(FileExistsError), writing(tmp_path / "b", PLAN, {}, replace=False) as put:
        put("x", X["x"])
        (tmp_path / "b").write_text("came in between")
    assert (tmp_path / "b").read_text() == "came in between"
    write(path, {"x": X["x"] + 1})
    assert TensorFile.open(path).array("x")[0, 0] == 1
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b"]


def test_arrays_mapped_from_a_file_can_be_written_over_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, X)
    mapped = TensorFile.open(path).array("x")
    write(path, {"y": mapped, "z": mapped})
    assert TensorFile.open(path).array("z").tolist() == mapped.tolist() == X["x"].tolist()


def test_missing_folder_and_folder_itself_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write(tmp_path / "no" / "a.safetensors", X)
    assert caught.value.filename == str(tmp_path / "no" / "a.safetensors")
    with pytest.raises(IsADirectoryError):
        write(tmp_path, X)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", X)
    (tmp_path / "b").touch()
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


def test_header_is_no_longer_than_may_be_and_keeps_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be called __metadata__"):
        write(tmp_path / "a.safetensors", {"__metadata__": X["x"]})
    monkeypatch.setattr("hqarray.tensorfile.HEADER_LIMIT", 100)
    with pytest.raises(ValueError, match="beyond the format's limit"):
        write(tmp_path / "a.safetensors", {"x" * 100: X["x"]})
    assert os.listdir(tmp_path) == []


def test_dtype_without_a_name_is_refused() -> None:
    for dtype in (np.dtype("longdouble"), np.dtype(complex), np.dtype(object), np.dtype("M8[s]"), np.dtype("U3")):
        with pytest.raises(TypeError, match="'x' has dtype"):
            type_name(dtype, "'x'")


def test_numpy_file_of_the_package_is_read(tmp_path: Path) -> None:
    save_file(X, tmp_path / "a.safetensors", {"m": "n"})
    file = TensorFile.open(tmp_path / "a.safetensors")
    assert file.metadata == {"m": "n"}
    assert np.array_equal(file.array("x"), X["x"])
