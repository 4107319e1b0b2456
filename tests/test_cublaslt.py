"""What reaches cuBLASLt, recorded by a library that is none; and the calls that matmul would make on other chips."""

import ctypes
import enum
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import hqarray as hq
from hqarray import cublaslt, gemm, info
from hqarray.arrays import QuantizedArray
from hqarray.buffers import Packed
from hqarray.cublaslt import Operand, Plan, Product, Refused
from hqarray.formats import BFLOAT16, FORMATS, as_format
from hqarray.layout import Tiled128x4, part_layout, round_up
from hqarray.rawkernels.catalogue import STORED

# Numbers and widths of cublasLt.h 13.
DESC = {"POINTER_MODE": (2, "i4"), "TRANSA": (3, "i4"), "TRANSB": (4, "i4"), "EPILOGUE": (7, "u4"),
        "BIAS_POINTER": (8, "i8"), "A_SCALE_POINTER": (17, "i8"), "B_SCALE_POINTER": (18, "i8"),
        "FAST_ACCUM": (25, "i1"), "BIAS_DATA_TYPE": (26, "i4"), "A_SCALE_MODE": (31, "i4"), "B_SCALE_MODE": (32, "i4")}
PREFERENCE = {"MAX_WORKSPACE_BYTES": (1, "u8"), "REDUCTION_SCHEME_MASK": (3, "u4"),
              "MIN_ALIGNMENT_A_BYTES": (5, "u4"), "MIN_ALIGNMENT_B_BYTES": (6, "u4"),
              "MIN_ALIGNMENT_C_BYTES": (7, "u4"), "MIN_ALIGNMENT_D_BYTES": (8, "u4")}
SCALE = {"SCALAR_32F": 0, "VEC16_UE4M3": 1, "VEC32_UE8M0": 2, "OUTER_VEC_32F": 3, "VEC128_32F": 4, "BLK128x128_32F": 5}
EPILOGUE = {"DEFAULT": 1, "BIAS": 4}
TYPES = {0: "float32", 2: "float16", 14: "bfloat16", 28: "e4m3", 29: "e5m2", 33: "e2m1"}

FLOAT32 = np.dtype(np.float32)

LOG = """\
[2026-11-30 14:37:37][cublasLt][696][Api][cublasLtMatmulDescCreate] matmulDesc=0X7FFE computeType=COMPUTE_32F
[2026-11-30 14:37:37][cublasLt][696][Error][cublasLtMatmulAlgoGetHeuristic] M must be divisible by 16
[2026-11-30 14:37:37][cublasLt][696][Hint][cublasLtMatmulAlgoGetHeuristic] The scaling mode for A needs a pointer
"""


class FakeError(Exception):
    pass


class Library:
    """Records attributes as they are read from memory; refuses what `refuses` says."""

    cuBLASLtError = FakeError
    MatmulDescAttribute = enum.IntEnum("MatmulDescAttribute", {name: number for name, (number, _) in DESC.items()})
    MatmulPreferenceAttribute = enum.IntEnum("Preference", {name: number for name, (number, _) in PREFERENCE.items()})
    MatmulMatrixScale = enum.IntEnum("MatmulMatrixScale", SCALE)
    Epilogue = enum.IntEnum("Epilogue", EPILOGUE)
    PointerMode = enum.IntEnum("PointerMode", {"HOST": 0, "DEVICE": 1})
    matmul_heuristic_result_dtype = np.dtype([("algo", "<u8", (8,)), ("workspace", "<u8"), ("rest", "<i4", (6,))])

    def __init__(self, refuses=lambda library: False):
        self.refuses, self.made, self.log, self.level = refuses, itertools.count(100), None, 0
        self.desc, self.layouts, self.preferences, self.launches, self.sets = {}, {}, {}, [], []
        self.destroyed = set()

    def get_version(self):
        return 130100

    def get_matmul_desc_attribute_dtype(self, attribute):
        return {number: np.dtype(width).type for number, width in DESC.values()}[attribute]

    def get_matmul_preference_attribute_dtype(self, attribute):
        return {number: np.dtype(width).type for number, width in PREFERENCE.values()}[attribute]

    def matmul_desc_create(self, compute, scale):
        assert (compute, scale) == (68, 0)
        self.desc = {}
        return next(self.made)

    def _read(self, table, attribute, pointer, nbytes):
        (name, width), = ((name, width) for name, (number, width) in table.items() if number == attribute)
        assert nbytes == np.dtype(width).itemsize, f"{name} takes {width}"
        return name, int(np.frombuffer(ctypes.string_at(pointer, nbytes), width)[0])

    def matmul_desc_set_attribute(self, desc, attribute, pointer, nbytes):
        name, value = self._read(DESC, attribute, pointer, nbytes)
        self.desc[name] = value
        self.sets.append(name)

    def matrix_layout_create(self, type, rows, columns, pitch):
        handle = next(self.made)
        self.layouts[handle] = (TYPES[type], rows, columns, pitch)
        return handle

    def matmul_preference_create(self):
        self.preferences = {}
        return next(self.made)

    def matmul_preference_set_attribute(self, preference, attribute, pointer, nbytes):
        name, value = self._read(PREFERENCE, attribute, pointer, nbytes)
        self.preferences[name] = value

    def matmul_algo_get_heuristic(self, handle, desc, a, b, c, d, preference, wanted, results, count):
        assert c == d and wanted == 1
        self.asked = tuple(self.layouts[layout] for layout in (a, b, d))
        if self.refuses(self):
            if self.level:
                with open(self.log, "w") as file:
                    file.write(LOG)
            raise FakeError("not supported (CUBLAS_STATUS_NOT_SUPPORTED). You can set CUBLASLT_LOG_LEVEL=5 to see more")
        ctypes.memset(count, 1, 1)

    def matmul(self, *arguments):
        self.launches.append((dict(self.desc), arguments))

    def logger_open_file(self, path):
        self.log = path

    def logger_set_level(self, level):
        self.level = level

    def _destroy(self, handle):
        assert handle not in self.destroyed
        self.destroyed.add(handle)

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _destroy


def product(scale_a=None, scale_b=None, type="e4m3", result="bfloat16", m=48, n=64, k=96, **more):
    return Product(Operand(type, m, k, k, scale=scale_a), Operand(type, n, k, k + 32, scale=scale_b), result, n, **more)


# --- descriptions ---------------------------------------------------------------------------------


def test_row_major_k_major_operands_are_cublas_tn_with_sides_exchanged():
    library = Library()
    Plan(library, 7, product("SCALAR_32F", "SCALAR_32F"))
    assert library.asked == (("e4m3", 96, 64, 128), ("e4m3", 96, 48, 96), ("bfloat16", 64, 48, 64))
    assert (library.desc["TRANSA"], library.desc["TRANSB"]) == (1, 0)
    assert library.preferences == {"MAX_WORKSPACE_BYTES": 32 << 20} | {f"MIN_ALIGNMENT_{x}_BYTES": 256 for x in "ABCD"}


def test_operands_that_lie_the_other_way_are_read_in_place():
    library = Library()
    a, b = Operand("bfloat16", 48, 96, 56, k_major=False), Operand("bfloat16", 64, 96, 72, k_major=False)
    Plan(library, 7, Product(a, b, "float32", 64))
    assert library.asked == (("bfloat16", 64, 96, 72), ("bfloat16", 48, 96, 56), ("float32", 64, 48, 64))
    assert (library.desc["TRANSA"], library.desc["TRANSB"]) == (0, 1)
    assert not any("SCALE" in name for name in library.desc)


@pytest.mark.parametrize(("a", "b"), [("SCALAR_32F", "SCALAR_32F"), ("VEC128_32F", "VEC128_32F"),
                                      ("VEC128_32F", "BLK128x128_32F"), ("BLK128x128_32F", "VEC128_32F"),
                                      ("VEC32_UE8M0", "VEC32_UE8M0"), ("VEC16_UE4M3", "VEC16_UE4M3")])
def test_scale_modes_and_pointers_change_sides_with_the_operands(a, b):
    library = Library()
    plan = Plan(library, 7, product(a, b))
    assert (library.desc["A_SCALE_MODE"], library.desc["B_SCALE_MODE"]) == (SCALE[b], SCALE[a])
    plan.run(1000, 2000, 3000, (11, 22), (4, 5), 0, 6000, 9)
    desc, arguments = library.launches[0]
    assert (desc["B_SCALE_POINTER"], desc["A_SCALE_POINTER"]) == (11, 22)
    handle, _, alpha, first, first_layout, second, second_layout, beta, c, c_layout, d, d_layout = arguments[:12]
    assert (handle, alpha, beta, first, second, c, d) == (7, 4, 5, 2000, 1000, 3000, 3000)
    assert (library.layouts[first_layout][2], library.layouts[second_layout][2]) == (64, 48)
    assert c_layout == d_layout and arguments[13:] == (6000, 32 << 20, 9)


def test_the_heuristic_is_asked_with_a_pointer_for_scales():
    """cuBLASLt 13.1 refuses block scales without one."""
    library = Library(lambda library: not library.desc.get("A_SCALE_POINTER"))
    Plan(library, 7, product("VEC128_32F", "VEC128_32F"))


def test_pointers_are_set_where_they_change_and_only_there():
    library = Library()
    plan = Plan(library, 7, product("SCALAR_32F", "SCALAR_32F", bias="bfloat16"))
    plan.run(0, 0, 0, (11, 22), (4, 5), 33, 0, 0)
    before = len(library.sets)
    plan.run(0, 0, 0, (11, 23), (4, 5), 33, 0, 0)
    assert library.sets[before:] == ["A_SCALE_POINTER"]
    assert library.launches[1][0]["BIAS_POINTER"] == 33


def test_bias_scalars_and_alignment():
    library = Library()
    plan = Plan(library, 7, product(type="bfloat16", bias="bfloat16", device_scalars=True, alignment=16))
    assert library.desc["EPILOGUE"] == 4 and library.desc["BIAS_DATA_TYPE"] == 14
    assert library.desc["POINTER_MODE"] == 1 and library.preferences["MIN_ALIGNMENT_D_BYTES"] == 16
    plan.run(0, 0, 0, (0, 0), (4, 5), 33, 0, 0)
    assert library.launches[0][0]["BIAS_POINTER"] == 33


def test_partial_sums_of_a_split_k_are_not_rounded_to_a_narrow_result():
    library = Library()
    for type, scale, result, mask in (("bfloat16", None, "bfloat16", 2), ("float16", None, "float16", 2),
                                      ("bfloat16", None, "float32", None), ("e4m3", "SCALAR_32F", "bfloat16", None)):
        Plan(library, 7, product(scale, scale, type, result))
        assert library.preferences.get("REDUCTION_SCHEME_MASK") == mask


def test_fast_accumulation_is_asked_for_alone():
    library = Library()
    Plan(library, 7, product("SCALAR_32F", "SCALAR_32F"))
    assert "FAST_ACCUM" not in library.desc
    Plan(library, 7, product("SCALAR_32F", "SCALAR_32F", fast_accumulate=True))
    assert library.desc["FAST_ACCUM"] == 1


def test_descriptors_are_destroyed_once_with_their_plan():
    library = Library()
    plan = Plan(library, 7, product())
    kept = set(library.layouts)
    assert not library.destroyed & kept
    del plan
    assert kept < library.destroyed and len(library.destroyed) == 5  # descriptor, three layouts, preference


def test_a_refusal_carries_what_cublaslt_logs():
    library = Library(lambda library: True)
    with pytest.raises(Refused, match=r"^not supported \(CUBLAS_STATUS_NOT_SUPPORTED\)\.$"):
        Plan(library, 7, product())
    reason = cublaslt.reason_of(library, lambda: Plan(library, 7, product()))
    assert reason == "M must be divisible by 16; The scaling mode for A needs a pointer"
    assert library.level == 0
    silent = Library(lambda library: True)
    silent.logger_set_level = lambda level: None
    assert cublaslt.reason_of(silent, lambda: Plan(silent, 7, product())).startswith("not supported")


def test_the_numbers_are_those_of_the_bindings():
    bindings = pytest.importorskip("nvmath.bindings.cublasLt")
    for name, (number, width) in DESC.items():
        assert bindings.MatmulDescAttribute[name].value == number
        assert np.dtype(bindings.get_matmul_desc_attribute_dtype(number)).itemsize == np.dtype(width).itemsize
    for name, (number, width) in PREFERENCE.items():
        assert bindings.MatmulPreferenceAttribute[name].value == number
        assert np.dtype(bindings.get_matmul_preference_attribute_dtype(number)).itemsize == np.dtype(width).itemsize
    assert all(bindings.MatmulMatrixScale[name].value == number for name, number in SCALE.items())
    assert all(bindings.Epilogue[name].value == number for name, number in EPILOGUE.items())
    assert bindings.matmul_heuristic_result_dtype.itemsize == Library.matmul_heuristic_result_dtype.itemsize


def test_a_library_that_is_too_old_is_named(monkeypatch):
    bindings = pytest.importorskip("nvmath.bindings.cublasLt")
    monkeypatch.setattr(bindings, "get_version", lambda: 120800, raising=False)
    cublaslt.library.cache_clear()
    with pytest.raises(ImportError, match=r"cuBLASLt 12\.8\.0 is loaded .* hqarray needs 12\.9\.0"):
        cublaslt.library()
    cublaslt.library.cache_clear()


# --- the calls of matmul, on any chip -------------------------------------------------------------


@pytest.fixture
def make(monkeypatch):
    """The call of `a @ b` on a chip that is not there, and the product it asks cuBLASLt for."""
    pytest.importorskip("cupy")
    from hqarray import cuda, cuda_gemm

    library = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt.handles, "of", lambda device: 7)
    monkeypatch.setattr(cuda_gemm, "getDevice", lambda: 0)
    monkeypatch.setattr(cuda, "_kernel", lambda launch, m, k, device: SimpleNamespace(launch=launch, shape=(m, k)))
    monkeypatch.setattr(cuda_gemm, "_plans", {})

    def make(a, b, m, n, k, chip, dtype=FLOAT32, refuses=lambda library: False, out=None, aux=None, **epilogue):
        library.refuses = refuses
        x, y = (_part_at(as_format(name), (outer, k)) for name, outer in ((a, m), (b, n)))
        left, right = (gemm.Operand(part, part.format.storage, dtype, part.shape[:1]) for part in (x, y))
        engine = gemm.choose_engine(left.storage, right.storage, chip)
        last = gemm.Epilogue(**epilogue)
        request = cuda_gemm.Request(None, None, left, right, (m, n), dtype, out, aux, last, engine, ())
        return cuda_gemm._make(request, x, y, out, aux, epilogue.get("bias"))

    return make


def _part_at(format, shape):
    layout = part_layout(format.storage, shape)
    return QuantizedArray(format, shape, Packed(SimpleNamespace(ptr=1 << 20), layout, layout.has_global_scale, False))


def test_mxfp8_on_blackwell_is_one_product_of_codes_with_tiled_scales(make):
    call = make("mxfp8", "mxfp8_e5m2", 256, 384, 1024, (10, 0))
    product = call.plan.product
    assert product.a == Operand("e4m3", 256, 1024, 1024, scale="VEC32_UE8M0")
    assert product.b == Operand("e5m2", 384, 1024, 1024, scale="VEC32_UE8M0")
    assert not product.device_scalars and call.alpha == -1 and call.finish is None
    left, right = (side.work for side in call.sides)
    assert (left.lines, left.blocks, right.lines, right.blocks) == (256, 32, 384, 32)
    assert left.codes == right.codes == -1 and not left.writes_alpha
    assert right.target - left.target >= np.prod(Tiled128x4().buffer_shape(256, 32))


def test_nvfp4_on_blackwell_multiplies_both_global_scales_into_alpha(make):
    call = make("nvfp4", "nvfp4_16x16", 256, 384, 1024, (10, 0), BFLOAT16)
    product = call.plan.product
    assert product.a == Operand("e2m1", 256, 1024, 1024, scale="VEC16_UE4M3")
    assert product.type == "bfloat16" and product.device_scalars and call.alpha >= 0
    assert [side.work.writes_alpha for side in call.sides] == [True, False]
    assert all(side.scalar_offset for side in call.sides)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_ragged_shapes_on_blackwell_are_padded_with_zero_codes(make, name):
    def is_ragged(library):
        return any(columns % 16 for _, _, columns, _ in library.asked[:2])

    call = make(name, name, 33, 50, 1000, (10, 0), refuses=is_ragged)
    product = call.plan.product
    assert (product.a.outer, product.b.outer) == (48, 64) and product.type == "float32" and call.finish is not None
    assert product.a.k == product.a.pitch == 1024 and product.a.k % 32 == 0
    for side in call.sides:
        assert (side.work.codes >= 0) == (name == "mxfp8")  # rows of 1008 bytes; 512 bytes are 1024 FP4 codes


@pytest.mark.parametrize("b", STORED)
@pytest.mark.parametrize("a", STORED)
def test_every_call_on_hopper_is_one_product_over_k_with_zeros(make, a, b):
    m, n, k = 33, 50, 77
    call = make(a, b, m, n, k, (9, 0))
    product, engine = call.plan.product, gemm.choose_engine(STORED[a].storage, STORED[b].storage, (9, 0)).name
    width = round_up(k, 8)
    expected = {"bf16": width, "bf16x3": 3 * width, "fp32": width}
    if engine != "native":
        assert product.a.k == product.b.k == expected[engine] or engine == "fp32"
        assert product.a.type == ("float32" if engine == "fp32" else "bfloat16")
        storages = [STORED[name].storage for name in (a, b)]
        scalars = [(s.global_scale and not s.global_per_row) or (s.block is None and s.scale != "none")
                   for s in storages]
        assert product.device_scalars == any(scalars)
        assert [side.scalar_offset > 0 for side in call.sides] == scalars
        writers = [getattr(side.work, "writes_alpha", False) for side in call.sides]
        assert sum(writers) == any(scalars)
    assert product.a.k == product.b.k and k <= product.a.k <= min(product.a.pitch, product.b.pitch)
    for operand in (product.a, product.b):
        assert operand.pitch * cublaslt.BITS[operand.type] % 128 == 0, "every pitch is a multiple of 16 bytes"
    assert product.pitch * cublaslt.BITS[product.type] % 128 == 0
    for side in call.sides:  # what is written to scratch memory does not overlap
        assert getattr(side.work, "target", 0) % 256 == 0


def test_scales_of_rows_that_a_padded_product_adds_have_their_pitch(make):
    """cuBLASLt 13.1 on sm_90: n % 8 == 0, m % 4 == 0 under 1x128 blocks."""
    def refuses(library):
        return library.asked[0][2] % 8 != 0 or library.asked[1][2] % 4 != 0

    call = make("fp8_block_1x128", "fp8_block_1x128", 3, 17, 300, (9, 0), refuses=refuses)
    product = call.plan.product
    assert (product.a.outer, product.b.outer) == (4, 24)
    left, right = (side.work for side in call.sides)
    assert left is None  # pad4(3) == pad4(4)
    assert (right.pitch, right.wider, right.blocks) == (4 * 20, 4 * 24, 3)
    assert call.finish is not None and call.finish.sum_pitch == 24


def test_scales_of_rows_are_cublaslts_outer_vectors(make):
    call = make("fp8_row_e4m3", "fp8_row_e4m3(element=e5m2)", 48, 64, 96, (9, 0), BFLOAT16)
    product = call.plan.product
    assert product.a == Operand("e4m3", 48, 96, 96, scale="OUTER_VEC_32F")
    assert product.b == Operand("e5m2", 64, 96, 96, scale="OUTER_VEC_32F")
    assert call.is_bare and not product.device_scalars and not any(side.scalar_offset for side in call.sides)
    for side, outer in zip(call.sides, (48, 64), strict=True):
        layout = part_layout(FORMATS["fp8_row_e4m3"].storage, (outer, 96))
        assert side.scales_offset == layout.scales_offset and side.scales_offset % 16 == 0
        assert layout.scales_shape == (1, outer), "one float32 after another"


def test_scales_of_rows_that_a_padded_product_adds_are_copied_to_a_longer_vector(make):
    def refuses(library):
        return any(outer % 16 for _, _, outer, _ in library.asked[:2])

    call = make("fp8_row_e4m3", "fp8_row_e4m3", 3, 17, 300, (9, 0), refuses=refuses)
    product = call.plan.product
    assert (product.a.outer, product.b.outer, product.a.k) == (16, 32, 304)
    left, right = (side.work for side in call.sides)
    assert (left.pitch, left.wider, left.blocks) == (4 * 4, 4 * 16, 1)
    assert (right.pitch, right.wider, right.blocks) == (4 * 20, 4 * 32, 1)
    assert call.finish is not None and product.type == "float32"


def test_what_cublaslt_refuses_altogether_names_operands_and_reason(make):
    with pytest.raises(Refused, match=r"refuses \(33, 64\) @ \(64, 50\) of e4m3 SCALAR_32F and .*: M must"):
        make("fp8_e4m3", "fp8_e4m3", 33, 50, 64, (9, 0), refuses=lambda library: True)


def test_shapes_without_work_ask_for_no_product(make):
    assert make("mxfp8", "mxfp8", 0, 5, 64, (9, 0)).plan is None
    call = make("mxfp8", "mxfp8", 4, 5, 0, (9, 0))
    assert call.plan is None and call.finish is not None


# --- what a call launches -------------------------------------------------------------------------


class Memory:
    def __init__(self, pointer):
        self.ptr, self.device_id = pointer, 0


def array_at(pointer, shape, dtype):
    itemsize = np.dtype(dtype).itemsize
    return SimpleNamespace(data=Memory(pointer), shape=shape, dtype=np.dtype(dtype), ndim=2,
                           strides=(shape[1] * itemsize, itemsize), flags=SimpleNamespace(c_contiguous=True))


SCRATCH, NEW = 1 << 24, 1 << 26


@pytest.fixture
def launched(make, monkeypatch):
    """Names and arguments of the launches of a call whose parts lie at 1 << 20."""
    from hqarray import cuda, cuda_calls, cuda_launch

    def run(a, b, m, n, k, chip, dtype=FLOAT32, out=None, aux=None, bias=None, capturing=False, **options):
        launches = []

        def kernel(launch, m, k, device):
            def record(stream, fields, *values):
                assert stream == 9
                assert fields.size == 8 * len(values)
                launches.append((launch.source.file, values))

            return SimpleNamespace(launch=record)

        monkeypatch.setattr(cuda, "_kernel", kernel)
        monkeypatch.setattr(cuda_launch, "alloc", lambda nbytes: Memory(SCRATCH))
        monkeypatch.setattr(cuda_calls, "getDevice", lambda: 0)
        monkeypatch.setattr(cuda_calls, "stream_of", lambda device: 9)
        monkeypatch.setattr(cuda_calls, "_constants", lambda device: (500, 504))
        monkeypatch.setattr(cuda_calls, "_workspaces", {(0, 9, "strided"): Memory(77)})
        kept = []
        for module in (cuda_calls, cuda_launch):
            monkeypatch.setattr(module, "streamIsCapturing", lambda stream: capturing)
            monkeypatch.setattr(module, "captured", kept)
        monkeypatch.setattr(cuda_calls.cupy, "ndarray", lambda shape, dtype: array_at(NEW, shape, dtype))
        call = make(a, b, m, n, k, chip, dtype, out=out, aux=aux, bias=bias, **options)
        monkeypatch.setattr(Plan, "run", lambda plan, *arguments: launches.append(("cublaslt", arguments)))
        parts = [QuantizedArray(STORED[name], (outer, k), Packed(Memory(1 << 20), part_layout(STORED[name].storage,
                 (outer, k)), False, False)) for name, outer in ((a, m), (b, n))]
        result = call(*parts, out, aux, bias)
        return call, result, launches, kept

    return run


def test_a_native_call_is_one_launch_from_the_parts_to_the_result(launched):
    out = array_at(NEW, (64, 48), np.float32)
    call, result, launches, kept = launched("fp8_e4m3", "fp8_e5m2", 64, 48, 128, (9, 0), out=out)
    assert call.is_bare and result is out and not kept
    scales = [(1 << 20) + side.scales_offset for side in call.sides]
    assert launches == [("cublaslt", (1 << 20, 1 << 20, NEW, tuple(scales), cublaslt.HOST_SCALARS[0], 0, 77, 9))]


def test_an_emulated_call_decodes_both_sides_and_multiplies_what_they_became(launched):
    bias = array_at(4096, (1, 48), np.float32)
    call, result, launches, _ = launched("nvfp4", "mxfp8", 64, 48, 128, (9, 0), bias=bias)
    assert [name for name, _ in launches] == ["decode.cu", "decode.cu", "cublaslt"] and result.data.ptr == NEW
    left, right = (side.work for side in call.sides)
    alpha, scalar = SCRATCH + call.alpha, (1 << 20) + call.sides[0].scalar_offset
    first, second = launches[0][1], launches[1][1]
    assert first[4:8] == (scalar, 0, alpha, SCRATCH + left.target)
    assert second[4:8] == (0, scalar, 0, SCRATCH + right.target)
    assert launches[2][1][:3] == (SCRATCH + left.target, SCRATCH + right.target, NEW)
    assert launches[2][1][4:6] == ((alpha, 500), 4096)  # beta is zero
    ends = [left.target + 64 * left.row_bytes, right.target + 48 * right.row_bytes]
    assert ends[0] <= right.target and ends[1] <= call.alpha < call.scratch_bytes


@pytest.mark.parametrize(("a", "b"), [("nvfp4_row", "fp8_e4m3"), ("fp8_e4m3", "nvfp4_row"), ("nvfp4_row", "mxfp8"),
                                      ("nvfp4_row", "nvfp4_row")])
def test_global_scales_of_rows_are_multiplied_by_the_decode_kernel_and_not_by_alpha(launched, a, b):
    call, _, launches, _ = launched(a, b, 64, 48, 128, (9, 0))
    assert [name for name, _ in launches] == ["decode.cu", "decode.cu", "cublaslt"]
    for side, name, outer, (_, values) in zip(call.sides, (a, b), (64, 48), launches, strict=False):
        layout = part_layout(STORED[name].storage, (outer, 128))
        if name == "nvfp4_row":
            assert side.scalar_offset == 0
            assert values[4] == (1 << 20) + layout.global_scale_offset and layout.num_global_scales == outer
        else:
            assert values[4] == ((1 << 20) + layout.scales_offset if name == "fp8_e4m3" else 0)
    has_alpha = "fp8_e4m3" in (a, b)
    assert (call.alpha >= 0) == has_alpha == call.plan.product.device_scalars
    writers = [values for _, values in launches[:2] if values[6]]
    assert len(writers) == has_alpha
    if has_alpha:  # the one factor of alpha is the other side's, or one's own
        scalar = (1 << 20) + call.sides[b == "fp8_e4m3"].scalar_offset
        assert scalar in (writers[0][4], writers[0][5])
        assert all(values[5] in (0, scalar) for values in writers)


def test_rotated_operands_are_decoded_by_the_kernel_of_those_that_are_not(make):
    rotated, plain = (make(name, name, 33, 50, 77, (9, 0)) for name in ("nvfp4(rht=true)", "nvfp4"))
    assert [side.work.kernel.launch for side in rotated.sides] == [side.work.kernel.launch for side in plain.sides]
    assert "rht = false" in rotated.sides[0].work.kernel.launch.source.text


def test_what_cublaslt_does_not_do_is_finished_from_a_float32_sum(launched):
    out, aux = array_at(NEW, (33, 50), BFLOAT16), array_at(1 << 27, (33, 50), np.float32)
    call, result, launches, kept = launched("mxfp8", "mxfp8", 33, 50, 77, (9, 0), BFLOAT16, out=out, aux=aux,
                                            bias=array_at(4096, (1, 50), np.float16), activation="gelu", capturing=True)
    assert [name for name, _ in launches] == ["decode.cu", "decode.cu", "cublaslt", "finish.cu"] and result is out
    sums = SCRATCH + call.finish.sum
    assert launches[2][1][2] == sums and launches[2][1][5] == 0  # the bias is added later
    assert launches[3][1] == (sums, 56, 4096, NEW, 100, 1 << 27, 200, 33, 50)
    assert kept[0].ptr == SCRATCH  # a captured graph will write there again


def test_accumulation_into_a_result_of_any_shape(launched):
    for shape, names, beta in (((64, 48), ["cublaslt"], 1), ((64, 50), ["cublaslt", "finish.cu"], 0)):
        out = array_at(NEW, shape, np.float32)
        _, _, launches, _ = launched("fp8_e4m3", "fp8_e4m3", *shape, 128, (9, 0), out=out, accumulate=True)
        assert [name for name, _ in launches] == names
        assert launches[0][1][4] == cublaslt.HOST_SCALARS[beta]


# --- choice by name -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "a", "b", "message"), [
    ("native", "mxfp8", "mxfp8", "sm_90 has no MXFP8 tensor cores"),
    ("native", "fp8_e5m2", "fp8_e5m2", "no E5M2 x E5M2; without engine= it is 'bf16'"),
    ("bf16", "fp8_block_1x128", "mxfp8", "one operand is not exact in bf16; without engine= it is 'bf16x3'"),
    ("bf16", "fp32", "fp32", "neither operand is exact in bf16"),
    ("bf16x3", "fp32", "fp8_block_128x128", "neither operand is exact in bf16; without engine= it is 'fp32'"),
])
def test_an_engine_that_is_not_exact_is_refused_with_the_reason(name, a, b, message):
    with pytest.raises(ValueError, match=message):
        gemm.asked_engine(name, STORED[a].storage, STORED[b].storage, (9, 0))


def test_an_engine_by_name_or_value():
    storage = STORED["fp8_e4m3"].storage
    for name in ("native", "bf16", "bf16x3", "fp32"):
        assert gemm.asked_engine(name, storage, storage, (9, 0)).name == name
    fast = gemm.asked_engine(hq.Engine("native", fast_accumulate=True), storage, storage, (9, 0))
    assert fast.fast_accumulate and str(fast) == "native: asked for"


# --- which file ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elsewhere", "how"), [(True, "loaded before, by another library"), (False, "by site-packages")]
)
def test_info_says_which_libcublaslt_matmul_takes_and_why(tmp_path, monkeypatch, elsewhere, how):
    file = tmp_path / "libcublasLt.so.13"
    file.write_bytes(b"")
    found = SimpleNamespace(abs_path=str(file), was_already_loaded_from_elsewhere=elsewhere, found_via="site-packages")
    pathfinder = SimpleNamespace(load_nvidia_dynamic_lib=lambda name: found)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=pathfinder))
    monkeypatch.setattr(info, "_version_of", lambda path: "13.1.0")
    (library,) = [library for library in info.cublaslt_libraries() if library.path == str(file)]
    assert str(library) == f"13.1.0, {file} (system, matmul takes it: {how})"


def test_info_runs_where_no_libcublaslt_can_be_found(monkeypatch):
    def missing(name):
        raise RuntimeError("No such file")

    pathfinder = SimpleNamespace(load_nvidia_dynamic_lib=missing)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(pathfinder=pathfinder))
    assert all(not library.taken for library in info.cublaslt_libraries())
