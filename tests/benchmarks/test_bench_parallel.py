"""Suite parallel on two processes of a CPU: rows of each kind, all near what one process computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sage_kernels.results import read_rows
from tests.support.repository import ROOT


@pytest.mark.slow("two processes; test_parallel_models shows what they compute")
def test_rows_of_one_process_and_of_two(tmp_path):
    path = tmp_path / "rows.csv"
    command = [sys.executable, str(ROOT / "kernels" / "benchmarks" / "bench_parallel.py"), "--tiny", "--device", "cpu"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [*command, "--csv", str(path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_rows(path) if row["metric"] == "time"]
    stock, ours = ("torch_sdpa_cudnn", ""), [("sage_kernels", "qk_int8_pv_bf16"), ("sage_kernels", "preset_fast")]
    kinds = {"x1": [stock, *ours], "x2_ulysses": [stock, *ours], "x2_ring": ours}
    assert [(row["case"], (row["provider"], row["recipe"])) for row in rows] == [
        (f"{case}/tiny/{kind}", who)
        for case in ("wan21_1_3b_480p81", "flux_2048")
        for kind, provided in kinds.items()
        for who in provided
    ]
    # of another number of devices are rounded in another order, but not of other numbers: bf16's last place
    errors = {(row["case"], row["recipe"]): float(row["rel_l2_error"]) for row in rows}
    assert 0 < errors["flux_2048/tiny/x2_ulysses", "qk_int8_pv_bf16"] and max(errors.values()) < 0.08
