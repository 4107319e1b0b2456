"""rotate.cuh, compiled for the host with a warp of 32 fibers, against hadamard.py and the matrix."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
from test_rawkernels_member import WARP

from hqarray import hadamard, testing
from hqarray.rawkernels import loader, traits

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

APART = (1, 8)
"""Which lane holds the other half: the next one of a row, or the next row's in a warp of 8 x 4 lanes."""

SHIM = WARP.partition('#include "member.cuh"')[0] + """
static float __shfl_xor_sync(unsigned, float value, int apart) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, 4);
    bits = unsigned(all(bits)[threadIdx.x ^ apart]);
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
#include "rotate.cuh"
static float (*values)[32][8];
static long long count;
static void lane_of() {
    for (long long n = 0; n < count; ++n)
        hq::rotate_back<APART>(values[n][threadIdx.x], SIGNS, threadIdx.x & APART, ~0u);
    all(0);
    if (threadIdx.x == 31) setcontext(&home);
    const int next = threadIdx.x + 1;
    threadIdx.x = next;
    setcontext(&lanes[next]);
}
extern "C" void rotate_back(float (*in_place)[32][8], long long times) {
    static char stacks[32][1 << 15];
    values = in_place; count = times;
    for (int i = 0; i < 32; ++i) {
        turns[i] = 0;
        getcontext(&lanes[i]);
        lanes[i].uc_stack.ss_sp = stacks[i];
        lanes[i].uc_stack.ss_size = sizeof stacks[i];
        lanes[i].uc_link = nullptr;
        makecontext(&lanes[i], lane_of, 0);
    }
    threadIdx.x = 0;
    swapcontext(&home, &lanes[0]);
}
"""


@pytest.fixture(scope="module", params=APART, ids=["rows", "columns"])
def rotate_back(tmp_path_factory, request):
    """float32 (n, 16) -> rotated back, as the lanes of a warp do it that lie so far apart."""
    folder = tmp_path_factory.mktemp("rotate")
    signs = f"{traits.SIGNS}u"
    (folder / "shim.cpp").write_text(SHIM.replace("APART", str(request.param)).replace("SIGNS", signs))
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{loader.SOURCES}", "shim.cpp",
               "-o", "shim.so"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(folder / "shim.so"))
    lane = np.arange(32)
    place = lane[(lane & request.param) == 0][:, None] | np.array([0, request.param])  # (groups, half)

    def rotate_back(values):
        warps = np.zeros((len(values) // 16, 32, 8), np.float32)
        warps[:, place] = values.reshape(-1, 16, 2, 8)
        library.rotate_back(ctypes.c_void_p(warps.ctypes.data), ctypes.c_longlong(len(warps)))
        return warps[:, place].reshape(values.shape)

    return rotate_back


@pytest.mark.parametrize("kind", testing.MATRICES)
def test_a_warp_rotates_back_as_the_reference_does(rotate_back, kind):
    """Bit for bit: zeros' signs, subnormals, sums that overflow."""
    values = testing.matrix(kind, (256, 16))
    expected = values.copy()
    with np.errstate(all="ignore"):
        hadamard.rotate_back(expected)
    actual, nan = rotate_back(values), np.isnan(expected)
    assert (np.isnan(actual) == nan).all()
    testing.assert_bitwise_equal(actual[~nan], expected[~nan])


def test_a_warp_rotates_back_by_the_matrix(rotate_back):
    index = np.arange(16)
    parity = np.array([[bin(i & j).count("1") & 1 for j in index] for i in index])
    rotation = np.array(hadamard.SIGNS)[:, None] * (1 - 2 * parity) / 4
    values = testing.matrix("gauss", (64, 16))
    np.testing.assert_allclose(rotate_back(values), values.astype(np.float64) @ rotation.T, rtol=0, atol=2e-6)
    units = np.eye(16, dtype=np.float32)
    testing.assert_bitwise_equal(rotate_back(units), rotation.T.astype(np.float32))
