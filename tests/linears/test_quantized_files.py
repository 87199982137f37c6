"""Models whose linear layers are in 8 bit, written and read: the same results, and no file that is trusted."""

from __future__ import annotations

import copy
import json
import struct

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears import quantized_files
from tests.support.tiny_models import MODELS


def flux(device=None):
    model, inputs = MODELS["flux"]()
    return model, inputs


def empty(model):
    with torch.device("meta"):
        return type(model).from_config(model.config).eval()


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, inputs = flux()
    path = tmp_path_factory.mktemp("quantized") / "model.safetensors"
    with sp.quantize_linears(model, min_features=0):
        expected = run(model, inputs)
        sp.save_quantized(model, path)
    return path, model, inputs, expected


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("drop", [True, False])
def test_a_read_model_is_the_written_one(format, drop, tmp_path):
    model, inputs = flux()
    sp.quantize_linears(model, format, min_features=0, drop_weights=drop)
    expected = run(model, inputs)
    sp.save_quantized(model, tmp_path / "a.safetensors")
    twin = empty(model)
    swap = sp.load_quantized(twin, tmp_path / "a.safetensors")
    torch.testing.assert_close(run(twin, inputs), expected)  # sums of FP8 codes are not exact, their order is BLAS's
    assert swap.report().fallbacks == {}
    assert not any(x.is_meta for x in (*twin.parameters(), *twin.buffers()))
    with pytest.raises(RuntimeError, match="16-bit weights were dropped"):
        swap.remove()
    sp.save_quantized(twin, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_gated_layers_are_written_in_the_models_order(tmp_path):
    from diffusers.models.activations import GEGLU

    block = GEGLU(48, 64).eval().requires_grad_(False)
    x = torch.randn(4, 48)
    with sp.quantize_linears(block, "fp8", min_features=0):
        before = block.proj(x) + 0
        expected = block(x) + 0
        sp.save_quantized(block, tmp_path / "a.safetensors")
    twin = GEGLU(48, 64).eval().requires_grad_(False)
    sp.load_quantized(twin, tmp_path / "a.safetensors")
    assert torch.equal(twin.proj(x) + 0, before) and torch.equal(twin(x) + 0, expected)


def test_a_file_is_safetensors_with_codes_in_place_of_weights(saved):
    from safetensors.torch import load_file

    path, model, _, _ = saved
    tensors = load_file(path)
    assert tensors["transformer_blocks.0.attn.to_q.codes"].dtype == torch.int8
    assert "transformer_blocks.0.attn.to_q.weight" not in tensors
    assert torch.equal(tensors["x_embedder.weight"], model.x_embedder.weight)


def test_tied_weights_are_read_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2))
            self.head.weight = self.embed.weight
            self.register_buffer("ids", torch.arange(7))

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model, x = Tied().eval().requires_grad_(False), torch.randint(0, 10, (2, 3))
    with sp.quantize_linears(model, min_features=0):
        expected = model(x) + 0
        sp.save_quantized(model, tmp_path / "a.safetensors")
    with torch.device("meta"):
        twin = Tied().eval()
    sp.load_quantized(twin, tmp_path / "a.safetensors")
    assert twin.head.weight is twin.embed.weight and torch.equal(twin(x) + 0, expected)
    assert torch.equal(twin.ids, torch.arange(7)) and type(twin.ids) is torch.Tensor
    rewrite(tmp_path / "a.safetensors", tmp_path / "b.safetensors", lambda h: h["ids"].update(dtype="F64"))
    with pytest.raises(ValueError, match=r"got F64 \[7\] for ids, expected \['I64'\]"):
        sp.load_quantized(Tied().eval(), tmp_path / "b.safetensors")


def rewrite(path, target, change_header=None, change_meta=None, body=lambda b: b):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    meta = json.loads(header["__metadata__"]["sage_processors_linears"])
    if change_meta:
        change_meta(meta)
        header["__metadata__"]["sage_processors_linears"] = json.dumps(meta)
    if change_header:
        change_header(header)
    text = json.dumps(header).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + body(rest))


Q = "transformer_blocks.0.attn.to_q"
DAMAGES = {
    "version": ({"change_meta": lambda m: m.update(format_version=3)}, "format_version 3, expected 2"),
    "class": ({"change_meta": lambda m: m.update(model_class="Other")}, "model_class Other"),
    "config": ({"change_meta": lambda m: m.update(config_hash="0")}, "config_hash 0"),
    "extra": ({"change_meta": lambda m: m.update(more=1)}, "unknown keys"),
    "no_layer": ({"change_meta": lambda m: m["layers"].update(nothing="int8")}, "got layer 'nothing'"),
    "format": ({"change_meta": lambda m: m["layers"].update({Q: "int4"})}, "got format 'int4'"),
    "other_format": ({"change_meta": lambda m: m["layers"].update({Q: "fp8"})}, "got I8 .* for .*to_q.codes"),
    "fewer": ({"change_meta": lambda m: m["layers"].pop(Q)}, "unknown tensors"),
    "missing": ({"change_header": lambda h: h.pop("x_embedder.bias")}, "missing tensors .*x_embedder.bias"),
    "shape": ({"change_header": lambda h: h["x_embedder.bias"].update(shape=[1])}, "for x_embedder.bias"),
    "dtype": ({"change_header": lambda h: h["x_embedder.bias"].update(dtype="I32")}, "for x_embedder.bias"),
    "offsets": (
        {"change_header": lambda h: h["x_embedder.bias"].update(data_offsets=[0, 128])},
        "safetensors refuses",
    ),
    "cut": ({"body": lambda b: b[:-1]}, "damaged"),
    "longer": ({"body": lambda b: b + b"x"}, "damaged"),
    "codes": ({"body": lambda b: b"\x80" * len(b)}, "codes or scales"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_refused_and_the_model_is_as_it_was(saved, name, tmp_path):
    path, model, inputs, _ = saved
    changes, words = DAMAGES[name]
    target = tmp_path / "damaged.safetensors"
    rewrite(path, target, **changes)
    twin = copy.deepcopy(model)
    expected = run(twin, inputs)
    with pytest.raises(ValueError, match=words):
        sp.load_quantized(twin, target)
    assert torch.equal(run(twin, inputs), expected)
    assert all(type(m) is nn.Linear for m in twin.modules() if isinstance(m, nn.Linear))


def test_what_is_no_such_file_or_model(saved, tmp_path):
    path, model, _, _ = saved
    for content in (b"", b"PK\x03\x04", b"\xff" * 64, struct.pack("<Q", 2**60) + b"{}"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="header of .* bytes"):
            sp.load_quantized(copy.deepcopy(model), tmp_path / "x.safetensors")
    with pytest.raises(FileNotFoundError):
        sp.load_quantized(model, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="ends in .safetensors"):
        sp.load_quantized(model, tmp_path / "x.bin")
    with pytest.raises(TypeError, match="path: got int"):
        sp.load_quantized(model, 3)
    with pytest.raises(TypeError, match="model: got int"):
        sp.save_quantized(3, path)
    with pytest.raises(TypeError, match="model: got int"):
        sp.load_quantized(3, path)
    with pytest.raises(ValueError, match="on_unsupported: got 'Strict', expected one of .'fallback', 'raise'"):
        sp.load_quantized(model, path, on_unsupported="Strict")
    with pytest.raises(ValueError, match="without 8-bit linear layers"):
        sp.save_quantized(model, tmp_path / "y.safetensors")
    with sp.quantize_linears(model, min_features=0):
        with pytest.raises(ValueError, match="linear layers are swapped"):
            sp.load_quantized(model, path)
    assert not (tmp_path / "y.safetensors").exists()


def test_models_with_adapters_or_without_numbers_are_refused(saved, tmp_path):
    path, model, inputs, _ = saved
    adapted = copy.deepcopy(model)
    adapted.x_embedder.add_module("base_layer", nn.Identity())
    with pytest.raises(ValueError, match="model: got one with adapters"):
        sp.load_quantized(adapted, path)
    swapped = copy.deepcopy(model)
    with sp.quantize_linears(swapped, min_features=0):
        run(swapped, inputs)
        swapped.norm_out.register_buffer("nothing", torch.zeros(3, device="meta"))
        with pytest.raises(ValueError, match="model: got norm_out.nothing on the meta device"):
            sp.save_quantized(swapped, tmp_path / "x.safetensors")
        swapped.x_embedder.add_module("base_layer", nn.Identity())
        with pytest.raises(ValueError, match="model: got one with adapters"):
            sp.save_quantized(swapped, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("field", ["dtype", "shape"])
def test_a_file_that_is_replaced_after_it_was_checked_is_refused(field, saved, tmp_path, monkeypatch):
    path, model, _, _ = saved
    target = tmp_path / "x.safetensors"
    target.write_bytes(path.read_bytes())
    check = quantized_files._check_entries

    def replaced(entries, expected, path_):
        check(entries, expected, path_)
        rows, columns = entries[f"{Q}.codes"]["shape"]
        new = {"dtype": "U8", "shape": [1, rows * columns]}[field]
        rewrite(path, target, change_header=lambda header: header[f"{Q}.codes"].update({field: new}))

    monkeypatch.setattr(quantized_files, "_check_entries", replaced)
    with pytest.raises(ValueError, match=f"got another tensor {Q}.codes than its header says"):
        sp.load_quantized(copy.deepcopy(model), target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_every_floating_type_are_read(dtype, tmp_path):
    model, x = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)).eval(), torch.randn(2, 16)
    with sp.quantize_linears(model, min_features=0):
        expected = model(x) + 0
        model[0].to(dtype)
        sp.save_quantized(model, tmp_path / "x.safetensors")
    twin = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)).eval()
    sp.load_quantized(twin, tmp_path / "x.safetensors")
    assert twin[0].weight.dtype == dtype
    twin[0].float()
    torch.testing.assert_close(twin(x) + 0, expected, atol=0.05, rtol=0)


def test_buffers_of_every_type_are_named_as_safetensors_names_them(tmp_path):
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(16, 8)).eval()
    for i, dtype in enumerate(quantized_files._NAMES):
        model.register_buffer(f"buffer{i}", (torch.arange(6) % 2).to(dtype))
    with sp.quantize_linears(model, min_features=0):
        model(torch.randn(2, 16))
        sp.save_quantized(model, tmp_path / "x.safetensors")
    read = load_file(tmp_path / "x.safetensors")
    for name, x in model.named_buffers():
        assert read[name].dtype == x.dtype and torch.equal(read[name].view(torch.uint8), x.view(torch.uint8))


def test_buffers_in_fp8_are_read_by_a_model_that_has_them(tmp_path):
    def model():
        made = nn.Sequential(nn.Linear(16, 8)).eval()
        made.register_buffer("small", torch.zeros(6, dtype=torch.float8_e4m3fn))
        return made

    saved = model()
    saved.small.copy_(torch.arange(6))
    with sp.quantize_linears(saved, min_features=0):
        saved(torch.randn(2, 16))
        sp.save_quantized(saved, tmp_path / "x.safetensors")
    read = model()
    sp.load_quantized(read, tmp_path / "x.safetensors")
    assert torch.equal(read.small.float(), torch.arange(6.0))


def test_parameters_that_layerwise_casting_keeps_in_fp8_are_not_written(tmp_path):
    """Who reads the file has a model whose parameters are wider, and no hooks that cast."""
    from diffusers.hooks import apply_layerwise_casting

    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)).eval()
    apply_layerwise_casting(model[1], torch.float8_e4m3fn, torch.float32, skip_modules_pattern=())
    with sp.quantize_linears(model, min_features=0, layers={"1": "none"}):
        model(torch.randn(2, 16))
        with pytest.raises(ValueError, match="float8_e4m3fn for parameter 1.weight, expected 16 bit or more"):
            sp.save_quantized(model, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_safetensors_does_not_know_are_not_written(tmp_path):
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with sp.quantize_linears(model, min_features=0):
        model(torch.randn(2, 16))
        with pytest.raises(ValueError, match="model: got torch.complex128 for odd"):
            sp.save_quantized(model, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format", "name", "value"),
    [
        ("int8", "scale", 0.0),
        ("int8", "scale", -1.0),
        ("int8", "scale", torch.nan),
        ("int8", "scale", torch.inf),
        ("int8", "codes", -128),
        ("fp8", "codes", torch.nan),
    ],
)
def test_one_code_or_scale_that_no_weight_has_is_refused(format, name, value, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path, model = tmp_path / "x.safetensors", nn.Sequential(nn.Linear(16, 8)).eval()
    with sp.quantize_linears(model, format, min_features=0):
        model(torch.randn(2, 16))
        sp.save_quantized(model, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    sp.load_quantized(nn.Sequential(nn.Linear(16, 8)).eval(), path)
    tensors[f"0.{name}"].view(-1)[5] = value
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match="got codes or scales of layer '0' that no weight has"):
        sp.load_quantized(nn.Sequential(nn.Linear(16, 8)).eval(), path)


def test_layers_that_were_left_alone_are_left_alone(tmp_path):
    def made():
        return nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).eval().requires_grad_(False)

    model, twin, x = made(), made(), torch.randn(2, 1024)
    with sp.quantize_linears(model, min_features=0, layers={"1": "none"}):
        expected = model(x) + 0
        sp.save_quantized(model, tmp_path / "x.safetensors")
    swap = sp.load_quantized(twin, tmp_path / "x.safetensors")
    assert torch.equal(twin(x) + 0, expected) and type(twin[1]) is nn.Linear
    assert torch.equal(twin[1].weight, model[1].weight) and [c.name for c in swap.choices if c.format != "none"] == [
        "0"
    ]
