"""What reaches cuBLASLt's grouped layout, recorded by a library that is none; and the calls of grouped products."""

import enum
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_cublaslt import SCALE, TYPES, Library

from hqarray import cublaslt, cublaslt_grouped, gemm
from hqarray.cublaslt import Refused
from hqarray.cublaslt_grouped import Arrays, Plan, Product, Unavailable, refusal
from hqarray.formats import BFLOAT16
from hqarray.grouped_gemm import Request
from hqarray.grouped_parts import GroupedPart, layout_of
from hqarray.groups import SIZE_KINDS, Sizes, Span
from hqarray.layout import part_layout, round_up
from hqarray.rawkernels import geometry
from hqarray.rawkernels.catalogue import STORED

named = pytest.mark.parametrize
FLOAT32 = np.dtype(np.float32)
HOPPER = (9, 0)
SCALAR = "PER_BATCH_SCALAR_32F"
MODES = SCALE | {SCALAR: 6}
GROUPED = {13: "GROUPED_AVERAGE_REDUCTION_DIM", 14: "GROUPED_DESC_D_AVERAGE_ROWS", 15: "GROUPED_DESC_D_AVERAGE_COLS"}


class GroupedLibrary(Library):
    """Records grouped layouts and the attributes that the table of widths does not know."""

    MatmulMatrixScale = enum.IntEnum("MatmulMatrixScale", MODES)
    version = 130500

    def get_version(self):
        return self.version

    def grouped_matrix_layout_create(self, type, count, rows, columns, pitches):
        handle = next(self.made)
        self.layouts[handle] = (TYPES[type], count, rows, columns, pitches)
        return handle

    def matmul_preference_set_attribute(self, preference, attribute, pointer, nbytes):
        if attribute in GROUPED:
            assert nbytes == 8, "averages are int64"
            name, value = self._read({GROUPED[attribute]: (attribute, "i8")}, attribute, pointer, 8)
            self.preferences[name] = value
        else:
            super().matmul_preference_set_attribute(preference, attribute, pointer, nbytes)


def product(**more):
    return replace(Product(5, "e4m3", "e5m2", "bfloat16", (SCALAR, "VEC128_32F"), (40, 64, 96)), **more)


# --- descriptions ---------------------------------------------------------------------------------


@named("count", [1, 3, 4, 5, 1024])
def test_arrays_lie_side_by_side_on_16_bytes(count):
    arrays = Arrays(count)
    spans = [(arrays.pointers(i), 8 * count) for i in range(5)]
    spans += [(offset, 4 * count) for matrix in range(3) for offset in arrays.dimensions(matrix)]
    assert len(spans) == 14
    for (start, nbytes), (following, _) in itertools.pairwise([*spans, (arrays.nbytes, 0)]):
        assert start % 16 == 0
        assert start + nbytes <= following < start + nbytes + 32


def test_operands_change_sides_and_dimensions_are_arrays():
    library = GroupedLibrary()
    Plan(library, 7, product(), 4096)
    arrays = Arrays(5)
    at = [tuple(4096 + offset for offset in arrays.dimensions(matrix)) for matrix in range(3)]
    assert library.asked == (("e5m2", 5, *at[0]), ("e4m3", 5, *at[1]), ("bfloat16", 5, *at[2]))
    assert (library.desc["TRANSA"], library.desc["TRANSB"]) == (1, 0)
    assert (library.desc["A_SCALE_MODE"], library.desc["B_SCALE_MODE"]) == (4, 6)
    assert library.desc["A_SCALE_POINTER"] == 4096 + arrays.pointers(3)
    assert library.desc["B_SCALE_POINTER"] == 4096 + arrays.pointers(4)
    assert library.desc.get("POINTER_MODE", 0) == int(cublaslt_grouped.DEVICE_SCALARS)
    assert "FAST_ACCUM" not in library.desc and "EPILOGUE" not in library.desc


def test_averages_are_of_the_column_major_result():
    library = GroupedLibrary()
    Plan(library, 7, product(), 4096)
    assert library.preferences == {
        "MAX_WORKSPACE_BYTES": 32 << 20, **{f"MIN_ALIGNMENT_{x}_BYTES": 16 for x in "ABCD"},
        "GROUPED_AVERAGE_REDUCTION_DIM": 96, "GROUPED_DESC_D_AVERAGE_ROWS": 64, "GROUPED_DESC_D_AVERAGE_COLS": 40,
    }


def test_a_run_takes_pointers_of_arrays_of_pointers():
    library = GroupedLibrary()
    plan = Plan(library, 7, product(), 4096)
    pointers = plan.arrays.pointers
    for base in (4096, 8192, 4096):
        plan.run(base, (11, 12), 6000, 9)
        desc, arguments = library.launches[-1]
        handle, _, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d = arguments[:12]
        assert (handle, alpha, beta) == (7, 11, 12)
        assert (a, b, c, d) == tuple(base + pointers(i) for i in (0, 1, 2, 2))
        assert desc["A_SCALE_POINTER"] == base + pointers(3) and desc["B_SCALE_POINTER"] == base + pointers(4)
        for layout, matrix in ((layout_a, 0), (layout_b, 1), (layout_d, 2)):
            assert library.layouts[layout][2:] == tuple(base + offset for offset in plan.arrays.dimensions(matrix))
        assert layout_c == layout_d and arguments[13:] == (6000, 32 << 20, 9)
    assert len(library.layouts) == 6, "layouts are made once for a block of arrays"
    del plan
    assert set(library.layouts) < library.destroyed


def test_unscaled_operands_set_no_scales_and_fast_accumulation_is_asked_for():
    library = GroupedLibrary()
    Plan(library, 7, product(a="bfloat16", b="bfloat16", scales=None), 4096)
    assert not any("SCALE" in name for name in library.desc)
    Plan(library, 7, product(fast_accumulate=True), 4096)
    assert library.desc["FAST_ACCUM"] == 1


def test_a_refusal_of_the_heuristic_is_refused():
    with pytest.raises(Refused, match="not supported"):
        Plan(GroupedLibrary(lambda library: True), 7, product(), 4096)


def test_the_numbers_are_those_of_the_bindings():
    bindings = pytest.importorskip("nvmath.bindings.cublasLt")
    for number, name in GROUPED.items():
        assert bindings.MatmulPreferenceAttribute[name].value == number == cublaslt_grouped.PREFERENCES[name]
    assert all(bindings.MatmulMatrixScale[name].value == number for name, number in MODES.items())
    assert hasattr(bindings, "grouped_matrix_layout_create")


# --- what there is --------------------------------------------------------------------------------


@named(("version", "chip", "change", "reason"), [
    (130500, (9, 0), {}, None),
    (130400, (9, 0), {}, r"13\.4\.0 .* grouped FP8 with a scale for each member for sm_90; install .*>=13\.5"),
    (130400, (9, 0), {"scales": ("VEC128_32F", "BLK128x128_32F")}, None),
    (130400, (9, 0), {"a": "bfloat16", "b": "bfloat16", "scales": None}, None),
    (130300, (9, 0), {"a": "bfloat16", "b": "bfloat16", "scales": None}, r"install nvidia-cublas>=13\.4 "),
    (130100, (9, 0), {}, r"cuBLASLt 13\.1\.0 \(.*\) has no grouped"),
    (130300, (10, 0), {"a": "bfloat16", "b": "bfloat16", "scales": None}, None),
    (130500, (11, 0), {"a": "bfloat16", "b": "bfloat16", "scales": None}, None),
    (131000, (12, 0), {}, "no grouped products on sm_120"),
    (131000, (8, 0), {}, "no grouped products on sm_80"),
    (131000, (9, 0), {"a": "float32", "b": "float32", "scales": None}, "no grouped products of float32"),
])
def test_what_is_missing_is_named_with_the_remedy(version, chip, change, reason):
    library = GroupedLibrary()
    library.version = version
    actual = refusal(library, chip, product(**change))
    if reason is None:
        assert actual is None
    else:
        assert actual is not None
        assert re.search(reason, actual) and "sizes on the host" in actual


def test_bindings_without_grouped_layouts_are_named():
    library = Library()
    library.get_version = lambda: 130500
    assert "nvmath-python" in refusal(library, HOPPER, product())


# --- launch geometry ------------------------------------------------------------------------------


@named("sizes", [[], [0], [300, 0, 1], [256] * 4, [1] * 100, [10379, 0, 1, 257]])
def test_a_ragged_grid_has_a_block_for_every_tile(sizes):
    tile = geometry.DECODE_TILE
    x, y, z = geometry.ragged_grid(tile, 200, sum(sizes), len(sizes))
    assert x >= sum(-(-n // tile.columns) for n in sizes) and x >= 1
    assert y * z * tile.rows >= 200


def test_one_block_sets_up_and_others_only_where_rows_are_zeroed():
    assert geometry.setup_grid(False) == (1, 1, 1)
    assert geometry.setup_grid(True)[0] > 1


# --- calls ----------------------------------------------------------------------------------------

PART_AT, OUT_AT, SCRATCH_AT = (1 << 40, 2 << 40), 3 << 40, 1 << 36
RAGGED = ([0, 128, 0, 130, 65, 0], [1, 7, 10379, 0, 130], [0, 0, 0], [1] * 100, [5], [64] * 8)


def arrays_of(groups, targets, ragged, m, n, k, k_unit, k_terms, pitch, stored):
    """What group_gemm.cu writes, in the words of its comments: pointers, and (rows, columns, pitch) of A, B and D."""
    _, kind, count, each, capacity, alignment = groups
    name = SIZE_KINDS[kind]
    given = [each] * count if name == "each" else [int(x) for x in stored]
    if name == "ends":
        given = [end - begin for begin, end in itertools.pairwise([0, *given])]
    starts, sizes, reach = [], [], 0
    for size in given:
        size = min(max(size, 0), capacity)
        starts.append(min(reach, capacity))
        sizes.append(min(size, capacity - starts[-1]))
        reach += round_up(size, alignment)
    pointers = []
    for base, unit, divide, multiple in targets:
        before, own = 0, []
        for i in range(count):
            units = starts[i] if divide < 0 else i if divide == 0 else before
            own.append(base + unit * units)
            before += Span(divide, multiple).units(sizes[i]) if divide > 0 else 1
        pointers.append(own)
    dimensions = [[], [], []]
    for size in sizes:
        rows = size if ragged == 1 else m
        depth = k_terms * round_up(size if ragged == 2 else k, k_unit)
        both = depth or k_unit  # the pitch of both operands
        for matrix, of_one in zip(dimensions, ((depth, n, both), (depth, rows, both), (n, rows, pitch)), strict=True):
            matrix.append(of_one)
    return pointers, dimensions


class Kernels:
    """Launches, by entry: the generated source and the values of the argument."""

    def __init__(self):
        self.launches = []

    def kernel(self, launch, grid, device):
        def record(stream, struct, *values):
            struct.pack(*values)
            self.launches.append((launch.source.entry, launch, grid, values))

        return SimpleNamespace(launch=record, of=launch, grid=grid)

    def of(self, entry):
        return [(launch, grid, values) for name, launch, grid, values in self.launches if name == entry]


@pytest.fixture
def machine(monkeypatch):
    """A GPU that is not there: its library and its kernels, recorded."""
    pytest.importorskip("cupy")
    from hqarray import cuda, cuda_grouped_gemm, cuda_grouped_sides

    library, kernels = GroupedLibrary(), Kernels()
    taken = itertools.count(SCRATCH_AT, 1 << 34)
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt.handles, "of", lambda device: 7)
    monkeypatch.setattr(cuda, "getDevice", lambda: 0)
    for name, value in {
        "_plans": {}, "_calls": {}, "kernel_of": kernels.kernel, "getDevice": lambda: 0,
        "stream_of": lambda device: 9,
        "chip_of": lambda device: HOPPER,
        "streamIsCapturing": lambda stream: machine.is_capturing,
        "alloc": lambda nbytes: SimpleNamespace(ptr=next(taken)),
        "_constants": lambda device: (50, 51), "workspace": lambda *place: machine.workspaces.append(place) or 777,
        "memsetAsync": lambda *values: machine.memsets.append(values), "captured": [],
        "groups_of": lambda sizes: (4242 if sizes.each is None else 0, SIZE_KINDS.index(sizes.kind), sizes.num_groups,
                                    sizes.each or 0, sizes.capacity, sizes.alignment),
    }.items():
        monkeypatch.setattr(cuda_grouped_gemm, name, value)
    monkeypatch.setattr(cuda_grouped_sides, "kernel_of", kernels.kernel)
    monkeypatch.setattr(cuda_grouped_gemm.cupy, "ndarray", lambda shape, dtype: array(shape, dtype))
    machine = SimpleNamespace(library=library, kernels=kernels, multiply=cuda_grouped_gemm.multiply, is_capturing=False,
                              memsets=[], workspaces=[], module=cuda_grouped_gemm)
    return machine


def array(shape, dtype, pointer=OUT_AT):
    dtype = np.dtype(dtype)
    strides = (*(int(np.prod(shape[i + 1 :])) * dtype.itemsize for i in range(len(shape) - 1)), dtype.itemsize)
    return SimpleNamespace(shape=tuple(shape), dtype=dtype, data=SimpleNamespace(ptr=pointer), strides=strides,
                           itemsize=dtype.itemsize, nbytes=int(np.prod(shape)) * dtype.itemsize)


def part_at(side, name, ragged, each, sizes):
    format = STORED[name]
    memory = SimpleNamespace(ptr=PART_AT[side], device_id=0)
    return GroupedPart(format, layout_of(format, ragged, each, sizes), sizes, memory, False)


def request(
    a, b, ragged, sizes, m=48, n=64, k=96, dtype=BFLOAT16, kind="int32", alignment=1, capacity=None, engine=None, **more
):
    """A product of groups whose ragged axis has these sizes, on the device."""
    count = len(sizes)
    reach = sum(round_up(size, alignment) for size in sizes)
    known = Sizes(count, None, None, object(), kind, reach if capacity is None else capacity, alignment)
    if ragged == "k":
        x, y = (part_at(side, name, "k", outer, known) for side, name, outer in ((0, a, m), (1, b, n)))
        of_m, of_n, of_k = Sizes.uniform(count, m), Sizes.uniform(count, n), known
    else:
        of_m = known if ragged == "rows" else Sizes.uniform(count, m)
        of_n, of_k = Sizes.uniform(count, n), Sizes.uniform(count, k)
        x, y = part_at(0, a, "outer", k, of_m), part_at(1, b, "outer", k, of_n)
    shape = (known.capacity, n) if ragged == "rows" else (count, m, n)
    chosen = gemm.choose_engine(x.format.storage, y.format.storage, HOPPER) if engine is None else engine
    rest = {"out": None, "bias": None, "activation": None, "accumulate": False} | more
    return Request(x, y, ragged, of_m, of_n, of_k, shape, np.dtype(dtype), rest["out"], rest["bias"],
                   rest["activation"], rest["accumulate"], chosen)


def set_up(machine, stored):
    """The arrays of the one set-up that was launched."""
    (_, grid, values), = machine.kernels.of("hq_group_gemm")
    groups, rest = values[:6], values[26:]
    targets = [values[i : i + 4] for i in range(6, 26, 4)]
    return arrays_of(groups, targets, *rest[:7], stored), grid, rest[7:]


NATIVE = [("bf16", "bf16"), ("fp16", "fp16"), ("fp8_e4m3", "fp8_e5m2"), ("fp8_block_1x128", "fp8_block_128x128"),
          ("fp8_block_128x128", "fp8_block_1x128"), ("fp8_block_1x128", "fp8_block_1x128")]
EMULATED = [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_16x16"), ("fp8_e4m3", "mxfp4"), ("bf16", "nvfp4"),
            ("mxfp6_e2m3", "bf16"), ("fp8_block_1x128", "mxfp8"), ("nvfp4", "fp8_block_128x128"),
            ("fp8_row_e4m3", "mxfp8"), ("bf16", "nvfp4_row"), ("nvfp4_row", "nvfp4"),
            ("nvfp4(rht=true)", "nvfp4(rht=true)")]


@named("sizes", RAGGED, ids=str)
@named("ragged", ["rows", "k", "none"])
@named(("a", "b"), NATIVE)
def test_members_are_found_where_their_layouts_put_them(machine, a, b, ragged, sizes):
    each = np.array(sizes, np.int64)
    if ragged == "none":
        each = np.full(len(sizes), 48)
    asked = request(a, b, ragged, sizes, dtype=FLOAT32)
    if ragged == "k" and not sum(sizes):
        machine.multiply(asked)
        assert not machine.library.launches and len(machine.kernels.of("hq_finish")) == 1
        return
    out = machine.multiply(asked)
    if not out.nbytes:
        assert not machine.kernels.launches
        return
    (pointers, (dim_a, dim_b, dim_d)), _, _ = set_up(machine, sizes)
    rows = each if ragged == "rows" else np.full(len(sizes), 48)
    depth = each if ragged == "k" else np.full(len(sizes), 96)
    for codes, scales, part, lines in ((1, 4, asked.a, rows), (0, 3, asked.b, np.full(len(sizes), 64))):
        of_part = each if part.sizes.each is None else part.sizes.values
        codes_at, scales_at = part.layout.starts(of_part)
        assert pointers[codes] == (part.memory.ptr + codes_at).tolist()
        if part.format.storage.scale != "none":
            assert pointers[scales] == (part.memory.ptr + scales_at).tolist()
        for (k, outer, pitch), line, length in zip((dim_b, dim_a)[codes == 0], lines, depth, strict=True):
            layout = part_layout(part.format.storage, (int(line), int(length)))
            assert (k, outer) == (layout.codes.pitch, line) and k - length < 16
            assert pitch == k or (not length and pitch > 0)
            assert pitch * part.format.storage.element.stored_bits % 128 == 0
    starts = np.cumsum([0, *rows[:-1]])
    assert pointers[2] == (OUT_AT + starts * 64 * 4).tolist()
    assert dim_d == [(64, row, 64) for row in rows]
    assert not machine.kernels.of("hq_decode") and not machine.kernels.of("hq_finish")
    assert all(p % 16 == 0 for own in pointers[:3] for p in own)


@named("kind", ["int32", "int64", "ends"])
@named("stored", [[-5, 40, 10**6, 7], [1 << 30, 1 << 30, 1, 1], [0, 0, 0, 0], [200, 0, 0, 1]])
def test_sizes_that_lie_reach_nothing_outside(machine, kind, stored):
    asked = request("fp8_block_1x128", "fp8_block_128x128", "rows", [50, 50, 50, 50], kind=kind)
    machine.multiply(asked)
    (pointers, (_, dim_b, dim_d)), _, _ = set_up(machine, stored)
    layout = asked.a.layout
    for i, (k, rows, _) in enumerate(dim_b):
        assert 0 <= rows <= 200 and dim_d[i][1] == rows
        assert PART_AT[0] <= pointers[1][i] <= pointers[1][i] + rows * k <= PART_AT[0] + layout.codes_nbytes
        scales = -(-k // 128) * round_up(rows, 4) * 4
        first = PART_AT[0] + layout.scales_offset
        assert first <= pointers[4][i] <= pointers[4][i] + scales <= first + layout.scales_nbytes
        assert pointers[2][i] + rows * 128 <= OUT_AT + 200 * 128


@named("alignment", [1, 16, 128])
def test_members_begin_on_the_alignment_and_gaps_are_zeroed(machine, alignment):
    sizes = [0, 128, 3, 130, 65, 0]
    asked = request("mxfp8", "mxfp8", "rows", sizes, alignment=alignment, capacity=1000)
    machine.multiply(asked)
    (pointers, _), grid, (arrays, rest, row_bytes) = set_up(machine, sizes)
    starts = np.cumsum([0, *(round_up(n, alignment) for n in sizes[:-1])])
    assert pointers[2] == (OUT_AT + starts * 128).tolist()
    (launch, decode_grid, values), _ = machine.kernels.of("hq_decode")
    assert pointers[1] == (values[7] + starts * 96 * 2).tolist() and launch.tile == geometry.DECODE_TILE
    assert decode_grid[1] >= sum(-(-round_up(n, alignment) // 64) for n in sizes)
    if alignment == 1:
        assert (rest, row_bytes) == (OUT_AT, 128) and grid[0] > 1 and not machine.memsets
    else:
        assert (rest, row_bytes) == (0, 0) and grid[0] == 1 and machine.memsets == [(OUT_AT, 0, 1000 * 128, 9)]
    assert arrays >= SCRATCH_AT


def test_a_given_result_is_not_zeroed(machine):
    asked = request("bf16", "bf16", "rows", [3, 4], capacity=10, alignment=2, out=array((10, 64), BFLOAT16))
    assert machine.multiply(asked) is asked.out
    _, grid, (_, rest, _) = set_up(machine, [3, 4])
    assert grid == (1, 1, 1) and rest == 0 and not machine.memsets


@named("sizes", RAGGED, ids=str)
@named("ragged", ["rows", "k"])
@named(("a", "b"), EMULATED)
def test_emulated_operands_are_decoded_once_for_all_members(machine, a, b, ragged, sizes):
    asked = request(a, b, ragged, sizes, n=37, m=33)
    if not sum(sizes):
        return
    machine.multiply(asked)
    (pointers, (dim_a, dim_b, _)), _, _ = set_up(machine, sizes)
    terms = 3 if asked.engine.name == "bf16x3" else 1
    decodes = machine.kernels.of("hq_decode")
    decoded = [part for part in (asked.a, asked.b) if part.format.storage.scale != "none" or terms > 1]
    assert len(decodes) == len(decoded)
    regions = []
    for part, (launch, _, values) in zip(decoded, decodes, strict=True):
        codes, pitch, scales, scale_pitch, scalars, _, alpha, target, row_bytes, outer, _ = values[:11]
        codes_unit, scales_unit, values_unit = values[17:]
        layout, storage, is_b = part.layout, part.format.storage, part is asked.b
        assert codes == part.memory.ptr and scales == codes + layout.scales_offset and not alpha
        of_part = np.array(sizes) if part.sizes.each is None else part.sizes.values
        starts = pointers[0 if is_b else 1]
        assert ("RAGGED_K = true" in launch.source.text) == (layout.ragged == "k") and "GROUPED 1" in launch.source.text
        if layout.ragged == "k":
            before = np.cumsum([0, *(round_up(n, 8) for n in sizes)])
            assert starts == (target + before[:-1] * values_unit).tolist()
            assert values_unit == layout.each * terms * 2 and outer == layout.each and codes_unit == layout.codes.nbytes
            end = target + before[-1] * values_unit
        else:
            assert row_bytes == terms * round_up(96, 8) * 2 and pitch == layout.codes.nbytes
            first = np.cumsum([0, *of_part[:-1]])
            assert starts == (target + first * row_bytes).tolist()
            end = target + int(of_part.sum()) * row_bytes
        regions.append((target, end))
        for size in of_part:
            one = part_layout(storage, layout.shape(int(size)))
            if layout.scales is not None and scale_pitch:
                assert scale_pitch == one.scales_shape[1]
        if storage.global_scale:
            assert scalars == codes + layout.global_scale_offset
        for k_of, lines, pitch_of in (dim_a if is_b else dim_b):
            assert k_of % (8 * terms) == 0 and pitch_of % 8 == 0 and lines >= 0
        assert scales_unit == (0 if layout.scales is None else layout.scales.nbytes)
    for (_, end), (start, _) in itertools.pairwise(sorted(regions)):
        assert end <= start
    assert dim_a[0][0] == dim_b[0][0]
    assert len(machine.kernels.of("hq_finish")) == 1, "n = 37 is no row of 16 bytes"


def finish_of(machine):
    (launch, grid, values), = machine.kernels.of("hq_finish")
    names = ("sum", "sum_pitch", "bias", "out", "row_bytes", "aux", "aux_row_bytes", "m", "n")
    return launch, grid, dict(zip(names, values[:9], strict=True)), values[9:15], values[15:]


@named(("change", "type", "is_direct"), [
    ({}, "bfloat16", True), ({"n": 37}, "float32", False), ({"n": 500}, "float32", False),
    ({"n": 504}, "bfloat16", True),
    ({"n": 36, "dtype": FLOAT32}, "float32", True), ({"activation": "gelu"}, "float32", False),
    ({"out": array((20, 64), BFLOAT16, OUT_AT + 16)}, "bfloat16", True),
    ({"out": array((20, 64), BFLOAT16, OUT_AT + 8)}, "float32", False),
    ({"out": array((20, 64), BFLOAT16), "accumulate": True}, "float32", False),
    ({"out": array((20, 64), FLOAT32), "dtype": FLOAT32, "accumulate": True}, "float32", True),
    ({"bias": array((2, 64), FLOAT32, 80)}, "float32", False),
])
def test_what_cublaslt_cannot_write_is_finished(machine, change, type, is_direct):
    machine.multiply(request("bf16", "bf16", "rows", [12, 8], **change))
    (_, arguments), = machine.library.launches
    assert machine.library.layouts[arguments[11]][0] == type
    (pointers, (_, _, dim_d)), _, _ = set_up(machine, [12, 8])
    pitch = dim_d[0][2]
    itemsize = 2 if type == "bfloat16" else 4
    assert pitch * itemsize % 16 == 0 and all(p % 16 == 0 for p in pointers[2])
    assert arguments[2] == 51 and arguments[7] == (51 if is_direct and change.get("accumulate") else 50)
    if is_direct:
        assert not machine.kernels.of("hq_finish")
        return
    launch, _, finish, groups, (bias_bytes, scalar_a, scalar_b, zeros_rest) = finish_of(machine)
    assert finish["sum"] == pointers[2][0] and finish["sum_pitch"] == pitch
    assert finish["n"] == change.get("n", 64) and finish["row_bytes"] == finish["n"] * 2
    assert groups[0] == 4242 and (scalar_a, scalar_b) == (0, 0) and "SCALED = false" in launch.source.text
    assert zeros_rest == ("out" not in change)
    assert (bias_bytes, finish["bias"]) == ((256, 80) if "bias" in change else (0, 0))
    assert f"ACCUMULATE = {'true' if change.get('accumulate') else 'false'}" in launch.source.text


def test_scales_of_whole_members_go_through_the_finishing_kernel(machine):
    asked = request("nvfp4", "fp8_e4m3", "rows", [12, 8])
    machine.multiply(asked)
    launch, _, _, _, (_, scalar_a, scalar_b, _) = finish_of(machine)
    assert "SCALED = true" in launch.source.text and "GROUPED 1" in launch.source.text
    assert scalar_a == PART_AT[0] + asked.a.layout.global_scale_offset
    assert scalar_b == PART_AT[1] + asked.b.layout.scales_offset


@named("ragged", ["rows", "k"])
def test_global_scales_of_rows_go_to_the_decode_kernel_alone(machine, ragged):
    asked = request("nvfp4_row", "nvfp4", ragged, [12, 8, 0])
    machine.multiply(asked)
    launch, _, _, _, (_, scalar_a, scalar_b, _) = finish_of(machine)
    assert "SCALED = true" in launch.source.text and scalar_a == 0
    assert scalar_b == PART_AT[1] + asked.b.layout.global_scale_offset
    (launch, _, values), _ = machine.kernels.of("hq_decode")
    assert "global_per_row = true" in launch.source.text and "SCALAR = false" in launch.source.text
    assert values[4] == PART_AT[0] + asked.a.layout.global_scale_offset
    own = asked.a.layout.globals
    (divide, multiple), = re.findall(r"#define GlobalScales hq::Span<(\d+), (\d+)>", launch.source.text)
    for size in (0, 1, 12, 128, (1 << 31) - (1 << 20)):
        units = Span(int(divide), int(multiple)).units(size)
        assert units == own.units(size)
        lines = 1 if ragged == "rows" else asked.a.layout.each
        assert 4 * units * lines == own.nbytes * own.units(size)


def test_results_of_equal_members_are_stacked_for_the_finishing_kernel(machine):
    machine.multiply(request("nvfp4", "nvfp4", "k", [12, 8, 0]))
    _, grid, _, groups, (*_, zeros_rest) = finish_of(machine)
    assert groups == (0, SIZE_KINDS.index("each"), 3, 48, 144, 1) and not zeros_rest
    assert grid[1] >= 3 * -(-48 // geometry.GROUP_FINISH_TILE.rows)
    (pointers, _), _, _ = set_up(machine, [12, 8, 0])
    assert np.diff(pointers[2]).tolist() == [48 * 64 * 4] * 2


@named("bias_strides", [(256, 4), (0, 4), (-256, 4)])
def test_a_bias_of_any_member_stride_is_read_in_place(machine, bias_strides):
    bias = array((2, 64), FLOAT32, 80)
    bias.strides = bias_strides
    machine.multiply(request("bf16", "bf16", "rows", [12, 8], bias=bias))
    *_, (bias_bytes, _, _, _) = finish_of(machine)
    assert bias_bytes == bias_strides[0]


def test_a_sum_over_nothing_needs_no_library(machine):
    machine.library.version = 120900
    for asked in (request("nvfp4", "mxfp8", "rows", [12, 8], k=0), request("fp32", "fp32", "k", [0, 0])):
        machine.kernels.launches.clear()
        machine.multiply(asked)
        _, _, finish, *_ = finish_of(machine)
        assert finish["sum"] == 0
    assert not machine.library.launches


@named(("ragged", "sizes", "change"), [("rows", [0, 0], {}), ("rows", [], {}), ("k", [5], {"n": 0}),
                                       ("none", [1], {"m": 0}), ("k", [], {})])
def test_an_empty_result_launches_nothing(machine, ragged, sizes, change):
    machine.multiply(request("bf16", "bf16", ragged, sizes, **change))
    assert not machine.kernels.launches


@named(("a", "b", "change", "match"), [
    ("fp32", "fp32", {}, "no grouped products of float32"),
    ("fp8_block_1x128", "fp32", {}, "no grouped float32 products"),
    ("fp8_row_e4m3", "fp8_row_e4m3", {}, "no grouped products of a scale for each row; give the sizes on the host"),
    ("nvfp4_row", "fp8_row_e4m3", {}, "no grouped float32 products"),
    ("bf16", "bf16", {"version": 130100}, r"cuBLASLt 13\.1\.0"),
    ("fp8_e4m3", "fp8_e4m3", {"version": 130400}, "a scale for each member"),
])
def test_what_there_is_not_is_unavailable(machine, a, b, change, match):
    machine.library.version = change.get("version", 130500)
    with pytest.raises(Unavailable, match=match):
        machine.multiply(request(a, b, "rows", [12, 8]))
    assert not machine.library.launches


def test_a_refusal_of_both_attempts_is_unavailable_with_the_reason(machine):
    machine.library.refuses = lambda library: True
    with pytest.raises(Unavailable, match=r"13\.5\.0 refuses a grouped product: not supported .* sizes on the host"):
        machine.multiply(request("bf16", "bf16", "rows", [12, 8]))


def test_byte_scales_are_emulated_on_blackwell_too(machine):
    machine.module.chip_of = lambda device: (10, 0)
    native = gemm.Engine("native", "cuBLASLt on sm_100")
    machine.multiply(request("mxfp8", "mxfp8", "rows", [12, 8], engine=native))
    assert len(machine.kernels.of("hq_decode")) == 2
    with pytest.raises(Unavailable, match="engine='bf16'"):
        machine.multiply(request("mxfp8", "mxfp8", "rows", [12, 8], engine=gemm.Engine("native", "asked for")))


# --- warm calls, streams, graphs ------------------------------------------------------------------


def test_a_second_call_is_a_look_up_and_uses_the_same_arrays(machine):
    asked = request("bf16", "bf16", "rows", [12, 8])
    for _ in range(3):
        machine.multiply(asked)
    assert len(machine.module._calls) == 1
    assert len({values[33] for _, _, values in machine.kernels.of("hq_group_gemm")}) == 1
    assert len(machine.library.launches) == 3 and len(machine.library.layouts) == 3
    assert set(machine.workspaces) == {(0, 9, "grouped")}


def test_a_captured_call_has_arrays_of_its_own(machine):
    asked = request("nvfp4", "nvfp4", "rows", [12, 8])
    machine.multiply(asked)
    machine.is_capturing = True
    machine.multiply(asked)
    machine.multiply(asked)
    machine.is_capturing = False
    machine.multiply(asked)
    used = [values[33] for _, _, values in machine.kernels.of("hq_group_gemm")]
    assert used[0] == used[3] and len(set(used)) == 3
    assert len(machine.module.captured) == 4, "scratch memory and arrays of each captured call"


@named("change", [{"m": 40}, {"n": 72}, {"capacity": 30}, {"dtype": FLOAT32}, {"alignment": 2}, {"activation": "gelu"},
                  {"a": "fp16", "b": "fp16"}, {"out": array((20, 64), BFLOAT16)}, {"sizes": [12, 8, 0]},
                  {"ragged": "k"}, {"out": array((20, 64), BFLOAT16, OUT_AT + 8)},
                  {"bias": array((2, 64), FLOAT32)}], ids=str)
def test_what_a_call_depends_on_is_in_its_key(machine, change):
    base = {"a": "bf16", "b": "bf16", "ragged": "rows", "sizes": [12, 8]}
    machine.multiply(request(**base))
    machine.multiply(request(**(base | change)))
    assert len(machine.module._calls) == 2 - (change == {"m": 40})  # rows are ragged there
