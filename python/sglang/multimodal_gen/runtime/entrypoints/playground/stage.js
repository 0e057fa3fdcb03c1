// The request that runs: its frames, its progress, its notes, its error.

import { byId, el, seconds } from "./dom.js";

const WORDS = { denoise: "Denoising", decode: "Decoding", enhance: "Rewriting the prompt" };
const EMPTY = "The picture appears here while it is made.";

/** A place where a picture comes to be: previews first, the picture at last. */
export class Frame {
  constructor(title, size) {
    const [width, height] = size.split("x").map(Number);
    this.title = title;
    this.image = el("img", { alt: "", hidden: true });
    this.box = el("div", { className: "picture waiting" }, this.image);
    this.box.style.aspectRatio = width > 0 && height > 0 ? `${width} / ${height}` : "1";
    this.caption = el("figcaption", {}, title);
    this.node = el("figure", {}, this.box, this.caption);
  }

  preview({ blob, step, total }) {
    this.#show(blob, `${this.title}: preview after step ${step} of ${total}`);
    this.node.dataset.preview = step;
    this.caption.textContent = `${this.title} · preview, step ${step}`;
  }

  picture(blob, alt, caption) {
    this.#show(blob, alt);
    delete this.node.dataset.preview;
    this.box.classList.remove("waiting");
    this.caption.textContent = caption;
  }

  stop() {
    this.box.classList.remove("waiting");
  }

  #show(blob, alt) {
    URL.revokeObjectURL(this.image.src);
    this.image.src = URL.createObjectURL(blob);
    Object.assign(this.image, { alt, hidden: false });
  }
}

/** Empties the stage for a new request. */
export function showFrames(frames) {
  for (const image of byId("frames").querySelectorAll("img")) URL.revokeObjectURL(image.src);
  byId("frames").replaceChildren(...frames.map((frame) => frame.node));
  byId("frames").dataset.count = frames.length;
  byId("comparison").hidden = true;
  tellError(null);
  tellNotes([]);
}

/** Ends the waiting of what was not made; with nothing to see, the stage is as at first. */
export function settleFrames() {
  const frames = byId("frames");
  for (const box of frames.querySelectorAll(".waiting")) box.classList.remove("waiting");
  if (frames.querySelector("img:not([hidden])")) return;
  frames.replaceChildren(el("p", { className: "empty" }, EMPTY));
}

/** `done`: share of the whole, 0 to 1; null: not known. */
export function showProgress(text, done) {
  const bar = byId("bar");
  byId("progress").hidden = false;
  byId("status").textContent = text;
  if (done === null) bar.removeAttribute("value");
  else bar.value = done;
}

export function hideProgress() {
  if (document.activeElement === byId("cancel")) byId("start").focus();
  byId("progress").hidden = true;
}

/** Words and share of a {label, step, total}; `label` is such as "denoise 1/2" or "decode". */
export function progressOf({ label, step, total }, pictures) {
  const [, kind, index] = /^(\w+)(?: (\d+)\/\d+)?/.exec(label);
  const which = pictures > 1 && index ? `picture ${index} of ${pictures}, ` : "";
  const words = WORDS[kind] ?? kind;
  if (kind !== "denoise") return { text: words, share: null };
  const text = `${words}: ${which}step ${step} of ${total}`;
  return { text, share: (Number(index ?? 1) - 1 + step / total) / pictures };
}

export function tellError(error) {
  const node = byId("error");
  node.hidden = !error;
  node.replaceChildren();
  if (!error) return;
  node.append(el("p", {}, error.message));
  const about = [error.status || null, error.code, error.requestId && `request ${error.requestId}`];
  if (error.retryAfter) about.push(`try again in ${error.retryAfter} s`);
  node.append(el("p", { className: "hint" }, about.filter(Boolean).join(" · ")));
}

export function tellNotes(texts) {
  const notes = byId("notes");
  notes.hidden = !texts.length;
  notes.replaceChildren(...[...new Set(texts)].map((text) => el("li", {}, text)));
}

/** For screen readers: the bar itself would talk at every step. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Seconds that the engine spent on the whole request. */
export function engineSeconds(report) {
  return Object.values(report.stage_seconds).reduce((sum, value) => sum + value, 0);
}

/** The same in words. */
export function engineTime(report) {
  const pictures = report.seeds.length;
  return seconds(engineSeconds(report)) + (pictures > 1 ? ` for ${pictures} pictures` : "");
}

/** One line about a picture. */
export function captionOf(title, report) {
  return `${title} · seed ${report.seed} · ${engineTime(report)}`;
}

/** Whether high was asked for and something else is what ran. */
export const isNotHigh = ({ requested_quality: asked, quality }) =>
  asked === "high" && quality !== "high";

/** Why high did not run, as a sentence; "" where it did. */
export function notMounted(report) {
  if (!isNotHigh(report)) return "";
  // Sites of that tier count no calls: they replace whole modules.
  const sites = report.sites.filter((site) => site.reason && !("fused_calls" in site));
  const why = sites.map((site) => ` ${site.op}: ${site.reason}.`).join("");
  return `High is not mounted on this server: ${report.quality} is what ran.${why}`;
}
