"""Ranks and sharded matrices: 2 and 4 processes with gloo, 2 with NCCL on as many GPUs or one, against one process."""

import time
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_work
from fake_nccl import in_threads
from rank_pool import Failed, Pool
from test_shards import OPTIONS

import hqarray as hq
from hqarray.formats import ROW
from hqarray.interop.distributed import Alone, NcclRanks, TorchRanks, as_ranks
from hqarray.interop.sharding import Sharding, all_gather, quantize_sharded

SHAPE = (300, 390)


def gpu_count():
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:
        return 0


ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(gpu_count() < 1, reason="no GPU"))
ON_GPUS = [pytest.param(name, marks=ON_A_GPU) for name in ("nccl-2", "cupy-2")]


@pytest.fixture(scope="module", params=["gloo-2", "gloo-4", *ON_GPUS])
def pool(request):
    backend, _, count = request.param.partition("-")
    with Pool(int(count), backend) as pool:
        yield pool


def borders(length, step, count):
    """Unequal pieces, one of them empty where there are four."""
    wanted = [0, length // 3, length // 3, length * 2 // 3, length] if count == 4 else [0, length // 3, length]
    return tuple(n if n == length else n // step * step for n in wanted)


def sharding_of(formats, axis, count, shape=SHAPE):
    step = hq.shard_alignment(**formats)[axis]
    if step >= ROW:
        return Sharding(shape, (0, shape[axis], *[shape[axis]] * (count - 1)), axis)  # all of it on rank 0
    return Sharding(shape, borders(shape[axis], step, count), axis)


# --- collectives --------------------------------------------------------------------------------


def test_collectives_do_what_one_process_would(pool):
    check_collectives(pool.run(rank_work.collectives))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cupys_nccl_is_told_what_it_takes(size):
    """Counts, types and addresses, by a stand-in for NCCL on the host."""
    check_collectives(in_threads(size, rank_work.collectives))
    formats = {"rowwise": "nvfp4"}
    sharding = Sharding((64, 64), (0, *[10] * (size - 1), 64))
    whole = hq.quantize(rank_work.matrix((64, 64)), **formats)
    for found in (*in_threads(size, rank_work.quantized_and_gathered, (64, 64), sharding, formats, {}),
                  *in_threads(size, rank_work.gathered_in_chunks, (64, 64), sharding, formats, {"chunks": 2})):
        assert np.array_equal(found[0], whole.rowwise.buffers.base)


def check_collectives(every):
    n, sizes = len(every), [i % 3 for i in range(len(every))]
    for r, found in enumerate(every):
        assert found["max"].tolist() == [n - 1, 0, np.inf]
        assert found["alike"][:, 0].tolist() == list(range(n))
        assert found["unlike"][:, 1].tolist() == np.repeat(range(n), sizes).tolist()
        assert found["sum"].tolist() == (np.arange(4).reshape(2, 2) + 4 * r).__mul__(n * (n + 1) // 2).tolist()
        assert found["rows"].tolist() == [10 * i + r for i in range(n) for _ in range((i + r) % 3)]
        assert found["equal"].tolist() == list(range(n))
        assert found["said"] == [(i, i * i) for i in range(n)]


def test_one_process_is_the_reference():
    found = rank_work.collectives(Alone())
    assert found["sum"].tolist() == [[0, 1], [2, 3]] and found["said"] == [(0, 0)]


# --- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("name", [*hq.FORMATS, *OPTIONS])
def test_shards_quantized_and_gathered_are_the_whole_byte_for_byte(name, axis, pool):
    for formats in ({"rowwise": name}, {"columnwise": name}):
        sharding = sharding_of(formats, axis, pool.size)
        whole = hq.quantize(rank_work.matrix(SHAPE), seed=rank_work.SEED, **formats)
        options = {"seed": rank_work.SEED}
        for found in pool.run(rank_work.quantized_and_gathered, SHAPE, sharding, formats, options):
            for part, wanted in zip(found, (whole.rowwise, whole.columnwise), strict=True):
                assert (part is None) == (wanted is None)
                if part is not None:
                    assert np.array_equal(part, wanted.buffers.base)


def engine_name(ranks):
    return ranks.engine


PAIRS = [
    ("nvfp4", "mxfp8", "original"), ("nvfp4", "nvfp4(rht=True)", "original"), ("fp8_e4m3", "fp8_e5m2", "original"),
    ("mxfp8", "nvfp4", "rowwise_dequantized"), ("nvfp4", "nvfp4", "rowwise_dequantized"),
    ("nvfp4", "bf16", "rowwise_dequantized"), ("nvfp4", "nvfp4(rht=True)", "rowwise_dequantized"),
]


@pytest.mark.parametrize(("row", "column", "source"), PAIRS, ids=lambda value: str(value))
def test_both_parts_are_those_of_the_whole_whatever_amaxes_they_need(row, column, source, pool):
    formats, options = {"rowwise": row, "columnwise": column}, {"columnwise_source": source}
    whole = hq.quantize(rank_work.matrix(SHAPE), **formats, **options)
    for axis in (0, 1):
        sharding = sharding_of(formats, axis, pool.size)
        for found in pool.run(rank_work.quantized_and_gathered, SHAPE, sharding, formats, options):
            assert np.array_equal(found[0], whole.rowwise.buffers.base)
            assert np.array_equal(found[1], whole.columnwise.buffers.base)


CHUNKED = ["fp8_e4m3", "fp8_row_e4m3", "fp8_block_128x128", "mxfp8", "nvfp4_row", "bf16", "nvfp4(rounding=stochastic)"]


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_that_travel_while_others_are_quantized_make_the_same_bytes(name, chunks, pool):
    options = {"chunks": chunks, "seed": rank_work.SEED}
    for axis, formats in ((0, {"rowwise": name}), (1, {"columnwise": name})):
        sharding = sharding_of(formats, axis, pool.size)
        whole = hq.quantize(rank_work.matrix(SHAPE), seed=rank_work.SEED, **formats)
        for found in pool.run(rank_work.gathered_in_chunks, SHAPE, sharding, formats, options):
            for part, wanted in zip(found, (whole.rowwise, whole.columnwise), strict=True):
                assert (part is None) == (wanted is None)
                assert part is None or np.array_equal(part, wanted.buffers.base)


def test_only_the_part_that_is_asked_for_is_gathered(pool):
    formats = {"rowwise": "nvfp4", "columnwise": "mxfp8"}
    sharding = Sharding.even(SHAPE, pool.size, step=32)
    for only, kept in (("rowwise", 0), ("columnwise", 1)):
        for found in pool.run(rank_work.quantized_and_gathered, SHAPE, sharding, formats, {}, only):
            assert found[kept] is not None and found[1 - kept] is None


def test_an_amax_of_one_shard_alone_would_be_noticed():
    """The oracle: a rank that is not told of the others' amax makes other bytes."""
    values, sharding = rank_work.matrix(SHAPE), Sharding(SHAPE, (0, 300))
    alone = quantize_sharded(values, sharding, Alone(), rowwise="fp8_e4m3", amax=1.0)
    right = quantize_sharded(values, sharding, Alone(), rowwise="fp8_e4m3")
    assert not np.array_equal(alone.rowwise.codes, right.rowwise.codes)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (5, 0), (33, 31)], ids=str)
def test_matrices_smaller_than_the_ranks_are_legal(shape, pool):
    formats = {"rowwise": "nvfp4" if shape[0] < 2 else "nvfp4_row", "columnwise": "fp8_e4m3"}
    sharding = Sharding.even(shape, pool.size, step=hq.shard_alignment(**formats)[0])
    whole = hq.quantize(rank_work.matrix(shape), **formats)
    for found in pool.run(rank_work.quantized_and_gathered, shape, sharding, formats, {}):
        assert np.array_equal(found[0], whole.rowwise.buffers.base)
        assert np.array_equal(found[1], whole.columnwise.buffers.base)


def test_even_pieces_begin_on_multiples():
    for count, step, length in ((1, 1, 5), (2, 32, 100), (4, 128, 391), (3, 16, 0), (7, 32, 64)):
        sharding = Sharding.even((length, 9), count, step=step)
        assert len(sharding.sizes) == count and sum(sharding.sizes) == length
        assert all(n % step == 0 or n == length for n in sharding.borders)
        assert max(sharding.sizes) - min(sharding.sizes) <= step or sharding.borders[-2] % step == 0
        assert all(a <= b for a, b in pairwise(sharding.borders))


# --- what is refused ----------------------------------------------------------------------------


def test_pieces_of_no_matrix_are_refused_on_every_rank_with_all_shapes(pool):
    shapes = [(4, 64)] * pool.size
    shapes[-1] = (4, 65)
    with pytest.raises(Failed) as caught:
        pool.run(rank_work.of_unlike_pieces, shapes, ["float32"] * pool.size, 0)
    assert len(caught.value.messages) == pool.size
    for rank, message in caught.value.messages.items():
        assert message.startswith("ValueError")
        assert f"rank {rank} of {pool.size}" in message and f"rank {pool.size - 1} (4, 65)" in message
    with pytest.raises(Failed, match="dtypes that differ"):
        pool.run(rank_work.of_unlike_pieces, [(4, 64)] * pool.size, ["float32"] * (pool.size - 1) + ["float16"], 0)
    with pytest.raises(Failed, match=r"-1: not 2-D"):
        pool.run(rank_work.of_unlike_pieces, [(4,)] + [(4, 64)] * (pool.size - 1), ["float32"] * pool.size, 0)


def test_a_cut_block_is_refused_on_every_rank_before_anything_is_sent(pool):
    sharding = Sharding((8, 70), (0, 33, *[70] * (pool.size - 1)), 1)
    with pytest.raises(Failed, match="cuts a block of rowwise=mxfp8; begin shards on multiples of 32") as caught:
        pool.run(rank_work.cut_block, sharding)
    assert len(caught.value.messages) == pool.size
    assert pool.run(engine_name)  # nobody waits for anybody


@pytest.mark.parametrize(("borders", "axis", "message"), [
    ((0, 5, 9), 0, "borders rise from 0 to the 8 rows"), ((0, 5, 3, 8), 0, "borders rise"), ((1, 8), 0, "borders rise"),
    ((0,), 0, "borders rise"), ((0, 8), 2, "axis=2 is 0"),
])
def test_shardings_that_cut_no_matrix_are_refused(borders, axis, message):
    with pytest.raises(ValueError, match=message):
        Sharding((8, 64), borders, axis)


def test_a_piece_of_another_shape_is_refused_with_rank_and_remedy():
    sharding = Sharding((8, 64), (0, 8))
    with pytest.raises(ValueError, match=r"rank 0 of 1 .*is \(7, 64\).* it has \(8, 64\): make it"):
        quantize_sharded(np.ones((7, 64), np.float32), sharding, Alone(), rowwise="mxfp8")
    with pytest.raises(ValueError, match="2 pieces, and rank 0 of 1"):
        quantize_sharded(np.ones((4, 64), np.float32), Sharding((8, 64), (0, 4, 8)), Alone(), rowwise="mxfp8")
    h = hq.quantize(np.ones((8, 64), np.float32), rowwise="mxfp8")
    with pytest.raises(ValueError, match="all_gather needs the columnwise part"):
        all_gather(h, sharding, Alone(), only="columnwise")


def test_what_is_no_engine_is_refused():
    with pytest.raises(TypeError, match="not int; Alone"):
        as_ranks(3)
    with pytest.raises(TypeError, match="-100, which new_group gives a process that is not in the group"):
        as_ranks(-100)
    with pytest.raises(ValueError, match="init_process_group"):
        as_ranks(None)
    with pytest.raises(ValueError, match=r"all_gather on rank 0 of 1 .*\(2, 3\) float32, \(3, 3\) float32"):
        Alone().all_gather(np.ones((2, 3), np.float32), np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="reduce_scatter"):
        Alone().reduce_scatter(np.ones((1, 3)), np.ones(3))
    with pytest.raises(ValueError, match="all_reduce_max"):
        Alone().all_reduce_max(np.ones(3))
    assert issubclass(TorchRanks, type(Alone()).__mro__[1]) and issubclass(NcclRanks, type(Alone()).__mro__[1])


# --- ranks that are gone ------------------------------------------------------------------------


PATIENCE = 3
"""Seconds that an engine waits for a rank here."""


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_ends_the_others_with_an_error_and_no_hang(size):
    with Pool(size, engine_timeout=PATIENCE) as pool:
        assert set(pool.run(rank_work.gather_from_all)) == {"all were there"}
        pool.kill(size - 1)
        start = time.monotonic()
        found = pool.run(rank_work.gather_from_all, ranks=range(size - 1))
        assert time.monotonic() - start < 10 * PATIENCE
        for rank, message in enumerate(found):
            assert f"all_gather failed on rank {rank} of {size}" in message
            assert f"(1, 16) uint8, ({size}, 16) uint8" in message


@pytest.mark.parametrize("how", [pytest.param(how, marks=ON_A_GPU) for how in ("killed", "changed")])
def test_who_waits_for_a_rank_with_nccl_is_ended_by_its_watchdog_which_says_what_was_waited_for(how):
    """The host does not wait for what is on its way on a GPU, so that torch ends the process."""
    with Pool(2, "nccl", engine_timeout=PATIENCE) as pool:
        assert pool.run(rank_work.gather_on_a_gpu) == ["all were there"] * 2
        if how == "killed":
            pool.kill(1)
        else:  # the other rank has a piece that it refuses
            with pytest.raises(Failed, match=r"ValueError: the piece on rank 1 of 2 .* is \(5, 64\)"):
                pool.run(rank_work.changed_piece, Sharding((8, 64), (0, 4, 8)), ranks=[1])
        start = time.monotonic()
        with pytest.raises((Failed, EOFError, ConnectionError)):
            pool.run(rank_work.gather_on_a_gpu, ranks=[0])
        assert time.monotonic() - start < 20 * PATIENCE
        said = pool.said(0)
        assert "OpType=" in said and "rank 0" in said.lower(), said


@pytest.mark.parametrize(("what", "words"), [
    ("format", ["quantize_all_gather", "MX(element='e4m3'", "MX(element='e5m2'"]),
    ("direction", ["all_gather", "('rowwise', MX", "('columnwise', MX"]),
    ("capacity", ["make_route", "capacity 8", "capacity None"]),
    ("columns", ["dispatch", "32 columns", "64 columns"]), ("dtype", ["combine", "float16", "float32"]),
    ("amax", ["all_gather", "[1.0]", "[2.0]"]), ("given amax", ["[1.0]", "[1.0000001192092896]"]),
    ("seed", ["quantize_sharded", "None, 1, Sharding", "None, 2, Sharding"]),
    ("needs", ["parallel_forward", "(True, True)", "(False, True)"]),
    ("much", ["much"]), ("call", ["dispatch: ", "quantize_sharded: "]),
])
def test_calls_that_do_not_go_together_are_refused_on_every_rank_before_anything_is_sent(what, words, pool):
    with pytest.raises(Failed) as caught:
        pool.run(rank_work.unlike_calls, what)
    assert len(caught.value.messages) == pool.size
    for rank, message in caught.value.messages.items():
        assert message.startswith("CollectiveError: ") and f"on rank {rank} of {pool.size}" in message
        assert all(word in message for word in words), message
    pool.run(rank_work.unlike_calls, "nothing")  # the group still serves


def test_what_one_rank_refuses_the_others_are_told(pool):
    with pytest.raises(Failed) as caught:
        pool.run(rank_work.unlike_calls, "refusal")
    assert caught.value.messages[0].startswith("ValueError: choices on rank 0")
    for rank in range(1, pool.size):
        assert f"make_route on rank {rank} of {pool.size}" in caught.value.messages[rank]
        assert "rank 0 refused: ValueError: choices on rank 0" in caught.value.messages[rank]
    pool.run(rank_work.unlike_calls, "nothing")


def test_a_piece_that_changed_behind_its_sharding_ends_with_an_error_on_every_rank_and_no_hang():
    with Pool(2, engine_timeout=PATIENCE) as pool:
        start = time.monotonic()
        with pytest.raises(Failed) as caught:
            pool.run(rank_work.changed_piece, Sharding((8, 64), (0, 4, 8)))
        assert time.monotonic() - start < 10 * PATIENCE
        changed, waiting = caught.value.messages[1], caught.value.messages[0]
        assert changed.startswith("ValueError: the piece on rank 1 of 2") and "(5, 64)" in changed
        assert waiting.startswith("CollectiveError: all_reduce_max failed on rank 0 of 2") and "(1,) float32" in waiting
