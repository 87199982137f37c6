"""The examples of several processes, with two of them on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.examples.running import EXAMPLES, IDENTICAL_DB, int8_calls, psnr, run
from tests.support.repository import ROOT


pytestmark = pytest.mark.slow("two processes each; test_parallel_models shows their attention")


# what torchrun starts, but as one process that is two once the slow imports are done
FORKED = """
import json, os, runpy, socket, sys
import command_line, small_pictures, small_videos
from diffusers import StableDiffusionPipeline, WanPipeline
from transformers import CLIPTextModel, CLIPTokenizer, UMT5EncoderModel
import sage_processors.calibration.search, sage_processors.diffusion.handle, torch.distributed
told, tells = os.pipe()
child = os.fork()
os.environ.update(RANK=str(int(child == 0)), LOCAL_RANK=str(int(child == 0)))
for sys.argv in json.loads(sys.argv[1]):
    if child:  # a port that is free now: one chosen earlier may be somebody else's by now
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = f"{free.getsockname()[1]:05}"
        os.write(tells, os.environ["MASTER_PORT"].encode())
    else:
        os.environ["MASTER_PORT"] = os.read(told, 5).decode()
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(end="\\f" if child else "", flush=True)
if child and os.waitpid(child, 0)[1]:
    sys.exit("the other process failed")
"""


KINDS = {"ulysses": 1, "ring": 2}  # of ring attention, a call for the keys of each process


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> tuple[Path, list[str]]:
    """(folder, what two processes say of each run) that run the examples together; imports take most of the time."""
    folder = tmp_path_factory.mktemp("drawn")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle on a blue background\n\na green star on a white background\n", encoding="utf-8")
    small = ("--steps", 1, "--compare", "--output")
    runs = [("one_big_video", "--kind", kind, *small, folder / f"{kind}.gif") for kind in KINDS]
    # the last one, of which both processes tell
    runs.append(("many_pictures", "--file", prompts, "--steps", 2, "--compare", "--output", folder / "x.png"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", EXAMPLES))), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    commands = [[str(EXAMPLES / f"{name}.py"), *map(str, arguments)] for name, *arguments in runs]
    command = [sys.executable, "-c", FORKED, json.dumps(commands)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.split("\f")


def test_many_pictures_are_shared_out(drawn, tmp_path, monkeypatch):
    folder, told = drawn
    shown = "".join(told[len(KINDS) :])
    assert sorted(re.findall(r"Process (\d) of 2, picture (\d)", shown)) == [("0", "0"), ("1", "1")]
    assert len(psnr(shown)) == 2 and all(60 < decibels < IDENTICAL_DB for decibels in psnr(shown))
    # a picture is the same whoever draws it
    more = ("--seed", 1, "--steps", 2, "--output", tmp_path / "alone.png")
    run("sd15", monkeypatch, "a green star on a white background", *more)
    assert (folder / "x_1.png").read_bytes() == (tmp_path / "alone.png").read_bytes()


def test_one_big_video_on_two_processes(drawn):
    folder, told = drawn
    for (kind, parts), shown in zip(KINDS.items(), told, strict=False):
        assert Image.open(folder / f"{kind}.gif").n_frames == 9
        assert "context_parallel" not in shown and int8_calls(shown) == 2 * 2 * parts
        assert 80 < psnr(shown)[0] < IDENTICAL_DB


def test_one_big_video_asks_for_several_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run("one_big_video", monkeypatch)
    shown = capsys.readouterr()
    assert ended.value.code == 2 and "torchrun" in shown.err and shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
