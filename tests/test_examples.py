"""The examples of several ranks: what each finds, on processes that are there already."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import rank_work
from test_distributed import pool  # noqa: F401  a fixture
from test_experts import run
from test_packaging import ROOT

BOUNDS = {"gather_shards": 1, "tensor_parallel": 1e-2, "expert_parallel": 0.1}


def test_every_example_is_run():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*BOUNDS, "ranks"}


@pytest.mark.parametrize("name", BOUNDS)
def test_examples_find_what_they_promise(name, pool):  # noqa: F811
    if pool.size == 4:
        pytest.skip("two ranks are enough")
    for found in run(pool, rank_work.example, str(ROOT / "examples"), name):
        assert found is True or 0 < found < BOUNDS[name]


def test_as_a_program_it_starts_and_ends_by_itself():
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, ROOT / "examples" / "gather_shards.py"], env={**os.environ, **where},
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1024 rows sent" in done.stdout
    for name in BOUNDS:
        text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert f"torchrun --nproc-per-node 2 examples/{name}.py" in text and "with torchrun() as" in text
