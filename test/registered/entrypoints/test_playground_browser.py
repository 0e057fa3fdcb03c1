"""The playground in a real Chromium, on a live server with the bundled model."""

import base64
import hashlib
import io
import json
import re
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from chromium import Watch, browser
from live_server import LiveServer
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

KEY = "a-key"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
PROMPT = "a red apple"
GENERATIONS = "**/v1/images/generations"
LONG_MS = 30_000  # a busy machine
# keeps what the page shows on its way: [text of the status, value of the bar, previews so far]
RECORD = """
window.seen = [];
new MutationObserver(() => {
  const previews = [...document.querySelectorAll("figure[data-preview]")];
  window.seen.push([document.getElementById("status").textContent,
    document.getElementById("bar").getAttribute("value"),
    previews.map((figure) => figure.querySelector("img").alt)]);
}).observe(document.getElementById("stage"), {subtree: true, childList: true, attributes: true,
  characterData: true});
"""
CANVAS = """
(canvas) => Array.from(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data)
"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(chromium):
    with LiveServer("--api-key", KEY) as live:
        yield live.wait_ready()


@contextmanager
def opened(chromium, url, **options):
    """A new tab on the page; fails when something went wrong in it."""
    context = chromium.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(LONG_MS)
    watch = Watch(page)
    page.goto(url)
    yield page
    context.close()
    assert watch.errors == []


@pytest.fixture
def tab(chromium, server):
    with opened(chromium, server.url, accept_downloads=True) as page:
        enter_key(page)
        yield page


def enter_key(page, key=KEY):
    page.locator("#key").fill(key)
    page.locator("#key").press("Tab")
    page.wait_for_selector("#state[data-state=ready]")


def fill(page, **values):
    for name, value in {"prompt": PROMPT, "steps": 4, **values}.items():
        page.locator(f"#{name}").fill(str(value))


def make(page):
    """Press the button, which makes the page busy at once, and wait for the end."""
    page.locator("#start").click()
    page.wait_for_selector("#start[aria-disabled=false]")


def compare(page):
    page.get_by_text("Compare tiers").click()
    make(page)


def cards(page):
    """The reports of the gallery, newest first."""
    texts = page.locator("#cards pre").all_text_contents()
    return [json.loads(text) for text in texts]


def pixels_of(file):
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def has_sideways_scroll(page):
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def test_the_key_is_asked_for_and_kept_for_the_tab(chromium, server):
    with opened(chromium, server.url) as page:
        page.wait_for_selector("#key-field:visible")
        assert "API key is missing or wrong" in page.locator("#error").inner_text()
        with page.expect_response("**/server_info") as refusal:
            page.locator("#key").fill("another")
            page.locator("#key").press("Tab")
        assert refusal.value.status == 401
        page.wait_for_selector("#error:visible")
        assert page.locator("#state").inner_text() == "invalid api key"
        enter_key(page)
        assert page.locator("#model-name").inner_text() == "bundled"
        assert page.locator("#error").is_hidden()
        page.reload()
        page.wait_for_selector("#state[data-state=ready]")


def test_pictures_come_with_previews_progress_and_what_ran(tab):
    tab.evaluate(RECORD)
    fill(tab, n=2, steps=6)
    make(tab)
    seen = tab.evaluate("window.seen")
    for picture in (1, 2):
        steps = [
            int(found[1])
            for text, _, _ in seen
            if (found := re.fullmatch(rf"Denoising: picture {picture} of 2, step (\d) of 6", text))
        ]
        assert set(steps) >= {1, 2, 3, 4, 5} and steps == sorted(steps)
        shown = {alt for _, _, alts in seen for alt in alts if f"picture {picture}:" in alt}
        assert len(shown) == 3 and all("preview after step" in alt for alt in shown)
    bar = [float(value) for _, value, _ in seen if value is not None]
    assert bar == sorted(bar) and bar[-1] > 0.9
    assert tab.locator("figure[data-preview]").count() == 0
    assert "seed 43" in tab.locator("figcaption").nth(1).inner_text()

    assert [report["seed"] for report in cards(tab)] == [43, 42]
    facts = tab.locator("#cards .facts").first.inner_text()
    assert facts.startswith("seed 43 · 128×128 · lossless")
    for report, link in zip(cards(tab), tab.locator("#cards a").all(), strict=True):
        with tab.expect_download() as download:
            link.click()
        name = download.value.suggested_filename
        assert name == f"a-red-apple_{report['seed']}_lossless.png"
        pixels = pixels_of(download.value.path().read_bytes())
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == report["sha256"]


def test_cancel_ends_the_request_and_leaves_no_trace(tab, server):
    fill(tab)
    make(tab)
    fill(tab, steps=80)
    tab.locator("#start").click()
    tab.wait_for_selector("figure[data-preview]")
    assert tab.locator("#bar").get_attribute("value") is not None
    tab.locator("#cancel").click()
    tab.wait_for_selector("#start[aria-disabled=false]")
    assert "Cancelled (Denoising: step" in tab.locator("#notes").inner_text()
    assert tab.locator("#error").is_hidden() and tab.locator("#progress").is_hidden()
    metrics = httpx.get(server.url + "/metrics", headers=AUTHORIZATION).text
    assert 'sglang_requests_total{status="cancelled"} 1.0' in metrics
    fill(tab)
    make(tab)
    after, before = cards(tab)
    assert after["sha256"] == before["sha256"]


def test_keys_start_and_cancel(tab):
    fill(tab, steps=80)
    tab.locator("#prompt").press("Control+Enter")
    tab.wait_for_selector("figure[data-preview]")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#start[aria-disabled=false]")
    assert "Cancelled" in tab.locator("#notes").inner_text()


def test_both_tiers_side_by_side_say_that_high_is_not_mounted(tab):
    fill(tab)
    compare(tab)
    said = tab.locator("#comparison").inner_text()
    assert "PSNR ∞ dB" in said and "equal in every value" in said
    assert "High is not mounted on this server: lossless is what ran." in said
    assert not np.reshape(tab.locator("canvas").evaluate(CANVAS), (128, 128, 4))[..., :3].any()
    high, lossless = cards(tab)
    assert (high["requested_quality"], lossless["requested_quality"]) == ("high", "lossless")
    assert high["sha256"] == lossless["sha256"]
    assert "high was asked for" in tab.locator("#cards article").first.inner_text()


def test_the_difference_of_two_tiers_is_measured_and_drawn(tab):
    pictures = []
    tab.route(GENERATIONS, lambda route: answer_as_if_mounted(route, pictures))
    fill(tab)
    compare(tab)
    lossless, high = pictures
    psnr = float(re.search(r"PSNR ([\d.]+) dB", tab.locator("#psnr").inner_text())[1])
    assert psnr == pytest.approx(peak_signal_noise_ratio(lossless, high), abs=0.005)
    assert "by 3 of 255 at most" in tab.locator("#verdict").inner_text()
    assert tab.locator("#mounted").is_hidden()
    delta = np.abs(lossless.astype(int) - high)
    for factor in (64, 255):
        tab.locator("#factor").select_option(str(factor))
        shown = np.reshape(tab.locator("canvas").evaluate(CANVAS), (128, 128, 4))
        assert (shown[..., :3] == np.minimum(delta * factor, 255)).all()
        assert tab.locator("figcaption").nth(2).inner_text() == f"difference × {factor}"


def answer_as_if_mounted(route, pictures):
    """The server's own answer; that of the high tier with other pixels."""
    asked, answer = route.request.post_data_json, route.fetch()
    lines = answer.text().split("\n")
    at = max(i for i, line in enumerate(lines) if line.startswith("data: "))
    event = json.loads(lines[at][6:])
    pixels = pixels_of(base64.b64decode(event["b64_json"]))
    if asked["quality"] == "high":
        noise = np.random.default_rng(0).integers(-3, 4, pixels.shape)
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
        event["report"]["quality"] = "high"
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        event["b64_json"] = base64.b64encode(file.getvalue()).decode()
    pictures.append(pixels)
    lines[at] = "data: " + json.dumps(event)
    route.fulfill(response=answer, body="\n".join(lines))


def test_errors_are_shown_at_the_field_that_they_are_about(tab):
    fill(tab, width=100)
    make(tab)
    assert "expected a multiple of 16" in tab.locator("#error").inner_text()
    assert "invalid_parameter" in tab.locator("#error").inner_text()
    assert tab.locator("#width").get_attribute("aria-invalid") == "true"
    assert tab.evaluate("document.activeElement.id") == "width"
    fill(tab, width=128, prompt=" ")
    make(tab)
    assert tab.evaluate("document.activeElement.id") == "prompt"
    assert tab.locator("#width").get_attribute("aria-invalid") is None
    tab.route(GENERATIONS, lambda route: route.abort())
    fill(tab)
    make(tab)
    assert "The server does not answer" in tab.locator("#error").inner_text()
    tab.unroute(GENERATIONS)
    make(tab)
    assert tab.locator("#error").is_hidden() and len(cards(tab)) == 1


def test_an_answer_that_breaks_off_is_an_error(tab):
    text = ': {"type": "image_generation.queued", "id": "x"}\n\n'
    tab.route(GENERATIONS, lambda route: route.fulfill(body=text, content_type="text/event-stream"))
    fill(tab)
    make(tab)
    assert "broke off after 0 of 1" in tab.locator("#error").inner_text()


def test_a_death_in_the_stream_is_told_and_the_recovery_seen(tab):
    shape = {"message": "the worker is gone", "type": "server_error", "param": None}
    died, restarting = ({"error": shape | {"code": code}} for code in ("worker_died", "restarting"))
    body = f"event: error\ndata: {json.dumps(died)}\n\n"
    tab.route(GENERATIONS, lambda route: route.fulfill(body=body))
    tab.route("**/health", lambda route: route.fulfill(status=503, body=json.dumps(restarting)))
    fill(tab)
    make(tab)
    assert tab.locator("#error").inner_text().startswith("the worker is gone")
    tab.wait_for_selector("#state[data-state=restarting]")
    tab.unroute("**/health")
    tab.wait_for_selector("#state[data-state=ready]")


def test_what_is_asked_is_never_read_as_html(tab):
    fill(tab, prompt="<img src=x onerror='document.title=1'> <b>bold</b>", steps=1)
    make(tab)
    assert tab.locator("#cards .said").inner_text().startswith("<img src=x onerror=")
    assert tab.title() == "sglang playground" and tab.locator("#cards b").count() == 0


def test_settings_of_a_picture_come_back(tab):
    fill(tab, negative="blue", seed=7, steps=2, n=2)
    make(tab)
    fill(tab, prompt="other", negative="", seed=1, steps=9)
    tab.get_by_role("button", name="Use settings").first.click()
    values = {name: tab.locator(f"#{name}").input_value() for name in ("prompt", "negative")}
    assert values == {"prompt": PROMPT, "negative": "blue"}
    assert [tab.locator(f"#{name}").input_value() for name in ("seed", "steps", "n")] == [
        "8",
        "2",
        "1",
    ]


@pytest.mark.parametrize("width, scheme", [(375, "light"), (375, "dark"), (1440, "light")])
def test_nothing_is_wider_than_the_screen(chromium, server, width, scheme):
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with opened(chromium, server.url, **options) as page:
        enter_key(page)
        assert not has_sideways_scroll(page)
        fill(page, prompt="apple" * 60, steps=1)
        compare(page)
        page.locator("#cards summary").first.click()
        assert not has_sideways_scroll(page)
        fill(page, width=100)
        make(page)
        assert page.locator("#error").is_visible() and not has_sideways_scroll(page)
        shot = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"))
        assert shot.shape == (800, width)
        assert (np.median(shot) < 64) == (scheme == "dark")
