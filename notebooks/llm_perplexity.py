# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What INT8 attention and an INT8 KV cache change of a language model
#
# The embedded language model reads text that it was not trained on and continues prompts greedily: with stock
# attention, with INT8 attention (`prefill`), and with INT8 attention and an INT8 KV cache (`prefill_kv`), where every
# token after the first part of a window attends to what the cache holds. The same windows everywhere, so perplexity is
# compared window by window.

# %%
from pathlib import Path

import drawing
import torch
from IPython.display import Image, Markdown, display
from picture_report import markdown_table

from sage_kernels import RECIPES
from sage_processors.evaluation import language


# %% tags=["parameters"]
SIZE = "full"  # "small" is what CI runs: fewer and shorter windows
FIGURES = "figures"

# %%
FIGURES = Path(FIGURES)
WINDOWS, LENGTH, CHUNK, PROMPTS, NEW_TOKENS = {"full": (24, 256, 8, 12, 48), "small": (4, 64, 16, 2, 8)}[SIZE]
torch.set_num_threads(1)
model, tokenizer = language.load("tiny_lm")
windows = language.heldout_windows(tokenizer, LENGTH, count=WINDOWS)
prompts = language.heldout_windows(tokenizer, 64, count=PROMPTS)
results = {}
for recipe in sorted(name for name, recipe in RECIPES.items() if not recipe.study):
    found = language.evaluate(model, windows, prompts, new_tokens=NEW_TOKENS, recipe=recipe, chunk=CHUNK)
    results |= {(result.recipe or "stock", name): result for name, result in found.items()}

# %% [markdown]
# ## Perplexity, continuations, memory
#
# `over stock` is the ratio of perplexities with its 95 % interval over windows. A continuation is identical when no
# token differs; a first difference moves everything behind it, so it says more about how sure the model was there than
# about the size of an error.

# %%
lines = []
for (recipe, name), result in results.items():
    spread = 1.96 * result.ratio_error
    over = "1" if name == "stock" else f"{result.ratio:.5f} [{result.ratio - spread:.5f}, {result.ratio + spread:.5f}]"
    unsure = [f"{margin:.3f}" for margin in result.margin if margin is not None]
    lines.append(
        [name, recipe, f"{result.perplexity.value:.3f}", over, f"{result.identical:.0%}", ", ".join(unsure) or "–"]
        + [str(result.kv_bytes_per_token), str(result.int8_calls), str(result.cache_calls)]
    )
header = ["run", "recipe", "perplexity", "over stock", "identical", "margin at first difference, nats"]
header += ["KV bytes per token", "INT8 calls", "of them on an INT8 cache"]
display(
    Markdown(f"{WINDOWS} windows of {LENGTH} tokens, {PROMPTS} prompts continued by {NEW_TOKENS} tokens, cpu, fp32")
)
Markdown(markdown_table(header, lines))

# %% [markdown]
# ## Window by window

# %%
ours = {key: result for key, result in results.items() if key[1] != "stock"}
stock = results["stock", "stock"]
figure, axes = drawing.figure(1, 2, width=11, height=4)
for index, ((recipe, name), result) in enumerate(ours.items()):
    change = 1000 * (result.perplexity.losses - stock.perplexity.losses)
    axes[0, 0].plot(change.sort().values, label=f"{name}, {recipe}", ms=4, lw=1, **drawing.style_of(index))
axes[0, 0].axhline(0, color="#333333", lw=0.8)
axes[0, 0].set(
    xlabel="window, sorted by change", ylabel="loss above stock's, 0.001 nats per token", title="perplexity"
)
axes[0, 0].legend(fontsize=8)
memory = {name: float(result.kv_bytes_per_token) for (_, name), result in results.items()}  # whatever the recipe
drawing.bars(axes[0, 1], list(memory), list(memory.values()), unit="KV cache, bytes per token", digits=0)
axes[0, 1].set_title("memory")
Image(drawing.save(figure, FIGURES / "llm_perplexity.png"))

# %%
for (_, name), result in ours.items():
    assert result.int8_calls > 0 and (result.cache_calls > 0) == (name == "prefill_kv"), result
    assert abs(result.ratio - 1) < 0.05, (name, result.ratio)
    print(name, f"perplexity x {result.ratio:.5f}, {result.int8_calls} INT8 calls, exact: {result.exact or 'none'}")
