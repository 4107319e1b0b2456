"""Arrays in safetensors files: bit-exact both ways, readable by others; lying metadata is found."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from test_tensorfile import mutate, raw

import hqarray as hq
from hqarray import testing
from hqarray.grouped_parts import ScatteredPart
from hqarray.interop.safetensors import FileError, load, save
from hqarray.tensorfile import TensorFile
from hqarray.testing import assert_bitwise_equal

RNG = np.random.default_rng(0)
X = RNG.standard_normal((130, 97)).astype(np.float32)


def same_groups(actual: Any, expected: hq.GroupedArray) -> None:
    assert isinstance(actual, hq.GroupedArray)
    assert (actual.shape, actual.dtype, actual.alignment) == (expected.shape, expected.dtype, expected.alignment)
    for ours, theirs in ((actual.rows, expected.rows), (actual.columns, expected.columns)):
        assert (ours.capacity, ours.each, ours.values.tolist()) == (
            theirs.capacity, theirs.each, theirs.values.tolist()
        )
    assert [name for name, _ in actual.parts()] == [name for name, _ in expected.parts()]
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise_equal(one, other)


# --- our own files ------------------------------------------------------------------------------


OPTIONS = ("nvfp4(rht=true,four_over_six=mae)", "nvfp4_row(rht=true,global_bound=256)", "mxfp4(block=32x32)")
"""Formats that no short name stands for."""


@pytest.mark.parametrize("format", [*hq.FORMATS, *OPTIONS])
@pytest.mark.parametrize("shape", testing.SHAPES)
def test_hybrid_arrays_come_back_bit_for_bit(format: str, shape: str, tmp_path: Path) -> None:
    x = testing.matrix("nans", testing.SHAPES[shape])
    arrays = {
        "both": hq.quantize(x, rowwise=format, columnwise="nvfp4"),
        "columns": hq.quantize(x.astype(np.float16), columnwise=format),
        "derived": hq.quantize(x, rowwise=format, columnwise="mxfp6_e2m3", columnwise_source="rowwise_dequantized"),
    }
    save(tmp_path / "a.safetensors", arrays)
    found = load(tmp_path / "a.safetensors")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert_bitwise_equal(found[name], array)
        assert found[name].derived == array.derived


@pytest.mark.parametrize("matrix", testing.MATRICES)
def test_every_kind_of_value_survives(matrix: str, tmp_path: Path) -> None:
    x = testing.matrix(matrix, (35, 61))
    arrays = {f"{format}": hq.quantize(x, rowwise=format, columnwise=format) for format in hq.FORMATS}
    save(tmp_path / "a.safetensors", arrays)
    for name, array in load(tmp_path / "a.safetensors").items():
        assert_bitwise_equal(array, arrays[name])
        assert_bitwise_equal(array.dequantize(), arrays[name].dequantize())


def test_every_code_survives_nan_and_minus_zero_among_them(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scales = np.arange(8, dtype=np.uint8).reshape(2, 4) * 36 + 3
    arrays = {
        name: hq.HybridArray(hq.QuantizedArray.from_buffers(codes, scales, name, (2, 128)))
        for name in ("mxfp8", "mxfp8_e5m2")
    }
    arrays["odd"] = hq.HybridArray(hq.QuantizedArray.from_buffers(codes[:, :50], scales, "mxfp4", (2, 99)))
    save(tmp_path / "a.safetensors", arrays)
    for name, array in load(tmp_path / "a.safetensors").items():
        assert_bitwise_equal(array, arrays[name])


def test_fields_of_a_format_and_the_nominal_dtype_are_kept(tmp_path: Path) -> None:
    arrays = {
        "a": hq.quantize(X.astype(ml_dtypes.bfloat16), rowwise="mxfp8(rule=floor)", columnwise="fp8_e4m3(pow2=true)"),
        "b": hq.quantize(X.reshape(13, 10, 97), rowwise=hq.FP8Block("e5m2", (1, 128), epsilon=0.25)),
        "c": hq.quantize(X.astype(np.float16), rowwise="bf16", columnwise=hq.HighPrecision()),
    }
    save(tmp_path / "a.safetensors", arrays, metadata={"note": "mine"})
    found = load(tmp_path / "a.safetensors")
    assert found.metadata == {"note": "mine"}
    for name, array in arrays.items():
        assert_bitwise_equal(found[name], array)
        assert [p.format for _, p in found[name].parts()] == [p.format for _, p in array.parts()]
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)


def groups() -> dict[str, hq.GroupedArray]:
    def ragged(**formats: Any) -> hq.GroupedArray:
        return hq.grouped_quantize(X, [7, 0, 33, 90], **formats)

    members = [RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 40), (17, 5), (0, 8), (128, 129))]
    made = {
        "rows": ragged(rowwise="mxfp8", columnwise="nvfp4"),
        "capacity": hq.grouped_quantize(X, [7, 0, 33], rowwise="fp8_e4m3", columnwise="fp8_block_1x128"),
        "aligned": hq.grouped_quantize(X, [7, 20, 33], rowwise="nvfp4", columnwise="mxfp4", alignment=32),
        "uniform": hq.grouped_quantize(X.reshape(5, 26, 97), rowwise="fp8_block_128x128", columnwise="fp8_e5m2"),
        "high": hq.GroupedArray.from_stacked(np.ascontiguousarray(X[:, :96]).reshape(5, 26, 96)),
        "scattered": hq.GroupedArray.from_arrays(members, rowwise="nvfp4", columnwise="mxfp6_e3m2"),
        "none": hq.grouped_quantize(X[:0], [], rowwise="mxfp8"),
        "half": hq.grouped_quantize(X.astype(np.float16), [100, 30], columnwise="fp16"),
    }
    made["turned"] = made["rows"].T
    made["range"] = made["rows"].split(2)[1]
    made["first"] = made["aligned"].T.split(3)[0]
    return made


@pytest.mark.parametrize("name", groups())
def test_groups_come_back_bit_for_bit_with_their_sizes(name: str, tmp_path: Path) -> None:
    group = groups()[name]
    save(tmp_path / "a.safetensors", {"g": group, "x": X})
    found = load(tmp_path / "a.safetensors")
    assert list(found) == ["g", "x"]
    same_groups(found["g"], group)
    save(tmp_path / "b.safetensors", found)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("format", [*hq.FORMATS, *OPTIONS])
@pytest.mark.parametrize("sizes", [[130], [0, 1, 129], [17, 16, 97, 0]])
def test_groups_of_every_format_come_back(format: str, sizes: list[int], tmp_path: Path) -> None:
    group = hq.grouped_quantize(X, sizes, rowwise=format, columnwise=format)
    save(tmp_path / "a.safetensors", {"g": group})
    same_groups(load(tmp_path / "a.safetensors")["g"], group)


def test_group_in_a_file_multiplies_as_before(tmp_path: Path) -> None:
    group = hq.grouped_quantize(X, [60, 70], rowwise="mxfp8", columnwise="mxfp8")
    weights = hq.GroupedArray.from_stacked(X[:80].reshape(2, 40, 97), rowwise="mxfp8")
    save(tmp_path / "a.safetensors", {"g": group, "w": weights})
    found = load(tmp_path / "a.safetensors")
    assert_bitwise_equal(found["g"] @ found["w"].T, group @ weights.T)


def test_plain_arrays_are_the_tensors_they_are(tmp_path: Path) -> None:
    arrays = {"f": X, "s": np.float32(3), "h": X.astype(ml_dtypes.bfloat16), "i": np.arange(3), "b": X > 0}
    save(tmp_path / "a.safetensors", arrays)
    found = load(tmp_path / "a.safetensors")
    for name, array in arrays.items():
        assert_bitwise_equal(found[name], np.asarray(array))
    assert found["s"].shape == ()


def test_tensors_of_torch_and_jax_are_saved_with_their_types(tmp_path: Path) -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    x = torch.linspace(-3, 3, 24).reshape(4, 6)
    given = {"f32": x.requires_grad_(), "bf16": x.detach().bfloat16().t(), "e5m2": x.detach().to(torch.float8_e5m2),
             "i64": torch.arange(3), "jax": jnp.arange(5, dtype=jnp.float16)}
    save(tmp_path / "x", given)
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        for name in ("f32", "bf16", "e5m2", "i64"):
            there = file.get_tensor(name)
            assert there.dtype == given[name].dtype
            ours, theirs = (t.detach().contiguous().view(torch.uint8) for t in (there, given[name]))
            assert torch.equal(ours, theirs)
    assert (load(tmp_path / "x")["jax"] == np.arange(5, dtype=np.float16)).all()
    for bad, text in ((x.detach().to_sparse(), "cannot be read by DLPack"), ([1.0], "'bad' is list; save takes")):
        with pytest.raises(TypeError, match=text):
            save(tmp_path / "y", {"bad": bad})
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_buffers_are_the_file_and_nothing_is_read_at_once(tmp_path: Path) -> None:
    array = hq.quantize(X, rowwise="mxfp8", columnwise="nvfp4")
    save(tmp_path / "a.safetensors", {"w": array, "x": X})
    found = load(tmp_path / "a.safetensors")
    for _, part in found["w"].parts():
        for buffer in (part.codes, part.scales, part.global_scale, part.amax):
            assert buffer is None or (np.shares_memory(buffer, found.file.memory) and not buffer.flags.writeable)
    assert np.shares_memory(found["x"], found.file.memory)
    with pytest.raises(ValueError, match=r"read-only; .copy\(\)"):
        hq.requantize(found["w"], X)
    own = found["w"].copy()
    hq.requantize(own, X * 2)
    assert_bitwise_equal(own.dequantize(), hq.quantize(X * 2, rowwise="mxfp8", columnwise="nvfp4").dequantize())


def test_a_file_larger_than_memory_is_opened_and_read_in_part(tmp_path: Path) -> None:
    outer, k = 1 << 21, 1 << 20  # 2 TiB of codes in a file of holes
    header = {
        "__metadata__": {"format": "hqarray", "version": "1", "arrays": json.dumps(
            {"w": {"kind": "hybrid", "dtype": "float32", "shape": [outer, k], "derived": None, "rowwise": "fp8_e4m3"}}
        )},
        "w.rowwise.scales": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]},
        "w.rowwise.codes": {"dtype": "F8_E4M3", "shape": [outer, k], "data_offsets": [4, 4 + outer * k]},
    }
    start = raw(header)
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(start)
        try:
            file.truncate(len(start) + 4 + outer * k)
        except OSError as error:
            pytest.skip(f"no such large files here: {error}")
    array = load(tmp_path / "a.safetensors")["w"]
    assert array.shape == (outer, k)
    assert array.rowwise.codes[-1, -1] == 0


# --- what others see of our files ---------------------------------------------------------------


def test_package_finds_typed_tensors_of_logical_shape(tmp_path: Path) -> None:
    array = hq.quantize(X, rowwise="mxfp8_e5m2", columnwise="nvfp4")
    save(tmp_path / "a.safetensors", {
        "w": array, "v": hq.quantize(X, rowwise="fp8_block_128x128", columnwise="mxfp6_e2m3"),
        "u": hq.quantize(X, rowwise="fp8_e4m3", columnwise="bf16"),
        "g": hq.grouped_quantize(X, [30, 100], rowwise="fp8_e4m3"),
    })
    data = (tmp_path / "a.safetensors").read_bytes()
    found = {name: (entry["dtype"], entry["shape"]) for name, entry in safetensors.deserialize(data)}
    assert found == {
        "w.rowwise.codes": ("F8_E5M2", [130, 97]), "w.rowwise.scales": ("U8", [130, 4]),
        "w.columnwise.codes": ("U8", [97, 65]), "w.columnwise.scales": ("F8_E4M3", [97, 9]),
        "w.columnwise.global_scale": ("F32", [1]), "w.columnwise.amax": ("F32", [1]),
        "v.rowwise.codes": ("F8_E4M3", [130, 97]), "v.rowwise.scales": ("F32", [2, 1]),
        "v.columnwise.codes": ("U8", [97, 130]), "v.columnwise.scales": ("U8", [97, 5]),
        "u.rowwise.codes": ("F8_E4M3", [130, 97]), "u.rowwise.scales": ("F32", [1, 1]),
        "u.rowwise.amax": ("F32", [1]), "u.columnwise.codes": ("BF16", [97, 130]),
        "g.rowwise.codes": ("F8_E4M3", [130, 97]), "g.rowwise.scales": ("F32", [2]), "g.rowwise.amax": ("F32", [2]),
        "g.rows": ("I64", [2]),
    }
    with safetensors.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"]) == ("hqarray", "1")
    assert json.loads(metadata["arrays"])["w"] == {
        "kind": "hybrid", "dtype": "float32", "shape": [130, 97], "derived": None, "rowwise": "mxfp8_e5m2",
        "columnwise": "nvfp4",
    }


def test_torch_decodes_our_tensors_to_our_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    arrays = {"fp8": hq.quantize(X, rowwise="fp8_e4m3"), "block": hq.quantize(X, rowwise="fp8_block_1x128"),
              "mx": hq.quantize(X, rowwise="mxfp8")}
    save(tmp_path / "a.safetensors", arrays)
    tensors = load_file(tmp_path / "a.safetensors")
    for name, scale in (("fp8", tensors["fp8.rowwise.scales"]), ("block", tensors["block.rowwise.scales"]),
                        ("mx", torch.exp2(tensors["mx.rowwise.scales"].float() - 127))):
        values = tensors[f"{name}.rowwise.codes"].float()
        wide = scale.repeat_interleave({"fp8": 97, "block": 128, "mx": 32}[name], 1)[:, :97]
        assert np.array_equal((values * wide).numpy(), arrays[name].dequantize())


@pytest.mark.gpu
def test_arrays_on_a_gpu_make_the_same_file(tmp_path: Path) -> None:
    import cupy

    def arrays(module: Any) -> dict[str, Any]:
        x, sizes = module.asarray(X), np.array([30, 0, 90], np.int32)
        return {
            "w": hq.quantize(x, rowwise="mxfp8", columnwise="nvfp4"), "x": x,
            "g": hq.grouped_quantize(x, sizes if module is np else module.asarray(sizes), rowwise="fp8_e4m3"),
        }

    save(tmp_path / "cpu", arrays(np))
    save(tmp_path / "gpu", arrays(cupy))
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "gpu").read_bytes()


# --- lying metadata -----------------------------------------------------------------------------


def own_file(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    arrays = groups()
    save(path, {"w": hq.quantize(X, rowwise="mxfp8", columnwise="nvfp4"), "p": X[:2],
                **{name: arrays[name] for name in ("rows", "aligned", "uniform", "scattered")}})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["arrays"]), content[8 + length :]


LIES = {
    "no version": lambda m: m.pop("version"),
    "version of the future": lambda m: m.update(version="2"),
    "version is a text": lambda m: m.update(version="new"),
    "arrays are no JSON": lambda m: m.update(arrays="{"),
    "arrays are a list": lambda m: m.update(arrays="[1]"),
    "deep arrays": lambda m: m.update(arrays="[" * 100_000),
    "array of nothing": lambda m: m.update(arrays='{"w": {}}'),
    "array of no tensors": lambda m: m.update(arrays='{"no": {"kind": "hybrid", "dtype": "float32", "shape": [1, 1], '
                                                     '"derived": null, "rowwise": "mxfp8"}}'),
}


@pytest.mark.parametrize("case", LIES)
def test_lying_metadata_is_one_error(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header, _, data = own_file(path)
    LIES[case](header["__metadata__"])
    path.write_bytes(raw(header, data))
    with pytest.raises(FileError) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(6))
def test_mutated_descriptions_are_refused_or_give_arrays(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path / "a.safetensors"
    header, described, data = own_file(path)
    refused = 0
    for _ in range(120):
        header["__metadata__"]["arrays"] = json.dumps(mutate(rng, described))
        path.write_bytes(raw(header, data))
        try:
            found = load(path)
        except FileError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        for name in found:
            item = found[name]
            assert isinstance(item, (np.ndarray, hq.HybridArray, hq.GroupedArray))
            if not isinstance(item, np.ndarray):
                item.dequantize()
    assert refused > 60


def test_sizes_that_lie_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    own_file(path)
    file = TensorFile.open(path)
    content = bytearray(path.read_bytes())
    for values in ([-1, 0, 33, 90], [1 << 62, 1 << 62, 1 << 62, 1 << 62], [7, 0, 34, 90]):
        where = file.tensors["rows.rows"]
        content[where.begin : where.end] = np.array(values, "<i8").tobytes()
        path.write_bytes(content)
        with pytest.raises(FileError, match="'rows'"):
            load(path)


def test_scattered_is_what_the_case_says() -> None:
    assert isinstance(groups()["scattered"].rowwise, ScatteredPart)
