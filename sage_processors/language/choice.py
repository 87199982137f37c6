"""Warnings and errors for models that can't run our attention implementations, such as Mamba or RWKV.

transformers accepts a registered name for any model. A model without attention, or with attention that takes no
implementation, never calls our functions, so not even a strict name could raise. set_attn_implementation and
from_pretrained of transformers.PreTrainedModel are therefore wrapped, and look afterwards for a layer that runs the
name. A model class with attention of its own that takes no implementation (Bloom, Falcon, Longformer) gets its default
instead: under our name it would be given our masks, which leave out parts that only our attention adds again.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from ..unsupported import UnsupportedAttentionError
from .masks import adds_masks
from .report import REMEDIES, follow_choice, takes_implementations


logger = logging.getLogger("sage_processors")

NO_ATTENTION = "no_attention"
_watched: set[type] = set()


def watch_choices(model_class: Any, implementations: dict) -> None:
    """Wrap the methods of transformers.PreTrainedModel that choose an implementation.

    Repeating it changes nothing.

    Args:
        model_class: transformers.PreTrainedModel.
        implementations: {name: options} of our names, read at each call.
    """
    if model_class in _watched:
        return
    _watched.add(model_class)
    choose, load = (vars(model_class).get(name) for name in ("set_attn_implementation", "from_pretrained"))
    check, can_choose = (
        vars(model_class).get(name) for name in ("get_correct_attn_implementation", "_can_set_attn_implementation")
    )
    if check is not None and can_choose is not None:
        model_class.get_correct_attn_implementation = _watched_check(check, implementations)
    if choose is not None:  # without these methods only the report tells
        model_class.set_attn_implementation = _watched_choice(choose, implementations)
    if isinstance(load, classmethod):
        model_class.from_pretrained = classmethod(_watched_load(load.__func__, implementations))


def _watched_check(check, implementations):
    @functools.wraps(check)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        name = check(self, requested_attention, *args, **kwargs)
        if name in implementations:
            adds_masks(type(self.config))  # computed now, because compiled code can only look it up
        if name not in implementations or self._can_set_attn_implementation():
            return name
        _warn_or_raise(self, [name], implementations)
        return check(self, None, *args, **kwargs)

    return get_correct_attn_implementation


def _watched_choice(choose, implementations):
    @functools.wraps(choose)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        wanted = {name for name in _names(attn_implementation) if name in implementations}
        before = [(config, config._attn_implementation) for config in configs_of(self)] if wanted else []
        result = choose(self, attn_implementation, *args, **kwargs)
        try:
            refuse_unused(self, wanted, implementations)
        except UnsupportedAttentionError:
            for config, name in before:
                config._attn_implementation = name  # parents first: setting a parent's name sets its parts' too
            raise
        if wanted:
            follow_choice(self, implementations)
        return result

    return set_attn_implementation


def _watched_load(load, implementations):
    @functools.wraps(load)
    def from_pretrained(cls, *args, **kwargs):
        result = load(cls, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result  # with output_loading_info
        wanted = {config._attn_implementation for config in configs_of(model)}
        refuse_unused(model, {name for name in wanted if name in implementations}, implementations)
        return result

    return from_pretrained


def refuse_unused(model, wanted: set[str], implementations: dict) -> None:
    """Warn about wanted names that no attention layer of the model runs.

    Raises: UnsupportedAttentionError with reason "no_attention" if such a name is strict.
    """
    unused = wanted - {module.config._attn_implementation for module in _layers(model)} if wanted else wanted
    _warn_or_raise(
        model, sorted(unused, key=lambda name: implementations[name].on_unsupported != "raise"), implementations
    )


def _warn_or_raise(model, names: list[str], implementations: dict) -> None:
    for name in names:
        if implementations[name].on_unsupported == "raise":
            raise _error(model, name)
        logger.warning("%s", _error(model, name))


def refuse_without_attention(model, name: str) -> None:
    """Raise UnsupportedAttentionError if no layer of the model could run the name."""
    if not any(True for _ in _layers(model)):
        raise _error(model, name)


def _error(model, name: str) -> UnsupportedAttentionError:
    error = UnsupportedAttentionError(type(model).__name__, NO_ATTENTION)
    error.args = (
        f"attn_implementation of {type(model).__name__}: got {name!r}, expected one of transformers' own: "
        + REMEDIES[NO_ATTENTION],
    )
    return error


def _layers(model):
    return (m for m in model.modules() if takes_implementations(m) and hasattr(m, "config"))


def configs_of(model) -> list:
    """Return the configs of the model and its parts, each once, a parent before its parts."""
    found: list = []
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop(0)
        if hasattr(config, "_attn_implementation") and all(config is not x for x in found):
            found.append(config)
            waiting += [getattr(config, key, None) for key in getattr(config, "sub_configs", ())]
    return found


def _names(chosen) -> list[str]:
    """Return all names in an argument of set_attn_implementation: a name, or a dict of names and dicts."""
    if not isinstance(chosen, dict):
        return [chosen] if isinstance(chosen, str) else []
    return [name for part in chosen.values() for name in _names(part)]
