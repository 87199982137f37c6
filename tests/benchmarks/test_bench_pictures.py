"""Whole pictures and clips at sizes for a CPU: every way draws, rows are of one run, wrong latents have none."""

from __future__ import annotations

import pytest
import torch

from sage_kernels.results import read_rows


pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
NAME = "wan21_1_3b_480p81"
TINY = ["--tiny", "--device", "cpu", "--case", NAME]


@pytest.fixture(scope="module")
def bench(on_the_path):
    import bench_end_to_end
    import bench_pictures

    compiler, bench_end_to_end.COMPILER = bench_end_to_end.COMPILER, "eager"
    yield bench_pictures
    bench_end_to_end.COMPILER = compiler


def test_every_way_has_its_rows(bench, tmp_path):
    assert bench.main([*TINY, "--whole", "--csv", str(tmp_path / "rows.csv")]) == 0
    rows = read_rows(tmp_path / "rows.csv")
    assert {row["suite"] for row in rows} == {"clip"}
    found = {(row["provider"], row["recipe"], row["case"].removeprefix(f"{NAME}/tiny"), row["metric"]) for row in rows}
    ways = [("torch_sdpa_default", ""), ("torch_sdpa_cudnn", ""), ("torch_compiled_cudnn", "")]
    ways += [("sage_kernels", "qk_int8_pv_bf16"), ("sage_kernels", "preset_fast")]
    timed = {(*way, case, "time") for way in ways for case in ("", "/first", "/step", "/rest")}
    assert found == timed | {(*way, "", metric) for way in ways[3:] for metric in ("rel_l1", "slowest_step")}
    assert all(float(row["median"]) >= 1 for row in rows if row["metric"] == "slowest_step")
    assert all(float(row["median"]) > 0 for row in rows if row["case"].endswith(("tiny", "first")))


def test_a_computed_picture_says_so_and_wrong_latents_have_no_row(bench, tmp_path, monkeypatch):
    stock, other = bench.chosen(["default", "cudnn"])
    draw, wrong = bench.Painter.draw, []

    def drawn(painter, steps, output_type="pil"):
        made = draw(painter, steps, output_type)
        return made + 1 if wrong and isinstance(made, torch.Tensor) else made

    def inside(model, pipe):
        wrong.append(True)
        return other.inside(model, pipe)

    monkeypatch.setattr(bench, "chosen", lambda names, least: [stock, other._replace(inside=inside)])
    monkeypatch.setattr(bench.Painter, "draw", drawn)
    assert bench.main([*TINY, "--csv", str(tmp_path / "rows.csv")]) == 1
    rows = read_rows(tmp_path / "rows.csv")
    assert {row["provider"] for row in rows} == {stock.provider}
    assert {row["case"] for row in rows} == {f"{NAME}/tiny/computed{part}" for part in ("", "/step", "/rest")}


def test_text_is_what_the_published_encoders_make(bench):
    """Numbers of parameters as in the checkpoints' files."""
    from picture_cases import DRAWINGS

    known = {"t5": 4_762_310_656, "clip": 123_060_480, "clip_g": 694_659_840, "qwen": 7_070_619_136}
    for drawing in DRAWINGS.values():
        for name, (cls, config, of, _) in drawing.texts.items():
            with torch.device("meta"):
                model = getattr(transformers, cls)(getattr(transformers, of)(**config))
            unlike = name == "t5" and drawing.suite == "clip"  # UMT5 has a larger vocabulary and biases by layer
            assert unlike or sum(p.numel() for p in model.parameters()) == known[name], name


def test_with_a_cache_all_ways_stop_in_the_same_forwards(bench, tmp_path, monkeypatch):
    """Whatever the numbers of the later ways say: here those of each forward say something else."""
    from diffusers.hooks.first_block_cache import FBCHeadBlockHook

    said, own, decided = [], [], bench.SameDecisions._decide

    def answered(hook, residual):
        own.append(hook.state_manager.get_state().head_block_residual is None or len(own) % 2 == 0)
        return own[-1]

    def watched(self, hook, residual):
        said.append(decided(self, hook, residual))
        return said[-1]

    monkeypatch.setattr(bench.SameDecisions, "_decide", watched)
    monkeypatch.setattr(FBCHeadBlockHook, "_should_compute_remaining_blocks", answered)
    options = ["--case", "flux_1024", "--whole", "--ways", "cudnn", "int8", "--first-block-cache", "0.05"]
    assert bench.main(["--tiny", "--device", "cpu", *options, "--csv", str(tmp_path / "rows.csv")]) == 0
    cases = {row["case"] for row in read_rows(tmp_path / "rows.csv")}
    assert cases == {f"flux_1024/tiny/first_block_cache{part}" for part in ("", "/first", "/step", "/rest")}
    assert len(said) == len(own) == 19 and said[1:10] == said[10:]  # one before the first way
    assert own[1:10] != own[10:] and False in said
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--first-block-cache", "0.05"])
