"""Folders in 8 bit that are refused, in both libraries, and models in which nothing would be quantised."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import sage_processors as sp
from tests.loading.test_loading import BUILD


FLUX, LLAMA = "transformer_blocks.0.attn.to_q", "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module", params=["flux", "llama"])
def small(request, tmp_path_factory):
    """(class, folder in 8 bit, name of its weights' file, name of a layer with INT8 weights)."""
    model, _ = BUILD[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "stock")
    config = sp.SageConfig(min_features=0)
    type(model).from_pretrained(folder / "stock", quantization_config=config).save_pretrained(folder / "small")
    weights = next((folder / "small").glob("*.safetensors")).name
    return type(model), folder, weights, FLUX if request.param == "flux" else LLAMA


def config_of(change):
    def damage(folder, weights, name):
        path = folder / "config.json"
        values = json.loads(path.read_text())
        change(values["quantization_config"], name)
        path.write_text(json.dumps(values))

    return damage


def tensors_of(change):
    def damage(folder, weights, name):
        tensors = load_file(folder / weights)
        change(tensors, name)
        save_file(tensors, folder / weights, metadata={"format": "pt"})

    return damage


def cut(folder, weights, name):
    content = (folder / weights).read_bytes()
    (folder / weights).write_bytes(content[: len(content) // 2])


def in_16_bit(tensors, name):
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"][0].float()


def all_in_16_bit(tensors, name):
    for key in [key for key in tensors if key.endswith(".weight_scale")]:
        del tensors[key]
        in_16_bit(tensors, key.removesuffix(".weight_scale"))


DAMAGES = {
    "newer": (
        config_of(lambda c, n: c.update(format_version=9)),
        "format_version 9, expected at most 2; install .* newer one",
    ),
    "more": (config_of(lambda c, n: c.update(more=1)), "unknown keys .'more'"),
    "format": (config_of(lambda c, n: c["modules"].update({n: "int4"})), "got format 'int4' of layer"),
    "no_layer": (config_of(lambda c, n: c["modules"].update(nothing="int8")), "got 8-bit layer 'nothing'"),
    "balance": (config_of(lambda c, n: c["balanced"].append("x")), "got balance of 'x'"),
    "other_format": (config_of(lambda c, n: c["modules"].update({n: "fp8"})), "got I8 .*expected F8_E4M3"),
    "half": (cut, "it is not whole; copy or download the folder again|Unable to load weights"),
    "16_bit": (tensors_of(in_16_bit), "got F32 .*expected I8 .*for a folder in 16 bit remove that entry"),
    "all_16_bit": (tensors_of(all_in_16_bit), "got 16-bit weights without .*remove that entry"),
    "unnamed": (
        config_of(lambda c, n: c["modules"].pop(n)),
        "does not name, expected the same ones in both|got balance of .*expected one 8-bit layer each",
    ),
    "missing": (tensors_of(lambda t, n: t.pop(f"{n}.weight_scale")), "got no tensors .*weight_scale"),
    "absurd": (tensors_of(lambda t, n: t[f"{n}.weight_scale"].view(-1)[3:4].fill_(1e38)), "that no weight has"),
    "nan": (tensors_of(lambda t, n: t[f"{n}.weight_scale"].view(-1)[3:4].fill_(torch.nan)), "that no weight has"),
    "negative": (tensors_of(lambda t, n: t[f"{n}.weight_scale"].view(-1)[3:4].fill_(-1)), "that no weight has"),
    "code": (tensors_of(lambda t, n: t[f"{n}.weight"].view(-1)[5:6].fill_(-128)), "that no weight has"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders_are_refused(small, name, tmp_path):
    kind, folder, weights, layer = small
    damage, words = DAMAGES[name]
    for file in (folder / "small").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path, weights, layer)
    with pytest.raises((ValueError, OSError), match=words):
        kind.from_pretrained(tmp_path)


def test_nothing_to_quantise_is_said_before_anything_is_read(small, monkeypatch):
    kind, folder, _, _ = small
    with pytest.raises(
        ValueError, match=r"SageConfig\('int8'\) would quantise nothing .*\d+ small.*lower min_features"
    ):
        kind.from_pretrained(folder / "stock", quantization_config=sp.SageConfig())
    with pytest.raises(ValueError, match=r"layers: got '\*.nothing', which matches no linear layer"):
        kind.from_pretrained(folder / "stock", quantization_config=sp.SageConfig(layers={"*.nothing": "int8"}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"format": "int4"}, "format: got 'int4', expected one of"),
        ({"layers": {"*": "int3"}}, "layers.*got 'int3'"),
        ({"layers": {"*": {"recipe": "16bit"}}}, "expected 'linears' alone"),
        ({"layers": "*"}, "layers: got '\\*'"),
        ({"min_features": -1}, "min_features: got -1"),
    ],
)
def test_options_are_checked(values, words):
    with pytest.raises((TypeError, ValueError), match=words):
        sp.SageConfig(**values)


def test_a_folder_without_this_package_is_refused_by_both_libraries(small):
    kind, folder, _, _ = small
    library = kind.__module__.split(".")[0]
    load = f"lib.{kind.__name__}.from_pretrained({str(folder / 'small')!r})"
    code = f"""
import {library} as lib
try:
    {load}
except Exception as error:
    print(error)
else:
    raise SystemExit("loaded without it")
import sage_processors
{load}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Unknown quantization type, got sage_processors" in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr[-2000:]


def test_maps_with_offloading_are_refused(small):
    kind, folder, _, _ = small
    for config in ({"quantization_config": sp.SageConfig(min_features=0)}, {}):
        with pytest.raises(ValueError, match="device_map: got .*disk.*expected one kind of device"):
            kind.from_pretrained(folder / ("small" if not config else "stock"), device_map={"": "disk"}, **config)


def test_out_of_memory_in_the_middle_can_be_tried_again(small, monkeypatch):
    from sage_processors.linears.weights import linear_state

    kind, folder, _, _ = small
    quantize, calls = linear_state.quantize_weight, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("out of memory")
        return quantize(*args, **options)

    monkeypatch.setattr(linear_state, "quantize_weight", failing)
    config = sp.SageConfig(min_features=0)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)):
        kind.from_pretrained(folder / "stock", quantization_config=config)
    model = kind.from_pretrained(folder / "stock", quantization_config=config)
    assert model.config.quantization_config.modules and not config.modules
