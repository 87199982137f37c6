"""Wrong input is answered in one line on stderr and exit code 2, by every command, before anything is drawn."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
import transformers
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.calibration.policy_files import write_policy
from sage_processors.cli import loading
from sage_processors.cli import main as cli
from sage_processors.evaluation import language
from sage_processors.installation import pip_install
from tests.cli.test_language_models import folder_of
from tests.support.repository import fresh


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def said(*arguments) -> str:
    """The one line that a command answers with."""
    done = CliRunner(env={"COLUMNS": "40", "HF_HUB_OFFLINE": "1"}).invoke(cli.app, [str(a) for a in arguments])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (done.output, done.exception)
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("Error: "), done.output
    return done.stderr


MODEL_COMMANDS = [
    ["demo"], ["report"], ["warm-up"], ["calibrate", "--target-psnr", "40"], ["time"], ["rate"],
]  # fmt: skip


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_a_model_that_is_not_there(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no/where" in said(*command, "no/where")
    assert "../nowhere" in said(*command, "../nowhere")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--steps", "-3"], "--steps"),
        (["demo", "--images", "0"], "--images"),
        (["demo", "--seed", str(2**63)], "--seed"),
        (["calibrate", "--steps", "0"], "--steps"),
        (["demo", "--recipe", "int1"], "recipe: got 'int1', expected one of"),
        (["report", "tiny_sd", "--scaling", "x"], "scaling: got 'x', expected one of"),
        (["warm-up", "tiny_sd", "--min-tokens", "-1"], "min_tokens: got -1"),
        (["warm-up", "tiny_sd", "--dtype", "int4"], "int4: expected one of bfloat16"),
        (
            ["calibrate", "tiny_flux", "--target-psnr", "40", "--linears", "int4"],
            "--linears: int4: expected one of int8, fp8",
        ),
        (["calibrate", "tiny_flux", "--target-psnr", "40", "--scaling", "x"], "--scaling: x: expected"),
        (["calibrate"], "such as --target-psnr 40"),
        (["time", "tiny_flux", "--preset", "faster"], "faster"),
        (["rate", "tiny_flux", "--output", "no/where"], "--output: got no/where, but folder no does not exist; make"),
        (["rate", "tiny_flux", "--output", ""], "'--output': got an empty name, expected a folder's"),
        (["rate", "tiny_flux", "--reference", "x"], "--reference: x: expected one of stock, float32"),
        (["demo", "--images", "100000000"], "--images"),
        (["rate", "tiny_flux", "--clip", "nosuch"], "--clip: nosuch: expected a folder with a CLIP model"),
        (["rate", "tiny_flux", "--prompts", "x", "--category", "writing"], "--category: got it beside --prompts"),
        (["time", "tiny_flux", "--height", "100000000"], "'--height'"),
        (["time", "tiny_flux", "--steps", "1001"], "--steps: got 1001, expected at most 1000"),
        (["rate", "tiny_sd", "--steps", "1001"], "--steps: got 1001, expected at most 1000"),
        (["demo", "tiny_sd", "--steps", "1001"], "--steps: got 1001, expected at most 1000, the steps that its s"),
        (
            ["calibrate", "--target-psnr", "9", "--steps", "1001"],
            "--steps: got 1001, expected at most 1000, the steps",
        ),
        (
            ["time", "tiny_lm", "--prompt-tokens", "500"],
            "--prompt-tokens: got 500 tokens and 128 new ones, expected at ",
        ),
        (
            ["time", "tiny_lm", "--new-tokens", "600"],
            "--new-tokens: got 2 tokens and 600 new ones, expected at most 512",
        ),
        (["rate", "tiny_lm", "--context", "600"], "--context: got 600 tokens, expected at most 512 together"),
        (
            ["rate", "tiny_lm", "--context", "400", "--new-tokens", "450"],
            "--new-tokens: got 100 tokens and 450 new ones",
        ),
        (["time", "tiny_lm", "--recipe", "mixed"], "--recipe: mixed: expected one of qk_int8_pv_bf16"),
        (["rate", "tiny_sd", "--recipe", "16bit"], "--recipe: got 16bit, with which nothing of tiny_sd runs in 8 bit"),
        (["time", "tiny_wan", "--recipe", "16bit", "--linears", "none"], "--recipe: got 16bit, with which nothing of"),
        (["rate", "tiny_lm", "--recipe", "int1"], "recipe: got 'int1', expected one of"),
        (["demo", "tiny_lm"], "tiny_lm is a language model, expected a pipeline; the embedded ones are tiny_flux"),
        (["calibrate", "tiny_lm", "--target-psnr", "40"], "tiny_lm is a language model, expected a pipeline"),
        (["warm-up", "tiny_lm"], "tiny_lm is a language model, expected a pipeline"),
        (["rate", "tiny_lm", "--context", "4", "--windows", "100000"], "--windows: got 100000, expected 1 to"),
        (["rate", "tiny_sd", "--height", "8"], "--height: got 8, expected at least 16: smaller pictures have no SSIM"),
        (["rate", "tiny_flux", "--width", "15"], "--width: got 15, expected at least 16"),
        (["time", "tiny_sd", "--policy", "no.json"], "--policy: got 'no.json', which does not exist"),
        (["time", "tiny_sd", "--policy", "no.json", "--preset", "fast"], "--policy: it has options of its own; leave"),
        (
            ["rate", "tiny_sd", "--policy", "no.json", "--linears", "int8"],
            "--policy: it has options of its own; leave",
        ),
        (["time", ""], "got an empty name, expected a model; the embedded ones are tiny_flux"),
        (["demo", " "], "got an empty name, expected a pipeline; the embedded ones are tiny_flux"),
        (["time", "nosuch"], "the embedded ones are tiny_flux, tiny_sd, tiny_wan, tiny_lm"),
        (["report", "nosuch"], "the embedded ones are tiny_flux, tiny_sd, tiny_wan, tiny_lm"),
        (["demo", "--device", "abacus"], "abacus"),
        (["time", "tiny_sd", "--device", "meta"], "--device: meta: it holds no numbers, expected one such as cpu"),
        (["time", "tiny_wan", "--frames", "256"], "--frames: got 256, expected at most 255, those that its denoiser"),
        (["demo", "--what"], "No such option"),
        (["demonstrate"], "No such command"),
        (["report"], "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in said(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"], ids=["empty", "other"])
def test_broken_weights(content, tmp_path):
    folder = tmp_path / "pipe"
    shutil.copytree(sp.pipelines.path("tiny_flux"), folder)
    next((folder / "transformer").glob("*.safetensors")).write_bytes(content)
    assert "could not be loaded" in said("demo", folder, "--output", tmp_path / "x.png", "--device", "cpu")


def test_a_pipeline_of_a_class_that_is_not_known(tmp_path):
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "NoPipeline", "unet": ["diffusers", "NoUNet"]})
    )
    assert "could not be loaded" in said("report", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", [1], "its config.json has a list, expected a JSON object"),
        ("config.json", {}, "its config.json has no model_type, as of transformers, and no _class_name"),
        ("model_index.json", [1], "its model_index.json has a list, expected a JSON object"),
        ("model_index.json", {}, "its model_index.json has no _class_name"),
        (
            "model_index.json",
            {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]},
            "its model_index.json lacks scheduler, text_encoder, tokenizer, text_encoder_2, tokenizer_2, transformer",
        ),
    ],
)
@pytest.mark.parametrize("command", ["time", "rate"])
def test_configs_that_say_nothing(command, file, content, words, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    assert f"{tmp_path} could not be loaded: {words}" in said(command, tmp_path)


def test_a_message_with_a_list_is_not_cut_off_before_it(tmp_path):
    folder = shutil.copytree(language.EMBEDDED, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "backend tokenizer from one of: (1) a `tokenizers` library serial" in said("rate", folder)


def test_more_images_than_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a red circle\na star\n")
    assert "--images: got 3, expected at most 2, the prompts" in said(
        "rate", "tiny_sd", "--prompts", "p.txt", "--images", 3
    )
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    """It is asked once, and what is in the local cache is then used without it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "HUB_SECONDS", 1)
    words = said("time", "some/model")
    assert "MODEL: some/model is not in the Hub's local cache, and http://127.0.0.1:9 can't be reached" in words
    assert "time --random one of configs and tokenizers" in words
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert loading.locate("some/model") == "some/model"
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True


FOR_PICTURES = {"steps": 1, "height": 64, "width": 64, "frames": 5, "policy": "p.json"}
OF_RATE = {"prompts": "p", "category": "writing", "images": 1, "seed": 1, "reference": "stock", "clip": "x"}
FOR_TEXTS = {"time": {"prompt-tokens": 9, "new-tokens": 9}, "rate": {"windows": 1, "context": 9, "new-tokens": 9}}


@pytest.mark.parametrize(
    ("command", "model", "option", "value"),
    [
        *(("time", "tiny_lm", *pair) for pair in FOR_PICTURES.items()),
        *(("rate", "tiny_lm", *pair) for pair in (FOR_PICTURES | OF_RATE).items()),
        *((command, "tiny_flux", *pair) for command, pairs in FOR_TEXTS.items() for pair in pairs.items()),
        *((command, "tiny_sd", "frames", 5) for command in FOR_TEXTS),
        ("rate", "tiny_wan", "chat", None),
        ("rate", "encoder", "chat", None),
        ("rate", "encoder", "csv", "r.csv"),
        ("rate", "encoder", "new-tokens", 9),
        ("time", "encoder", "full", None),
    ],
)
def test_options_that_a_model_would_ignore(command, model, option, value, tmp_path, monkeypatch):
    """Each is named with the kind of model that was given; also if the value is the default one."""
    monkeypatch.chdir(tmp_path)
    kind = {"tiny_lm": "a language model", "tiny_wan": "a pipeline of clips", "encoder": "a sentence encoder"}
    if model == "encoder":
        folder_of("bert", tmp_path / model)
    if option == "policy":
        write_policy(tmp_path / value, sp.SageAttnProcessor(), [], budget={}, result={}, curve=[])
    words = [command, model, f"--{option}", *([] if value is None else [value])]
    assert f"--{option}: {model} is {kind.get(model, 'a pipeline of pictures')}, which has no" in said(*words)


def test_models_that_are_not_measured(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanImageToVideoPipeline"}))
    assert "is a WanImageToVideoPipeline, expected a pipeline that draws from a prompt" in said("time", tmp_path)
    transformer = sp.pipelines.path("tiny_flux") / "transformer"
    assert "holds a FluxTransformer2DModel alone, expected a whole pipeline" in said("time", transformer)
    for name, kind in (("t5", "T5ForConditionalGeneration"), ("siglip", "SiglipModel")):
        folder = folder_of(name, tmp_path / name)
        assert f"is a {kind}, expected a pipeline of diffusers, a language model or" in said("rate", folder)
    transformers.MambaConfig(architectures=["MambaForCausalLM"], hidden_size=32).save_pretrained(tmp_path / "mamba")
    assert "none of whose layers takes an attention implementation" in said("time", tmp_path / "mamba")


@pytest.mark.parametrize("name", ["rating.json", "index.html", "pictures"])
def test_what_is_in_a_ratings_folder_in_place_of_its_files(name, tmp_path):
    made = tmp_path / name
    made.write_text("") if name == "pictures" else made.mkdir()
    assert name in said("rate", "tiny_flux", "--output", tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == [name]


ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(ALLOCATOR), "out of memory, tried to allocate 9 bytes: choose a smaller --height or --width"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
            "tried to allocate 2.50 GiB: choo",
        ),
        (MemoryError(), "out of memory: choose a smaller --height or --width or --frames or --batch or --images"),
    ],
    ids=["cpu", "gpu", "python"],
)
def test_out_of_memory_names_what_to_make_smaller(error, words, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_pipeline", lambda *_: (_ for _ in ()).throw(error))
    assert words in said("rate", "tiny_sd", "--output", tmp_path / "r")


def test_other_errors_of_torch_are_shown_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_pipeline", lambda *_: torch.zeros(2).view(3))
    done = CliRunner().invoke(cli.app, ["rate", "tiny_sd", "--output", str(tmp_path / "r")])
    assert isinstance(done.exception, RuntimeError) and "shape" in str(done.exception)


@pytest.mark.parametrize(
    ("command", "words"), [("time", "no result was written"), ("rate", "the same command goes on")]
)
@pytest.mark.parametrize("place", ["load_language_skeleton", "load_pipeline"])
def test_control_c_ends_in_one_line(command, words, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, place, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    done = CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(cli.app, [command, "tiny_sd"])
    assert done.exit_code == 130 and done.stderr.startswith("Interrupted: ") and words in done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_control_c_during_imports_ends_in_one_line():
    code = """
        import builtins
        from sage_processors.cli import run
        sys.stderr, real = sys.stdout, builtins.__import__
        def stopped(name, *more):
            if name == "typer":
                raise KeyboardInterrupt
            return real(name, *more)
        builtins.__import__ = stopped
        try:
            run()
        except SystemExit as stop:
            print(stop.code)
        """
    assert fresh(code) == "Interrupted: nothing was written.\n130\n"


@pytest.mark.parametrize("name", ["index.html", "pictures"])
def test_a_folder_with_somebody_elses_files_is_left_alone(name, tmp_path):
    made = tmp_path / name
    made.write_text("mine") if name == "index.html" else made.mkdir()
    assert f"has {name} but no rating.json" in said("rate", "tiny_flux", "--output", tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == [name]


def test_a_missing_package_of_the_command_line():
    code = """
        sys.stderr = sys.stdout
        from sage_processors.cli import run
        try:
            run()
        except SystemExit as stop:
            print(stop.code)
        """
    assert fresh(code, without=("rich",)) == f"Error: the command line needs rich: {pip_install()}\n1\n"
