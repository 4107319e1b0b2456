"""Calls of groups that are looked up: what is launched is what the checked call launches, and nothing stale is read."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_cublaslt_grouped import FLOAT32, OUT_AT, array, machine, part_at  # noqa: F401  machine is a fixture

from hqarray import gemm, grouped_gemm, grouped_inputs
from hqarray.formats import BFLOAT16, FORMATS
from hqarray.grouped import GroupedArray
from hqarray.groups import Sizes

named = pytest.mark.parametrize
CHOICES = (None, None, False, None)
K, N = 96, 64


@pytest.fixture
def warm(machine, monkeypatch):  # noqa: F811
    """The module, empty, on a GPU that is not there."""
    from hqarray import cuda_grouped, cuda_grouped_warm, cuda_launch

    for name in ("_products", "_quantized"):
        monkeypatch.setattr(cuda_grouped_warm, name, {})
    monkeypatch.setattr(machine.module, "groups_of", cuda_grouped.groups_of)
    monkeypatch.setattr(cuda_grouped_warm, "getDevice", lambda: 0)
    for name, value in {
        "_plans": {}, "stream_of": lambda device: 9, "alloc": lambda nbytes: SimpleNamespace(ptr=1 << 40, device_id=0),
        "getDevice": lambda: 0,
        "kernel_of": machine.kernels.kernel,
        "_uploaded": lambda host, device, stream: (on_device(hash(host)), None),
        "streamIsCapturing": lambda stream: False,
    }.items():
        monkeypatch.setattr(cuda_grouped, name, value)
    for name, value in {
        "alloc": lambda nbytes: SimpleNamespace(ptr=1 << 40, device_id=0), "streamIsCapturing": lambda stream: False,
        "memsetAsync": lambda *values: machine.memsets.append(values),
    }.items():
        monkeypatch.setattr(cuda_launch, name, value)
    return cuda_grouped_warm


def on_device(pointer, shape=(2,), dtype=np.int32):
    made = array(shape, dtype, pointer)
    made.data.device_id = 0
    return made


def told(pointer=0, host=None, capacity=20, alignment=1):
    """Sizes on the device at a pointer, or on the host."""
    if host is not None:
        return Sizes.known(host, capacity, alignment)
    return Sizes(2, None, None, on_device(pointer), "int32", capacity, alignment)


def stacked(rows, name="bf16", k=K, dtype=BFLOAT16):
    """Members (rows, k) that a @ b reads by their rows."""
    return GroupedArray(part_at(0, name, "outer", k, rows), None, rows, Sizes.uniform(2, k), dtype)


def weights(name="bf16", k=K, n=N, dtype=BFLOAT16):
    columns = Sizes.uniform(2, n)
    return GroupedArray(None, part_at(1, name, "outer", k, columns), Sizes.uniform(2, k), columns, dtype)


def summed(a_sizes, b_sizes, name="bf16"):
    """A pair whose sum is over ragged sizes."""
    m, n = Sizes.uniform(2, 48), Sizes.uniform(2, N)
    a = GroupedArray(part_at(0, name, "k", 48, a_sizes), None, m, a_sizes, BFLOAT16)
    return a, GroupedArray(None, part_at(1, name, "k", N, b_sizes), b_sizes, n, BFLOAT16)


def multiply(machine, warm, a, b, out=None, bias=None, choices=CHOICES, dtype=BFLOAT16):  # noqa: F811
    """The checked product, which is kept."""
    product = grouped_gemm.product(a, b)
    engine = gemm.choose_engine(product.left.storage, product.right.storage, (9, 0))
    request = product.request(np.dtype(dtype), out, bias, choices[1], choices[2], engine)
    result = machine.multiply(request)
    warm.keep_matmul(a, b, out, bias, choices, request, product.is_transposed)
    return result


def launched(machine, call):  # noqa: F811
    """What a call launches, but for where scratch memory was taken."""
    kernels, library = machine.kernels.launches, machine.library.launches
    kernels.clear()
    library.clear()
    result = call()
    assert result is not None
    return [(entry, grid, values) for entry, _, grid, values in kernels], list(library)


@named("name", ["bf16", "fp8_block_1x128", "nvfp4"])
@named("kind", ["device", "host", "k", "none"])
def test_a_product_that_is_looked_up_launches_what_a_checked_one_does(machine, warm, kind, name, monkeypatch):  # noqa: F811
    taken = SimpleNamespace(ptr=1 << 40)
    monkeypatch.setattr(machine.module, "alloc", lambda nbytes: taken)

    def operands(n):
        if kind == "k":
            return summed(told(5000 + n), told(6000 + n), name)
        rows = {"none": Sizes.uniform(2, 48), "host": told(host=[3 + n, 17 - n])}.get(kind, told(5000 + n))
        return stacked(rows, name), weights(name)

    multiply(machine, warm, *operands(0))
    for n in range(1, 4):
        a, b = operands(n)
        looked_up = launched(machine, lambda: warm.matmul(a, b, None, None, CHOICES))  # noqa: B023
        assert looked_up == launched(machine, lambda: multiply(machine, warm, a, b))  # noqa: B023
    assert len(warm._products) == 1


def test_a_transposed_product_is_given_its_out(machine, warm):  # noqa: F811
    columns, rows = told(5000), Sizes.uniform(2, 48)
    a = GroupedArray(part_at(0, "bf16", "outer", K, rows), None, rows, Sizes.uniform(2, K), BFLOAT16)
    b = GroupedArray(None, part_at(1, "bf16", "outer", K, columns), Sizes.uniform(2, K), columns, BFLOAT16)
    out = on_device(OUT_AT, (48, 20), BFLOAT16)
    multiply(machine, warm, a, b, out)
    assert warm.matmul(a, b, out, None, CHOICES) is out
    (*_, first), (*_, second) = machine.kernels.of("hq_group_gemm")
    assert first == second and first[0] == 5000


def test_sizes_on_the_host_that_disagree_are_left_to_the_checks(machine, warm):  # noqa: F811
    multiply(machine, warm, *summed(told(host=[3, 17]), told(host=[3, 17])))
    assert warm.matmul(*summed(told(host=[9, 11]), told(host=[9, 11])), None, None, CHOICES) is not None
    assert warm.matmul(*summed(told(host=[3, 17]), told(host=[17, 3])), None, None, CHOICES) is None


@named("change", [
    {"rows": {"capacity": 24}}, {"rows": {"alignment": 2}}, {"a": "fp16"}, {"b": "mxfp8"}, {"k": 104}, {"n": 72},
    {"out": (OUT_AT, BFLOAT16)}, {"out": (OUT_AT + 8, BFLOAT16)}, {"out": (OUT_AT, FLOAT32)}, {"bias": BFLOAT16},
    {"choices": (FLOAT32, None, False, None)}, {"choices": (None, "gelu", False, None)},
    {"choices": (None, None, False, "bf16")}, {"choices": ([1], None, False, None)}, {"a_dtype": np.float16},
    {"b_dtype": np.float16},
], ids=str)
def test_another_product_is_not_looked_up(machine, warm, change):  # noqa: F811
    multiply(machine, warm, stacked(told(5000)), weights())
    k, rows = change.get("k", K), told(5000, **change.get("rows", {}))
    a = stacked(rows, change.get("a", "bf16"), k, change.get("a_dtype", BFLOAT16))
    b = weights(change.get("b", "bf16"), k, change.get("n", N), change.get("b_dtype", BFLOAT16))
    out = on_device(change["out"][0], (20, N), change["out"][1]) if "out" in change else None
    bias = on_device(1 << 30, (N,), change["bias"]) if "bias" in change else None
    assert warm.matmul(a, b, out, bias, change.get("choices", CHOICES)) is None
    assert warm.matmul(stacked(told(7000)), weights(), None, None, CHOICES) is not None


def test_what_is_no_group_in_one_buffer_is_left_to_the_checks(warm):
    rows, host = told(5000), np.zeros((20, N), np.float32)
    for a, b, out in ((stacked(rows).T, weights(), None), (stacked(rows), weights().T, None),
                      (stacked(rows), weights(), host), (stacked(rows), weights(), (host, host))):
        assert warm.matmul(a, b, out, None, CHOICES) is None


# --- quantize -----------------------------------------------------------------------------------


def quantize(warm, values, out=None, sizes=None, offsets=None, names=("nvfp4", "mxfp8"), alignment=1):
    """The checked call, which is kept."""
    from hqarray import cuda_grouped

    formats = [FORMATS[name] for name in names]
    given = sizes if offsets is None else offsets
    kind = "ends" if sizes is None else given.dtype.name
    rows = Sizes(given.shape[0], None, None, given, kind, values.shape[0], alignment)
    parts = None if out is None else (out.rowwise, out.columnwise)
    made = cuda_grouped.quantize_groups(values, rows, *formats, None, parts)
    group = GroupedArray(*made, rows, Sizes.uniform(given.shape[0], values.shape[1]), values.dtype)
    warm.keep_quantize(values, sizes, offsets, names, alignment, out, values, group)
    return group


VALUES = {"values": on_device(1 << 32, (40, K), BFLOAT16), "sizes": on_device(5000)}


@named("names", [("nvfp4", "mxfp8"), ("fp8_e4m3", "fp8_block_1x128")])
@named("into", [False, True])
def test_a_group_that_is_looked_up_is_what_the_checked_call_makes(machine, warm, into, names):  # noqa: F811
    out = quantize(warm, **VALUES, names=names) if into else None
    quantize(warm, **VALUES, out=out, names=names)
    for n in range(1, 4):
        values, sizes = on_device((1 << 32) + 4096 * n, (40, K), BFLOAT16), on_device(5000 + n)
        group = warm.quantize(values, sizes, None, names, 1, out)
        assert group.rows.device is sizes and all(part.sizes is group.rows for _, part in group.parts())
        looked_up = launched(machine, lambda: warm.quantize(values, sizes, None, names, 1, out))  # noqa: B023
        assert looked_up == launched(machine, lambda: quantize(warm, values, out, sizes, names=names))  # noqa: B023
        checked = quantize(warm, values, out, sizes, names=names)
        assert (group.shape, group.dtype, group.rows.capacity) == (checked.shape, checked.dtype, checked.rows.capacity)
        for (_, mine), (_, other) in zip(group.parts(), checked.parts(), strict=True):
            assert (mine.layout, mine.format, mine.memory.ptr) == (other.layout, other.format, other.memory.ptr)


@named("change", [
    {"values": on_device(1 << 32, (40, K), FLOAT32)}, {"values": on_device((1 << 32) + 8, (40, K), BFLOAT16)},
    {"values": on_device(1 << 32, (32, K), BFLOAT16)}, {"sizes": on_device(5000, (3,))}, {"sizes": [3, 5]},
    {"sizes": on_device(5000, dtype=np.int64)}, {"sizes": None, "offsets": on_device(5000)}, {"sizes": None},
    {"offsets": on_device(5000)}, {"alignment": 2}, {"alignment": 1.0}, {"names": ("nvfp4", None)}, {"names": ([1], 2)},
    {"out": 3},
], ids=str)
def test_another_group_is_not_looked_up(warm, change):
    quantize(warm, **VALUES)
    asked = {"sizes": VALUES["sizes"], "offsets": None, "names": ("nvfp4", "mxfp8"), "alignment": 1, "out": None}
    asked |= {"values": VALUES["values"]} | change
    given = [asked[name] for name in ("values", "sizes", "offsets", "names", "alignment", "out")]
    assert warm.quantize(*given) is None


def test_out_of_another_layout_is_left_to_the_checks(warm):
    out = quantize(warm, **VALUES)
    quantize(warm, **VALUES, out=out)
    given = (VALUES["values"], VALUES["sizes"], None, ("nvfp4", "mxfp8"), 1)
    assert warm.quantize(*given, out) is not None
    for other in (out.T, out.drop(columnwise=True), quantize(warm, **VALUES, alignment=2)):
        assert warm.quantize(*given, other) is None


def test_values_that_were_copied_first_are_not_kept(warm):
    values, sizes = VALUES["values"], VALUES["sizes"]
    group = quantize(warm, values, sizes=sizes)
    warm._quantized.clear()
    copied = on_device(1 << 33, (40, K), BFLOAT16)
    warm.keep_quantize(values, sizes, None, ("nvfp4", "mxfp8"), 1, None, copied, group)
    wide = on_device(1 << 32, (40, K), np.float64)
    warm.keep_quantize(wide, sizes, None, ("nvfp4", "mxfp8"), 1, None, wide, group)
    known = grouped_inputs.host_sizes([3, 5], 40, False, 1)
    on_host = GroupedArray(*(part.with_sizes(known) for _, part in group.parts()), known, group.columns, group.dtype)
    warm.keep_quantize(values, [3, 5], None, ("nvfp4", "mxfp8"), 1, None, values, on_host)
    assert not warm._quantized
