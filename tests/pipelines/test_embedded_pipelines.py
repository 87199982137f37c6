"""The embedded pipelines are real, small, and draw what the prompt says."""

import sys

import pytest
import torch


pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from diffusers import DiffusionPipeline

from sage_processors import pipelines
from tests.support.repository import ROOT


sys.path.insert(0, str(ROOT / "examples"))

from tiny_check import check_images
from tiny_data import COLORS, SHAPES


NAMES = ("tiny_flux", "tiny_sd")
CLASSES = {"tiny_sd": "StableDiffusionPipeline", "tiny_flux": "FluxPipeline"}
MAX_BYTES = 24_000_000
STEPS = 12
PROMPTS = (("red", "circle", ""), ("yellow", "star", "black"), ("green", "square", "white"))  # "": not said


def load(name: str) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(pipelines.path(name))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module", params=NAMES)
def pipe(request):
    return load(request.param)


def size_options(pipe) -> dict:
    """FluxPipeline draws 256x256 and pads the text to 512 tokens unless told otherwise; guidance helps it."""
    if type(pipe).__name__ == "StableDiffusionPipeline":
        return {}
    size = {"height": 128, "width": 128, "max_sequence_length": pipe.tokenizer_2.model_max_length}
    guidance = pipelines.call_arguments("tiny_flux")
    return {**size, **guidance, "negative_prompt": [guidance["negative_prompt"]] * len(PROMPTS)}


def test_names_and_path_find_the_folders():
    assert pipelines.names() == list(NAMES)
    for name in NAMES:
        assert (pipelines.path(name) / "model_index.json").is_file()
    with pytest.raises(ValueError, match="got 'tiny', expected.*tiny_flux"):
        pipelines.path("tiny")
    with pytest.raises(TypeError, match="name.*got int"):
        pipelines.path(3)


def test_folders_stay_small_and_hold_only_safetensors_and_json():
    files = [f for name in NAMES for f in pipelines.path(name).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= MAX_BYTES
    assert {f.suffix for f in files} == {".json", ".safetensors"}


def test_weights_are_stored_fp16():
    from safetensors import safe_open

    for name in NAMES:
        for path in pipelines.path(name).rglob("*.safetensors"):
            with safe_open(path, "pt") as file:
                dtypes = {file.get_slice(key).get_dtype() for key in file.keys()}
            assert dtypes == {"F16"}, path


def test_plain_loading_gives_stock_classes_in_one_dtype(pipe):
    assert type(pipe).__name__ in CLASSES.values()
    assert type(pipe).__module__.startswith("diffusers.pipelines.")
    modules = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
    assert {m.dtype for m in modules} == {torch.float32}


def test_largest_attention_has_1024_tokens_and_heads_of_64(pipe, monkeypatch):
    seen = []
    exact = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, *args, **kwargs):
        seen.append((query.shape[-2], key.shape[-2], query.shape[-1]))
        return exact(query, key, value, *args, **kwargs)

    embeds = pipe.encode_prompt(
        "a red circle", device="cpu", num_images_per_prompt=1,
        **({"do_classifier_free_guidance": False} if "unet" in pipe.components else {"max_sequence_length": 32}),
    )  # fmt: skip
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    if "unet" in pipe.components:
        expected, options = 1024, {"prompt_embeds": embeds[0], "guidance_scale": 1.0}
    else:
        expected, options = 1024 + 32, {"prompt_embeds": embeds[0], "pooled_prompt_embeds": embeds[1]}
    sizes = size_options(pipe)
    pipe(**options, **sizes, num_inference_steps=1, output_type="latent")
    assert max(seen) == (expected, expected, 64)
    assert {head_dim for _, _, head_dim in seen} == {64}


@pytest.mark.slow("draws pictures in many steps")
def test_pictures_show_their_prompts(pipe):
    prompts = [
        f"a {color} {shape}{f' on a {ground} background' if ground else ''}" for color, shape, ground in PROMPTS
    ]
    seeds = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    options = size_options(pipe)
    images = pipe(prompts, num_inference_steps=STEPS, generator=seeds, output_type="pt", **options).images
    assert images.shape == (len(prompts), 3, 128, 128)
    color = torch.tensor([COLORS.index(prompt[0]) for prompt in PROMPTS])
    shape = torch.tensor([SHAPES.index(prompt[1]) for prompt in PROMPTS])
    ground = torch.tensor([COLORS.index(prompt[2]) if prompt[2] else -1 for prompt in PROMPTS])
    result = check_images(images * 2 - 1, shape, color, ground)
    assert all(result["color"]), dict(zip(prompts, result["color"], strict=True))
    assert sum(result["shape"]) >= len(prompts) - 1, dict(zip(prompts, result["shape"], strict=True))


def test_the_check_rejects_wrong_pictures():
    """The measure above must be able to fail: drawn pictures pass their own captions and fail others."""
    from tiny_data import draw, sample_scene

    scene = sample_scene(8, torch.device("cpu"), torch.Generator().manual_seed(0))
    images = draw(scene, 64, torch.Generator().manual_seed(1))
    right = check_images(images, scene.shape, scene.color, scene.ground_color)
    assert all(right["color"]) and all(right["shape"])
    wrong = check_images(images, (scene.shape + 1) % len(SHAPES), (scene.color + 1) % len(COLORS), scene.ground_color)
    assert not any(wrong["color"]) and not any(wrong["shape"])
    same_colors = check_images(images, (scene.shape + 3) % len(SHAPES), scene.color, scene.ground_color)
    assert all(same_colors["color"]) and sum(same_colors["shape"]) <= 2
