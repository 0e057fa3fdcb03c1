"""The playground without a browser: what is served, under which policy, and whether the API fits.

Its scripts run in the Node.js of playwright's package, with a few words in place of a document.
"""

import ast
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import playwright
import pytest
from fake_engine import fake_server
from skimage.metrics import peak_signal_noise_ratio

from sglang.multimodal_gen import report
from sglang.multimodal_gen.runtime.entrypoints.http_playground import FOLDER, MEDIA_TYPES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

NODE = Path(playwright.__file__).parent / "driver" / "node"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
WITHOUT_END = {"meta", "link", "input", "img"}
# what the inputs hold, and all that `settings.js` asks of a document
DOCUMENT = """
const values = {prompt: "a red apple", negative: "blue", width: "64", height: "48", steps: "3",
  seed: "7", n: "2", quality: "high"};
const nodes = Object.fromEntries([...Object.keys(values), "negative-field"].map(
  (id) => [id, {value: values[id] ?? "", hidden: false}]));
globalThis.document = {getElementById: (id) => nodes[id]};
"""
# the page's request: what it would send, and what it makes of the answer in argv
REQUEST = """
import { readFileSync } from "node:fs";
import { Api } from "./api.js";
import { asked } from "./settings.js";
let sent;
globalThis.fetch = async (path, options) => {
  sent = {path, method: options.method, headers: options.headers, body: JSON.parse(options.body)};
  return new Response(readFileSync(process.argv[2]));
};
const api = new Api();
api.key = "a-key";
const events = [];
for await (const event of api.generate(asked(), "an-id", null)) {
  events.push({...event, blob: event.blob && event.blob.size});
}
console.log(JSON.stringify({sent, events}));
"""


class Page(HTMLParser):
    """The tags of a page, and the texts inside script and style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.inline = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] in ("script", "style"):
            self.inline.append(data)

    def values(self, name):
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def page():
    return Page((FOLDER / "index.html").read_text())


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Runs a module beside the page's scripts; returns what it prints, read as JSON."""
    folder = tmp_path_factory.mktemp("playground")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}')

    def run(source, *arguments):
        (folder / "main.js").write_text(source)
        done = subprocess.run(
            [NODE, "main.js", *map(str, arguments)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_part_is_served_under_the_policy_without_a_key(path):
    address = "/" if path.name == "index.html" else f"/playground/{path.name}"
    with fake_server(api_key="a-key") as (client, _):
        answer = client.get(address)
    assert answer.status_code == 200 and answer.content == path.read_bytes()
    assert answer.headers["content-type"] == MEDIA_TYPES[path.suffix]
    policy = dict(
        rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert policy["img-src"] == "'self' blob:"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", [
    "none.js", "..%2fhttp_playground.py", "../http_playground.py", "%2e%2e/http_server.py",
    "__init__.py", "app.js%00", "APP.JS", "",
])  # fmt: skip
def test_nothing_else_of_the_disk_is_served(name):
    with fake_server() as (client, _):
        answer = client.get(f"/playground/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_the_page_is_whole_and_loads_only_its_own_parts(page):
    assert page.open == [] and page.inline == []
    parts = [a for name in ("src", "href") for a in page.values(name) if not a.startswith("#")]
    assert {"playground/app.js", "playground/style.css", "playground/icon.svg"} == set(parts)
    forbidden = [k for _, attributes in page.tags for k in attributes if k[:2] == "on"]
    assert forbidden == [] and page.values("style") == []
    for path in FILES:
        elsewhere = set(re.findall(r"\w+://[^\s\"'`)]*", path.read_text()))
        assert elsewhere <= {"http://www.w3.org/2000/svg"}, path.name


def test_what_people_use_has_a_name(page):
    labels = set(page.values("for"))
    for tag, attributes in page.tags:
        if tag in ("input", "select", "textarea", "progress"):
            inside_a_label = attributes.get("type") == "radio"
            assert inside_a_label or attributes["id"] in labels, attributes
    assert all("alt" in attributes for tag, attributes in page.tags if tag == "img")
    assert len(page.values("id")) == len(set(page.values("id")))


def test_the_scripts_find_what_they_ask_for(page):
    ids, names = set(page.values("id")), {path.name for path in FILES}
    for path in SCRIPTS:
        text = path.read_text()
        assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= ids, path.name
        assert {name for name in re.findall(r'from "\./([\w.]+)"', text)} <= names, path.name
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        command = [NODE, "--check", "--input-type=module"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_what_the_page_sends_is_what_the_server_takes(node, tmp_path):
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    sent = node(DOCUMENT + REQUEST, empty)["sent"]
    assert (sent["path"], sent["method"]) == ("v1/images/generations", "POST")
    assert sent["headers"]["Authorization"] == "Bearer a-key"
    with fake_server(api_key="a-key") as (client, engine):
        schema = client.get("/openapi.json").json()["paths"]["/v1/images/generations"]["post"]
        answer = client.post("/" + sent["path"], json=sent["body"], headers=sent["headers"])
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "an-id"
        params = engine.asked[0].params
    content = schema["requestBody"]["content"]["application/json"]
    assert set(sent["body"]) <= set(content["schema"]["properties"])
    assert (params.prompt, params.negative_prompt) == ("a red apple", "blue")
    assert (params.width, params.height, params.num_inference_steps) == (64, 48, 3)
    assert (params.seed, params.num_outputs_per_prompt, params.quality) == (7, 2, "high")
    assert engine.asked[0].previews == 3
    (tmp_path / "answer").write_bytes(answer.content)
    events = node(DOCUMENT + REQUEST, tmp_path / "answer")["events"]
    assert [event["kind"] for event in events] == ["queued", "progress", "picture", "picture"]
    assert events[1] == {"kind": "progress", "label": "denoise", "step": 1, "total": 2}
    assert [event["seed"] for event in events[2:]] == [7, 8] and events[2]["blob"] > 60


def test_the_form_is_filled_from_the_servers_defaults(node, tmp_path):
    with fake_server() as (client, _):
        info = client.get("/server_info").json()
    source = (
        DOCUMENT
        + f"""
import {{ fillIn }} from "./settings.js";
fillIn({json.dumps(info)});
console.log(JSON.stringify(nodes, (key, value) => value === undefined ? "nothing" : value));
"""
    )
    found = node(source)
    assert "nothing" not in json.dumps(found)
    assert (found["width"]["value"], found["height"]["value"]) == (128, 128)
    assert (found["steps"]["value"], found["seed"]["value"]) == (20, 42)
    assert (found["width"]["step"], found["steps"]["max"], found["n"]["max"]) == (16, 200, 10)
    assert found["negative-field"]["hidden"] is False  # the bundled model's true_cfg_scale is 2.5


def test_a_seed_that_json_cannot_carry_is_refused_not_rounded(node):
    source = (
        DOCUMENT
        + """
import { asked } from "./settings.js";
nodes.seed.value = "9223372036854775807";
let message = "";
try { asked(); } catch (error) { message = error.message; }
console.log(JSON.stringify(message));
"""
    )
    assert "seed: got 9223372036854775807, expected" in node(source)


def test_the_report_has_what_the_page_shows():
    source = ast.parse(Path(report.__file__).read_text())
    known = {
        key.value
        for function in ast.walk(source)
        if isinstance(function, ast.FunctionDef) and function.name == "build_report"
        for dictionary in ast.walk(function)
        if isinstance(dictionary, ast.Dict)
        for key in dictionary.keys
    }
    used = {name for path in SCRIPTS for name in re.findall(r"\breport\.(\w+)", path.read_text())}
    assert {"sites", "stage_seconds", "size", "seeds"} <= used <= known


def test_the_tiers_on_the_page_are_the_servers(page):
    offered = [a["value"] for tag, a in page.tags if tag == "option"]
    from sglang.multimodal_gen.configs.sampling_params import SamplingParams

    rule = SamplingParams.__dataclass_fields__["quality"].metadata["rule"]
    assert offered == list(rule.values)


def test_the_events_do_not_mind_where_the_network_cuts(node):
    source = """
import { readEvents } from "./events.js";
const text = ': {"a": 1}\\r\\n\\r\\nevent: picture\\ndata: {"b": "\\u00fc"}\\n\\n: cut';
const bytes = new TextEncoder().encode(text);
const results = [];
for (const size of [1, 2, 3, 7, 1000]) {
  const parts = [];
  for (let i = 0; i < bytes.length; i += size) parts.push(bytes.slice(i, i + size));
  const found = [];
  for await (const event of readEvents(ReadableStream.from(parts))) found.push(event);
  results.push(found);
}
console.log(JSON.stringify(results));
"""
    whole = [{"comment": '{"a": 1}'}, {"event": "picture", "data": {"b": "ü"}}]
    assert node(source) == [whole] * 5


def test_the_difference_is_what_scikit_image_says(node, tmp_path):
    rng = np.random.default_rng(0)
    one = rng.integers(0, 256, (12, 9, 4), np.uint8)
    other = np.clip(one.astype(int) + rng.integers(-5, 6, one.shape), 0, 255).astype(np.uint8)
    files = [tmp_path / "one", tmp_path / "other"]
    for file, pixels in zip(files, (one, other), strict=True):
        file.write_bytes(pixels.tobytes())
    source = """
import { readFileSync } from "node:fs";
import { amplified, difference, fittingFactor } from "./compare.js";
const [one, other] = process.argv.slice(2).map((path) => readFileSync(path));
const equal = difference(one, one);
console.log(JSON.stringify({
  found: difference(one, other),
  equal: {...equal, psnr: String(equal.psnr)},
  shown: Array.from(amplified(one, other, 64)),
  fitting: [0, 1, 5, 127, 128, 255].map((largest) => fittingFactor(largest, [1, 2, 32, 255])),
}));
"""
    said = node(source, *files)
    rgb, other_rgb = one[..., :3], other[..., :3]
    delta = np.abs(rgb.astype(int) - other_rgb)
    expected = peak_signal_noise_ratio(rgb, other_rgb)
    assert said["found"]["psnr"] == pytest.approx(expected, abs=1e-9)
    assert said["found"]["largest"] == delta.max() == 5
    assert said["found"]["differing"] == pytest.approx((delta > 0).mean())
    assert said["equal"] == {"psnr": "Infinity", "largest": 0, "differing": 0}
    shown = np.array(said["shown"]).reshape(one.shape)
    assert (shown[..., :3] == np.minimum(64 * delta, 255)).all() and (shown[..., 3] == 255).all()
    assert said["fitting"] == [255, 255, 32, 2, 1, 1]
