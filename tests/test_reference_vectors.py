"""Quantize against bytes that other libraries made: the golden vectors, and torchao where it is installed."""

import re
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import hqarray as hq
from hqarray import hadamard, testing

VECTORS = np.load(Path(__file__).parent / "data" / "vectors.npz")
FORMAT_NAMES = sorted({key.split("/")[1] for key in VECTORS.files if key.startswith("out/")})


def format_of(name):
    """The format that a name in the file stands for."""
    if kind := re.fullmatch(r"fp8_current_(e\dm\d)(_pow2)?", name):
        return hq.FP8(kind[1], pow2=bool(kind[2]))
    if kind := re.fullmatch(r"fp8_block_(\d+)x(\d+)_(e\dm\d)(_pow2)?", name):
        return hq.FP8Block(kind[3], (int(kind[1]), int(kind[2])), pow2=bool(kind[4]))
    if kind := re.fullmatch(r"mxfp\d_(e\dm\d)_(up|floor|even)", name):
        return hq.MX(kind[1], kind[2])
    kind = re.fullmatch(r"nvfp4_(\d+)x(\d+)(_rht)?(?:_4over6_(mae|mse))?", name)
    return hq.NVFP4((int(kind[1]), int(kind[2])), rht=bool(kind[3]), four_over_six=kind[4])


def input_of(name):
    stored = VECTORS[f"in/{name}"]
    return stored.view(ml_dtypes.bfloat16) if name.endswith("bfloat16") else stored


def cases():
    return sorted({tuple(key.split("/")[1:3]) for key in VECTORS.files if key.startswith("out/")})


@pytest.mark.parametrize(("name", "source"), cases())
def test_both_parts_equal_the_golden_bytes(name, source):
    array = hq.quantize(input_of(source), rowwise=format_of(name), columnwise=format_of(name))
    compared = 0
    for direction, part in (("row", array.rowwise), ("col", array.columnwise)):
        for field, ours in (("data", part.codes), ("scale", part.scales), ("amax", part.amax)):
            key = f"out/{name}/{source}/{direction}/{field}"
            if key in VECTORS:
                theirs = VECTORS[key].reshape(ours.shape)
                testing.assert_bitwise_equal(np.ascontiguousarray(ours), theirs, name=key)
                compared += 1
    assert compared in (4, 6)


def test_every_vector_is_read():
    assert {name for name, _ in cases()} == set(FORMAT_NAMES)


@pytest.mark.parametrize("source", [source for name, source in cases() if name == "nvfp4_1x16_rht"])
def test_rotated_values_equal_the_golden_ones(source):
    values = input_of(source)
    for direction, turned in (("row", values), ("col", values.T)):
        wanted = VECTORS.get(f"out/nvfp4_1x16_rht/{source}/{direction}/transformed")
        if wanted is not None:
            ours = hadamard.rotate(np.ascontiguousarray(turned).astype(np.float32), turned.shape[1])
            theirs = wanted.view(ml_dtypes.bfloat16) if wanted.dtype == np.uint16 else wanted
            np.testing.assert_array_equal(ours, theirs.astype(np.float32))


@pytest.fixture(scope="module")
def torchao():
    """(torch, to_mx, ScaleCalculationMode); importing them warns about optional extensions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        config = pytest.importorskip("torchao.prototype.mx_formats.config")
    return torch, mx.to_mx, config.ScaleCalculationMode


@pytest.mark.parametrize("kind", ["gauss", "wide", "tiny", "huge", "zero_blocks", "powers_of_two", "ties", "largest"])
@pytest.mark.parametrize("rule", ["up", "floor", "even"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_torchao_makes_the_same_mx_bytes(torchao, element, rule, kind):
    torch, to_mx, modes = torchao
    values = testing.matrix(kind, (64, 128))
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}[element]
    mode = {"up": modes.RCEIL, "floor": modes.FLOOR, "even": modes.EVEN}[rule]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scales, codes = to_mx(torch.from_numpy(values), dtype, 32, mode)
    part = hq.quantize(values, rowwise=hq.MX(element, rule)).rowwise
    theirs = scales.view(torch.uint8).numpy()
    testing.assert_bitwise_equal(np.ascontiguousarray(part.scales), theirs)
    testing.assert_bitwise_equal(np.ascontiguousarray(part.codes), codes.view(torch.uint8).numpy())
