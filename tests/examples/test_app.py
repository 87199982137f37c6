"""The page of examples/app.py, in a process of its own: over HTTP, and in a Chromium that clicks on it."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from PIL import Image

from tests.examples.running import EXAMPLES, IDENTICAL_DB, int8_calls, psnr, run
from tests.support import browser
from tests.support.repository import ROOT


pytestmark = [  # without importing it: that takes seconds, and the quick tests need none of it
    pytest.mark.slow("starts the page and a browser"),
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None,
        reason="gradio is not installed: pip install -e '.[app]'",
    ),
]
PROMPT = "a yellow star on a black background"
OPTIONS = ("qk_int8_pv_bf16", "timestep", "none")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page, served on a free port until the tests end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = os.environ | {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "GRADIO_TEMP_DIR": str(tmp_path_factory.mktemp("gradio")),
    }  # fmt: skip
    log = tmp_path_factory.mktemp("app") / "log"
    with log.open("w") as file:
        command = [sys.executable, str(EXAMPLES / "app.py"), "--port", str(port), "--steps", "2"]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 180
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < end, log.read_text()
                    time.sleep(0.3)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def client(address):
    from gradio_client import Client

    return Client(address, verbose=False)


@pytest.mark.parametrize(("model", "least_db"), [("tiny_sd", 60), ("random_sdxl", 70)])
def test_the_page_draws_and_says_what_ran(client, model, least_db):
    pair, difference, said, report = client.predict(PROMPT, model, *OPTIONS, 2, 0, api_name="/draw")
    assert int8_calls(said) > 0 and "INT8 attention: what really ran" in report
    assert least_db < psnr(said)[0] < IDENTICAL_DB and re.search(r"; [\d.]+ s, stock [\d.]+ s", said)
    pictures = [Image.open(path).convert("RGB") for path in (*pair, difference)]
    assert len({picture.size for picture in pictures}) == 1
    assert all(picture.getextrema() != ((0, 0),) * 3 for picture in pictures)


def test_options_of_the_page_reach_the_swap(client):
    _, _, said, report = client.predict(
        PROMPT, "random_sdxl", "qk_int8_pv_fp8", "per_block", "int8", 1, 3, api_name="/draw"
    )
    assert int8_calls(said) > 0
    assert "qk_int8_pv_fp8" in report and "per_block" in report and "linear layers" in report


def test_every_choice_shows_what_is_chosen(client):
    lists = [part["props"] for part in client.config["components"] if part["type"] == "dropdown"]
    assert len(lists) == 4 and all(own["value"] in dict(own["choices"]) for own in lists)


def test_wrong_input_is_refused_and_the_page_goes_on(client):
    wrong = [(1, "no/where", "not in the list"), (2, "int1", "not in the list"), (5, 0, "minimum"), (6, -1, "minimum")]
    for place, value, message in wrong:
        given = [PROMPT, "tiny_sd", *OPTIONS, 1, 0]
        given[place] = value
        with pytest.raises(Exception, match=message):
            client.predict(*given, api_name="/draw")
    assert int8_calls(client.predict(PROMPT, "tiny_sd", *OPTIONS, 1, 0, api_name="/draw")[2]) > 0


@pytest.mark.skipif(browser.installed() is None, reason="no Chromium is installed: apt-get install chromium")
def test_the_page_in_a_browser(address, tmp_path, pytestconfig):
    with browser.Browser(tmp_path / "profile") as page:
        page.open(address)
        page.wait("[...document.querySelectorAll('button')].some(b => b.innerText.trim() == 'Submit')")
        page.run(
            "(() => { const text = document.querySelector('textarea');"
            f" text.value = '{PROMPT}'; text.dispatchEvent(new Event('input', {{bubbles: true}}));"
            " [...document.querySelectorAll('button')].find(b => b.innerText.trim() == 'Submit').click(); })()"
        )
        said = page.wait("(document.body.innerText.match(/.*% of attention calls in INT8.*/) || [''])[0]")
        assert int8_calls(said) > 0
        assert psnr(page.run("document.body.innerText"))[0] > 60
        loaded = "[...document.querySelectorAll('img')].filter(i => i.complete && i.naturalWidth == 128).length"
        page.wait(f"{loaded} >= 3")  # stock, INT8, difference
        page.screenshot(tmp_path / "page.png")
    assert Image.open(tmp_path / "page.png").size[0] == 1280


def test_a_model_that_is_not_there_ends_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run("app", monkeypatch, "--model", "no/where")
    shown = capsys.readouterr()
    assert ended.value.code == 2 and shown.err.startswith("Error: --model: no/where could not be loaded")
    assert shown.err.count("\n") == 1 and not list(tmp_path.iterdir())
