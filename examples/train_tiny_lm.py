"""Train the embedded language model from scratch on text that comes with Python, and save it as a folder.

    python examples/train_tiny_lm.py --preset cpu --workdir training --minutes 20
    python examples/train_tiny_lm.py --preset cpu --workdir training --minutes 20 --resume   # until it says: saved

The learning rate follows a cosine over a known number of steps. A session that runs out of minutes leaves a
checkpoint; `--resume` goes on, and with other `--steps` the cosine ends sooner or later (with as many as are done, the
model is saved at once). `--prepare` only builds the tokenizer and the tokens in the work folder, so that a lent GPU
need not wait for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import time
from pathlib import Path

import tiny_text
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sage_processors.evaluation import language
from sage_processors.files.whole_file import whole_file


WARM_UP = 100  # steps
FLOOR = 0.02  # of the peak learning rate, at the end
WATCH = 500  # steps between two looks at the held-out text
TOKENIZER_DIALOGUES = 10_000  # made-up documents that the tokenizer sees, beside all the others
HELDOUT_CHARACTERS = 60_000  # of each kind of text, shipped with the model
PROMPTS = ("What is 12 plus 7?", "Tell me a story about a fox and a key.", "What is the capital of France?")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Size of the model and of its training.

    batch: windows of `context` tokens per step. shares: of the windows, from each of tiny_text.KINDS; the smaller a
    text is beside the whole training, the sooner it is learnt by heart.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    context: int
    batch: int
    steps: int
    rate: float
    shares: tuple[float, float, float, float]


PRESETS = {  # 3.3 and 7.7 million parameters
    "cpu": Preset(256, 3, 4, 2, 704, context=512, batch=4, steps=2500, rate=2e-3, shares=(0.08, 0.22, 0.25, 0.45)),
    "gpu": Preset(384, 6, 6, 2, 544, context=1024, batch=32, steps=2500, rate=2e-3, shares=(0.03, 0.12, 0.35, 0.5)),
}


def build(preset: Preset, tokenizer) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=preset.hidden,
            intermediate_size=preset.intermediate,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            num_key_value_heads=preset.kv_heads,
            head_dim=64,
            max_position_embeddings=preset.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def prepare(workdir: Path) -> tuple[object, dict[str, torch.Tensor]]:
    """(tokenizer, training tokens by kind); made once per work folder."""
    folder, made = workdir / "tokenizer", workdir / "tokens.pt"
    if not made.exists():
        training, held_out = tiny_text.corpus()
        made_up = [document for document in training if document.kind == "dialogues"]
        rest = [document for document in training if document.kind != "dialogues"]
        tokenizer = tiny_text.train_tokenizer([*rest, *made_up[:TOKENIZER_DIALOGUES]])
        tokenizer.save_pretrained(folder)
        (workdir / "heldout.json").write_text(json.dumps(shipped_text(held_out), indent=0) + "\n")
        replace(tiny_text.encode(tokenizer, training), made)
    return AutoTokenizer.from_pretrained(folder), torch.load(made, weights_only=True)


def shipped_text(documents: list[tiny_text.Document]) -> list[dict[str, str]]:
    """The held-out documents that the model's measurements use, as many as fit per kind."""
    chosen, room = [], dict.fromkeys(tiny_text.KINDS, HELDOUT_CHARACTERS)
    for document in documents:
        text = document.text[: room[document.kind]]
        if text:
            room[document.kind] -= len(text)
            chosen.append({"kind": document.kind, "name": document.name, "text": text})
    return chosen


def replace(content, path: Path) -> None:
    """torch.save, of which no reader ever sees half."""
    with whole_file(path) as file:
        torch.save(content, file)


class Trainer:
    """The model, its optimizer and the step it is at; all of it is in the checkpoint."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.preset, self.device = args, PRESETS[args.preset], torch.device(args.device)
        self.steps = args.steps or self.preset.steps
        self.batch = args.batch or self.preset.batch
        self.tokenizer, streams = prepare(args.workdir)
        self.sizes = [len(streams[kind]) for kind in tiny_text.KINDS]
        self.stream = torch.cat([streams[kind] for kind in tiny_text.KINDS]).to(self.device)
        torch.manual_seed(args.seed)
        self.model = build(self.preset, self.tokenizer).to(self.device)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds, self.checkpoint = 0, 0.0, args.workdir / f"tiny_lm_{args.preset}.pt"
        if args.resume:
            self.load()
        elif self.checkpoint.exists():
            raise SystemExit(f"{self.checkpoint} exists: go on with --resume, or remove it to start again")
        self.fast = torch.compile(self.model) if args.compile else self.model

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        print(f"resumed at step {self.step} of {self.steps}, after {self.seconds:.0f} s", flush=True)

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        replace({**state, "step": self.step, "seconds": self.seconds}, self.checkpoint)

    def windows(self) -> torch.Tensor:
        """int64 [batch, context + 1] of this step: which ones depends on the seed and the step alone."""
        draw = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
        kinds = torch.multinomial(torch.tensor(self.preset.shares), self.batch, replacement=True, generator=draw)
        sizes = torch.tensor(self.sizes)
        first = (sizes.cumsum(0) - sizes)[kinds]
        room = sizes[kinds] - self.preset.context
        starts = first + (torch.rand(self.batch, generator=draw, dtype=torch.float64) * room).long()
        places = starts[:, None] + torch.arange(self.preset.context + 1)
        return self.stream[places.to(self.device)].long()

    def rate(self) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.step / self.steps)))
        return self.preset.rate * min(1.0, (self.step + 1) / WARM_UP) * (FLOOR + (1 - FLOOR) * cosine)

    def train(self) -> bool:
        """Train until all steps are done (True) or the session's minutes are over (False)."""
        start = reported = saved = time.monotonic()
        before, steps_before = self.seconds, self.step
        while self.step < self.steps:
            tokens = self.windows()
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate()
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.fast(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - start
            if self.step % 20 == 0 or self.step == self.steps:
                value = loss.item()  # also keeps the queue of launched work short
                if not math.isfinite(value):
                    raise RuntimeError(f"the loss is {value} at step {self.step}: start again with another --seed")
                if now - reported > 15 or self.step == self.steps:
                    speed = (self.step - steps_before) * tokens[:, 1:].numel() / (now - start)
                    print(f"step {self.step}/{self.steps} loss {value:.3f} {speed:.0f} tokens/s", flush=True)
                    reported = now
            if self.step % WATCH == 0:
                windows = language.heldout_windows(self.tokenizer, self.preset.context, folder=self.args.workdir)
                print(f"held-out loss {math.log(language.perplexity(self.model, windows[::8]).value):.3f}", flush=True)
            if now - saved > 120:
                self.save()
                saved = now
            if now - start > self.args.minutes * 60:
                break
        self.save()
        return self.step >= self.steps

    def finish(self) -> None:
        """Save the folder in fp16, load it again, and measure what was saved."""
        folder = self.args.out
        folder.mkdir(parents=True, exist_ok=True)
        self.model.to("cpu", torch.float16).save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        path = folder / "config.json"  # transformers loads with the dtype it reads here
        path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "float32"}, indent=2) + "\n")
        self.tokenizer.model_max_length = self.preset.context
        self.tokenizer.save_pretrained(folder, save_jinja_files=False)
        (folder / "heldout.json").write_text((self.args.workdir / "heldout.json").read_text())
        metrics = self.measure(folder)
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(json.dumps(metrics, indent=2))
        model, tokenizer = language.load(folder)
        for prompt in PROMPTS:
            inputs = language.chat_ids(tokenizer, prompt)
            output = model.generate(inputs, max_new_tokens=60, do_sample=False)
            print(f"> {prompt}\n{tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)}")
        print(f"saved: {folder}", flush=True)

    def measure(self, folder: Path) -> dict:
        """Held-out loss in nats per token, of the model and of a bigram model that saw the same training tokens."""
        model, tokenizer = language.load(folder)
        bigram = tiny_text.Bigram(self.stream.cpu(), len(tokenizer))
        losses = {"model": {}, "bigram": {}}
        for kind in tiny_text.KINDS:
            windows = language.heldout_windows(tokenizer, self.preset.context, kinds=(kind,), folder=folder)
            losses["model"][kind] = round(math.log(language.perplexity(model, windows).value), 4)
            losses["bigram"][kind] = round(bigram.loss(windows), 4)
        return {
            "heldout_loss_nats_per_token": losses,
            "parameters": sum(p.numel() for p in model.parameters()),
            "training": {
                "preset": self.args.preset,
                "steps": self.step,
                "tokens": self.step * self.batch * self.preset.context,
                "seconds": round(self.seconds),
                "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
                "corpus_tokens": sum(self.sizes),
                "python": platform.python_version(),
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workdir", type=Path, required=True, help="tokens, tokenizer and checkpoint")
    parser.add_argument("--out", type=Path, default=language.EMBEDDED, help="folder that the model is saved to")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop this session then, with a checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the work folder")
    parser.add_argument("--prepare", action="store_true", help="only make the tokenizer and the tokens")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=0, help="of the whole training; 0: the preset's")
    parser.add_argument("--batch", type=int, default=0, help="windows per step; 0: the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention backward died with illegal memory accesses on torch 2.11 and an H200
    torch.backends.cuda.enable_cudnn_sdp(False)
    if args.prepare:
        prepare(args.workdir)
        return
    trainer = Trainer(args)
    if trainer.train():
        trainer.finish()
    else:
        print(f"session over at step {trainer.step} of {trainer.steps}: run again with --resume", flush=True)


if __name__ == "__main__":
    main()
