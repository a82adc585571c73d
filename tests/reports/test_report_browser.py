"""The report in a real Chromium: it loads alone, fits a phone and a laptop, is readable in both schemes, and prints."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_run import make_run
from markupsafe import escape

from sftkit.reports.page import SECTIONS, write_report
from sftkit.reports.values import POLICY

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # what the browser wants for itself does not get out either
]
WIDTHS = (390, 1280)
# Runs in a copy of the page whose policy allows it: measures, and tells the page that frames it.
PROBE = """
const rgb = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
const seen = e => e.getClientRects().length > 0;
addEventListener('load', () => {
  const faint = [], overlaps = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!seen(e) || e.tagName === 'title' || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const style = getComputedStyle(e), front = rgb(e.tagName === 'text' ? style.fill : style.color);
    const [a, b] = [light(front.slice(0, 3)), light(behind(e).slice(0, 3))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) faint.push(e.textContent.slice(0, 60));
  }
  for (const svg of document.querySelectorAll('svg')) {
    const texts = [...svg.querySelectorAll('text')].filter(seen);
    texts.forEach((one, i) => texts.slice(i + 1).forEach(two => {
      const a = one.getBoundingClientRect(), b = two.getBoundingClientRect();
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
        overlaps.push(svg.getAttribute('aria-label') + ': ' + one.textContent + ' / ' + two.textContent);
    }));
  }
  parent.postMessage({width: innerWidth, scroll: document.documentElement.scrollWidth, faint, overlaps,
    back: getComputedStyle(document.body).backgroundColor, texts: document.querySelectorAll('svg text').length}, '*');
});
"""


def chromium(folder: Path, address: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    profile = f"--user-data-dir={folder / 'profile'}"
    words = [CHROMIUM, *FLAGS, profile, *flags, address.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def console(outcome: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in outcome.stderr.splitlines() if "CONSOLE" in line]


def requests(log: Path) -> list[str]:
    """Network addresses that a page asked for, from the browser's own log; what the browser asks for by itself is not."""
    asked = r'"initiator":"(?!not an origin")[^"]*".*?"url":"((?:https?|wss?)://[^"]*)"'
    return re.findall(asked, log.read_text(errors="replace"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = make_run(folder / "chat" / "sft", steps=1200)
    with (run / "samples.jsonl").open("a") as file:  # a word that no line has room for
        file.write(
            json.dumps({"step": 1200, "prompt": "x" * 600, "reference": "<b>" * 90, "answer": "y/" * 400}) + "\n"
        )
    other = make_run(folder / "chat" / "a_run_with_quite_a_long_name", steps=1200, shift=0.2)
    return write_report(run, other)


def measured(folder: Path, page: Path, *flags: str) -> dict[int, dict[str, Any]]:
    """What the probe finds in the page at each width; a frame can be as narrow as a phone, a window cannot."""
    text = page.read_text().replace(
        str(escape(POLICY)), "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    )
    copy = folder / "probed.html"
    copy.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"))
    frames = "".join(
        f'<iframe src="{copy.as_uri()}" style="width:{width}px;height:900px;border:0"></iframe>' for width in WIDTHS
    )
    wrapper = folder / "wrapper.html"
    script = "addEventListener('message', e => { const p = document.createElement('pre'); p.textContent = JSON.stringify(e.data); document.body.append(p); });"
    wrapper.write_text(f"<!doctype html><body><script>{script}</script>{frames}")
    outcome = chromium(folder, wrapper, "--window-size=1800,1000", "--virtual-time-budget=8000", "--dump-dom", *flags)
    found = [json.loads(html.unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", outcome.stdout, re.DOTALL)]
    assert {each["width"] for each in found} == set(WIDTHS), outcome.stderr[-2000:]
    return {each["width"]: each for each in found}


def test_page_loads_alone_without_a_complaint_or_a_request(report: Path, tmp_path: Path) -> None:
    outcome = chromium(tmp_path, report, "--dump-dom", f"--log-net-log={tmp_path / 'net.json'}")
    assert set(re.findall(r'<section id="([^"]+)"', outcome.stdout)) == set(SECTIONS)
    assert console(outcome) == []
    assert requests(tmp_path / "net.json") == []


def test_policy_stops_what_a_page_must_not_do(report: Path, tmp_path: Path) -> None:
    extra = "<script>document.title = 'ran'</script><img src='http://127.0.0.1:9/x.png'>"
    text = report.read_text().replace("</body>", f"{extra}</body>")
    found = {}
    for name, content in (("with", text), ("without", text.replace(str(escape(POLICY)), "default-src *"))):
        page, log = tmp_path / f"{name}.html", tmp_path / f"{name}.json"
        page.write_text(content)
        found[name] = (len(console(chromium(tmp_path, page, "--dump-dom", f"--log-net-log={log}"))), requests(log))
    assert found["with"] == (2, [])  # two refusals on the console
    assert found["without"][1] == ["http://127.0.0.1:9/x.png"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_and_is_readable_on_phone_and_laptop(report: Path, tmp_path: Path, scheme: str) -> None:
    flags = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    for width, found in measured(tmp_path, report, *flags).items():
        assert found["scroll"] <= width
        assert found["faint"] == []
        assert found["overlaps"] == []
        assert found["texts"] > 50
        brightness = sum(map(int, re.findall(r"\d+", found["back"])[:3]))
        assert (brightness < 150) == (scheme == "dark")


@pytest.mark.slow
def test_page_prints_on_several_a4_pages(report: Path, tmp_path: Path) -> None:
    pdf = tmp_path / "report.pdf"
    chromium(tmp_path, report, "--no-pdf-header-footer", f"--print-to-pdf={pdf}")
    content = pdf.read_bytes()
    sizes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", content)
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", content)) >= 4
    assert {(round(float(width)), round(float(height))) for width, height in sizes} == {(595, 842)}
