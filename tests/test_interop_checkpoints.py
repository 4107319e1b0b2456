"""Other programs' checkpoints: decoded as scalar twins of their documents say, written and read back."""

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
from test_tensorfile import raw

import hqarray as hq
from hqarray import testing
from hqarray.interop.safetensors import load, save
from hqarray.testing import assert_bitwise_equal

RNG = np.random.default_rng(0)
X = RNG.standard_normal((130, 97)).astype(np.float32)


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


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_tensors_that_are_not_aligned_are_read_and_multiplied(shift: int, tmp_path: Path) -> None:
    x = RNG.standard_normal((4, 256)).astype(np.float32)
    array = hq.quantize(x, rowwise="fp8_block_1x128").rowwise
    checkpoint(tmp_path / "a.safetensors", {
        "shift": ("U8", [shift], bytes(shift)), "w_scale": ("F32", [4, 2], array.scales.tobytes()),
        "w": ("F8_E4M3", [4, 256], array.codes.tobytes()), "x": ("F32", [4, 256], x.tobytes()),
    })
    found = load(tmp_path / "a.safetensors")
    whole = hq.quantize(x, rowwise="fp8_block_1x128")
    assert_bitwise_equal(found["w"].dequantize(), whole.dequantize())
    assert_bitwise_equal(found["w"].rowwise.packed().scales, whole.rowwise.scales)
    assert_bitwise_equal(hq.quantize(found["x"], rowwise="nvfp4"), hq.quantize(x, rowwise="nvfp4"))
    assert_bitwise_equal(found["w"] @ found["w"].T, whole @ whole.T)
    save(tmp_path / "b.safetensors", found)
    assert_bitwise_equal(load(tmp_path / "b.safetensors")["w"].dequantize(), whole.dequantize())


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
