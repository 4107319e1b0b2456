"""GroupedArrays as torch tensors and back, on the CPU and on a GPU: the same memory, or a copy with the same bits."""

import numpy as np
import pytest

import hqarray as hq
from hqarray import testing

torch = pytest.importorskip("torch")

from hqarray.interop import torch as hqt  # noqa: E402
from hqarray.interop.torch_arrays import as_array  # noqa: E402

SIZES = [33, 0, 5, 90]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def numpy_or_cupy(device):
    return np if device == "cpu" else pytest.importorskip("cupy")


def host(array):
    array = as_array(array.cpu()) if isinstance(array, torch.Tensor) else array
    return array.get() if hasattr(array, "get") else np.asarray(array)


def stacked(name, device, **options):
    """Members of one shape."""
    xp = numpy_or_cupy(device)
    return hq.GroupedArray.from_stacked(xp.asarray(testing.matrix("wide", (4 * 40, 72)).reshape(4, 40, 72)),
                                        rowwise=name, columnwise=name, **options)


def ragged(name, device):
    xp = numpy_or_cupy(device)
    return hq.grouped_quantize(xp.asarray(testing.matrix("wide", (130, 72))), SIZES, rowwise=name, columnwise=name)


MAKERS = {"one_shape": stacked, "rows": ragged, "columns": lambda name, device: ragged(name, device).T}


def assert_same_members(actual, expected):
    assert len(actual) == len(expected) and actual.shape == expected.shape
    for ours, theirs in zip(actual, expected, strict=True):
        for direction, part in theirs.parts():
            other = ours.part(direction)
            assert (other.format.storage, other.shape) == (part.format.storage, part.shape)
            for field in ("codes", "scales", "global_scale"):
                if getattr(part, field) is not None:
                    testing.assert_bitwise_equal(host(getattr(other, field)), host(getattr(part, field)), name=field)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", hq.FORMATS)
def test_a_group_comes_back_bit_for_bit_in_the_same_memory(name, make, device):
    group = MAKERS[make](name, device)
    tensors = hqt.to_torch(group)
    for part, (_, stored) in zip((tensors.rowwise, tensors.columnwise), group.parts(), strict=True):
        pointer = stored.base.ctypes.data if device == "cpu" else stored.base.data.ptr
        assert part.codes.data_ptr() == pointer
    back = hqt.from_torch(tensors, format=name, dtype=group.dtype)
    assert_same_members(back, group)
    if stored.format.storage.scale != "none":
        assert [p.base.size for _, p in back.parts()] == [p.base.size for _, p in group.parts()]
        tensors.rowwise.codes.view(torch.uint8).zero_()
        assert not host(group[0].rowwise.codes).any() and not host(back[0].rowwise.codes).any()


@pytest.mark.parametrize("name", hq.FORMATS)
def test_members_of_one_shape_are_those_of_the_tensors(name, device):
    group = stacked(name, device)
    for tensors, direction in zip(hqt.to_torch(group), ("rowwise", "columnwise"), strict=False):
        for i, member in enumerate(group):
            alone = hqt.to_torch(member.part(direction))
            for together, one in zip(tensors, alone, strict=True):
                if one is not None:
                    assert together[i].reshape(one.shape).dtype == one.dtype
                    assert together[i].data_ptr() == one.data_ptr() and together[i].numel() == one.numel()
                    if one.numel() > 1:
                        assert together[i].stride() == one.stride()


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_block_1x128", "mxfp8", "mxfp4", "nvfp4", "bf16"])
def test_codes_of_experts_that_torch_holds_are_taken(name, device):
    """Codes without padding and scales row by row, as checkpoints have them; the format is told, products are right."""
    group = stacked(name, device)
    tensors = hqt.to_torch(group).rowwise
    plain = hqt.TorchPart(*(
        None if t is None else (t.view(torch.uint8) if t.element_size() == 1 else t).contiguous().view(t.dtype)
        for t in tensors
    ))
    # a scale for each row may also be one of a block that is longer than the row
    back = hqt.from_torch(hqt.TorchGroup(plain), format=name if name == "fp8_block_1x128" else None)
    assert back.shape == (4, 40, 72) and back.rowwise.format.storage == group.rowwise.format.storage
    assert_same_members(back, group.drop(columnwise=True))
    x = numpy_or_cupy(device).asarray(testing.matrix("gauss", (130, 72)))
    gx = hq.grouped_quantize(x, SIZES, rowwise="mxfp8")
    testing.assert_bitwise_equal(host(gx @ back.T), host(gx @ group.drop(columnwise=True).T))


def test_one_scale_for_each_expert_may_be_flat(device):
    group = stacked("fp8_e5m2", device).drop(columnwise=True)
    codes, scales, _ = hqt.to_torch(group).rowwise
    for given in (scales.flatten(), scales.flatten(1), scales):
        back = hqt.from_torch(hqt.TorchGroup(hqt.TorchPart(codes, given)), format="fp8_e5m2")
        assert_same_members(back, group)
        assert back.rowwise.codes.shape == group.rowwise.codes.shape
    assert hqt.from_torch(hqt.TorchGroup((codes, scales.flatten()))).rowwise.format.name == "fp8_e5m2"


@pytest.mark.parametrize("told", [None, "nvfp4"])
def test_the_shape_of_a_group_says_whether_k_is_odd(told, device):
    x = numpy_or_cupy(device).asarray(testing.matrix("wide", (3 * 40, 71)).reshape(3, 40, 71))
    for direction in ("rowwise", "columnwise"):
        group = hq.GroupedArray.from_stacked(x if direction == "rowwise" else x.transpose(0, 2, 1).copy(),
                                             **{direction: "nvfp4"})
        parts = hqt.to_torch(group)._replace(rows=None, columns=None)
        assert_same_members(hqt.from_torch(parts, format=told, shape=group.shape), group)
        with pytest.raises(ValueError, match="or half the columns in FP4"):
            hqt.from_torch(parts, format=told, shape=(3, 8, 71))


def test_what_torch_writes_is_multiplied(device):
    group = stacked("mxfp8", device)
    tensors = hqt.to_torch(group.drop(columnwise=True))
    tensors.rowwise.codes.view(torch.uint8).fill_(0x38)  # 1.0
    tensors.rowwise.scales.view(torch.uint8).fill_(128)  # 2.0
    x = numpy_or_cupy(device).ones((130, 72), np.float32)
    y = host(hq.grouped_quantize(x, SIZES, rowwise="mxfp8") @ hqt.from_torch(tensors).T)
    assert (y[: sum(SIZES)] == 144).all()


def test_unquantized_members_share_the_memory_of_a_stack():
    w = torch.randn(3, 32, 64, dtype=torch.bfloat16)
    group = hq.GroupedArray.from_stacked(w)
    codes, scales, _ = hqt.to_torch(group).rowwise
    assert torch.equal(codes, w) and codes.data_ptr() == w.data_ptr() and scales is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_sizes_on_a_device_stay_there(kind):
    import cupy

    x = cupy.asarray(testing.matrix("wide", (130, 72)))
    group = hq.grouped_quantize(x, cupy.array(SIZES, kind), rowwise="mxfp8", columnwise="nvfp4")
    back = hqt.from_torch(hqt.to_torch(group), format=("mxfp8", "nvfp4"))
    assert back.rows is group.rows and not back.is_known
    assert_same_members(back.to_host(), group.to_host())


def members_of_two_shapes():
    return hq.GroupedArray.from_arrays([np.ones((3, 32), np.float32), np.ones((4, 64), np.float32)], rowwise="mxfp8")


REFUSED = {
    "both_axes": (lambda g: hqt.to_torch(members_of_two_shapes()), ValueError, "differ along both axes and make no te"),
    "not_told": (lambda g: hqt.from_torch(hqt.to_torch(g)), ValueError, "do not tell the format; pass format="),
    "range": (lambda g: hqt.from_torch(hqt.to_torch(g.split(2)[0]), format="mxfp8"), ValueError, r"to_torch\(g.copy"),
    "other": (lambda g: hqt.from_torch(hqt.to_torch(g), format="mxfp8_e5m2"), TypeError, "codes of mxfp8_e5m2 are"),
    "whole": (lambda g: hqt.from_torch(hqt.to_torch(ragged("nvfp4", "cpu"))._replace(
        rowwise=hqt.to_torch(ragged("nvfp4", "cpu")).rowwise._replace(global_scale=None)), format="nvfp4"),
        ValueError, "nvfp4 needs global_scale"),
    "sizes": (lambda g: hqt.from_torch(hqt.to_torch(g)._replace(rows=[1], columns=[2]), format="mxfp8"), TypeError,
              "rows are Sizes as to_torch gives them, not list"),
    "one_axis": (lambda g: hqt.from_torch(hqt.to_torch(g)._replace(rows=None)), ValueError, "both rows"),
    "empty": (lambda g: hqt.from_torch(hqt.TorchGroup()), ValueError, "a part at least"),
    "2-D": (lambda g: hqt.from_torch(hqt.TorchGroup(hqt.to_torch(g[0].rowwise))), ValueError, r"\(num_groups, outer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_is_refused(case):
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call(ragged("mxfp8", "cpu").drop(columnwise=True))
