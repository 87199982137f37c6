"""The Hub kernel: made of sage_kernels' own files, loaded as `kernels` loads it, through transformers (P64, P65)."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sage_kernels
from sage_kernels.testing import exact_attention, relative_l2
from tests.kernels.attention.varlen_cases import packed_inputs, slices
from tests.support.placing import device, placed
from tests.support.repository import ROOT


MAKE = ROOT / "kernels" / "hub" / "make.py"
REPOSITORY = "me/sage-int8-flash2"


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    subprocess.run([sys.executable, MAKE, folder], check=True)
    return folder


@pytest.fixture(scope="session")  # a process can register its operators once
def kernel(repository):
    """As kernels/importer.py does: the package by its path, under a name of no importable place."""
    name = "_hub_kernel_of_a_test"
    spec = importlib.util.spec_from_file_location(
        name, repository / "build" / f"torch-{device().type}" / "__init__.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    for loaded in [key for key in sys.modules if key.split(".")[0] == name]:
        del sys.modules[loaded]


def test_P64_all_that_it_imports_is_in_it(repository):
    """Relative imports to files that are there; beside them the standard library, torch, and what comes with torch."""
    package = repository / "build" / "torch-cuda"
    files = list(package.rglob("*.py"))
    assert len(files) > 40
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                assert package in (*base.parents, base), path
                there = base.with_suffix(".py").is_file() or (base / "__init__.py").is_file() or not node.module
                assert there, (path, node.module)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                roots = {name.split(".")[0] for name in names}
                assert roots <= {*sys.stdlib_module_names, "torch", "triton", "typing_extensions"}, (path, roots)


def test_P64_kernels_are_the_sources_of_this_checkout(repository):
    for variant in ("build/torch-cuda", "build/torch-cpu", "torch-ext/sage_int8_flash2"):
        copied = repository / variant / "sage_kernels" / "_triton" / "attention" / "kernel.py"
        assert copied.read_bytes() == (ROOT / "kernels/sage_kernels/_triton/attention/kernel.py").read_bytes()
    names = {path.name for path in (repository / "build/torch-cpu/sage_kernels").iterdir()}
    assert not names & {"decode.py", "linear.py", "planning"}


def test_P64_its_ops_are_its_own_beside_ours(kernel):
    q, k, v = placed([torch.randn(1, 20, 2, 32) for _ in range(3)])
    assert torch.equal(kernel.sage_attention(q, k, v), sage_kernels.sage_attention(q, k, v))
    space = next(name for name in dir(torch.ops) if name.startswith("sage_int8_flash2_"))
    assert all(hasattr(getattr(torch.ops, space), name) for name in ("attention_lse", "attention_varlen"))
    compiled = torch.compile(kernel.flash_attn_func, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, causal=True), sage_kernels.sage_attention(q, k, v, causal=True))


def test_P64_scales_are_tensors_that_the_caller_keeps(kernel):
    q, k, v = placed([torch.randn(1, 20, 2, 32) for _ in range(3)])
    state = kernel.new_head_state(2, 32, device())
    kernel.sage_attention(q, k, v, state=state)
    ours = sage_kernels.new_head_state(2, 32, device())
    sage_kernels.sage_attention(q, k, v, state=ours)
    assert all(torch.equal(a, b) for a, b in zip(state, ours, strict=True)) and state.counts[:, 0].tolist() == [1, 1]


BANDS = {
    "full": ({}, (False, None)),
    "causal": ({"causal": True}, (True, None)),
    "causal window": ({"causal": True, "window_size": (7, 7)}, (True, 8)),
    "left": ({"window_size": (7, 0)}, (True, 8)),
    "both sides": ({"window_size": (7, 7)}, (False, 8)),
    "right of 0": ({"window_size": (-1, 0)}, (True, None)),
}


@pytest.mark.parametrize("band", BANDS)
def test_P64_varlen_has_flash_attentions_meaning(kernel, band):
    q, k, v, cu_q, cu_k = placed(packed_inputs(head_dim=32, dtype=torch.float32))
    asked, (causal, window) = BANDS[band]
    result = kernel.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 200, 0.0, 0.2, return_attn_probs=True, **asked)
    out, lse, nothing = result
    assert lse.shape == (4, len(q)) and nothing is None
    for rows, keys in zip(slices(cu_q), slices(cu_k), strict=True):
        seq_q, seq_kv = rows.stop - rows.start, keys.stop - keys.start
        if seq_q and seq_kv:
            distance = placed(torch.arange(seq_kv) - torch.arange(seq_q)[:, None] - (seq_kv - seq_q))
            seen = distance <= 0 if causal else distance == distance
            seen = seen if window is None else seen & (distance.abs() < window)
            exact, exact_lse = exact_attention(q[None, rows], k[None, keys], v[None, keys], 0.2, mask=seen)
            assert relative_l2(out[None, rows], exact) < 0.03
            assert torch.allclose(lse[:, rows].T.double(), exact_lse[0], atol=0.05)


def test_P64_a_batch_has_flash_attentions_meaning(kernel):
    q, k, v = placed((torch.randn(2, 5, 4, 32), torch.randn(2, 9, 2, 32), torch.randn(2, 9, 2, 32)))
    out, lse, _ = kernel.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    exact, exact_lse = exact_attention(q, k, v, mask=placed(torch.ones(5, 9, dtype=torch.bool).tril(4)))
    assert relative_l2(out, exact) < 0.03 and torch.allclose(lse.transpose(1, 2).double(), exact_lse, atol=0.05)
    assert torch.equal(kernel.flash_attn_func(q, k, v, causal=True), out)


def test_P64_a_paged_cache_has_flash_attentions_meaning(kernel):
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = placed([torch.randn(6, 4, 2, 32, generator=generator) for _ in range(2)])
    k, v, q = placed([torch.randn(3, 1, heads, 32, generator=generator) for heads in (2, 2, 4)])
    table = placed(torch.tensor([[3, 0, -1], [5, 1, 2], [-1, -1, -1]], dtype=torch.int32))
    before, lengths = k_cache.clone(), placed(torch.tensor([4, 9, -1], dtype=torch.int32))
    for window in (-1, 3):
        out = kernel.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, window_size=(window, window)
        )
        assert (out[2] == 0).all()
        for b, number in ((0, 5), (1, 10)):
            first = 0 if window < 0 else number - 1 - window
            own = [x[table[b].long()].flatten(0, 1)[None, first:number] for x in (k_cache, v_cache)]
            assert torch.equal(own[0][0, -1], k[b, 0])
            assert relative_l2(out[b : b + 1], exact_attention(q[b : b + 1], *own)[0]) < 0.03
    assert (before != k_cache).any((2, 3)).nonzero().tolist() == [[0, 0], [2, 1]]  # page and place of the new tokens


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dropout_p": 0.1}, "dropout_p.*0.1"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
        ({"window_size": (3, 5)}, r"window_size.*\(3, 5\)"),
    ],
)
def test_P64_what_it_can_not_do_is_an_error(kernel, asked, words):
    q, k, v, cu_q, cu_k = placed(packed_inputs(head_dim=32))
    with pytest.raises(NotImplementedError, match=words):
        kernel.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 200, **asked)
    with pytest.raises(NotImplementedError, match=words):
        kernel.flash_attn_func(q[None], k[None], v[None], **asked)
    with pytest.raises(TypeError, match="block_table"):
        kernel.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 130, 200, block_table=None)


def test_P64_the_generator_writes_over_nothing(repository, tmp_path):
    for arguments, words in (([str(repository)], "has files"), ([], "usage")):
        done = subprocess.run([sys.executable, MAKE, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def skip_without_kernels():
    """Not by its name: a folder of this repository is called kernels, too."""
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Hugging Face's kernels is not installed")


def run(repository: Path, code: str) -> str:
    """What a new Python prints, in which the repository is the Hub's. Fails with its error."""
    environment = os.environ | {"LOCAL_KERNELS": f"{REPOSITORY}={repository}", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False, cwd=repository
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_P65_the_kernels_package_loads_it(repository):
    skip_without_kernels()
    code = f"""
import torch
from kernels import get_kernel
kernel = get_kernel({REPOSITORY!r}, version=1)
q = torch.randn(10, 2, 16)
cu = torch.tensor([0, 4, 10], dtype=torch.int32)
print(tuple(kernel.flash_attn_varlen_func(q, q, q, cu, cu, 6, 6).shape), "sage_kernels" in __import__("sys").modules)
"""
    assert run(repository, code).strip() == "(10, 2, 16) False"


def test_P65_transformers_runs_it_by_its_name(repository):
    skip_without_kernels()
    utils = pytest.importorskip("transformers.utils")
    if not utils.is_kernels_available():
        pytest.skip("this transformers wants another version of kernels")
    code = f"""
import sys
import torch
from tests.support.tiny_language_models import MODELS
model, inputs = MODELS["mistral"]()
ids = inputs["input_ids"][:2]
mask = torch.ones_like(ids)
mask[0, :5] = 0
positions = torch.cat([torch.arange(20), torch.arange(ids.shape[1] - 20)])[None]
asked = dict(whole=dict(input_ids=ids), padded=dict(input_ids=ids, attention_mask=mask),
             packed=dict(input_ids=ids[:1], position_ids=positions), generate=dict(input_ids=ids))
def logits(name):
    with torch.no_grad():
        if name == "generate":
            return model.generate(**asked[name], max_new_tokens=4, do_sample=False, pad_token_id=0).float()
        out = model(**asked[name], use_cache=False).logits
        return out if name != "padded" else out[mask.bool()]
model.set_attn_implementation("eager")
stock = dict((name, logits(name)) for name in asked)
model.set_attn_implementation({REPOSITORY!r}, allow_all_kernels=True)
calls = []
kernel = next(m for n, m in list(sys.modules.items()) if n.startswith("_sage_int8_flash2_c") and "." not in n)
flash = sys.modules[kernel.__name__ + ".flash"]
for name in ("sage_attention", "sage_attention_varlen"):
    whole = getattr(flash, name)
    def counted(*args, whole=whole, name=name, **kwargs):
        calls.append(name)
        return whole(*args, **kwargs)
    setattr(flash, name, counted)
for name in asked:
    calls.clear()
    out = logits(name)
    print(name, float((out - stock[name]).norm() / stock[name].norm()), *sorted(set(calls)))
"""
    lines = [line.split() for line in run(repository, code).strip().splitlines()[-4:]]
    assert [name for name, *_ in lines] == ["whole", "padded", "packed", "generate"]
    for name, error, *calls in lines:
        assert float(error) < 0.05 and calls, name
        assert ("sage_attention_varlen" in calls) == (name in ("padded", "packed")), (name, calls)
