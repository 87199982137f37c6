"""A script of tests/ run by two processes that talk to each other, on the CPU or on a GPU each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

from tests.support.repository import ROOT


# runs a script's `main`, once what it imports is there, in this process and in one forked from it
FORK = """
import importlib.util, os, sys
path, file, printed = sys.argv[1:]
spec = importlib.util.spec_from_file_location("script", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
child = os.fork()
rank = int(child == 0)
if rank:
    os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY), sys.stdout.fileno())
script.main(rank, file)
sys.stdout.flush()
if child and os.waitpid(child, 0)[1]:
    sys.exit("the other process failed")
"""


def two_processes(script: str, tmp_path_factory, device: str = "cpu") -> list[dict]:
    """The rows (a JSON object a line) that both print. Called as `SCRIPT.py RANK FILE [cuda]`."""
    folder = tmp_path_factory.mktemp("parallel")
    path, file, printed = ROOT / "tests" / f"{script}.py", folder / "meet", folder / "printed"
    paths = (str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    commands = [[str(path), str(rank), str(file), *([device] if device != "cpu" else [])] for rank in range(2)]
    is_forked = device == "cpu" and hasattr(os, "fork")  # what both import takes longer than what they do
    if is_forked:
        commands = [["-c", FORK, str(path), str(file), str(printed)]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    pipes["start_new_session"] = True  # a group each, with what is forked
    processes = [subprocess.Popen([sys.executable, *command], **pipes) for command in commands]
    said = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            said.append(out)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # all of the group has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if is_forked:
        said.append(printed.read_text())
    return [
        {"rank": rank} | json.loads(line)
        for rank, out in enumerate(said)
        for line in out.splitlines()
        if line.startswith("{")
    ]
