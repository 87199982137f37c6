"""Launches through the CUDA driver: what a kernel gets is what its machine code and Triton's launcher say it gets."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from sage_kernels import sage_attention
from sage_kernels.facts.state import new_head_state
from sage_kernels.ops import replay


pytest.importorskip("triton", reason="triton is not installed")
from tests.support.recording_driver import run  # noqa: E402


# in a process of its own: compiled for an sm_90 that is not there, with a driver that keeps what it is handed
SCRIPT = """
import ctypes, re, struct
import torch, triton
from tests.support.recording_driver import install

install(device=None, stream=7)
triton.knobs.compilation.always_compile = True  # of what is prebuilt there is no PTX
from sage_kernels._triton import launch as launching
from sage_kernels._triton.attention import launch as launch_attention
from sage_kernels._triton.prologue import prologue
from sage_kernels._triton.decode import launch as attention_decode
from sage_kernels._triton.decode.launch import launch_decode_attention
from sage_kernels._triton.launch.direct import DirectLaunch, NotDirect
from sage_kernels._triton.attention.tiles import choose_tile
from sage_kernels.facts.masking import UNLIMITED, Masking, make_masking
from sage_kernels.facts.state import new_head_state

launch_attention.device_tile = lambda _, width, scaling, masking, pv, lagged: choose_tile(90, width, scaling, pv=pv)
launch_attention.processors_of = prologue.processors_of = lambda device: 132


attention_decode.capability_of = lambda device: 90


class Driver:
    '''The CUDA driver's functions, of a kernel that is known by its PTX.'''

    def __init__(self, ptx):
        entry = re.search(r"\\.entry [^(]*\\(([^)]*)\\)", ptx).group(1)
        sizes = {"b64": 8, "u64": 8, "b32": 4, "u32": 4, "f32": 4}
        self.sizes = []
        for line in re.findall(r"\\.param([^,]*)", entry):
            array = re.search(r"\\.b8 \\w+\\[(\\d+)\\]", line)
            self.sizes.append(int(array[1]) if array else sizes[re.search(r"\\.([bufs]\\d+)", line)[1]])
        self.described, self.launched = [], None

    def cuFuncGetParamInfo(self, function, i, offset, size):
        if i.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[i.value]
        return 0

    def cuTensorMapEncodeTiled(self, room, dtype, rank, address, shape, strides, box, steps, *rest):
        assert room.value % 64 == 0
        ctypes.memmove(room.value, struct.pack("<16Q", *[address.value] * 16), 128)
        self.described.append((address.value, list(shape), list(strides)[: rank - 1], list(box), list(steps)))
        return 0

    def cuLaunchKernelEx(self, address, function, pointers, extra):
        *grid, threads, y, z, shared = struct.unpack("<7I", ctypes.string_at(address, 28))  # CUlaunchConfig
        stream, attributes, number = struct.unpack("<QQI", ctypes.string_at(address + 32, 20))
        assert (grid[1:], y, z, extra) == ([1, 1], 1, 1, None)
        kinds = [struct.unpack("<IIi", ctypes.string_at(attributes + 72 * i, 12)) for i in range(number)]
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        values = [ctypes.string_at(p, n) for p, n in zip(pointers, self.sizes, strict=True)]
        self.launched = (grid[0], threads, shared, stream, kinds, values)
        return 0


def expected(compiled, values):
    '''Bytes of every parameter; of a description, those that Driver writes.'''
    found = []
    for kind, value in zip(compiled.src.signature.values(), values):
        if kind.startswith("tensordesc"):
            found.append(struct.pack("<16Q", *[value.base.data_ptr()] * 16))
            found += [struct.pack("<i", x) for x in value.shape] + [struct.pack("<q", x) for x in value.strides]
        elif kind != "constexpr":
            letter = "Q" if kind[0] == "*" else {"i32": "i", "i64": "q", "fp32": "f"}[kind]
            found.append(struct.pack("<" + letter, value))
    return found + [bytes(8)] * 2


def check(step, addresses, numbers):
    ptx = step.compiled.asm["ptx"]
    waits = "griddepcontrol.wait" in ptx  # a kernel that may begin before the one before ends: before it reads
    assert waits == step.compiled.metadata.launch_pdl
    assert not waits or ptx.index("griddepcontrol.wait") < re.search(r"\\bld\\.global|cp\\.async", ptx).start()
    fake = Driver(ptx)
    table = (ctypes.c_uint64 * len(addresses))()
    make = lambda: DirectLaunch(
        step.compiled, step.programs, step.without_tensors(), step.slots, step.named, table, driver=fake
    )
    direct, values = make(), step.without_tensors()
    for shift in (0, 1 << 20, 0, 1 << 20):  # the same addresses again: nothing is described anew
        there = {name: x + shift for name, x in numbers.items()}
        for i, slot in step.places:
            values[i] = addresses[slot] + shift
        for i, descriptor, slot in step.described:
            values[i] = descriptor.at(addresses[slot] + shift)
        for i, name in step.named:
            values[i] = there[name]
        table[:] = [x + shift for x in addresses]
        assert direct(7 + shift, [x + shift for x in addresses], there)
        *launched, kinds, stored = fake.launched
        metadata = step.compiled.metadata
        assert launched == [step.programs, 32 * metadata.num_warps, metadata.shared, 7 + shift]
        assert kinds == ([(6, 0, 1)] if metadata.launch_pdl else [])
        for a, b in zip(stored, expected(step.compiled, values), strict=True):
            assert a == b, (a, b)
    where = [addresses[slot] for _, _, slot in step.described]
    assert [d[0] for d in fake.described] == [*where, *(x + (1 << 20) for x in where)]
    for (_, shape, strides, box, steps), (_, descriptor, _) in zip(fake.described, step.described * 2, strict=True):
        assert shape == list(descriptor.shape)[::-1] and set(steps) == {1} and box == descriptor.block_shape[::-1]
        nbytes = strides[0] // descriptor.strides[-2] if strides else 0
        assert strides == [nbytes * s for s in descriptor.strides[-2::-1]]
    if step.named:
        assert not direct(7, addresses, dict.fromkeys(numbers, 2**31))  # 32 bits would wrap around
    # other code than the signature says: Triton launches
    for sizes in (fake.sizes[:-1], [*fake.sizes, 8], [4, *fake.sizes[1:]]):
        fake.sizes = sizes
        try:
            make()
        except NotDirect:
            continue
        raise AssertionError(sizes)
    return len(step.described)


def attention(given, recipe, scaling):
    masking, _ = make_masking(None, "", None, 0.0, None, 200, 200)
    state = type(new_head_state(1, 8, "cpu"))(*given[3:]) if len(given) > 3 else None
    return launch_attention.launch_attention_fwd(
        *given[:3], state=state, recipe=recipe, scaling=scaling, scale=0.1, smooth_k=True, return_lse=False,
        masking=masking,
    )[0]


described = 0
for recipe, scaling in (("qk_int8_pv_bf16", "per_token"), ("qk_int8_pv_fp8", "planned")):
    qkv = [torch.randn(2, 200, 4, 64, dtype=torch.bfloat16) for _ in range(3)]
    given = (*qkv, *(new_head_state(4, 64, "cpu") if scaling == "planned" else ()))
    _, again = launching.record(lambda: attention(given, recipe, scaling), given)
    for step in again.launches:
        described += check(step, [4096 + 256 * i for i in range(40)], {})
assert described >= 4, described

q, mean = torch.randn(1, 1, 8, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64)
codes = [torch.zeros(1, 2, 900, 64, dtype=torch.int8) for _ in "kv"]
scales = [torch.ones(1, 2, 900, dtype=torch.bfloat16) for _ in "kv"]
given = (q, codes[0], scales[0], codes[1], scales[1], mean)
masking = Masking(None, UNLIMITED, UNLIMITED, softcap=0.0, sinks=None)
options = {"ring": False, "masking": masking, "scale": 0.1, "return_lse": False, "splits": 3}
_, again = launching.record(lambda: launch_decode_attention(*given, None, **options)[0], given, {"capacity": 900})
assert [step.compiled.metadata.launch_pdl for step in again.launches] == [False, True]
for step in again.launches:
    check(step, [4096 + 256 * i for i in range(40)], {"capacity": 901})
print("done")
"""


@pytest.mark.slow("compiles every kernel")
def test_a_kernel_gets_what_its_code_and_triton_say(tmp_path):
    found = run(SCRIPT, tmp_path)
    assert found.returncode == 0 and found.stdout.strip().endswith("done"), found.stderr[-3000:]


def compiled_for(kinds=("*bf16", "i32"), backend="cuda", **metadata):
    metadata = {
        "num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0,
        "tensordesc_meta": (), "target": SimpleNamespace(backend=backend), **metadata,
    }  # fmt: skip
    signature = dict(enumerate(kinds))
    return SimpleNamespace(metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=signature))


def test_what_needs_more_than_a_grid_is_left_to_triton():
    from sage_kernels._triton.launch.direct import parameters_of

    assert [x.nbytes for x in parameters_of(compiled_for())] == [8, 4, 8, 8]
    assert [x.nbytes for x in parameters_of(compiled_for(("constexpr", "fp32")))] == [4, 8, 8]
    more = {"num_ctas": 2, "launch_cooperative_grid": True, "global_scratch_size": 8, "profile_scratch_size": 8}
    for name, value in more.items():
        assert parameters_of(compiled_for(**{name: value})) is None, name
    assert parameters_of(compiled_for(backend="hip")) is None
    for kinds in ((("*bf16", "i32"),), ("tensordesc<fp16[64, 64]>",), ("u4",)):  # a tuple, no description, a new type
        assert parameters_of(compiled_for(kinds)) is None, kinds


def test_results_are_made_like_a_tensor_of_their_kind_only():
    from sage_kernels._triton.launch.replay import _like

    result = torch.empty(2, 3, 4, 8)
    other, turned = torch.empty(2, 3, 4, 8, dtype=torch.float16), torch.empty(2, 4, 3, 8).transpose(1, 2)
    assert turned.shape == result.shape
    assert _like(result, [other, turned]) is None and _like(result, [other, turned, torch.empty(2, 3, 4, 8)]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["qk_int8_pv_bf16", "qk_int8_pv_fp8"])
def test_replayed_calls_are_launched_by_the_driver(recipe):
    """And give the same bits from another thread, whose context nobody has set, with buffers at other addresses."""
    from sage_kernels._triton.compat import cuda_driver

    if cuda_driver() is None:
        pytest.skip("the CUDA driver is too old")
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(1, 700, 4, 64, device="cuda", generator=generator).bfloat16() for _ in range(3))
    state = new_head_state(4, 64, "cuda")
    before = set(replay.replays)
    first = sage_attention(q, k, v, state=state, recipe=recipe)
    (key,) = set(replay.replays) - before
    assert all(step.direct is not None for step in replay.replays[key].launches)
    results = [sage_attention(q, k, v, state=state, recipe=recipe)]
    in_the_way = torch.empty(3 << 20, device="cuda")  # the next buffers lie elsewhere
    thread = threading.Thread(target=lambda: results.append(sage_attention(q, k, v, state=state, recipe=recipe)))
    thread.start()
    thread.join()
    del in_the_way
    assert len(results) == 2 and all(torch.equal(first, x) for x in results)
