"""Devices, streams, graphs, repeats, memory, threads and processes (cases E, T05 and T06 of the contract)."""

from __future__ import annotations

import itertools
import os
import textwrap

import pytest
import torch

import sage_kernels
from sage_kernels import new_head_state, sage_attention
from sage_kernels.facts.masking import NO_MASKING
from sage_kernels.testing import exact_attention, relative_l1
from tests.kernels.attention.attention_cases import key_padding, normal


BAR = 0.015  # relative L1 of the recipe on N(0, 1)


def cuda(*inputs):
    return tuple(x.to("cuda") for x in inputs)


def masked_options(seq_q, seq_kv, heads, device):
    """One set of options for each code path of the kernels."""
    generator = torch.Generator().manual_seed(0)
    return [
        {},
        {"scaling": "per_block"},
        {"scaling": "per_head"},
        {"causal": "bottom_right", "sinks": torch.zeros(heads, device=device)},
        {"causal": "bottom_right", "window": 40},
        {"attn_mask": key_padding([seq_kv - 9], seq_kv).to(device)},
        {"attn_mask": torch.randn(seq_q, seq_kv, generator=generator).to(device), "softcap": 20.0},
    ]


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("which", ["k", "v", "attn_mask", "sinks", "state"])
def test_E02_inputs_on_different_gpus_raise(which):
    q, k, v = normal(1, 70, 70, 2, 2, 64)
    inputs = {"q": q.to("cuda:0"), "k": k.to("cuda:0"), "v": v.to("cuda:0")}
    other = {
        "attn_mask": torch.ones(70, 70, dtype=torch.bool),
        "sinks": torch.zeros(2),
        "state": new_head_state(2, 64, "cuda:1"),
    }
    if which in inputs:
        inputs[which] = inputs[which].to("cuda:1")
    else:
        inputs[which] = other[which] if which == "state" else other[which].to("cuda:1")
    with pytest.raises(ValueError, match=f"(?s){which}.*cuda:1.*cuda:0"):
        sage_attention(**inputs)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_E03_tensors_on_a_gpu_that_is_not_the_current_one():
    q, k, v = normal(2, 100, 140, 2, 2, 64)
    assert torch.cuda.current_device() == 0
    for options in masked_options(100, 140, 2, "cuda:1"):
        out = sage_attention(*(x.to("cuda:1") for x in (q, k, v)), **options)
        assert torch.cuda.current_device() == 0 and out.device == torch.device("cuda:1")
        options = {n: x.to("cuda:0") if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        assert torch.equal(out.cpu(), sage_attention(*(x.to("cuda:0") for x in (q, k, v)), **options).cpu())
    states = [new_head_state(2, 64, f"cuda:{i}") for i in range(2)]
    outs = [sage_attention(*(x.to(f"cuda:{i}") for x in (q, k, v)), state=states[i]).cpu() for i in range(2)]
    assert torch.equal(*outs)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*states, strict=True))


@pytest.mark.gpu
def test_E04_all_work_runs_on_the_current_stream():
    """Inputs are written on a side stream, after a sleep: a helper on another stream would read what was before."""
    first, second = (cuda(*normal(2, 200, 200, 2, 2, 64, seed=seed)) for seed in (0, 1))
    for options in masked_options(200, 200, 2, "cuda"):
        state = [{"state": new_head_state(2, 64, "cuda")} if "scaling" in options else {} for _ in range(2)]
        expected = sage_attention(*second, **options, **state[0])
        inputs = [x.clone() for x in first]
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # about 30 ms
            for x, new in zip(inputs, second, strict=True):
                x.copy_(new)
            out = sage_attention(*inputs, **options, **state[1])
            for x in inputs:
                x.zero_()
        side.synchronize()
        assert torch.equal(out, expected), options


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(8))
def test_E05_a_cuda_graph_replays_with_new_data(case):
    """Bitwise, with masks that change between replays and with a planned state, whose statistics are recorded too."""
    options = (masked_options(200, 200, 2, "cuda") + [{}])[case]
    from sage_kernels.planning.state import ScaleState, Site

    def planned():
        scales = ScaleState([Site("a", 2, 64)], device="cuda")
        sage_attention(*cuda(*normal(2, 200, 200, 2, 2, 64)), state=scales.head_state(0))
        scales.advance(1.0, 0.9)
        return scales.head_state(0)

    states = [planned() if case == 7 else None for _ in range(2)]
    inputs = cuda(*normal(2, 200, 200, 2, 2, 64))
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):  # compiles; on a state of its own, so that both sides record the same calls
        sage_attention(*inputs, **options, return_lse=True, state=planned() if case == 7 else None)
    warm_up.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sage_attention(*inputs, **options, return_lse=True, state=states[0])
    for seed in (1, 2):
        for x, new in zip(inputs, cuda(*normal(2, 200, 200, 2, 2, 64, seed=seed)), strict=True):
            x.copy_(new)
        mask = options.get("attn_mask")
        if mask is not None:
            mask.copy_(mask.roll(7 * seed, -1))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = sage_attention(*inputs, **options, return_lse=True, state=states[1])
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    if case == 7:
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        assert states[0].counts[:, 0].tolist() == [2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["per_token", "per_block", "planned"])
@pytest.mark.parametrize("masking", [{}, {"causal": True}, {"attn_mask": key_padding([150] * 60, 160)}])
def test_E06_250_repeats_of_a_batch_of_60_give_the_same_bits(masking, scaling):
    """FlashAttention's test for races: many programs at once, many times."""
    q, k, v = cuda(*normal(60, 160, 160, 4, 2, 64))
    options = {n: x.to("cuda") if isinstance(x, torch.Tensor) else x for n, x in masking.items()}

    def once():
        if scaling != "planned":
            return (sage_attention(q, k, v, scaling=scaling, **options),)
        state = new_head_state(2, 64, "cuda")
        return (sage_attention(q, k, v, state=state, **options), state.stats, state.counts)

    first = once()
    for _ in range(250):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_E07_a_sample_has_the_same_bits_alone_and_in_a_batch_of_8(attend):
    q, k, v = normal(8, 40, 70, 2, 1, 64)
    for options in ({}, {"causal": "bottom_right"}):
        together, _ = attend(q, k, v, **options)
        for sample in (0, 3, 7):
            one = [x[sample : sample + 1] for x in (q, k, v)]
            assert torch.equal(attend(*one, **options)[0], together[sample : sample + 1])


def test_E09_a_gpu_that_is_too_old_is_named(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.attention.launch import device_tile

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(NotImplementedError, match=r"7\.5.*8\.0.*scaled_dot_product_attention"):
        device_tile(torch.device("cuda"), 64, "per_token")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 4)])
def test_E09_a_gpu_without_fp8_is_named_with_the_recipe_that_it_runs(capability, monkeypatch):
    """(9, 4) on ROCm: its e4m3 is another format."""
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.attention.launch import device_tile

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(torch.version, "hip", "6.4" if capability == (9, 4) else None)
    with pytest.raises(NotImplementedError, match=r"Some GPU.*8\.9.*qk_int8_pv_bf16"):
        device_tile(torch.device("cuda"), 64, "per_token", pv="fp8_e4m3")


def test_E09_small_shared_memory_gets_smaller_tiles(monkeypatch):
    """99 KB a block on sm_86 and sm_89 (and 120) against 163 KB: codes and values of all stages must fit."""
    pytest.importorskip("triton", reason="triton is not installed")
    from sage_kernels._triton.attention.launch import device_tile
    from sage_kernels._triton.primitives import head_width

    monkeypatch.setattr(torch.version, "hip", None)
    for capability, limit in (((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((12, 0), 99), ((10, 0), 227)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, cc=capability: cc)
        formats = ("16bit", "fp8_e4m3") if capability >= (8, 9) else ("16bit",)
        for head_dim, pv in itertools.product((64, 128, 256), formats):
            width = head_width(head_dim)
            for scaling in (*sage_kernels.SCALINGS, "planned"):
                for masking in (NO_MASKING, NO_MASKING._replace(right=0, softcap=1.0)):
                    tile = device_tile(torch.device("cuda"), width, scaling, masking, pv)
                    stages = tile.num_stages * tile.block_n * width * 3  # int8 codes and 16-bit values
                    assert stages <= limit * 1024, (capability, head_dim, scaling, tile)


def in_a_fresh_process(code: str, tmp_path) -> str:
    """Output of `code` in a new interpreter, whose Triton cache is empty."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.support.recording_driver import run

    done = run(textwrap.dedent(code), tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.gpu
def test_E11_out_of_memory_leaves_the_state_and_a_retry_works(tmp_path):
    code = """
        import torch
        from sage_kernels import new_head_state, sage_attention
        q, k, v = (torch.randn(4, 8192, 16, 128, dtype=torch.float16, device="cuda") for _ in range(3))
        state = new_head_state(16, 128, "cuda")
        expected = sage_attention(q, k, v, state=new_head_state(16, 128, "cuda"))  # compiles
        before = [x.clone() for x in state]
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        for spare in (16, 150):  # MiB: not enough for the output (128), and for the output but not for the codes (64)
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare * 2**20) / total)
            try:
                sage_attention(q, k, v, state=state)
                raise SystemExit("no error")
            except torch.OutOfMemoryError as error:
                assert "memory" in str(error)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            assert all(torch.equal(a, b) for a, b in zip(before, state))
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(sage_attention(q, k, v, state=state), expected)
        print("retried")
        """
    assert in_a_fresh_process(code, tmp_path) == "retried"


COLD = """
    import torch
    from sage_kernels import new_head_state, sage_attention

    def call(case):
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (torch.randn(2, 200, 2, 64, dtype=torch.float16, device="cuda", generator=generator) for _ in "qkv")
        mask = torch.ones(200, dtype=torch.bool, device="cuda")
        state = new_head_state(2, 64, "cuda")
        options = [{}, {"scaling": "per_block"}, {"causal": True}, {"attn_mask": mask}, {"state": state}][case]
        return sage_attention(q, k, v, **options).cpu()
    """


@pytest.mark.gpu
def test_T05_8_threads_with_a_cold_cache_give_the_same_bits(tmp_path):
    code = (
        COLD
        + """
    import threading
    results, barrier = {}, threading.Barrier(8)

    def work(thread):
        barrier.wait()
        for case in range(5):  # all threads compile the same kernels at once
            results[thread, case] = call(case)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(results) == 40
    assert all(torch.equal(out, call(case)) for (_, case), out in results.items())
    print("same")
    """
    )
    assert in_a_fresh_process(code, tmp_path) == "same"


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_T06_8_processes_with_a_cold_cache_and_fork_after_import(method, tmp_path):
    """Importing must touch no GPU: CUDA can't be used in a fork of a process that did."""
    code = (
        COLD
        + f"""
    import multiprocessing

    def work(_):
        return [call(case).view(torch.int16).long().sum().item() for case in range(5)]

    if __name__ == "__main__":
        assert not torch.cuda.is_initialized()
        with multiprocessing.get_context({method!r}).Pool(8) as pool:
            results = pool.map(work, range(8), chunksize=1)
        assert all(result == results[0] for result in results), results
        assert results[0] == work(0)
        print("same")
    """
    )
    assert in_a_fresh_process(code, tmp_path) == "same"


@pytest.mark.slow("a process of its own")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_T06_fork_after_import_runs_on_the_cpu(tmp_path):
    code = """
        import os, torch, sage_kernels, sage_processors
        assert not torch.cuda.is_initialized()
        torch.set_num_threads(1)  # forking is safe as long as no thread pool was started
        child = os.fork()
        if child == 0:
            q = torch.randn(1, 20, 2, 16)
            os._exit(0 if torch.isfinite(sage_kernels.sage_attention(q, q, q, causal=True)).all() else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    assert in_a_fresh_process(code, tmp_path) == "0"


@pytest.mark.gpu
def test_E01_cpu_and_gpu_give_the_same_result_within_rounding():
    """The reference on the CPU and the kernels on the GPU are the same op: nothing but rounding of P is between."""
    q, k, v = normal(2, 200, 300, 4, 2, 64)
    on_cpu = sage_attention(q, k, v)
    on_gpu = sage_attention(*cuda(q, k, v)).cpu()
    assert relative_l1(on_gpu, on_cpu) < 2.0**-10
    assert relative_l1(on_gpu, exact_attention(q, k, v)[0]) <= BAR
