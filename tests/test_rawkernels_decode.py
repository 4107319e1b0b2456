"""What decodes and moves parts, run on the host by g++ (host_kernels.py) against the reference; bits, but for NaN's."""

import shutil
from dataclasses import replace

import host_kernels
import numpy as np
import pytest
from host_kernels import Memory
from moved import poisoned

import hqarray as hq
from hqarray import reference, reference_grouped, testing
from hqarray.arrays import QuantizedArray
from hqarray.buffers import Packed
from hqarray.formats import BFLOAT16, as_format
from hqarray.grouped_parts import GroupedPart
from hqarray.layout import round_up

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

named = pytest.mark.parametrize
FLOAT32 = np.dtype(np.float32)
NAMES = ("nvfp4(rht=true)", "nvfp4(rht=true,per_row=true)", "nvfp4_row", "fp8_row_e4m3", "fp8_row_e4m3(element=e5m2)",
         "mxfp8", "fp8_block_128x128")
SIZES = ([3, 0, 17, 48, 33, 1], [0, 128, 0, 130, 65, 0])


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return host_kernels.Compiler(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def cuda(monkeypatch, compiler):
    """The modules that launch on CuPy, launching on the host."""
    pytest.importorskip("cupy")
    from hqarray import cuda, cuda_gemm, cuda_grouped, cuda_grouped_sides

    host_kernels.install(monkeypatch, compiler)
    cuda.modules = cuda_gemm, cuda_grouped, cuda_grouped_sides
    yield cuda
    del cuda.modules


def part_of(name, shape, kind="gauss"):
    return hq.quantize(testing.matrix(kind, shape, BFLOAT16), rowwise=name).rowwise


def device(part):
    """A part in the memory of the GPU that is none, with NaN between its scales."""
    buffers = poisoned(part).buffers
    memory = Memory(buffers.layout.nbytes, buffers.base)
    return QuantizedArray(part.format, part.shape, Packed(memory, buffers.layout, buffers.has_global_scale,
                                                          buffers.has_amax))


def assert_same(actual, expected):
    nan = np.isnan(expected.astype(np.float32))
    assert actual.shape == expected.shape and (np.isnan(actual.astype(np.float32)) == nan).all()
    testing.assert_bitwise_equal(np.where(nan, 0, actual), np.where(nan, 0, expected))


@named("transposed", [False, True], ids=["rows", "columns"])
@named("dtype", [BFLOAT16, FLOAT32], ids=str)
@named("name", NAMES)
def test_values_are_those_of_the_reference(cuda, name, dtype, transposed):
    for shape, kind in (((33, 129), "wide"), ((40, 64), "nans"), ((19, 1), "wide"), ((7, 17), "infinities"),
                        ((145, 280), "wide")):
        part = part_of(name, shape, kind)
        actual = cuda.dequantize_part(device(part), dtype, transposed=transposed)
        assert_same(actual.T.values.T, reference.dequantize_part(part, dtype, transposed=transposed))


@named("alignment", [1, 16])
@named("k", [33, 96])
@named("name", NAMES)
def test_values_of_groups_are_those_of_the_reference(cuda, name, k, alignment):
    _, cuda_grouped, _ = cuda.modules
    for sizes in SIZES:
        rows = sum(round_up(n, alignment) for n in sizes) + 9
        x = testing.matrix("wide", (rows, k), BFLOAT16)
        group = hq.grouped_quantize(x, sizes, rowwise=name, columnwise=name, alignment=alignment)
        for part in (group.rowwise, group.columnwise):
            actual = cuda_grouped.dequantize_groups(on_device(part), BFLOAT16)
            assert_same(actual.values, reference_grouped.dequantize_groups(part, BFLOAT16))


def on_device(part):
    return GroupedPart(part.format, part.layout, part.sizes, Memory(part.layout.nbytes, part.base), part.has_amax)


@named("name", ["mxfp8_32x32", "nvfp4_16x16", "fp8_block_128x128"])
def test_moved_codes_and_scales_are_those_of_the_reference(cuda, name):
    for shape in ((33, 129), (145, 280), (19, 1), (300, 47), (128, 128)):
        part = part_of(name, shape, "wide")
        turned, expected = cuda.transpose_part(device(part)).buffers, reference.transpose_part(part)
        packed = Packed.of(turned.memory.bytes, turned.layout, turned.has_global_scale, turned.has_amax)
        actual = QuantizedArray(part.format, expected.shape, packed)
        testing.assert_bitwise_equal(actual, expected)
        testing.assert_code_padding_is_zero(actual)


# --- operands of products -------------------------------------------------------------------------

OPERANDS = ("nvfp4(rht=true,per_row=true)", "nvfp4_row", "fp8_row_e4m3", "fp8_row_e4m3(pow2=true)", "mxfp8_32x32")
"""Formats without a scale of the whole matrix, which goes elsewhere."""


def assert_operand(stored, expected, terms):
    """The terms of each value add up to it, rotated as it is stored."""
    width = stored.shape[1] // terms
    actual = stored.astype(np.float64).reshape(len(stored), terms, width).sum(1)
    assert not actual[:, expected.shape[1] :].any(), "padding of k"
    actual, expected = actual[:, : expected.shape[1]], expected.astype(np.float64)
    finite = np.isfinite(expected)
    assert (actual[finite] == expected[finite]).all() and not np.isfinite(actual[~finite]).any()


@named("engine", ["bf16", "fp32"])
@named("name", OPERANDS)
def test_operands_are_exact(cuda, name, engine):
    from hqarray.cuda_calls import Scratch

    cuda_gemm, _, _ = cuda.modules
    storage = as_format(name).storage
    terms = 1 if engine == "fp32" else storage.bf16_terms
    for shape, kind in (((33, 129), "gauss"), ((145, 280), "gauss"), ((19, 1), "gauss"), ((40, 64), "nans")):
        part, scratch = part_of(name, shape, kind), Scratch()
        left = device(part)
        chosen = "bf16x3" if terms == 3 else engine
        side = cuda_gemm._side(left, storage, chosen, terms, terms == 3, scratch, 0)
        assert side.scalar_offset == 0
        memory, alpha, at = Memory(scratch.nbytes), Memory(16), left.buffers.memory.ptr
        work = replace(side.work, writes_alpha=True)
        work.prepare((at, at + side.scales_offset, 0, 0, alpha.ptr), memory.ptr, 0)
        assert alpha.bytes[:4].view(np.float32)[0] == 1
        written = memory.bytes[work.target : work.target + work.row_bytes * work.outer]
        stored = written.view(FLOAT32 if engine == "fp32" else BFLOAT16).reshape(work.outer, -1)
        assert_operand(stored, reference.dequantize_part(part, FLOAT32, rotated=True), terms)


@named("ragged", ["outer", "k"])
@named("name", OPERANDS)
def test_operands_of_groups_are_exact(cuda, name, ragged):
    from hqarray.cuda_calls import Scratch

    _, cuda_grouped, sides = cuda.modules
    terms = as_format(name).storage.bf16_terms
    for sizes in SIZES:
        x = testing.matrix("gauss", (sum(sizes), 41), BFLOAT16)
        group, scratch = hq.grouped_quantize(x, sizes, rowwise=name, columnwise=name), Scratch()
        part = on_device(group.rowwise if ragged == "outer" else group.columnwise)
        engine = "bf16x3" if terms == 3 else "bfloat16"
        side = sides.side_of(part, sides.A, part.sizes, engine, terms, terms == 3, scratch, 0)
        assert side.scalars_offset == 0
        memory = Memory(scratch.nbytes)
        side.decode.launch(part.memory.ptr, memory.ptr, cuda_grouped.groups_of(part.sizes), 0)
        at = side.decode.target
        for member in (group.rowwise if ragged == "outer" else group.columnwise).members():
            width = round_up(member.shape[1], 8) * terms
            end = at + member.shape[0] * width * 2
            stored, at = memory.bytes[at:end].view(BFLOAT16).reshape(member.shape[0], width), end
            if member.codes.size:
                assert_operand(stored, reference.dequantize_part(member, FLOAT32, rotated=True), terms)
