"""One line for transformers models: INT8 attention, linear layers and cache, graphs, and back again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sage_kernels
from sage_kernels.facts import crossover

from ...linears.quantize import quantize_linears
from ...linears.random_run import RunFailed, random_run, unmeasured
from ...linears.swap import LinearSwap, swap_of
from ...option_groups import OF_ATTENTION, Keep, Scaling
from ...options import SageAttnProcessor
from ...patching.block_state import block_state, forget
from ...presets import heading
from ..attention import attention_report, register_transformers
from ..choice import configs_of, refuse_without_attention
from ..names import IMPLEMENTATIONS, Implementation, name_of, standard
from ..report import AttentionReport
from . import default_cache  # noqa: F401 (generate makes INT8 caches once it is imported)
from .decode_graphs import DecodeGraphs, start_graphs, stop_graphs


logger = logging.getLogger("sage_processors")

# option → what is meant instead, for options that mean nothing for a language model
_MEANINGLESS = {
    "scaling": "leave it out: a prompt has no denoising steps, and each token has a scale of its own",
    "keep": "leave it out: a language model has no denoising steps",
    "skip": "leave it out: lists of tiles are measured in denoising steps",
    "mixed": "leave it out: mixed precision is for denoisers",
    "rotation": 'leave it out, or rotation="hadamard": "auto" is decided in denoising steps',
    "recipe": "a recipe of sage_kernels.RECIPES: mixed precision is for denoisers",
    "layers": 'rules for linear layers alone, such as {"*.down_proj": {"linears": "none"}}: all attention layers of a '
    "model share one implementation",
}


class LanguageHandle:
    """INT8 in a transformers model, as returned by `sage_processors.apply`.

    As a context manager it removes it again at the end. Attributes: config (SageAttnProcessor), graphs (DecodeGraphs
    or None), linears (LinearSwap or None); cache_reason (why `generate` makes no Int8KVCache, "" if it does, None if
    that is unknown), ordinary_caches (the number of 16-bit ones that it made for that reason).
    """

    def __init__(self, model: Any, config: SageAttnProcessor):
        check_options(config)
        refuse_without_attention(model, "sage_int8")
        self.model, self.config, self._active = model, config, True
        self.linears: LinearSwap | None = None
        self.graphs: DecodeGraphs | None = None
        self.cache_reason: str | None = None
        self.ordinary_caches = 0
        self._running: list[object] = []  # calls of `generate`
        self._has_left = False
        self._last_report: AttentionReport | None = None
        self._notes: list[str] = []
        self._name: str | None = None
        self._before = [(x, x._attn_implementation) for x in configs_of(model)]
        try:
            rules: Any = dict(config.rules("linears"))
            strictness: Any = config.on_unsupported
            kept = swap_of(model)
            if kept is not None and kept.dropped and kept.serves(config.linears, config.rules("linears")):
                self.linears = kept  # 8-bit layers whose 16-bit weights an earlier handle has dropped
            elif config.linears.format != "none" or rules:
                self.linears = self._quantized(rules, strictness)
            self._name = implementation_of(config)
            model.set_attn_implementation(self._name)
            stop_graphs(model)
            self.graphs = start_graphs(model) if config.graphs == "auto" else None
            if self.graphs is not None:
                if self.linears is not None:  # in prompts too, so that results don't depend on what is replayed
                    self.linears.run_short_calls(True)
            block_state(model).handle = self
        except Exception:
            self._put_back()
            raise

    def _quantized(self, rules: Any, strictness: Any) -> LinearSwap:
        """Put linear layers into 8 bit, balanced by a run on random tokens, which comes before INT8 attention."""
        own = self.config.linears
        options: dict[str, Any] = {"layers": rules, "min_features": own.min_features, "on_unsupported": strictness}
        options |= {"drop_weights": own.drop_weights, "gated": "16bit"}
        run = random_run(self.model)
        try:
            if not isinstance(run, str):
                return quantize_linears(self.model, own.format, calibration=run, **options)
        except RunFailed as error:
            run = str(error)
        said = unmeasured(self.model, run)
        self._notes.append(said)
        logger.warning("linears: %s", said)
        return quantize_linears(self.model, own.format, **options)

    def refresh(self) -> None:
        """Quantise changed weights again, and swap new linear layers.

        PyTorch does not count all writes, such as those through `.data`: only this notices them.
        Raises: RuntimeError after `remove`.
        """
        if not self._active:
            raise RuntimeError(
                "handle: got one that was removed, expected a live one; call sage_processors.apply again"
            )
        if self.linears is not None:
            self.linears.refresh()
        if self.graphs is not None:
            self.graphs.forget()

    def report(self) -> AttentionReport:
        """Report what ran: attention, linear layers and graphs. Waits for the device.

        After `remove` it is the last report before.
        """
        if self._last_report is not None:
            return self._last_report
        found = attention_report(self.model)
        found.heading = heading(self.config)
        lines = list(self._notes)
        if self.graphs is not None:
            eager = ", ".join(f"{reason} {number}" for reason, number in sorted(self.graphs.eager.items()))
            lines.append(
                f"{self.graphs.replays} decode steps came from CUDA graphs ({self.graphs.captures} captured)"
                f"{'; eager ones: ' + eager if eager else ''}."
            )
        if self.ordinary_caches:
            lines.append(f"{self.said_of_caches()} Calls: {self.ordinary_caches}.")
        found.notes[:0] = lines
        return found

    def said_of_caches(self) -> str:
        """Return the sentence for the log and the report that this model gets 16-bit caches, and why."""
        return f"Keys and values stay in 16 bit, as this model can't decode over an Int8KVCache ({self.cache_reason})."

    def remove(self) -> None:
        """Put everything back as it was. A second call does nothing.

        Linear layers whose 16-bit weights were dropped stay in 8 bit. The log and the report say so; a later `apply`
        with the same `linears` takes them over. If `generate` is running, it keeps our attention until it ends, as
        nothing else can read its INT8 cache.
        """
        if not self._active:
            return
        try:
            self._last_report = self.report()
        except Exception as error:  # such as an error of the GPU: the model must be given back all the same
            logger.warning("handle: got no last report: %s", error)
            self._last_report = AttentionReport([])
        self._put_back()

    def _put_back(self) -> None:
        self._active = False
        if self.graphs is not None:
            self.graphs.stop()
        if self.linears is not None and swap_of(self.model) is self.linears:
            if self.linears.dropped:
                said = f"{self.linears.dropped} linear layers stay in 8 bit, as their 16-bit weights were dropped."
                logger.warning("%s", said)
                if self._last_report is not None:
                    self._last_report.notes.append(said)
            else:
                self.linears.remove()
        if handle_of(self.model) is self:
            forget(self.model, "handle")
            block_state(self.model).leaving = self
        if not self._running:
            self.leave()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Note a running `generate`, which may read INT8 caches until it ends."""
        call = object()
        self._running.append(call)
        try:
            yield
        finally:
            self._running.remove(call)
            if not (self._active or self._running):
                self.leave()

    def leave(self) -> None:
        """Give the model the attention back that it had. A second call does nothing."""
        if self._has_left:
            return
        self._has_left = True
        if getattr(vars(self.model).get("_sage"), "leaving", None) is self:
            forget(self.model, "leaving")
        for config, name in self._before:  # parents first: setting a parent's name sets its parts' too
            now = str(config._attn_implementation).removeprefix("paged|")
            if self._name in (None, now):  # else somebody has chosen another one since
                config._attn_implementation = name

    def __enter__(self) -> LanguageHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copy of the model has no handle."""

    def __reduce__(self) -> Any:
        return _no_handle, ()


def _no_handle() -> None:
    """Return what a pickled handle is read as."""


def handle_of(model: Any) -> LanguageHandle | None:
    """Return the live handle of a transformers model, or None."""
    found: LanguageHandle | None = getattr(vars(model).get("_sage"), "handle", None)
    return found


def apply_to_language_model(model: Any, config: SageAttnProcessor) -> LanguageHandle:
    """Run a transformers model in INT8. An earlier handle of it, or of a part, is removed first.

    Raises: ValueError for options that mean nothing here; UnsupportedAttentionError for a model without attention that
        takes an implementation.
    """
    check_options(config)
    for part in list(model.modules()):
        earlier = handle_of(part)
        if earlier is not None:
            earlier.remove()
        leaving = getattr(vars(part).get("_sage"), "leaving", None)
        if leaving is not None:  # a running `generate` goes on with the new handle's attention
            leaving.leave()
    return LanguageHandle(model, config)


def check_options(config: SageAttnProcessor) -> None:
    """Raise ValueError for an option that means nothing here, naming the alternative."""
    usual = Scaling()
    wrong = {
        "scaling": config.scaling not in (usual, Scaling("per_token"), Scaling("dynamic")),
        "keep": config.keep != Keep(),
        "skip": config.skip is not None,
        "mixed": config.mixed != sage_kernels.Mixed.of(None),
        "rotation": config.rotation == "auto",
        "recipe": config.recipe not in (*sage_kernels.RECIPES, "16bit"),
        "layers": any(config.rules(option) for option in (*OF_ATTENTION, "recipe", "scaling", "rotation")),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            got = getattr(config, name)
            raise ValueError(f"{name}: got {got!r} for a transformers model, expected none; {_MEANINGLESS[name]}")


def implementation_of(config: SageAttnProcessor) -> str:
    """Return the name of the attention implementation with these options. Registers it if need be."""
    sixteen = config.recipe == "16bit"
    recipe = sage_kernels.DEFAULT_RECIPE if sixteen else config.recipe
    is_usual = recipe == sage_kernels.DEFAULT_RECIPE and config.rotation == "none"
    options: dict[str, Any] = {
        "recipe": recipe,
        "min_tokens": crossover.NEVER if sixteen else config.min_tokens,
        "on_unsupported": config.on_unsupported,
        "training": config.training,
        "rotation": "hadamard" if is_usual else config.rotation,
    }
    wanted = Implementation("", **options)
    for name, known in {**standard(), **IMPLEMENTATIONS}.items():
        if all(getattr(known, key) == getattr(wanted, key) for key in (*options, "smooth_k")):
            return name
    tokens = "16bit" if sixteen else "" if config.min_tokens is None else f"from_{config.min_tokens}"
    parts = (name_of(recipe), tokens, config.on_unsupported, config.training, options["rotation"])
    return register_transformers("_".join(part for part in parts if part), **options)[0]
