"""`time` and `rate` on the small models, offline: figures that are right, pages that are whole, work that goes on."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
import transformers
from typer.testing import CliRunner

import sage_processors as sp
from sage_kernels.results import read_rows
from sage_processors.cli import main as cli
from sage_processors.cli import random_weights, rate
from sage_processors.evaluation import quality
from sage_processors.evaluation.protocol import rating, rating_page, scores, timing
from sage_processors.evaluation.protocol.prompts import PROMPTS, built_in, from_file
from sage_processors.reporting import layer_report


SMALL = ["--steps", "1", "--batch", "1", "--device", "cpu", "--json"]


def invoke(*words, code=0):
    done = CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout) if "--json" in words and not code else done.output


class Page(HTMLParser):
    """Tags of a page, and its images."""

    def __init__(self, path):
        super().__init__()
        self.open, self.images, self.seen = [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag == "img":
            self.images.append(dict(attributes))
        elif tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.slow("draws in three ways")
def test_rate_draws_measures_and_writes_a_page(tmp_path):
    found = invoke("rate", "tiny_flux", "--images", 2, *SMALL, "--output", tmp_path / "r", "--csv", tmp_path / "r.csv")
    state = json.loads((tmp_path / "r" / "rating.json").read_text())
    psnr = [row["metrics"]["int8"]["psnr_db"] for row in state["rows"]]
    assert len(psnr) == 2 and found["worst_psnr_db"] == min(psnr) and all(35 < value < 100 for value in psnr)
    assert found["means"]["another exact kernel"]["psnr_db"][0] > 100 > found["means"]["int8"]["psnr_db"][0]
    assert found["int8_calls"] > 0 and "too few to say" in found["verdict"]
    assert "100% of attention calls and no linear layer ran in 8 bit" in found["verdict"]
    page = Page(tmp_path / "r" / "index.html")
    assert len(page.images) == 6 and all(
        image["alt"] and (tmp_path / "r" / image["src"]).is_file() for image in page.images
    )
    assert "script" not in page.seen and "http" not in (tmp_path / "r" / "index.html").read_text()
    number = len(list(read_rows(tmp_path / "r.csv")))
    cases = {row["case"]: row for row in read_rows(tmp_path / "r.csv") if row["metric"] == "psnr_db_mean"}
    assert set(cases) == {"tiny_flux/rated", "tiny_flux/another_kernel"}
    assert float(cases["tiny_flux/rated"]["median"]) == pytest.approx(sum(psnr) / 2, abs=0.01)
    again = ("rate", "tiny_flux", "--images", 2, *SMALL, "--output", tmp_path / "r", "--csv", tmp_path / "r.csv")
    invoke(*again)
    assert len(list(read_rows(tmp_path / "r.csv"))) == number
    said = invoke("rate", "tiny_flux", "--images", 3, *SMALL, "--output", tmp_path / "r", code=2)
    assert "holds a rating with other settings than those asked for (prompts, seeds)" in said
    picture, other = (tmp_path / "r" / state["rows"][i]["pictures"]["int8"] for i in (0, 1))
    before, kept = picture.read_bytes(), other.stat().st_mtime_ns
    picture.unlink()
    invoke(*again)  # draws it again, and no other
    assert picture.read_bytes() == before and other.stat().st_mtime_ns == kept
    assert json.loads((tmp_path / "r" / "rating.json").read_text())["rows"] == state["rows"]
    for key, word in (("version", "0.0.0"), ("gpu", "another"), ("clip", "a model"), ("torch", "1"), ("kernels", "")):
        changed = state | {"settings": state["settings"] | {key: word}}
        (tmp_path / "r" / "rating.json").write_text(json.dumps(changed))
        assert f"holds a rating with other settings than those asked for ({key}):" in invoke(*again, code=2)


@pytest.mark.slow("draws twice; the first test rates in one go")
def test_rate_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    words = ("rate", "tiny_flux", "--images", 2, *SMALL, "--output", tmp_path / "r")
    generate, calls = quality.generate, []

    def watched(pipe, prompts, *args, **options):
        calls.append(prompts)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return generate(pipe, prompts, *args, **options)

    monkeypatch.setattr(quality, "generate", watched)
    said = invoke(*words, code=130)
    assert "Interrupted: the same command goes on" in said and "Traceback" not in said
    first = json.loads((tmp_path / "r" / "rating.json").read_text())["rows"]
    assert len(first) == 1 and len(calls) == 5
    bars = []
    monkeypatch.setattr(rate, "steps_bar", lambda label, total, done: bars.append((total, done)) or nullcontext(int))
    invoke(*words)
    rows = json.loads((tmp_path / "r" / "rating.json").read_text())["rows"]
    assert bars == [(6, 3)] and len(calls) == 8 and rows[:1] == first and len(rows) == 2


def test_rate_goes_on_where_it_was_interrupted_in_its_first_picture(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, "generate", stopped)
    for _ in range(2):  # the second is not refused
        said = invoke("rate", "tiny_flux", "--images", 2, *SMALL, "--output", tmp_path / "r", code=130)
        assert "Interrupted: the same command goes on" in said
    assert json.loads((tmp_path / "r" / "rating.json").read_text())["rows"] == []


@pytest.mark.slow("draws in two dtypes")
def test_rate_against_float32_has_stock_beside_it(tmp_path):
    more = ("--dtype", "bfloat16", "--reference", "float32", "--output", tmp_path / "r")
    found = invoke("rate", "tiny_flux", "--images", 1, *SMALL, *more)["means"]
    assert list(found) == ["stock", "another exact kernel", "int8"]
    assert 30 < found["int8"]["psnr_db"][0] <= found["stock"]["psnr_db"][0] + 3 < 70


@pytest.mark.slow("draws clips")
def test_rate_clips_by_frame_and_flicker(tmp_path, monkeypatch):
    size = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 32}
    monkeypatch.setitem(sp.pipelines._CALL_ARGUMENTS, "tiny_wan", size)
    found = invoke("rate", "tiny_wan", "--images", 1, *SMALL, "--output", tmp_path / "r")
    assert found["means"]["int8"]["flicker"][0] > 0 and found["means"]["int8"]["psnr_db"][0] > 30


def test_rate_of_a_model_in_which_nothing_runs_in_int8_ends_with_an_error(tmp_path):
    policy = tmp_path / "p.json"
    sp_options = sp.SageAttnProcessor(layers={"*": {"recipe": "16bit"}}, min_tokens=10**6)
    from sage_processors.calibration.policy_files import write_policy

    write_policy(policy, sp_options, [], budget={}, result={}, curve=[])
    words = ("rate", "tiny_flux", "--images", 1, *SMALL[:-1], "--output", tmp_path / "r", "--policy", policy)
    assert "nothing was rated" in invoke(*words, code=1)


class Reader:
    """OCR that reads what is given, and notes the pixels."""

    def __init__(self, params):
        self.said, self.seen = iter(["OPEN AT NINE", "0PEN NINE", None]), []
        Reader.made = self

    def __call__(self, pixels):
        self.seen.append(pixels)
        text = next(self.said)
        return SimpleNamespace(txts=text and tuple(text.split(" ")))


def test_legibility_is_the_share_of_quoted_letters_that_ocr_reads(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=Reader))
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    pictures, prompt = torch.zeros(4, 3, 8, 8), built_in(4, ["writing"])[0][1]
    pictures[0, 0] = 1  # red
    found = scores.Legibility()(pictures, [prompt, prompt, "no writing", prompt])
    assert found == [1, 0.7, None, 0]
    assert Reader.made.seen[0][0, 0].tolist() == [0, 0, 255]  # blue first, as OpenCV has it


def test_a_noise_floor_of_nothing_is_no_distance():
    said = rating.summarise([row(50, quality.PSNR_CEILING)] * 6)["verdict"]
    assert said.startswith("Another exact kernel draws the very same pictures here; INT8 does not: PSNR 50.0 dB")
    assert "where the other kernel has 120 dB (identical, the most there is); SSIM" in said and "120.0" not in said


def test_a_page_says_where_psnr_ends(tmp_path):
    named = {"category": "", "prompt": "a", "seed": 1, "pictures": {"int8": "x.png"}}
    for ours, times in ((50, 1), (quality.PSNR_CEILING, 3)):  # the floor; and the mean and the picture of INT8
        rows = [row(ours, quality.PSNR_CEILING) | named]
        state = {"settings": {"model": "x"}, "rows": rows, "notes": [], **rating.summarise(rows * 6)}
        rating_page.write_page(state | {"verdict": ""}, tmp_path / "x.html")
        page = (tmp_path / "x.html").read_text()
        assert (
            page.count("120 dB (identical, the most there is)") == times
            and "Identical pictures count as 120 dB." in page
        )
        assert "120 [" not in page and ("50 [50, 50]" in page) == (ours == 50)


def test_a_mean_is_over_the_pictures_that_have_the_metric():
    rows = [row(50, 60), row(52, 58)]
    for way, share in (("reference", 1), ("int8", 0.5), ("another exact kernel", 0.75)):
        rows[1]["metrics"].setdefault(way, {})["legibility"] = share
    found = rating.summarise(rows)["summary"]
    assert found["means"]["reference"]["legibility"][0] == 1 and found["ours_minus_floor"]["legibility"][0] == -0.25


def row(ours: float, floor: float, calls=(3, 0, 0, 0)) -> dict:
    each = {"int8": ours, "another exact kernel": floor}
    return {"metrics": {way: {"psnr_db": x, "ssim": 0.9} for way, x in each.items()}, "calls": list(calls)}


def test_a_verdict_on_clips_speaks_of_clips_and_their_frames():
    rows = [row(50 + i % 2, 50 + i % 3) for i in range(8)]
    pictures = rating.summarise(rows)["verdict"]
    for found in rows:
        for way in found["metrics"].values():
            way["flicker"] = 0.1
    clips = rating.summarise(rows)["verdict"]
    assert "pictures tell" in pictures and "frames" not in pictures
    assert "picture" not in clips and "clips tell" in clips and "of 8 clips 50.0 dB, means over frames;" in clips


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(40 + i % 2, 50 + i) for i in range(8)], r"INT8 is 13\.0 dB \(\d+\.\d to \d+\.\d\) further"),
        (
            [row(50 + (-1) ** i, 50) for i in range(8)],
            "no further from the reference than another exact kernel, as far",
        ),
        ([row(51 + i, 50 + i) for i in range(8)], "INT8 is nearer to the reference"),
        ([row(30, 50)] * 5, "5 of at least 6 pictures, too few"),
        ([row(30, 50, (0, 3, 1, 3))] * 8, "no attention call and 25% of linear layers' calls ran in 8 bit"),
        ([row(30, 50, (0, 3, 0, 1))] * 8, "Not rated: no call ran in INT8"),
    ],
)
def test_verdicts_follow_the_paired_interval(rows, words):
    assert re.search(words, rating.summarise(rows)["verdict"])


def test_a_page_escapes_what_others_wrote(tmp_path):
    state = {"settings": {"model": "folder/<b>x"}, "rows": [], "notes": ["<i>"], **rating.summarise([row(40, 50)] * 6)}
    named = {"category": "", "prompt": 'a "sign" <b> {0}', "seed": 1, "pictures": {"int8": "x.png"}}
    rating_page.write_page(state | {"rows": [row(40, 50) | named]}, tmp_path / "x.html")
    page = Page(tmp_path / "x.html")
    assert "<h1>&lt;b&gt;x: INT8 beside stock</h1>" in (tmp_path / "x.html").read_text()  # of a path, its last part
    assert page.images[0]["alt"] == 'INT8: a "sign" <b> (0)' and "b" not in page.seen and "i" not in page.seen


def test_clip_scores_come_from_a_model_on_the_disk(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(sp.pipelines.path("tiny_sd") / "tokenizer")
    tokenizer.save_pretrained(tmp_path)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = (
        small | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id},
        small | {"image_size": 32, "patch_size": 16},
    )
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    size = {"crop_size": {"height": 32, "width": 32}, "size": {"shortest_edge": 32}}
    transformers.CLIPImageProcessor(**size).save_pretrained(tmp_path)
    score = rating.ClipScore(str(tmp_path), torch.device("cpu"))
    pictures = torch.rand(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    two = score(pictures, ["a red circle", "a circle"])
    assert two == pytest.approx(
        [score(pictures[i : i + 1], [p])[0] for i, p in enumerate(("a red circle", "a circle"))], abs=1e-3
    )
    assert two[0] != two[1] and all(-100 <= x <= 100 for x in two)
    assert "nowhere" in rating.usable("CLIP", lambda: rating.ClipScore(str(tmp_path / "nowhere"), torch.device("cpu")))


def test_prompts_of_a_file_and_of_categories(tmp_path):
    assert [category for category, _ in built_in(9)] == [*PROMPTS, next(iter(PROMPTS))] and len(
        set(built_in(32))
    ) == 32
    assert {category for category, _ in built_in(6, ["writing"])} == {"writing"}
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "p.txt").write_text("one\n\ntwo\n", encoding=encoding)
        assert from_file(tmp_path / "p.txt") == [("", "one"), ("", "two")]
    assert "expected one of colours" in invoke("rate", "tiny_flux", "--category", "cats", code=2)
    assert "could not be read" in invoke("rate", "tiny_flux", "--prompts", tmp_path / "no.txt", code=2)


# --- time ---


@pytest.mark.parametrize("whole", [False, True])
def test_a_picture_is_what_surrounds_the_steps_and_all_steps(whole, monkeypatch):
    clock, calls = [0.0], []

    def call(steps):
        clock[0] += 0.5 + 0.1 * steps + 2.0 * (not calls)
        calls.append(steps)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = timing.time_calls(call, 28, torch.device("cpu"), few=2, more=6, whole=whole)
    assert found == pytest.approx((3.3, 0.1, 0.5, 2.0, None)) and (28 in calls) == whole


def test_a_text_has_the_steps_of_its_graphs_and_long_calls_are_not_repeated(monkeypatch):
    clock, calls = [0.0], []

    def call(steps):
        clock[0] += sum(0.1 if i < 20 else 0.01 for i in range(sum(calls), sum(calls) + steps))
        calls.append(steps)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = timing.time_calls(call, 64, torch.device("cpu"), whole=True)
    assert found == pytest.approx((0.64, 0.01, 0.0, 20 * 0.09, None)) and calls == [64] + [2] * 3 + [64] * 3
    calls.clear()
    timing.time_calls(call, 3000, torch.device("cpu"), whole=True)
    assert calls == [3000] + [2] * 3 + [3000]
    calls.clear()
    timing.time_calls(call, 3000, torch.device("cpu"), few=600, more=700)
    assert calls == [600] * 4 + [700] * 3


@pytest.mark.parametrize(
    ("ours", "calls", "words"),
    [
        (
            1.0,
            (9, 0, 1, 3),
            "Yes, on A GPU: 1.00 s a picture, stock 2.00 s (0.50), 3.0 GiB for stock's 3.0; 100% "
            "of attention calls and 25% of linear layers' calls ran in 8 bit.",
        ),
        (1.98, (9, 0, 0, 0), "No, on A GPU: 1.98"),
        (1.0, (0, 9, 1, 0), "Yes, on A GPU: 1.00"),
        (1.0, (0, 9, 0, 3), "No: nothing of this model ran"),
    ],
)
def test_yes_or_no_for_this_gpu(ours, calls, words, monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "get_device_name", lambda device=None: "A GPU")
    times = {way: timing.Timing(total, 0.1, 0.1, 0.1, 3.0) for way, total in (("stock", 2.0), ("int8", ours))}
    assert timing.verdict(times, timing.Calls(*calls), torch.device("cuda"), "picture").startswith(words)
    on_cpu = timing.verdict(times, timing.Calls(*calls), torch.device("cpu"), "picture")
    assert on_cpu.startswith("No GPU" if calls[0] or calls[2] else "No: nothing of this model ran in 8 bit on a CPU")


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            (9, 3, 2, 0, 9),
            "no attention call and 100% of linear layers' calls ran in 8 bit: of attention, the cache al",
        ),
        ((9, 3, 2, 0, 8), "75% of attention calls and 100% of linear layers' calls ran in 8 bit"),
        ((9, 3, 0, 2, 0, "linear layers: short 2"), "no linear layer ran in 8 bit (linear layers: short 2)"),
        ((9, 3, 1, 1, 0, "linear layers: short 2"), "50% of linear layers' calls ran in 8 bit"),
    ],
)
def test_what_ran_in_words(calls, words):
    said = timing.Calls(*calls).in_words()
    assert words in said and ("alone" in said) == (calls[4] == 9) and ("short" in said) == ("no linear" in said)
    twice = timing.Calls.total([(1, 1, 1, 1), calls])
    assert twice[:5] == tuple(x + y for x, y in zip(calls, (1, 1, 1, 1, 0), strict=False))
    assert twice.why == timing.Calls(*calls).why


def test_why_nothing_ran_comes_from_the_report():
    layers = [{"layer": x, "status": x, "calls": 0, "fallbacks": {}} for x in ("small", "protected", "active")]
    short = [{"layer": "a", "status": "active", "calls": 0, "fallbacks": {"short": 3}}]
    linears = layer_report.LayerReport(layers)
    assert timing.Calls.of(layer_report.LayerReport(short, linears=linears)).why == (
        "attention: short 3; linear layers: 1 layer of too few features (min_features), 1 layer protected"
    )
    ran = [{"layer": "a", "status": "active", "calls": 2, "cache_calls": 1, "fallbacks": {"short": 3}}]
    assert timing.Calls.of(layer_report.LayerReport(ran)) == (2, 3, 0, 0, 1, "")


@pytest.mark.slow("several calls of each way")
@pytest.mark.parametrize(
    "words",
    [("tiny_flux", "--steps", 4, "--timed", 1), ("tiny_lm", "--prompt-tokens", 16, "--new-tokens", 4, "--random")],
    ids=["picture", "text"],
)
def test_time_of_small_models(words, monkeypatch):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    asked, text_call = [], timing.text_call

    def recorded(model, tokens):
        call = text_call(model, tokens)
        return lambda number: (asked.append(number), call(number))

    monkeypatch.setattr(timing, "text_call", recorded)
    found = invoke("time", *words, "--device", "cpu", "--json")
    assert set(asked) == ({4, timing.FEW} if words[0] == "tiny_lm" else set())  # all tokens, and few
    assert found["int8_calls"] > 0 and found["verdict"].startswith("No GPU")
    assert all(time["total"] >= time["rest"] >= 0 and time["peak_gib"] is None for time in found["times"].values())


@pytest.mark.slow("loads a pipeline twice, and draws")
def test_random_weights_have_the_true_shapes_and_need_no_weights(tmp_path):
    folder = tmp_path / "configs"
    shutil.copytree(sp.pipelines.path("tiny_flux"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    pipe = random_weights.random_pipeline(str(folder), torch.device("cpu"), torch.bfloat16)
    import diffusers

    true = diffusers.DiffusionPipeline.from_pretrained(sp.pipelines.path("tiny_flux"), use_safetensors=True)
    assert set(pipe.components) == set(true.components) and pipe.dtype == torch.bfloat16
    for name, model in true.components.items():
        if isinstance(model, torch.nn.Module):
            shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (model, pipe.components[name])]
            assert shapes[0] == shapes[1]
    assert quality.generate(pipe, ["a"], [0], steps=1).isfinite().all()
