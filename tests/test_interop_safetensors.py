"""Arrays in safetensors files: bit-exact both ways, readable by others, and other programs' checkpoints decoded."""

import json
import math
import os
import struct
from fractions import Fraction
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


@pytest.mark.parametrize("format", hq.FORMATS)
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


@pytest.mark.parametrize("format", hq.FORMATS)
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


# --- scalar twins of the checkpoints' own documents ---------------------------------------------

E2M1 = [0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6]


def e4m3(byte: int) -> Fraction:
    """OCP OFP8: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits; S.1111.111 is NaN and not asked for here."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    size = Fraction(mantissa, 8 * 64) if exponent == 0 else normal
    return -size if byte & 128 else size


def fp4(code: int) -> Fraction:
    return Fraction(-E2M1[code & 7] if code & 8 else E2M1[code & 7])


def float32(value: Fraction) -> float:
    """Rounded to nearest even; these tests stay in float32's normal range."""
    if not value:
        return 0.0
    exponent = math.floor(math.log2(abs(value))) - 23
    rounded = float(round(value / Fraction(2) ** exponent) * Fraction(2) ** exponent)
    assert rounded == np.float32(rounded)
    return rounded


def checkpoint(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A file written by hand, as other programs do: entries in order, one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (kind, shape, content) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    path.write_bytes(raw(header, data))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def codes(count: int, *, avoid: tuple[int, ...] = ()) -> bytes:
    return bytes(b if b not in avoid else 0 for b in RNG.integers(0, 256, count).tolist())


NAN = (0x7F, 0xFF)


def test_deepseek_blocks_decode_as_the_scalar_twin_says(tmp_path: Path) -> None:
    """weight[i, j] = e4m3(codes[i, j]) * weight_scale_inv[i // 128, j // 128], ragged blocks and all."""
    n, k = 150, 260
    weight = codes(n * k, avoid=NAN)
    scales = [0.001, 0.5, 3.25e-4, 7.0, 1e-5, 0.3]
    name = "model.layers.0.self_attn.q_a_proj.weight"
    path = tmp_path / "a.safetensors"
    checkpoint(path, {
        name: ("F8_E4M3", [n, k], weight), f"{name}_scale_inv": ("F32", [2, 3], floats(*scales)),
        "model.norm.weight": ("BF16", [4], bytes(8)),
    })
    found = load(path, dtype=ml_dtypes.bfloat16)
    assert list(found) == [name, "model.norm.weight"]
    array = found[name]
    assert array.rowwise.format.name == "fp8_block_128x128" and array.dtype == ml_dtypes.bfloat16
    assert np.shares_memory(array.rowwise.codes, found.file.memory)
    decoded = array.dequantize(dtype=np.float32)
    for i in range(0, n, 7):
        for j in range(k):
            scale = Fraction(float(np.float32(scales[i // 128 * 3 + j // 128])))
            assert decoded[i, j] == float32(e4m3(weight[i * k + j]) * scale), (i, j)


@pytest.mark.parametrize(("blocks", "scales"), [("_blocks", "_scales"), (".blocks", ".scales")])
def test_gpt_oss_blocks_decode_as_the_scalar_twin_says(blocks: str, scales: str, tmp_path: Path) -> None:
    """Byte b of block g holds elements 32 g + 2 b (low nibble) and 32 g + 2 b + 1; a scale is 2^(byte - 127)."""
    experts, n, groups = 3, 5, 2
    packed, exponents = codes(experts * n * groups * 16), bytes(RNG.integers(100, 140, experts * n * groups).tolist())
    name = "model.layers.7.mlp.experts.gate_up_proj"
    path = tmp_path / "a.safetensors"
    checkpoint(path, {
        f"{name}_bias": ("BF16", [3, 5], bytes(30)), name + blocks: ("U8", [experts, n, groups, 16], packed),
        name + scales: ("U8", [experts, n, groups], exponents),
    })
    found = load(path)
    assert list(found) == [f"{name}_bias", name]
    array = found[name]
    assert array.shape == (experts, n, 64) and array.rowwise.format.name == "mxfp4"
    assert np.shares_memory(array.rowwise.codes, found.file.memory)
    decoded = array.dequantize()
    for e in range(experts):
        for i in range(n):
            for j in range(64):
                at = (e * n + i) * groups + j // 32
                byte = packed[at * 16 + j % 32 // 2]
                code = byte >> 4 if j % 2 else byte & 15
                assert decoded[e, i, j] == float32(fp4(code) * Fraction(2) ** (exponents[at] - 127))
                assert np.signbit(decoded[e, i, j]) == (code >= 8)


@pytest.mark.parametrize("divided", [False, True], ids=["ModelOpt", "compressed-tensors"])
def test_nvfp4_decodes_as_the_scalar_twin_says(divided: bool, tmp_path: Path) -> None:
    """ModelOpt: fp4 * e4m3 scale * weight_scale_2; compressed-tensors: fp4 * e4m3 scale / weight_global_scale."""
    n, k = 6, 48
    packed, scales = codes(n * k // 2), bytes(b & 127 for b in codes(n * k // 16, avoid=NAN))
    base = "model.layers.0.mlp.down_proj."
    second = 1536.5 if divided else 0.0123
    names = ("weight_packed", "weight_scale", "weight_global_scale") if divided else (
        "weight", "weight_scale", "weight_scale_2"
    )
    path = tmp_path / "a.safetensors"
    checkpoint(path, {
        f"{base}input_scale": ("F32", [], floats(2.5)), base + names[0]: ("U8", [n, k // 2], packed),
        base + names[1]: ("F8_E4M3", [n, k // 16], scales),
        base + names[2]: ("F32", [1] if divided else [], floats(second)),
    })
    found = load(path)
    assert list(found) == [f"{base}input_scale", f"{base}weight"]
    array = found[f"{base}weight"]
    assert array.rowwise.format.name == "nvfp4" and array.shape == (n, k)
    g = Fraction(float(np.float32(second)))
    g = Fraction(float32(1 / g)) if divided else g
    decoded = array.dequantize()
    for i in range(n):
        for j in range(k):
            byte = packed[i * k // 2 + j // 2]
            exact = fp4(byte >> 4 if j % 2 else byte & 15) * e4m3(scales[i * 3 + j // 16]) * g
            assert decoded[i, j] == float32(exact), (i, j)


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
@pytest.mark.parametrize("ending", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_fp8_of_one_scale_decodes_as_the_scalar_twin_says(
    shape: list[int], ending: str, kind: str, tmp_path: Path
) -> None:
    weight, scale = codes(5 * 200, avoid=NAN), 0.0390625
    stored = floats(scale) if kind == "F32" else floats(scale)[2:]
    block = ending == "_scale_inv" and len(shape) == 2  # the one block of a small matrix
    checkpoint(tmp_path / "a.safetensors", {
        "w.weight": ("F8_E4M3", [100, 10] if block else [200, 5], weight),
        f"w.weight{ending}": (kind, shape, stored),
    })
    array = load(tmp_path / "a.safetensors")["w.weight"]
    assert array.rowwise.format.name == ("fp8_block_128x128" if block else "fp8_e4m3")
    expected = [float32(e4m3(byte) * Fraction(scale)) for byte in weight]
    assert array.dequantize().reshape(-1).tolist() == expected


def test_other_forms_that_are_exact_in_a_format_are_read(tmp_path: Path) -> None:
    weight, powers = codes(4 * 256, avoid=NAN), bytes([120, 127, 130, 125] * 8)
    path = tmp_path / "a.safetensors"
    checkpoint(path, {
        "mx.weight": ("F8_E4M3", [4, 256], weight), "mx.weight_scale": ("U8", [4, 8], powers),
        "mx8.weight": ("F8_E5M2", [4, 256], weight), "mx8.weight_scale": ("F8_E8M0", [4, 8], powers),
        "mx4.weight_packed": ("U8", [4, 128], weight[:512]), "mx4.weight_scale": ("U8", [4, 8], powers),
        "pow2.weight": ("F8_E4M3", [4, 256], weight), "pow2.weight_scale_inv": ("F8_E8M0", [1, 2], powers[:2]),
        "rows.weight": ("F8_E4M3", [4, 256], weight),
        "rows.weight_scale": ("F32", [4, 2], floats(1, 2, 3, 4, 5, 6, 7, 8)),
        "experts": ("F8_E4M3", [2, 128, 4], weight),
        "experts_scale_inv": ("F32", [2, 1, 1], floats(1, 2)),
        "raw": ("F8_E4M3", [4, 256], weight),
    })
    found = load(path)
    assert {name: found[name].rowwise.format.name for name in found if name != "raw"} == {
        "mx.weight": "mxfp8", "mx8.weight": "mxfp8_e5m2", "mx4.weight": "mxfp4",
        "pow2.weight": "fp8_block_128x128_pow2", "rows.weight": "fp8_block_1x128", "experts": "fp8_block_128x128",
    }
    assert found["raw"].dtype.name == "float8_e4m3fn" and found["raw"].tobytes() == weight
    assert found["pow2.weight"].dequantize()[3, 200] == e4m3(weight[3 * 256 + 200])
    assert found["experts"].dequantize()[1, 3, 2] == 2 * e4m3(weight[512 + 14])
    assert found["rows.weight"].dequantize()[2, 128] == 6 * e4m3(weight[2 * 256 + 128])


UNREADABLE: dict[str, dict[str, tuple[str, list[int], bytes]]] = {
    "a scale per row": {"w": ("F8_E4M3", [4, 256], bytes(1024)), "w_scale": ("F32", [4, 1], bytes(16))},
    "blocks of 64": {"w": ("F8_E4M3", [128, 128], bytes(16384)), "w_scale_inv": ("F32", [2, 2], bytes(16))},
    "NVFP4 without scale_2": {"w": ("U8", [4, 8], bytes(32)), "w_scale": ("F8_E4M3", [4, 1], bytes(4))},
    "scale_2 of many": {"w": ("U8", [4, 8], bytes(32)), "w_scale": ("F8_E4M3", [4, 1], bytes(4)),
                        "w_scale_2": ("F32", [4], bytes(16))},
    "swizzled scales": {"w": ("U8", [4, 8], bytes(32)), "w_scale": ("U8", [512], bytes(512)),
                        "w_scale_2": ("F32", [], bytes(4))},
    "FP8 of another kind": {"w": ("F8_E4M3FNUZ", [4, 4], bytes(16)), "w_scale": ("F32", [], bytes(4))},
    "int8": {"w": ("I8", [4, 4], bytes(16)), "w_scale": ("F32", [], bytes(4))},
    "int4": {"w_packed": ("I32", [4, 4], bytes(64)), "w_scale": ("BF16", [4, 1], bytes(8))},
    "blocks of 24": {"w_blocks": ("U8", [4, 2, 12], bytes(96)), "w_scales": ("U8", [4, 2], bytes(8))},
    "scales of another shape": {"w_blocks": ("U8", [4, 2, 16], bytes(128)), "w_scales": ("U8", [8], bytes(8))},
    "blocks that cross matrices": {"w": ("F8_E4M3", [2, 100, 4], bytes(800)),
                                   "w_scale_inv": ("F32", [2, 1, 1], bytes(8))},
    "a number": {"w": ("F8_E4M3", [], bytes(1)), "w_scale": ("F32", [], bytes(4))},
    "float64 scale": {"w": ("F8_E4M3", [4, 4], bytes(16)), "w_scale": ("F64", [], bytes(8))},
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_unknown_convention_names_the_tensors_and_spares_the_rest(case: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "a.safetensors", {**UNREADABLE[case], "other": ("F32", [1], floats(1))})
    found = load(tmp_path / "a.safetensors")
    assert set(found) == {"w", "other"}
    assert found["other"].tolist() == [1]
    with pytest.raises(NotImplementedError, match="'w': no format has codes and scales like 'w") as caught:
        found["w"]
    for name in UNREADABLE[case]:
        assert repr(name) in str(caught.value)
        assert found.stored(name).nbytes == len(UNREADABLE[case][name][2])


def test_scales_of_nobody_and_floats_beside_scales_are_plain(tmp_path: Path) -> None:
    tensors = {"w": ("BF16", [2, 2], bytes(8)), "w_scale": ("F32", [], bytes(4)), "v_scale": ("F32", [], bytes(4)),
               "u_blocks": ("U8", [2, 16], bytes(32)), "t_blocks": ("U8", [2, 16], bytes(32)),
               "t_scales": ("U8", [2], bytes(2)), "t": ("F32", [], bytes(4))}
    checkpoint(tmp_path / "a.safetensors", tensors)
    found = load(tmp_path / "a.safetensors")
    assert set(found) == set(tensors)
    assert all(isinstance(found[name], np.ndarray) for name in found)


# --- writing checkpoints ------------------------------------------------------------------------


STYLES = {
    "fp8": ("fp8_e4m3", {"w": ("F8_E4M3", [70, 96]), "w_scale": ("F32", [])}),
    "fp8 e5m2": ("fp8_e5m2", {"w": ("F8_E5M2", [70, 96]), "w_scale": ("F32", [])}),
    "fp8_block": ("fp8_block_128x128", {"w": ("F8_E4M3", [70, 96]), "w_scale_inv": ("F32", [1, 1])}),
    "mxfp4": ("mxfp4", {"w_blocks": ("U8", [70, 3, 16]), "w_scales": ("U8", [70, 3])}),
    "nvfp4": ("nvfp4", {"w": ("U8", [70, 48]), "w_scale": ("F8_E4M3", [70, 6]), "w_scale_2": ("F32", [])}),
}


@pytest.mark.parametrize("case", STYLES)
@pytest.mark.parametrize("matrix", ["gauss", "negative_zeros", "nans", "infinities", "all_zero", "subnormals"])
def test_written_checkpoint_has_the_tensors_of_its_style_and_comes_back(
    case: str, matrix: str, tmp_path: Path
) -> None:
    format, tensors = STYLES[case]
    x = testing.matrix(matrix, (70, 96))
    array, path = hq.quantize(x, rowwise=format), tmp_path / "a.safetensors"
    save(path, {"w": array, "norm": x[0]}, style=case.split()[0])
    found = {name: (entry["dtype"], entry["shape"]) for name, entry in safetensors.deserialize(path.read_bytes())}
    assert found == {**tensors, "norm": ("F32", [96])}
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    back = load(path)["w"]
    part, wrote = back.rowwise, array.rowwise
    assert part.format == wrote.format
    for ours, theirs in ((part.codes, wrote.codes), (part.scales, wrote.scales),
                         (part.global_scale, wrote.global_scale)):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.tobytes() == np.ascontiguousarray(theirs).tobytes()
    assert_bitwise_equal(back.dequantize(), array.dequantize())


def test_matrices_of_many_experts_are_written_and_read(tmp_path: Path) -> None:
    x = RNG.standard_normal((3, 128, 64)).astype(np.float32)
    for style, format in (("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("fp8_block", "fp8_block_128x128_pow2")):
        array = hq.quantize(x, rowwise=format)
        save(tmp_path / "a.safetensors", {"w": array}, style=style)
        back = load(tmp_path / "a.safetensors")["w"]
        assert back.shape == x.shape
        assert_bitwise_equal(back.dequantize(), array.dequantize())
    with pytest.raises(NotImplementedError, match="'w' is"):
        save(tmp_path / "b", {"w": hq.quantize(x[:, :100], rowwise="fp8_block_128x128")}, style="fp8_block")


@pytest.mark.parametrize(
    ("array", "style", "error", "message"),
    [
        (hq.quantize(X, rowwise="mxfp8"), "fp8", ValueError, "'w' is mxfp8, and style 'fp8' holds fp8_e4m3 or"),
        (hq.quantize(X, rowwise="mxfp4"), "nvfp4", ValueError, "'w' is mxfp4"),
        (hq.quantize(X, rowwise="mxfp4"), "mxfp4", ValueError, "a last axis of a multiple of 32"),
        (hq.quantize(X, rowwise="nvfp4"), "nvfp4", ValueError, "a last axis of a multiple of 16"),
        (hq.quantize(X, rowwise="fp8_e4m3", columnwise="fp8_e4m3"), "fp8", ValueError, "drop(columnwise=True)"),
        (hq.quantize(X, columnwise="fp8_e4m3"), "fp8", ValueError, "use array.T"),
        (hq.grouped_quantize(X, [130], rowwise="fp8_e4m3"), "fp8", NotImplementedError, "GroupedArray"),
        (hq.quantize(X, rowwise="fp8_e4m3"), "fp9", ValueError, "style='fp9' is not one of 'hqarray'"),
        (hq.quantize(X, rowwise="fp8_e4m3").rowwise, "hqarray", TypeError, "HybridArray(rowwise=part)"),
        ([1.0], "hqarray", TypeError, "'w' is list"),
        (np.array([object()]), "hqarray", TypeError, "'w' has dtype object"),
        (np.ma.masked_array([1.0], [True]), "hqarray", TypeError, "masked array"),
    ],
)
def test_what_a_style_cannot_hold_is_named_and_no_file_is_left(
    array: Any, style: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        save(tmp_path / "a.safetensors", {"x": X, "w": array}, style=style)
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_names_and_keys_that_collide_are_refused(tmp_path: Path) -> None:
    array = hq.quantize(X, rowwise="mxfp8")
    with pytest.raises(ValueError, match=r"'w' needs a tensor 'w.rowwise.codes'"):
        save(tmp_path / "a", {"w.rowwise.codes": X, "w": array})
    with pytest.raises(ValueError, match="metadata format: these keys"):
        save(tmp_path / "a", {"w": array}, metadata={"format": "pt"})
    assert os.listdir(tmp_path) == []


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
