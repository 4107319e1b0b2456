"""Products of groups on the GPU: against float64 of each member, and the kernels around them against their words."""

import threading

import numpy as np
import pytest
from test_cublaslt_grouped import arrays_of
from test_gemm_cuda import assert_product, on_gpu
from test_grouped_cuda import device_sizes

import hqarray as hq
from hqarray import cublaslt, cublaslt_grouped, testing
from hqarray.formats import BFLOAT16, FORMATS
from hqarray.groups import SIZE_KINDS
from hqarray.layout import round_up

pytestmark = pytest.mark.gpu

named = pytest.mark.parametrize
SIZES = {
    "ragged": [0, 128, 0, 130, 65, 0],
    "one large": [1, 7, 10379, 0, 130],
    "all empty": [0, 0, 0],
    "one row each": [1] * 100,
    "1024 groups": [n % 5 for n in range(1024)],
    "one group": [257],
}
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"),
         ("fp8_block_1x128", "fp8_block_128x128"), ("fp8_block_128x128", "fp8_block_1x128"),
         ("fp8_block_1x128", "fp8_block_1x128"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("nvfp4", "mxfp8"),
         ("fp8_e4m3", "nvfp4"), ("bf16", "mxfp6_e2m3"), ("fp8_block_1x128", "mxfp8"), ("mxfp4", "fp8_block_128x128"))
"""Every engine that groups have, and every way in which an operand comes to cuBLASLt."""

FEW = (PAIRS[0], PAIRS[2], PAIRS[4], PAIRS[6], PAIRS[8], PAIRS[12])
KINDS = ("int32", "int64", "ends")
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def grouped(cupy):
    """cupy, where cuBLASLt has every grouped product."""
    chip = cupy.cuda.Device().compute_capability
    if int(chip[:-1]) not in cublaslt_grouped.OLDEST:
        pytest.skip(f"sm_{chip} has no grouped products")
    version = cublaslt.library().get_version()
    if version < cublaslt_grouped.OLDEST_SCALAR:
        pytest.skip(f"cuBLASLt {cublaslt.version_text(version)} is loaded; 13.5.0 has every grouped product")
    return cupy


def rows_of(sizes, alignment=1):
    """Where members begin, and where the last one's span ends."""
    return np.cumsum([0, *(round_up(n, alignment) for n in sizes)])


def activations(cupy, sizes, k, row=None, column=None, kind="int32", alignment=1, extra=0, seed=0, values="gauss"):
    x = on_gpu(cupy, values, (int(rows_of(sizes, alignment)[-1]) + extra, k), BFLOAT16, seed)
    given = {"sizes": sizes} if kind == "host" else device_sizes(cupy, sizes, kind)
    return hq.grouped_quantize(x, **given, rowwise=row, columnwise=column, alignment=alignment)


def weights(cupy, groups, n, k, row=None, column=None, values="gauss"):
    return hq.GroupedArray.from_stacked(on_gpu(cupy, values, (groups * n, k), BFLOAT16, 1).reshape(groups, n, k),
                                        rowwise=row, columnwise=column)


def some(count):
    """Of many members every so manyth, the last one too."""
    return sorted({*range(0, count, max(1, count // 24)), count - 1} - {-1})


def read(a, b):
    """What a @ b reads."""
    return hq.HybridArray(a.rowwise, dtype=a.dtype), hq.HybridArray(columnwise=b.columnwise, dtype=b.dtype)


def assert_rows(cupy, out, a, b, sizes, alignment=1, bias=None, gelu=False, before=None):
    """out is stacked rows of a[i] @ b[i]."""
    a, b = a.to_host(), b.to_host()
    starts = rows_of(sizes, alignment)
    for i in some(len(sizes)):
        if sizes[i]:
            rows = slice(int(starts[i]), int(starts[i]) + sizes[i])
            assert_product(cupy, out[rows], *read(a[i], b[i]), bias=None if bias is None else bias[i], gelu=gelu,
                           added=None if before is None else before[rows])


def assert_matrices(cupy, out, a, b, sizes, before=None):
    """out[i] is a[i] @ b[i], of k that differs."""
    a, b = a.to_host(), b.to_host()
    for i in some(len(sizes)):
        if sizes[i]:
            assert_product(cupy, out[i], *read(a[i], b[i]), added=None if before is None else before[i])
        elif before is None:
            assert not out[i].any(), f"member {i} is a sum over nothing"
        else:
            testing.assert_bitwise_equal(out[i], before[i])


def others(sizes, alignment, total):
    """Rows of no member."""
    mine = np.zeros(total, bool)
    for start, size in zip(rows_of(sizes, alignment), sizes, strict=False):
        mine[start : start + size] = True
    return np.flatnonzero(~mine)


# --- the kernels around cuBLASLt ------------------------------------------------------------------


@named("alignment", [1, 16])
@named("kind", [*KINDS, "each"])
@named("stored", [*SIZES.values(), [-5, 40, 10**6, 7], [1 << 30] * 3, [300, 1, -7, 0, 2]],
       ids=[*SIZES, "negative", "too many", "mixed"])
def test_the_set_up_kernel_writes_what_its_words_say(cupy, stored, kind, alignment):
    from hqarray import cuda_grouped_gemm, cuda_launch
    from hqarray.rawkernels import geometry, traits

    count, capacity = len(stored), int(rows_of([max(0, n) for n in stored], alignment)[-1])
    capacity = min(capacity, 700)
    device = cupy.asarray(np.cumsum(stored) if kind == "ends" else stored,
                          dtype=np.int64 if kind == "int64" else np.int32)
    each = 9 if kind == "each" else 0
    groups = (0 if each else device.data.ptr, SIZE_KINDS.index(kind), count, each, 9 * count if each else capacity,
              alignment)
    targets = ((1 << 40, 96, -1, 0), (1 << 41, 1000, 0, 0), (1 << 42, 48, 1, 8), (1 << 43, 4, 128, 4), (7, 16, 2, 16))
    for ragged in (0, 1, 2):
        arrays = cupy.full(cublaslt_grouped.Arrays(count).nbytes + 64, 0xA5, np.uint8)
        rest = cupy.full((groups[4] + 2, 8), -1, np.int16)
        constants = (ragged, 33, 40, 136, 8, 3, 48)
        launch, grid = traits.group_gemm_launch(), geometry.setup_grid(True)
        kernel = cuda_launch.kernel_of(launch, grid, cupy.cuda.Device().id)
        kernel.launch(cuda_launch.stream_of(cupy.cuda.Device().id), cuda_grouped_gemm._SET_UP, *groups,
                      *(n for target in targets for n in target), *constants, arrays.data.ptr, rest.data.ptr, 16)
        pointers, dimensions = arrays_of(groups, targets, *constants, device.get())
        layout, entries = cublaslt_grouped.Arrays(count), round_up(count, 4)
        written = arrays.get()
        for i, own in enumerate(pointers):
            np.testing.assert_array_equal(written[layout.pointers(i) :][: 8 * count].view(np.int64), own)
        for matrix, own in enumerate(dimensions):
            for offset, wanted in zip(layout.dimensions(matrix), np.array(own).T, strict=True):
                np.testing.assert_array_equal(written[offset:][: 4 * count].view(np.int32), wanted)
        assert (written[76 * entries :] == 0xA5).all()
        if alignment == 1:
            told = device.get().astype(np.int64)
            given = [each] * count if each else np.diff(told, prepend=0) if kind == "ends" else told
            used = min(sum(min(max(int(n), 0), groups[4]) for n in given), groups[4])
            zeroed = (rest.get() == 0).all(axis=1)
            assert zeroed[used : groups[4]].all() and not zeroed[:used].any() and not zeroed[groups[4] :].any()


@named("sizes", [SIZES["ragged"], SIZES["one row each"], [300, 0, 513], SIZES["1024 groups"]], ids=str)
@named("name", FORMATS)
def test_members_are_decoded_exactly(cupy, name, sizes):
    """The terms of an element add up to its value but for the scale of the whole member, whose power of two is in."""
    from hqarray import cuda_grouped_sides, cuda_launch
    from hqarray.cuda_calls import Scratch
    from hqarray.cuda_grouped import groups_of

    storage = FORMATS[name].storage
    terms = storage.bf16_terms
    g = activations(cupy, sizes, 136, name, name, extra=3, values="wide")
    device = cupy.cuda.Device().id
    for direction in ("rowwise", "columnwise"):
        part, scratch = g.part(direction), Scratch()
        side = cuda_grouped_sides._decoded_side(part, 0, part.sizes, terms, terms > 1, scratch, device)
        memory = cupy.full(scratch.nbytes, 0xFF, np.uint8)
        groups = groups_of(part.sizes)
        side.decode.launch(part.memory.ptr, memory.data.ptr, groups, cuda_launch.stream_of(device))
        values = memory.view(BFLOAT16).get()
        members = g.to_host().part(direction).members()
        at = 0
        for i, member in enumerate(members):
            outer, k = member.shape
            width = round_up(k, 8)
            own = values[at : at + outer * terms * width].reshape(outer, terms, width)
            at += outer * terms * width
            if i not in some(len(sizes)) or not own.size:
                continue
            assert not own[:, :, k:].any()
            decoded = own[:, :, :k].astype(np.float64).sum(axis=1)
            expected = hq.HybridArray(member).dequantize(dtype=np.float32).get().astype(np.float64)
            if side.scalars_offset:
                scalar = float((part.global_scale if storage.global_scale else part.scales)[i].get())
                rest = 2 * np.frexp(scalar)[0]  # in [1, 2)
                np.testing.assert_allclose(decoded * rest, expected, rtol=2.0**-22, atol=2.0**-140)
            else:
                np.testing.assert_allclose(decoded, expected, rtol=0, atol=2.0**-133)


@named("dtype", DTYPES)
@named("alignment", [1, 8])
def test_a_sum_over_nothing_is_the_bias_and_zero_where_no_member_is(cupy, alignment, dtype):
    sizes, n = [3, 0, 40, 1], 37
    gx, gw = activations(cupy, sizes, 0, "bf16", extra=50, alignment=alignment), weights(cupy, 4, n, 0, "bf16")
    bias = on_gpu(cupy, "gauss", (4, n), seed=3)
    y = hq.matmul(gx, gw.T, bias=bias, out_dtype=DTYPES[dtype])
    starts = rows_of(sizes, alignment)
    for i, size in enumerate(sizes):
        rows = y[int(starts[i]) : int(starts[i]) + size]
        testing.assert_bitwise_equal(rows, cupy.broadcast_to(bias[i].astype(DTYPES[dtype]), rows.shape).copy())
    assert not y[others(sizes, alignment, len(y))].any()


# --- products -------------------------------------------------------------------------------------


@named("sizes", SIZES.values(), ids=SIZES)
@named(("a", "b"), PAIRS)
def test_rows_are_products_of_each_member(grouped, a, b, sizes):
    for n, k, kind in ((40, 136, "int32"), (37, 96, "int64"), (128, 1000, "ends")):
        if len(sizes) > 1000 and k == 1000:
            continue
        gx, gw = activations(grouped, sizes, k, a, kind=kind, extra=9), weights(grouped, len(sizes), n, k, b)
        y = gx @ gw.T
        assert y.shape == (sum(sizes) + 9, n)
        assert_rows(grouped, y, gx, gw.T, sizes)
        assert not y[sum(sizes) :].any()


@named("sizes", SIZES.values(), ids=SIZES)
@named(("a", "b"), PAIRS)
def test_matrices_are_sums_over_each_members_rows(grouped, a, b, sizes):
    """wgrad: dy.T @ x; an empty member gives exact zeros."""
    for m, n, kind in ((40, 136, "int32"), (33, 37, "int64")):
        gdy = activations(grouped, sizes, m, column=a, kind=kind, extra=9)
        gx = activations(grouped, sizes, n, column=b, kind=kind, extra=9, seed=1)
        y = hq.matmul(gdy.T, gx, out_dtype=np.float32)
        assert y.shape == (len(sizes), m, n)
        assert_matrices(grouped, y, gdy.T, gx, sizes)


@named(("a", "b"), PAIRS)
def test_equal_members_are_a_batch(grouped, a, b):
    x, w = weights(grouped, 5, 33, 136, a), weights(grouped, 5, 40, 136, b)
    y = x @ w.T
    assert y.shape == (5, 33, 40)
    for i in range(5):
        assert_product(grouped, y[i], x[i], w.T[i])


@named(("a", "b"), FEW)
def test_forward_and_both_gradients_of_one_layer(grouped, a, b):
    sizes, n, k = SIZES["ragged"], 72, 136
    gx, gdy = activations(grouped, sizes, k, a, b, extra=4), activations(grouped, sizes, n, a, a, extra=4, seed=2)
    gw = weights(grouped, len(sizes), n, k, b, b)
    assert_rows(grouped, gx @ gw.T, gx, gw.T, sizes)
    assert_rows(grouped, gdy @ gw, gdy, gw, sizes)
    assert_matrices(grouped, gdy.T @ gx, gdy.T, gx, sizes)


@named("n", [1, 8, 36, 500, 504, 2056])
@named("dtype", DTYPES)
@named(("a", "b"), FEW)
def test_any_width_of_any_dtype(grouped, a, b, dtype, n):
    """n = 500 in bf16 is no row of 16 bytes, which cuBLASLt must never see."""
    sizes = [5, 0, 131, 1]
    gx, gw = activations(grouped, sizes, 264, a), weights(grouped, 4, n, 264, b)
    assert_rows(grouped, hq.matmul(gx, gw.T, out_dtype=DTYPES[dtype]), gx, gw.T, sizes)


@named("k", [1, 15, 129, 1004, 1016, 4096])
@named(("a", "b"), FEW)
def test_any_depth(grouped, a, b, k):
    sizes = [5, 0, 131, 1]
    gx, gw = activations(grouped, sizes, k, a), weights(grouped, 4, 48, k, b)
    assert_rows(grouped, gx @ gw.T, gx, gw.T, sizes)


@named("alignment", [8, 16, 128])
@named(("a", "b"), FEW)
def test_members_on_an_alignment(grouped, a, b, alignment):
    sizes = SIZES["ragged"]
    for n in (64, 37):
        gx = activations(grouped, sizes, 136, a, b, alignment=alignment, extra=200)
        gw = weights(grouped, len(sizes), n, 136, b)
        y = gx @ gw.T
        assert_rows(grouped, y, gx, gw.T, sizes, alignment)
        assert not y[others(sizes, alignment, len(y))].any()
        gdy = activations(grouped, sizes, n, column=a, alignment=alignment, extra=200, seed=4)
        assert_matrices(grouped, gdy.T @ gx, gdy.T, gx, sizes)


@named(("a", "b"), PAIRS)
def test_sizes_on_the_host_give_the_same_bits(grouped, a, b):
    sizes = SIZES["ragged"]
    gw = weights(grouped, len(sizes), 40, 136, b)
    results = [activations(grouped, sizes, 136, a, kind=kind, extra=3) @ gw.T for kind in ("host", *KINDS)]
    for other in results[1:]:
        testing.assert_bitwise_equal(other, results[0])


# --- sizes that lie -------------------------------------------------------------------------------


@named("stored", [[-5, 40, 10**6, 7], [1 << 30, 1 << 30, 1, 1], [200, 200, -1, 200]], ids=str)
@named(("a", "b"), FEW)
def test_sizes_that_lie_are_cut_off(grouped, a, b, stored):
    x = on_gpu(grouped, "gauss", (200, 136), BFLOAT16)
    gw = weights(grouped, 4, 40, 136, b)
    gx = hq.grouped_quantize(x, grouped.asarray(stored, dtype=np.int64), rowwise=a, columnwise=a)
    kept = gx.to_host()
    y = gx @ gw.T
    assert_rows(grouped, y, kept, gw.T, kept.rows.values.tolist())
    gdy = hq.grouped_quantize(x, gx.rows.device, columnwise=b)
    assert_matrices(grouped, gdy.T @ gx, gdy.T, gx, kept.rows.values.tolist())


# --- out, bias, accumulate ------------------------------------------------------------------------


@named("shift", [0, 8, 1])
@named("n", [64, 37])
@named(("a", "b"), FEW)
def test_nothing_around_the_result_is_written(grouped, a, b, n, shift):
    """shift: elements by which out begins off 16 bytes."""
    sizes, total = SIZES["ragged"], sum(SIZES["ragged"]) + 70
    gx, gw = activations(grouped, sizes, 136, a, extra=70), weights(grouped, len(sizes), n, 136, b)
    field = grouped.full(total * n + 64, np.nan, np.float32).astype(BFLOAT16)
    out = field[8 + shift : 8 + shift + total * n].reshape(total, n)
    assert hq.matmul(gx, gw.T, out=out) is out
    assert_rows(grouped, out, gx, gw.T, sizes)
    used = 8 + shift + sum(sizes) * n
    assert grouped.isnan(field[: 8 + shift]).all() and grouped.isnan(field[used:]).all()


@named(("a", "b"), FEW)
def test_rows_of_no_member_are_not_read(grouped, a, b):
    sizes = [3, 0, 129, 1]
    for alignment in (1, 16):
        gx, gw = activations(grouped, sizes, 136, a, alignment=alignment, extra=40), weights(grouped, 4, 40, 136, b)
        clean = gx @ gw.T
        codes = gx.rowwise.padded_codes
        codes[others(sizes, alignment, len(codes))] = np.nan if codes.dtype != np.uint8 else 0xFF
        testing.assert_bitwise_equal(gx @ gw.T, clean)


@named("dtype", DTYPES)
@named("activation", [None, "gelu"])
@named("bias_dtype", [None, "float32", "bfloat16", "float64", "one for all", "strided"])
@named(("a", "b"), FEW)
def test_epilogues_are_within_the_bound(grouped, a, b, bias_dtype, activation, dtype):
    sizes, n, dtype = [5, 0, 131, 1], 40, DTYPES[dtype]
    gx, gw = activations(grouped, sizes, 136, a, extra=3), weights(grouped, 4, n, 136, b)
    bias = on_gpu(grouped, "gauss", (4, n), seed=3)
    if bias_dtype is None:
        given = each = None
    elif bias_dtype == "one for all":
        given, each = bias[1], grouped.broadcast_to(bias[1], (4, n))
    elif bias_dtype == "strided":
        given = each = grouped.asfortranarray(bias)
    else:
        given = each = bias.astype(DTYPES.get(bias_dtype, np.float64))
    gelu = activation is not None
    y = hq.matmul(gx, gw.T, bias=given, activation=activation, out_dtype=dtype)
    assert_rows(grouped, y, gx, gw.T, sizes, bias=each, gelu=gelu)
    assert not y[sum(sizes) :].any()
    total = on_gpu(grouped, "gauss", y.shape, dtype, 4)
    before = total.copy()
    hq.matmul(gx, gw.T, bias=given, activation=activation, out=total, accumulate=True)
    assert_rows(grouped, total, gx, gw.T, sizes, bias=each, gelu=gelu, before=before)
    testing.assert_bitwise_equal(total[sum(sizes) :], before[sum(sizes) :])


@named("dtype", DTYPES)
@named(("a", "b"), FEW)
def test_wgrad_accumulates_and_an_empty_member_leaves_out_as_it_is(grouped, a, b, dtype):
    sizes = SIZES["ragged"]
    gdy, gx = activations(grouped, sizes, 40, column=a), activations(grouped, sizes, 136, column=b, seed=1)
    total = on_gpu(grouped, "gauss", (len(sizes) * 40, 136), DTYPES[dtype], 4).reshape(-1, 40, 136)
    before = total.copy()
    hq.matmul(gdy.T, gx, out=total, accumulate=True)
    assert_matrices(grouped, total, gdy.T, gx, sizes, before)


# --- warm calls, streams, graphs ------------------------------------------------------------------


def size_vectors(count, total):
    """Ten ways to divide rows: none, all for one, few, at random, up to the last row and short of it."""
    rng = np.random.default_rng(5)
    yield np.zeros(count, np.int64)
    for i in (0, count - 1):
        one = np.zeros(count, np.int64)
        one[i] = total
        yield one
    yield np.arange(count) % 3
    for _ in range(6):
        yield rng.multinomial(total - int(rng.integers(0, 40)), rng.dirichlet(np.full(count, 0.5)))


@named("kind", KINDS)
@named(("a", "b"), FEW)
def test_a_captured_graph_follows_ten_size_vectors(grouped, a, b, kind):
    count, total, n, k = 6, 517, 72, 136
    x, dy = on_gpu(grouped, "gauss", (total, k), BFLOAT16), on_gpu(grouped, "gauss", (total, n), BFLOAT16, 7)
    gw = weights(grouped, count, n, k, b)
    vectors = [np.asarray(v) for v in size_vectors(count, total)]
    given = device_sizes(grouped, vectors[-1], kind)
    (stored,) = given.values()
    gx = hq.grouped_quantize(x, **given, rowwise=a, columnwise=b)
    gdy = hq.grouped_quantize(dy, **given, columnwise=a)
    y, dw = grouped.empty((total, n), BFLOAT16), grouped.empty((count, n, k), np.float32)

    def step():
        hq.grouped_quantize(x, **given, out=gx)
        hq.grouped_quantize(dy, **given, out=gdy)
        hq.matmul(gx, gw.T, out=y)
        hq.matmul(gdy.T, gx, out=dw)

    stream = grouped.cuda.Stream(non_blocking=True)
    grouped.cuda.Device().synchronize()
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for vector in vectors:
            stored[...] = grouped.asarray(np.cumsum(vector) if kind == "ends" else vector).astype(stored.dtype)
            y[...], dw[...] = np.nan, np.nan
            scribbled = [grouped.full(1 << 16, np.nan, np.float32) for _ in range(8)]  # what scratch memory may become
            graph.launch(stream)
            step()  # beside the graph's, on memory of its own
            y[...], dw[...] = np.nan, np.nan
            graph.launch(stream)
            stream.synchronize()
            sizes = vector.tolist()
            mx, mdy = (hq.grouped_quantize(v, sizes, rowwise=a, columnwise=c) for v, c in ((x, b), (dy, a)))
            assert_rows(grouped, y, mx, gw.T, sizes)
            assert grouped.isnan(y[sum(sizes) :]).all()
            assert_matrices(grouped, dw, mdy.T, mx, sizes)
            assert all(grouped.isnan(other).all() for other in scribbled)


@named(("a", "b"), FEW)
def test_a_warm_call_reads_the_arrays_and_sizes_of_that_call(grouped, a, b):
    gw = weights(grouped, 4, 40, 136, b)
    for sizes in ([5, 0, 131, 1], [100, 0, 0, 37], [0, 137, 0, 0], [34, 34, 34, 35]):
        gx = activations(grouped, sizes, 136, a, seed=sizes[0])
        assert_rows(grouped, gx @ gw.T, gx, gw.T, sizes)


def test_threads_on_one_stream_do_not_share_pointers(grouped):
    sizes, gw = [64, 0, 33, 31], weights(grouped, 4, 64, 128, "fp8_e4m3")
    inputs = [activations(grouped, sizes, 128, "fp8_e4m3", seed=seed) for seed in range(4)]
    expected = [(gx @ gw.T).get() for gx in inputs]
    wrong = []

    def work(number):
        with grouped.cuda.Device(0):
            for _ in range(100):
                y = inputs[number] @ gw.T
                if (y.get() != expected[number]).any():
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@named(("a", "b"), [PAIRS[0], PAIRS[4], PAIRS[8]])
def test_more_than_2_to_the_31_elements(grouped, a, b):
    sizes, n, k = [300_001, 0, 300_007, 5], 4096, 128
    gx, gw = activations(grouped, sizes, k, a, kind="int64"), weights(grouped, 4, n, k, b)
    y = gx @ gw.T
    assert y.size > 1 << 31
    end = sum(sizes)
    last = gx.to_host()[3]
    assert_product(grouped, y[end - 5 :], last, gw.T[3])
    part = gx.to_host()[2].rowwise
    tail = hq.HybridArray(hq.QuantizedArray.from_buffers(
        part.codes[-64:].copy(), part.scales[-64:].copy() if part.scales.size else part.scales, part.format, (64, k),
        global_scale=part.global_scale))
    assert_product(grouped, y[end - 69 : end - 5], tail, gw.T[2])


# --- what there is not ----------------------------------------------------------------------------


def test_float32_is_multiplied_one_by_one_where_the_host_knows_the_sizes(cupy):
    sizes = [5, 0, 131, 1]
    gw = weights(cupy, 4, 40, 136, "fp32")
    known, unknown = (activations(cupy, sizes, 136, "fp32", kind=kind) for kind in ("host", "int32"))
    assert_rows(cupy, known @ gw.T, known, gw.T, sizes)
    with pytest.raises(cublaslt_grouped.Unavailable, match=r"no grouped products of float32.*sizes on the host"):
        unknown @ gw.T


def test_an_older_library_multiplies_one_by_one_or_says_what_to_install(cupy, monkeypatch):
    from hqarray import cuda_grouped_gemm, cuda_grouped_warm

    monkeypatch.setattr(cublaslt_grouped, "OLDEST", dict.fromkeys(cublaslt_grouped.OLDEST, 990000))
    monkeypatch.setattr(cuda_grouped_warm, "_products", {})
    for name in ("_calls", "_plans"):
        monkeypatch.setattr(cuda_grouped_gemm, name, {})
    sizes, gw = [5, 0, 131, 1], weights(cupy, 4, 40, 136, "mxfp8")
    known, unknown = (activations(cupy, sizes, 136, "mxfp8", kind=kind) for kind in ("host", "int32"))
    assert_rows(cupy, known @ gw.T, known, gw.T, sizes)
    with pytest.raises(cublaslt_grouped.Unavailable, match=r"no grouped products for sm_\d+; install nvidia"):
        unknown @ gw.T
