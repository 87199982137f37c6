"""One of two processes that share a model's tokens and do not agree: `python parallel_peers.py RANK FILE [cuda]`.

FILE: where the two meet. Prints a row a case. On a CPU replays of graphs compute what was captured, with gloo's
collectives: a process that replays while the other does something else hangs, or draws another picture.
"""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import torch
import torch.distributed as dist

import sage_processors as sp
from sage_processors.diffusion.calls import peers
from sage_processors.diffusion.graphs.agreement import forget_before_the_end
from sage_processors.diffusion.graphs.comparison import EVERY
from sage_processors.diffusion.graphs.model_graphs import WARM_UP
from tests.diffusion.calls.context_parallel import parallel_config
from tests.diffusion.calls.parallel_models import counted_bytes, drawing, join, spread
from tests.support.cpu_graphs import Recorder, captures
from tests.support.tiny_models import MODELS


STEPS = WARM_UP + 2
AUTO = sp.SageAttnProcessor(min_tokens=0, graphs="auto")


def shorter(inputs):
    inputs["hidden_states"] = inputs["hidden_states"][:, :-2]
    inputs["img_ids"] = inputs["img_ids"][:-2]


# what is different in the second process: (options, version of this package, change of the inputs)
CALLS = {
    "alike": ({}, peers.__version__, lambda inputs: None),
    "options": ({"recipe": "qk_int8_pv_fp8"}, peers.__version__, lambda inputs: None),
    "versions": ({}, "0.0.9", lambda inputs: None),
    "shapes": ({}, peers.__version__, shorter),
    "dtypes": ({}, peers.__version__, lambda inputs: inputs.update(img_ids=inputs["img_ids"].double())),
}


def call(name: str, parallel, rank: int) -> dict:
    options, version, change = CALLS[name] if rank else CALLS["alike"]
    model, inputs = MODELS["flux"]()
    change(inputs)
    config, row = sp.SageAttnProcessor(min_tokens=0, **options), {}
    with torch.no_grad(), sp.apply(model, config), spread(model, parallel), counted_bytes() as sent:
        try:
            with patch.object(peers, "__version__", version):
                model(**inputs, return_dict=False)
        except ValueError as error:
            row["error"] = str(error)
    return row | {"sent": sum(sent)}


def nothing(graphs, recorder, model):
    pass


def wrong(graphs, recorder, model):
    """A replay of this process gives other numbers, in the run in which it is compared."""
    recorder.error = 1e-3
    for graph in graphs.whole.graphs.values():
        graph.compared = graphs._run - EVERY


def unable(graphs, recorder, model):
    """A capture of this process fails in the end, as one at its beginning would leave gloo's collectives waiting."""

    def record(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs.record = record


# what happens to the second process alone: (before the first picture, before the second one)
GRAPHS = {
    "alike": (nothing, nothing),
    "changed": (nothing, lambda graphs, recorder, model: setattr(model.proj_out, "a_new_attribute", 1)),
    "refreshed": (nothing, lambda graphs, recorder, model: graphs.forget()),
    "stream": (nothing, lambda graphs, recorder, model: setattr(graphs, "_reason_against", lambda: "stream")),
    "not_capturable": (unable, nothing),
    "memory": (lambda graphs, recorder, model: setattr(graphs, "room", lambda: -1), nothing),
    "differs": (nothing, wrong),
}
ON_GPUS = ("alike", "changed", "refreshed", "stream")


def pictures(name: str, parallel, rank: int, device: str) -> dict:
    pipe, draw, _ = drawing(device)
    model = pipe.transformer
    with sp.apply(pipe, sp.SageAttnProcessor(min_tokens=0)), spread(model, parallel):
        wanted = draw(STEPS)
    with sp.apply(pipe, AUTO) as handle, spread(model, parallel):
        graphs, recorder = graphs_of(handle, device)
        first, second = GRAPHS[name] if rank else GRAPHS["alike"]
        first(graphs, recorder, model)
        found = [draw(STEPS)]
        second(graphs, recorder, model)
        found += [draw(STEPS) for _ in range(3)]
        row = {"same": [torch.equal(x, wanted) for x in found], "replays": graphs.replays, "eager": graphs.eager}
    model.proj_out.__dict__.pop("a_new_attribute", None)
    return row


def graphs_of(handle, device: str):
    recorder = Recorder()
    return (handle._denoisers[0].graphs if device == "cuda" else captures(handle, recorder=recorder)[0]), recorder


def main(rank: int, file: str, device: str = "cpu") -> None:
    join(rank, file, device)
    for kind in ("ulysses", "ring"):
        parallel = parallel_config(kind, rank, device)
        for name in CALLS if (kind, device) == ("ulysses", "cpu") else ():
            print(json.dumps({"case": name} | call(name, parallel, rank)), flush=True)
            dist.barrier()
        for name in GRAPHS if device == "cpu" else ON_GPUS:
            print(json.dumps({"case": f"{kind} {name}"} | pictures(name, parallel, rank, device)), flush=True)
    pipe, draw, _ = drawing(device)
    with sp.apply(pipe, AUTO) as handle, spread(pipe.transformer, parallel):
        graphs, _ = graphs_of(handle, device)
        if device == "cpu":
            forget_before_the_end(graphs)  # as a capture by CUDA does
        draw(STEPS)
        live = len(graphs.whole.graphs)
        dist.destroy_process_group()  # NCCL waits here for graphs that are alive
    print(json.dumps({"case": "end", "live": [live, len(graphs.whole.graphs)]}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
