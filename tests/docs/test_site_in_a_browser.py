"""The site in a browser 1280 and 390 pixels wide: nothing is cut off, pictures have words, words can be read."""

from __future__ import annotations

import functools
import http.server
import threading

import pytest

from tests.support import browser
from tests.support.repository import ROOT


PAGES = ("", "overview/", "guide/", "gpus/", "models/", "compatibility/", "results/", "comparison/", "faq/", "rating/",
         "recipes/", "linears/", "language/", "reports/")  # fmt: skip
# what reaches beyond the page, or beyond the box that shows it; the site's own menus are no content
CUT = """[...document.querySelectorAll('article :is(p,li,td,th,pre,code,img,h1,h2,h3,table)')].filter(x => {
  const box = x.getBoundingClientRect();
  if (!box.width || x.closest('.headerlink,.md-clipboard,.md-nav')) return false;
  const hides = x.scrollWidth > x.clientWidth + 1 && x.clientWidth && getComputedStyle(x).display != 'inline';
  return box.right > innerWidth + 1 || box.left < -1 || hides && getComputedStyle(x).overflowX != 'visible';
}).map(x => x.tagName + ': ' + x.innerText.slice(0, 60))"""
FAINT = """(() => {
  const channel = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = c => .2126 * channel(c[0]) + .7152 * channel(c[1]) + .0722 * channel(c[2]);
  const behind = x => { for (; x; x = x.parentElement) {
    const c = numbers(getComputedStyle(x).backgroundColor);
    if (c.length < 4 || c[3] > .9) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll('article :is(p,li,td,th,a,h1,h2)')].filter(x => {
    if (!x.innerText.trim() || x.matches('.headerlink,.md-button,.md-content__button')) return false;
    const back = behind(x), front = numbers(getComputedStyle(x).color), a = front.length > 3 ? front[3] : 1;
    const shown = [0, 1, 2].map(i => a * front[i] + (1 - a) * back[i]);
    const [low, high] = [light(back), light(shown)].sort((p, q) => p - q);
    return (high + .05) / (low + .05) < 4.5;
  }).map(x => x.tagName + ': ' + x.innerText.slice(0, 60));
})()"""
READY = "document.readyState == 'complete' && !!document.querySelector('article')"
MUTE = "[...document.images].filter(x => !x.alt && !x.closest('.twemoji')).map(x => x.src)"

pytestmark = [
    pytest.mark.slow("builds the site and opens a browser"),
    pytest.mark.skipif(browser.installed() is None, reason="no Chromium is installed: apt-get install chromium"),
]


class Silent(http.server.SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The site, built and served on a free port until the tests end."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
        config.plugins.run_event("startup", command="build", dirty=False)
        build(config)  # raises where anything warned, as `make docs` does
    api = (folder / "api" / "index.html").read_text(encoding="utf-8")
    assert "SageAttnProcessor" in api and "on_unsupported" in api and "sage_attention" in api
    handler = functools.partial(Silent, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_and_everything_can_be_read(width, address, tmp_path):
    found = {}
    with browser.Browser(tmp_path / "profile", (1280, 900)) as page:
        for name in PAGES:
            page.open(f"{address}/{name}")
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            page.wait(f"location.href == '{address}/{name}' && {READY} && innerWidth == {width}")
            wide = page.run("document.documentElement.scrollWidth > innerWidth")
            said = [*page.run(CUT), *page.run(FAINT), *page.run(MUTE), *["the page scrolls sideways"] * wide]
            if said:
                found[name] = said
    assert found == {}


def test_the_check_sees_what_is_cut_off(tmp_path):
    """A table that is wider than its page, words in grey on grey, a picture without words: each is found."""
    (tmp_path / "x.html").write_text(
        "<!doctype html><article><table><tr>" + "<td>aaaaaaaaaaaaaaaa</td>" * 40 + "</tr></table>"
        "<pre style='overflow:auto;width:90px'>aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa</pre>"
        "<p style='color:#999;background:#bbb'>faint</p><img src='x.png' width=5></article>"
    )
    with browser.Browser(tmp_path / "profile", (1280, 900)) as page:
        page.open((tmp_path / "x.html").as_uri())
        page.wait(READY)
        cut = " ".join(page.run(CUT))
        assert "TABLE" in cut and "PRE" in cut and page.run(FAINT) == ["P: faint"] and len(page.run(MUTE)) == 1
