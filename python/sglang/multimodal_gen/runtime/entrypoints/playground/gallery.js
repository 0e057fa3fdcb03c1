// The pictures of this tab, newest first.

import { byId, el } from "./dom.js";
import { engineTime, isNotHigh } from "./stage.js";

const KEPT = 100; // a picture of 1024 x 1024 takes 2 MB of the browser's memory
const MAX_SLUG = 40; // characters

/** Adds a {blob, seed, report}; `onReuse` is called when its settings are asked for. */
export function addPicture(picture, onReuse) {
  const cards = byId("cards");
  cards.prepend(card(picture, onReuse));
  for (const old of [...cards.children].slice(KEPT)) {
    URL.revokeObjectURL(old.querySelector("img").src);
    old.remove();
  }
  byId("gallery-hint").hidden = false;
}

function card({ blob, seed, report }, onReuse) {
  const url = URL.createObjectURL(blob);
  const name = `${report.prompt}, seed ${seed}, ${report.quality}`;
  const [width, height] = report.size;
  const view = el("button", { type: "button", className: "thumb", "aria-label": `View: ${name}` });
  view.append(el("img", { src: url, alt: name }));
  view.onclick = () => show(url, name);
  const again = el("button", { type: "button" }, "Use settings");
  again.onclick = onReuse;
  const facts = el(
    "p",
    { className: "facts" },
    `seed ${seed} · ${width}×${height} · ${report.quality} · ${engineTime(report)}`,
  );
  const download = el("a", { href: url, download: fileName(report, blob.type) }, "Download");
  download.setAttribute("aria-label", `Download: ${name}`);
  const text = el("p", { className: "said", title: report.prompt }, report.prompt);
  const actions = el("div", { className: "row" }, download, again);
  return el("article", {}, view, text, facts, ...warning(report), actions, details(report));
}

function warning(report) {
  if (!isNotHigh(report)) return [];
  const text = `high was asked for, ${report.quality} is what ran: see the report`;
  return [el("p", { className: "hint" }, text)];
}

function details(report) {
  const json = el("pre", { tabIndex: 0 }, JSON.stringify(report, null, 1));
  json.setAttribute("aria-label", "Report as JSON");
  const sites = report.sites.map(({ op, status, reason }) =>
    el("li", {}, `${op}: ${status}${reason ? ` (${reason})` : ""}`),
  );
  const list = el("ul", {}, ...(sites.length ? sites : [el("li", {}, "no fused site ran")]));
  return el("details", {}, el("summary", {}, "Report"), list, json);
}

function show(url, name) {
  Object.assign(byId("viewer-image"), { src: url, alt: name });
  byId("viewer").showModal();
}

function fileName(report, type) {
  const words = report.prompt.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, MAX_SLUG);
  const stem = words.replace(/^-|-$/g, "") || "picture";
  return `${stem}_${report.seed}_${report.quality}.${type.split("/")[1]}`;
}
