"""A script of tests/diffusion run by two processes that talk to each other, on the CPU or on a GPU each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.repository import ROOT


def two_processes(script: str, tmp_path_factory, device: str = "cpu") -> list[dict]:
    """The rows (a JSON object a line) that both print. Called as `SCRIPT.py RANK FILE [cuda]`."""
    file = tmp_path_factory.mktemp("parallel") / "meet"
    paths = (str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(ROOT / "tests" / "diffusion" / f"{script}.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [
        subprocess.Popen([*command, str(rank), str(file), *([device] if device != "cpu" else [])], **pipes)
        for rank in range(2)
    ]
    rows = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            rows += [{"rank": rank} | json.loads(line) for line in out.splitlines() if line.startswith("{")]
    finally:
        for process in processes:
            process.kill()
    return rows
