"""What torch's scaled GEMMs and torchao are given: run where they run, else decoded as torch's sources read it."""

import inspect
import warnings

import numpy as np
import pytest
from moved import on_gpu

import hqarray as hq
from hqarray import testing
from hqarray.formats import ELEMENTS, scale_values

torch = pytest.importorskip("torch")

from hqarray.interop import torch as hqt  # noqa: E402
from hqarray.interop.torch_arrays import as_array  # noqa: E402

F = torch.nn.functional


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def operands(formats, m=40, n=48, k=272, device="cpu"):
    """a (m, k) and b (k, n): what fprop multiplies."""
    xp = np if device == "cpu" else pytest.importorskip("cupy")
    x, w = (xp.asarray(testing.matrix("gauss", shape, seed=i)) for i, shape in enumerate(((m, k), (n, k))))
    return hq.quantize(x, rowwise=formats[0]), hq.quantize(w, rowwise=formats[1]).T


def quantized_on(device, shape, name, seed=0):
    """A rowwise part on the device, quantized by the reference."""
    array = hq.quantize(testing.matrix("gauss", shape, seed=seed), rowwise=name)
    if device == "cpu":
        return array
    return hq.HybridArray(on_gpu(pytest.importorskip("cupy"), array.rowwise), dtype=array.dtype)


def host(array):
    if isinstance(array, torch.Tensor):
        return as_array(array.detach().cpu())
    return array.get() if hasattr(array, "get") else array


def assert_product(actual, a, b, unit):
    """Row by row: within k roundings of the float32 sum of magnitudes, and one of the result's dtype (unit)."""
    x, y = (host(z.dequantize(dtype=np.float32)).astype(np.float64) for z in (a, b))
    bound = (x.shape[1] * 2.0**-23 + unit) * (np.abs(x) @ np.abs(y))
    assert actual.shape == (x.shape[0], y.shape[1])
    assert (np.abs(host(actual).astype(np.float64) - x @ y) <= bound + 1e-30).all()


# --- torch's own GEMM ---------------------------------------------------------------------------

PER_TENSOR = [("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "fp8_e4m3")]
PER_ROW = [("fp8_row_e4m3", "fp8_row_e4m3"), ("fp8_row_e4m3(pow2=true)", "fp8_row_e4m3")]


@pytest.mark.parametrize("k", [16, 72, 272])
@pytest.mark.parametrize("formats", PER_TENSOR, ids="-".join)
@pytest.mark.parametrize("function", ["scaled_mm", "_scaled_mm"])
def test_torch_multiplies_matrices_of_one_scale(function, formats, k, device):
    a, b = operands(formats, k=k, device=device)
    given = hqt.scaled_mm_arguments(a, b, function=function)
    if function == "scaled_mm":
        y = F.scaled_mm(**given, output_dtype=torch.float32)
    else:
        y = torch._scaled_mm(**given, out_dtype=torch.float32)
    assert_product(y, a, b, 2.0**-12 if device == "cuda" else 0.0)  # FP8 tensor cores sum in fewer bits


@pytest.mark.parametrize("sizes", [(40, 48, 72), (37, 16, 272), (1, 144, 17)], ids=str)
@pytest.mark.parametrize("formats", PER_ROW, ids="-".join)
@pytest.mark.parametrize("function", ["scaled_mm", "_scaled_mm"])
def test_torch_multiplies_matrices_of_a_scale_for_each_row(function, formats, sizes, device):
    m, n, k = sizes
    a, b = (quantized_on(device, (outer, k), name, seed) for seed, (outer, name) in enumerate(zip((m, n), formats,
                                                                                                strict=True)))
    b = b.T
    given = hqt.scaled_mm_arguments(a, b, function=function)
    if function == "scaled_mm":
        y = F.scaled_mm(**given, output_dtype=torch.bfloat16)
    else:
        y = torch._scaled_mm(**given, out_dtype=torch.bfloat16)
    assert_product(y.float(), a, b, 2.0**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("function", ["scaled_mm", "_scaled_mm"])
@pytest.mark.parametrize("formats", [("fp8_block_1x128", "fp8_block_128x128"), ("fp8_block_1x128", "fp8_block_1x128"),
                                     ("fp8_block_128x128", "fp8_block_1x128")], ids="-".join)
def test_torch_multiplies_blocks_on_hopper(formats, function):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch multiplies float32 block scales on sm_90 only")
    a, b = operands(formats, 256, 384, 1024, device="cuda")
    given = hqt.scaled_mm_arguments(a, b, function=function)
    if function == "scaled_mm":
        y = F.scaled_mm(**given, output_dtype=torch.bfloat16)
    else:
        y = torch._scaled_mm(**given, out_dtype=torch.bfloat16)
    assert_product(y.float(), a, b, 2.0**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_16x16")], ids="-".join)
def test_torch_multiplies_mx_and_nvfp4_on_blackwell(formats):
    if torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("torch multiplies byte scales on sm_100 only")
    a, b = operands(formats, 256, 384, 1024, device="cuda")
    y = F.scaled_mm(**hqt.scaled_mm_arguments(a, b), output_dtype=torch.bfloat16)
    assert_product(y.float(), a, b, 2.0**-8)


# --- as torch reads it --------------------------------------------------------------------------


def decoded(mat, scales, recipe, swizzle):
    """A K-major operand (outer, k) as ScaledBlas.cpp reads it; asserts the shapes and strides that it checks."""
    types = F.ScalingType
    scale, *whole = scales
    name = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float4_e2m1fn_x2: "e2m1"}[mat.dtype]
    codes = host(mat.view(torch.uint8))
    if name == "e2m1":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    values = ELEMENTS[name].values[codes].astype(np.float64)
    outer, k = values.shape
    assert k % 16 == 0 and mat.stride(1) == 1
    tiled = [F.SwizzleType.SWIZZLE_32_4_4] if scale.dtype != torch.float32 else [F.SwizzleType.NO_SWIZZLE]
    assert swizzle == tiled + [F.SwizzleType.NO_SWIZZLE] * len(whole)
    assert recipe[1:] == [types.TensorWise] * len(whole)
    if recipe[0] is types.TensorWise:
        assert scale.numel() == 1 and scale.dtype == torch.float32
        return values * float(scale)
    if recipe[0] is types.RowWise:
        assert tuple(scale.shape) == (outer, 1) and scale.is_contiguous() and scale.stride(1) == 1
        return values * host(scale)
    if recipe[0] is types.BlockWise1x128:
        assert tuple(scale.shape) == (outer, -(-k // 128)) and scale.stride() in ((1, outer), (1, 1))
        return values * np.repeat(host(scale), 128, 1)[:, :k]
    if recipe[0] is types.BlockWise128x128:
        blocks = -(-k // 128)
        assert tuple(scale.shape) == (-(-blocks // 4) * 4, -(-outer // 128)) and scale.stride(0) == 1
        assert scale.shape[1] == 1 or scale.stride(1) == scale.shape[0]
        return values * np.repeat(np.repeat(host(scale).T[:, :blocks], 128, 0)[:outer], 128, 1)[:, :k]
    block, kind = (32, "e8m0") if recipe[0] is types.BlockWise1x32 else (16, "e4m3")
    blocks = -(-k // block)
    assert scale.is_contiguous() and scale.numel() == -(-outer // 128) * 128 * (-(-blocks // 4) * 4)
    i, j = np.indices((outer, blocks))
    at = ((i // 128) * -(-blocks // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    stored = scale_values(kind)[host(scale.view(torch.uint8))[at]]
    return values * np.repeat(stored, block, 1)[:, :k] * (float(whole[0]) if whole else 1.0)


PAIRS = [*PER_TENSOR, *PER_ROW, ("fp8_block_1x128", "fp8_block_128x128"), ("fp8_block_1x128", "fp8_block_1x128"),
         ("fp8_block_128x128", "fp8_block_1x128_pow2"), ("mxfp8", "mxfp8_e5m2"), ("mxfp8", "mxfp8"),
         ("mxfp8_e5m2", "mxfp8"), ("nvfp4", "nvfp4_16x16"), ("nvfp4", "nvfp4")]


@pytest.mark.parametrize("sizes", [(40, 48, 272), (132, 400, 1000), (4, 16, 17), (260, 144, 640)], ids=str)
@pytest.mark.parametrize("formats", PAIRS, ids="-".join)
def test_arguments_decode_to_the_operands_and_share_their_memory(formats, sizes, device):
    m, n, k = sizes
    a, b = quantized_on(device, (m, k), formats[0]), quantized_on(device, (n, k), formats[1], 1).T
    given = hqt.scaled_mm_arguments(a, b)
    mats = {"a": given.pop("mat_a"), "b": given.pop("mat_b").t()}
    for side, part in (("a", a.rowwise), ("b", b.columnwise)):
        scales, recipe, swizzle = (given.pop(f"{name}_{side}") for name in ("scale", "scale_recipe", "swizzle"))
        if recipe[0] is F.ScalingType.RowWise and side == "b":
            assert tuple(scales[0].shape) == (1, part.shape[0])
            scales = [scales[0].t()]
        values = decoded(mats[side], scales, recipe, swizzle)
        wanted = host(hq.HybridArray(part).dequantize(dtype=np.float32)).astype(np.float64)
        np.testing.assert_allclose(values[:, : part.shape[1]], wanted, rtol=2.0**-23, atol=0)
        assert not values[:, part.shape[1]:].any(), "padding of k"
        own = hqt.to_torch(part)
        assert mats[side].data_ptr() == own.codes.data_ptr()
        assert scales[0].data_ptr() == own.scales.data_ptr() or own.scales.dtype != torch.float32
        if own.global_scale is not None:
            assert scales[1].data_ptr() == own.global_scale.data_ptr()
    assert not given


@pytest.mark.parametrize("formats", [pair for pair in PAIRS if "nvfp4" not in pair[0]], ids="-".join)
def test_the_older_function_takes_scales_of_b_as_those_of_b(formats):
    """torch._scaled_mm: float32 scales of mat2 transposed, tiles as they are; 128x128 where pitch and blocks agree."""
    a, b = operands(formats, 40, 48, 512)
    given, newer = hqt.scaled_mm_arguments(a, b, function="_scaled_mm"), hqt.scaled_mm_arguments(a, b)
    assert list(given) == ["input", "mat2", "scale_a", "scale_b"]
    for name, side, part in (("scale_a", "a", a.rowwise), ("scale_b", "b", b.columnwise)):
        scale = given[name]
        if scale.dtype != torch.float32:
            assert torch.equal(scale.view(torch.uint8), newer[f"scale_{side}"][0].view(torch.uint8))
            continue
        scale = scale if side == "a" else scale.t()
        assert tuple(scale.shape) == part.scales.shape and (host(scale) == part.scales).all()


NOT_TAKEN = {
    "e5m2_twice": (("fp8_e5m2", "fp8_e5m2"), {}, "there is no E5M2 x E5M2"),
    "squares": (("fp8_block_128x128", "fp8_block_128x128"), {}, "there is no 128x128 by 128x128"),
    "mixed": (("mxfp8", "fp8_e4m3"), {}, "operands are scaled differently"),
    "row_and_tensor": (("fp8_row_e4m3", "fp8_e4m3"), {}, "operands are scaled differently"),
    "row_and_block": (("fp8_block_1x128", "fp8_row_e4m3"), {}, "operands are scaled differently"),
    "row_globals": (("nvfp4_row", "nvfp4_row"), {}, "it takes one global scale, not one for each row"),
    "block_and_tensor": (("fp8_block_1x128", "fp8_e4m3"), {}, "operands are scaled differently"),
    "fp6": (("mxfp6_e2m3", "mxfp8"), {}, "takes no such operand"),
    "mxfp4": (("mxfp4", "mxfp4"), {}, "takes no such operand"),
    "bf16": (("bf16", "bf16"), {}, "takes no such operand"),
    "n": (("fp8_e4m3", "fp8_e4m3"), {"n": 40}, "n of a multiple of 16, not 40; hqarray.matmul takes any"),
    "rows": (("fp8_block_1x128", "fp8_block_128x128"), {"m": 37}, "1x128 scales of a multiple of 4 rows"),
    "older_nvfp4": (("nvfp4", "nvfp4"), {"function": "_scaled_mm"}, "takes no global scales"),
    "older_squares": (("fp8_block_1x128", "fp8_block_128x128"), {"function": "_scaled_mm"}, "multiple of 4 blocks"),
    "function": (("fp8_e4m3", "fp8_e4m3"), {"function": "mm"}, "is not 'scaled_mm' or '_scaled_mm'"),
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_pairs_that_torch_does_not_take_are_named(case):
    formats, options, text = NOT_TAKEN[case]
    sizes = {name: options.pop(name) for name in ("m", "n") if name in options}
    a, b = operands(formats, **sizes)
    with pytest.raises(ValueError, match=text):
        hqt.scaled_mm_arguments(a, b, **options)


def test_a_missing_part_and_what_is_no_array_are_named():
    a, b = operands(("fp8_e4m3", "fp8_e4m3"))
    with pytest.raises(ValueError, match="needs the rowwise part"):
        hqt.scaled_mm_arguments(b, b)
    with pytest.raises(ValueError, match=r"takes a \(m, k\) and b \(k, n\)"):
        hqt.scaled_mm_arguments(a, operands(("fp8_e4m3", "fp8_e4m3"), k=32)[1])
    with pytest.raises(TypeError, match="a is ndarray"):
        hqt.scaled_mm_arguments(np.zeros((2, 2)), b)


# --- groups -------------------------------------------------------------------------------------


def groups(format, sizes, device="cpu", k=96, n=48, T=300):
    xp = np if device == "cpu" else pytest.importorskip("cupy")
    x, w = (xp.asarray(testing.matrix("gauss", s, seed=i)) for i, s in enumerate(((T, k), (len(sizes), n, k))))
    return hq.grouped_quantize(x, sizes, rowwise=format), hq.grouped_quantize(w, rowwise=format)


@pytest.mark.parametrize("sizes", [[3, 0, 197, 100], [300, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8"])
def test_grouped_arguments_decode_to_the_members(format, sizes, device):
    g, gw = groups(format, sizes, device)
    given = hqt.scaled_grouped_mm_arguments(g, gw.T)
    codes, weights = given["input"], given["mat2"].transpose(1, 2)
    assert codes.data_ptr() == hqt.to_torch(g[0].rowwise).codes.data_ptr()
    assert given["offs"].tolist() == np.cumsum(sizes).tolist() and given["offs"].dtype == torch.int32
    assert tuple(given["mat2"].shape) == (4, 96, 48) and given["mat2"].stride(-2) == 1
    start = tiles = 0
    for i, size in enumerate(sizes):
        rows, scale_b = codes[start : start + size], given["scale_b"][i]
        if format == "fp8_e4m3":
            scale_a = given["scale_a"][start : start + size]
            assert tuple(scale_b.shape) == (48,) and given["scale_a"].shape == (300,)
            x, w = (host(m.float() * s[:, None]) for m, s in ((rows, scale_a), (weights[i], scale_b)))
        else:
            high = -(-size // 128) * 128
            scale_a = given["scale_a"][tiles : tiles + high].reshape(-1)
            tiles += high
            x, w = (decoded(m, [s], [F.ScalingType.BlockWise1x32], [F.SwizzleType.SWIZZLE_32_4_4])
                    for m, s in ((rows, scale_a), (weights[i].contiguous(), scale_b)))
        start += size
        np.testing.assert_allclose(x, host(g[i].dequantize(dtype=np.float32)), rtol=2.0**-23, atol=0)
        np.testing.assert_allclose(w, host(gw[i].dequantize(dtype=np.float32)), rtol=2.0**-23, atol=0)


def ragged_k(format, sizes, device="cpu", m=48, n=32):
    """dy.T and x of a wgrad: rows of groups are what is contracted."""
    xp = np if device == "cpu" else pytest.importorskip("cupy")
    dy, x = (xp.asarray(testing.matrix("gauss", (sum(sizes), width), seed=i)) for i, width in enumerate((m, n)))
    return hq.grouped_quantize(dy, sizes, columnwise=format).T, hq.grouped_quantize(x, sizes, columnwise=format)


def members_of(given, side, format, i, rows, outer):
    """Values of member i of an operand as torch's kernels find them; of ragged k given["sizes"] are the widths."""
    first = "input" if "input" in given else "mat_a"
    mat = given[first] if side == "a" else given[{"input": "mat2", "mat_a": "mat_b"}[first]].mT
    codes, (start, end) = mat.view(torch.uint8), rows
    per_byte = 2 if "fp4" in format else 1
    scale, *whole = given[f"scale_{side}"] if isinstance(given[f"scale_{side}"], list) else [given[f"scale_{side}"]]
    block = 16 if format == "nvfp4" else 32
    high = -(-outer // 128) * 128
    if mat.ndim == 3:
        codes, scale = codes[i], scale[i]
    elif "sizes" not in given:  # ragged rows
        codes, ends = codes[start:end], [0, *given["offs"].tolist()]
        above = sum(-(-(ends[j + 1] - ends[j]) // 128) * 128 for j in range(i))
        scale = scale[start:end] if scale.dtype == torch.float32 else scale[above : above + high]
    else:  # ragged k
        codes = codes[:, start // per_byte : end // per_byte]
        if scale.dtype == torch.float32:
            scale = scale[i * outer : (i + 1) * outer]
        else:
            widths = [-(-n // block // 4) * 4 for n in given["sizes"]]
            flat, at = scale.view(torch.uint8).reshape(-1), high * sum(widths[:i])
            scale = flat[at : at + high * widths[i]].view(scale.dtype)
    types = F.ScalingType
    recipe = given.get(f"scale_recipe_{side}", [types.RowWise if scale.dtype == torch.float32 else types.BlockWise1x32])
    codes = codes.contiguous().view(mat.dtype)
    if scale.dtype == torch.float32:
        assert recipe == [types.RowWise] and not whole and tuple(scale.shape) == (len(codes),)
        return host(codes.float() * scale[:, None])
    wanted = [types.BlockWise1x16, types.TensorWise] if format == "nvfp4" else [types.BlockWise1x32]
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE][: 1 + len(whole)]
    assert recipe == wanted and given.get(f"swizzle_{side}", swizzles) == swizzles
    return decoded(codes, [scale.reshape(-1), *(w[i] for w in whole)], recipe, swizzles)


NEWER = ["fp8_e4m3", "mxfp8", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("sizes", [[32, 0, 160, 64], [256]], ids=str)
@pytest.mark.parametrize(("format", "function"), [(f, "scaled_grouped_mm") for f in NEWER] + [
    (f, "_scaled_grouped_mm") for f in NEWER[:2]])
def test_arguments_of_ragged_k_decode_to_the_members(format, function, sizes, device):
    a, b = ragged_k(format, sizes, device)
    given = hqt.scaled_grouped_mm_arguments(a, b, function=function)
    assert given["offs"].tolist() == np.cumsum(sizes).tolist() and given["offs"].dtype == torch.int32
    ends = [0, *given["offs"].tolist()]
    given = {**given, "sizes": sizes}
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        rows = ends[i], ends[i + 1]
        if sizes[i]:
            for side, outer, wanted in (("a", 48, x), ("b", 32, y.T)):
                np.testing.assert_allclose(members_of(given, side, format, i, rows, outer),
                                           host(wanted.dequantize(dtype=np.float32)), rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("format", NEWER)
def test_arguments_of_the_newer_function_decode_to_the_members(format, device):
    sizes = [3, 0, 197, 100]
    g, gw = groups(format, sizes, device)
    given = hqt.scaled_grouped_mm_arguments(g, gw.T, function="scaled_grouped_mm")
    ends = [0, *given["offs"].tolist()]
    for i, (x, w) in enumerate(zip(g, gw, strict=True)):
        for side, outer, wanted in (("a", sizes[i], x), ("b", 48, w)):
            if sizes[i] or side == "b":
                np.testing.assert_allclose(members_of(given, side, format, i, (ends[i], ends[i + 1]), outer),
                                           host(wanted.dequantize(dtype=np.float32)), rtol=2.0**-23, atol=0)
    accepted = inspect.signature(F.scaled_grouped_mm).parameters
    assert set(given) <= set(accepted)


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8"])
@pytest.mark.parametrize("axis", ["rows", "k", "none"])
def test_torchs_own_checks_take_the_arguments(axis, format):
    """Oracle: the meta kernel, which makes the checks of the CUDA one without a GPU."""
    sizes = [32, 0, 160, 64]
    if axis == "none":
        if format == "mxfp8":
            pytest.skip("torch takes MXFP8 with offsets only")
        a, b = (hq.GroupedArray.from_stacked(testing.matrix("gauss", (4 * n, 96)).reshape(4, n, 96), rowwise=format)
                for n in (32, 48))
        b = b.T
    elif axis == "k":
        a, b = ragged_k(format, sizes)
    else:
        a, b = groups(format, sizes, T=256)
        b = b.T
    given = hqt.scaled_grouped_mm_arguments(a, b)
    meta = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for name, t in given.items()}
    y = torch._scaled_grouped_mm(**meta, out_dtype=torch.bfloat16)
    assert tuple(y.shape) == {"rows": (256, 48), "k": (4, 48, 32), "none": (4, 32, 48)}[axis]


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True], ids=["host_sizes", "device_sizes"])
def test_torch_multiplies_groups_on_hopper(on_device):
    import cupy

    sizes = [32, 0, 160, 64]
    g, gw = groups("fp8_e4m3", cupy.array(sizes) if on_device else sizes, "cuda", 256, 128, 256)
    y = torch._scaled_grouped_mm(**hqt.scaled_grouped_mm_arguments(g, gw.T), out_dtype=torch.bfloat16)
    for rows, a, b in zip(y.float().split(sizes), g.to_host(), gw, strict=True):
        if a.shape[0]:
            assert_product(rows, a, b.T, 2.0**-8)


@pytest.mark.gpu
def test_torch_multiplies_groups_of_ragged_k_on_hopper():
    a, b = ragged_k("fp8_e4m3", [32, 160, 64], "cuda", 128, 256)
    y = torch._scaled_grouped_mm(**hqt.scaled_grouped_mm_arguments(a, b), out_dtype=torch.bfloat16)
    for product, x, w in zip(y.float(), a, b, strict=True):
        assert_product(product, x, w, 2.0**-8)


def pair_of(format, **sizes):
    g, gw = groups(format, [100, 200], **sizes)
    return g, gw.T


GROUPS_NOT_TAKEN = {
    "ragged_k": (lambda g, w: ragged_k("fp8_e4m3", [8, 16]), {}, ValueError, "multiples of 16, group 0 has 8"),
    "ragged_n": (lambda g, w: (g.T, g), {}, ValueError, "a.rowwise|needs the rowwise part"),
    "blocks": (lambda g, w: tuple(f(groups("fp8_block_1x128", [100, 200])[i])
                                  for i, f in enumerate((lambda x: x, lambda x: x.T))), {},
               ValueError, "one scale a group, MXFP8, MXFP4 and NVFP4, both operands alike, not fp8_block_1x128"),
    "mixed": (lambda g, w: (g, groups("mxfp8", [100, 200])[1].T), {}, ValueError, "not fp8_e4m3 by mxfp8"),
    "older_nvfp4": (lambda g, w: pair_of("nvfp4"), {}, ValueError, "_scaled_grouped_mm takes no nvfp4, torch.nn.fun"),
    "function": (lambda g, w: (g, w.T), {"function": "mm"}, ValueError, "function='mm' is not '_scaled_grouped_mm' or"),
    "n": (lambda g, w: (g, groups("fp8_e4m3", [3, 4], n=40)[1].T), {}, ValueError, "multiple of 16, not 40"),
    "k": (lambda g, w: pair_of("mxfp8", k=48), {}, ValueError, "k of a multiple of 32, not 48"),
    "hybrid": (lambda g, w: (g[0], w.T), {}, TypeError, "a is HybridArray; scaled_grouped_mm_argumen"),
    "fit": (lambda g, w: (g, groups("fp8_e4m3", [3, 4], k=64)[1].T), {}, ValueError, "do not fit"),
}


@pytest.mark.parametrize("case", GROUPS_NOT_TAKEN)
def test_groups_that_torch_does_not_take_are_named(case):
    make, options, error, text = GROUPS_NOT_TAKEN[case]
    with pytest.raises(error, match=text):
        hqt.scaled_grouped_mm_arguments(*make(*groups("fp8_e4m3", [100, 200])), **options)


# --- torchao ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", exc_type=ImportError)
        return pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)


@pytest.mark.parametrize("source", ["rowwise", "columnwise"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_16x16"])
def test_torchao_decodes_our_parts_and_gives_them_back(torchao, name, swizzled, source, device):
    xp = np if device == "cpu" else pytest.importorskip("cupy")
    array = hq.quantize(xp.asarray(testing.matrix("wide", (160, 192))), rowwise=name, columnwise=name)
    tensor = hqt.to_torchao(array, source=source, swizzled=swizzled)
    part = array.part(source)
    assert tuple(tensor.shape) == (160, 192) and tensor.is_swizzled_scales == swizzled
    assert tensor.qdata.data_ptr() == hqt.to_torch(part).codes.data_ptr()
    back = hqt.from_torchao(tensor)
    assert [direction for direction, _ in back.parts()] == [source]
    assert back.part(source).format.storage == part.format.storage
    for field in ("codes", "scales", "global_scale"):
        ours, theirs = getattr(back.part(source), field), getattr(part, field)
        if theirs is not None:
            testing.assert_bitwise_equal(host(ours), host(theirs), name=field)
    decoded_by_us = host(array.dequantize(source=source))
    # torchao multiplies the two scales of NVFP4 first: two roundings, not one
    np.testing.assert_allclose(host(tensor.dequantize()), decoded_by_us, rtol=2.0**-22 if "nv" in name else 0, atol=0)


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "nvfp4", "nvfp4_of_one_scale"])
def test_tensors_that_torchao_quantized_are_taken(torchao, element, swizzled, device):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x = torch.from_numpy(testing.matrix("gauss", (160, 192))).to(device, torch.bfloat16)
    if "nvfp4" in element:
        whole = None if "one" in element else torch.tensor(0.01, device=device)
        tensor = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole, is_swizzled_scales=swizzled)
    else:
        tensor = torchao.MXTensor.to_mx(x, getattr(torch, element), 32, is_swizzled_scales=swizzled)
    values = tensor.dequantize(torch.float32)
    for given, wanted in ((tensor, values), (tensor.t(), values.t())):
        array = hqt.from_torchao(given)
        assert (array.shape, array.dtype.name) == (tuple(wanted.shape), "bfloat16")
        np.testing.assert_allclose(host(array.dequantize(dtype=np.float32)), host(wanted), rtol=2.0**-22, atol=0)
        if not swizzled:
            (_, part), = array.parts()
            assert part.scales.ctypes.data == tensor.scale.data_ptr() if device == "cpu" else True


def test_what_torchao_does_not_have_is_refused(torchao):
    x = testing.matrix("gauss", (40, 72))
    for name, text in (("mxfp8", "k of a multiple of the block, 32"), ("fp8_e4m3", "this part is fp8_e4m3; use to_to")):
        with pytest.raises(ValueError, match=text):
            hqt.to_torchao(hq.quantize(x, rowwise=name))
    with pytest.raises(ValueError, match="needs the columnwise part"):
        hqt.to_torchao(hq.quantize(x, rowwise="mxfp8"), source="columnwise")
    with pytest.raises(TypeError, match="takes an MXTensor or NVFP4Tensor, not Tensor"):
        hqt.from_torchao(torch.zeros(3, 3))
    tensor = torchao.MXTensor.to_mx(torch.zeros(4, 64), torch.float8_e4m3fn, 64)
    with pytest.raises(ValueError, match=r"no format has torch\.float8_e4m3fn elements in blocks of 64"):
        hqt.from_torchao(tensor)
