"""Command line of bench_end_to_end.py, and the cases it chooses."""

from __future__ import annotations

import argparse
from pathlib import Path

from model_cases import CASES, ModelCase
from rival_attention import ATTENTION_RIVALS
from rival_linears import RIVALS

from sage_kernels import DEFAULT_RECIPE, RECIPES


CALLED = ("eager", "inference_mode", "compiled", "compiled_graphs", "cuda_graph", "captured")
GRAPHS = ("cuda_graph", "captured")  # graphs of whole forwards


def parse(about: str, arguments=None) -> argparse.Namespace:
    """Parse a command line. about: the program's description. Exits with 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated; all by default")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default=DEFAULT_RECIPE)
    parser.add_argument("--reps", type=int, help="timed forwards; the case's own number by default")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each provider")
    parser.add_argument("--together", type=int, default=1, help="forwards before a wait; the case's name says so")
    parser.add_argument("--layers", type=int, help="at most so many blocks of each kind; the case's name says so")
    parser.add_argument("--min-tokens", type=int, help="of our options: 0 runs short calls in INT8 too; named so")
    parser.add_argument("--linears", choices=("none", "int8", "fp8"), default="none", help="of our options")
    parser.add_argument("--fast", action="store_true", help="our preset, by apply; language models only")
    rivals = (*RIVALS, *ATTENTION_RIVALS)
    parser.add_argument("--rival", action="append", choices=rivals, default=[], help="another package; repeatable")
    parser.add_argument("--min-features", type=int, help="of our options: short linear calls run in 8 bit; named so")
    parser.add_argument("--called", choices=CALLED, default="eager", help="denoisers only; the case's name says so")
    parser.add_argument("--skip", type=int, default=0, help="percent of the key tiles; denoisers only; named so")
    parser.add_argument("--compensate", action="store_true", help="for what --skip leaves out; named so")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same classes; needs --csv to save")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="where rows go; results.csv by default")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if options.called in ("compiled_graphs", *GRAPHS) and not options.device.startswith("cuda"):
        parser.error(f"--called {options.called}: needs --device cuda")
    if options.min_features is not None and options.linears == "none" and not options.fast:
        parser.error("--min-features: needs --linears or --fast")
    if options.fast and (options.linears, options.recipe) != ("none", DEFAULT_RECIPE):
        parser.error("--fast: sets --linears and --recipe by itself")
    for name in ("rounds", "together"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    if options.compensate and not options.skip:
        parser.error("--compensate: needs --skip")
    if not 0 <= options.skip < 100:
        parser.error(f"--skip {options.skip}: expected a percentage from 0 to 99")
    return options


def chosen_cases(options: argparse.Namespace) -> list[ModelCase]:
    """Return the chosen cases. Each name tells how the case differs from the default."""
    cases = [CASES[name] for name in options.case or CASES]
    if options.fast:
        cases = [case for case in cases if not case.is_denoiser]
    if options.called != "eager":
        cases = [case.renamed(options.called) for case in cases if case.is_denoiser]
    if options.skip:
        name = f"skip{options.skip}{'/compensated' * options.compensate}"
        cases = [case.renamed(name) for case in cases if case.is_denoiser]
    if options.together > 1:
        cases = [case.renamed(f"together{options.together}") for case in cases if case.is_denoiser]
    if options.layers is not None:
        cases = [case.thinned(options.layers) for case in cases]
    cases = [case.tiny() for case in cases] if options.tiny else cases
    for name, number in (("min_tokens", options.min_tokens), ("min_features", options.min_features)):
        cases = cases if number is None else [case.renamed(f"{name}{number}") for case in cases]
    return cases
