// The page: connects the form, the server and the stage.

import { Api, ApiError, newRequestId } from "./api.js";
import { TIERS, comparisonFrames, showComparison } from "./comparison.js";
import { byId } from "./dom.js";
import { addPicture } from "./gallery.js";
import { asked, fillIn, markWrong, randomSeed, reuse, unmark } from "./settings.js";
import {
  Frame,
  announce,
  captionOf,
  hideProgress,
  progressOf,
  settleFrames,
  showFrames,
  showProgress,
  tellError,
  tellNotes,
} from "./stage.js";

const KEY = "sglang-playground-key"; // in this tab's storage
const RETRY_MS = 2000;
const CANCEL_MS = 3000; // for the server to end a cancelled request by itself

const api = new Api();
let running = null; // {id, controller, cancelled, told}
let retry = 0; // the timer of the next attempt to connect
let known = false; // the form has the server's defaults

// The server

async function connect() {
  clearTimeout(retry);
  try {
    if (!known) describe(await api.info());
    const why = await api.whyNotReady();
    showState(why);
    if (!why && known) return;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showState(error);
    if (error.status === 401) {
      askForKey(error);
      return;
    }
  }
  retry = setTimeout(connect, RETRY_MS); // only until it is ready: a page at rest asks nothing
}

function describe(info) {
  byId("model-name").textContent = info.model;
  byId("key-field").hidden = !info.http_args.needs_key;
  if (!info.defaults) return; // of a model that is still being downloaded
  fillIn(info);
  const { edits, prompt_enhancer: enhancer } = info.abilities;
  const more = [edits && "edits over the API", enhancer && "rewrites prompts"];
  byId("abilities").textContent = ["text to image", ...more].filter(Boolean).join(", ");
  known = true;
}

function showState(error) {
  const state = byId("state");
  state.dataset.state = error ? error.code : "ready";
  state.textContent = error ? error.code.replaceAll("_", " ") : "ready";
  state.title = error?.message ?? "";
}

function askForKey(error) {
  byId("key-field").hidden = false;
  tellError(error);
  markWrong(error);
}

function useKey() {
  api.key = byId("key").value.trim() || null;
  sessionStorage.setItem(KEY, api.key ?? "");
  tellError(null);
  unmark();
  known = false;
  connect();
}

// A request

async function start() {
  unmark();
  const compare = mode() === "compare";
  running = { controller: new AbortController(), cancelled: false, told: "" };
  setBusy(true);
  try {
    await (compare ? makeBoth(asked()) : makePictures(asked()));
    announce(compare ? `${byId("psnr").textContent}.` : "The picture is ready.");
  } catch (error) {
    fail(error);
  } finally {
    settleFrames();
    hideProgress();
    setBusy(false);
    running = null;
  }
}

async function makePictures(body) {
  const count = body.n ?? 1;
  const titles = Array.from({ length: count }, (_, i) => (count > 1 ? `picture ${i + 1}` : "picture"));
  const frames = titles.map((title) => new Frame(title, body.size));
  showFrames(frames);
  const pictures = await run(body, frames);
  tellNotes(pictures.flatMap(({ warnings }) => warnings));
}

async function makeBoth(body) {
  const frames = comparisonFrames(body.size);
  showFrames(frames);
  const pictures = [];
  for (const [i, quality] of TIERS.entries()) {
    pictures.push(...(await run({ ...body, n: 1, quality }, [frames[i]], `${quality}: `)));
  }
  tellNotes(pictures[0].warnings); // what the second adds is about its tier: the verdict says it
  await showComparison(frames[2], pictures);
}

/** One request into its frames. Returns its pictures. */
async function run(body, frames, prefix = "") {
  const { signal } = running.controller;
  const pictures = [];
  running.id = newRequestId();
  showProgress(`${prefix}sending`, null);
  for await (const event of api.generate(body, running.id, signal)) {
    if (event.kind === "queued") accepted(prefix);
    if (event.kind === "progress") step(event, frames.length, prefix);
    if (event.kind === "preview") frames[event.index].preview(event);
    if (event.kind === "picture") {
      const frame = frames[pictures.length];
      frame.picture(event.blob, altOf(event.report), captionOf(frame.title, event.report));
      addPicture(event, () => useSettings(body, event.seed));
      pictures.push(event);
    }
  }
  if (pictures.length === frames.length) return pictures;
  const message = `The answer broke off after ${pictures.length} of ${frames.length} pictures.`;
  throw new ApiError({ message, code: "incomplete_answer", param: null }, 0);
}

function accepted(prefix) {
  showProgress(`${prefix}waiting in the queue`, null);
  byId("stage").scrollIntoView({ block: "nearest" });
}

function step(event, count, prefix) {
  const { text, share } = progressOf(event, count);
  running.told = prefix + text;
  if (!running.cancelled) showProgress(running.told, share);
}

async function cancel() {
  const request = running;
  if (!request || request.cancelled) return;
  request.cancelled = true;
  showProgress("Cancelling", null);
  // Closing the connection cancels as well; the endpoint says when it is done.
  setTimeout(() => request.controller.abort(), CANCEL_MS);
  try {
    if (request.id) await api.cancel(request.id);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    request.controller.abort();
  }
}

function fail(error) {
  if (running.cancelled && (error.name === "AbortError" || error.code === "request_cancelled")) {
    const text = `Cancelled${running.told ? ` (${running.told})` : ""}.`;
    tellNotes([text]);
    announce(text);
    return;
  }
  if (!(error instanceof ApiError)) throw error;
  tellError(error);
  if (error.status === 401) byId("key-field").hidden = false;
  markWrong(error);
  byId("error").scrollIntoView({ block: "nearest" });
  if (!error.param) connect(); // it may be the server's state: show that, until it is ready
}

// The form

const mode = () => new FormData(byId("form")).get("mode");
const altOf = (report) => `${report.prompt}, seed ${report.seed}`;

function setBusy(busy) {
  byId("start").setAttribute("aria-disabled", busy); // disabled, it would lose the focus
  byId("stage").setAttribute("aria-busy", busy);
}

function showMode() {
  const compare = mode() === "compare";
  byId("compare-hint").hidden = !compare;
  byId("n-field").hidden = byId("quality-field").hidden = compare;
  byId("start").textContent = compare ? "Compare" : "Make";
}

function useSettings(body, seed) {
  reuse(body, seed);
  byId("prompt").focus();
}

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
  if (event.key === "Escape" && !byId("viewer").open) cancel();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) start();
});
byId("form").addEventListener("input", ({ target }) => target.name === "mode" && showMode());
byId("cancel").addEventListener("click", cancel);
byId("random").addEventListener("click", randomSeed);
byId("key").addEventListener("change", useKey);
document.addEventListener("keydown", onKey);

api.key = byId("key").value = sessionStorage.getItem(KEY) ?? "";
showMode(); // a reload may keep the mode
connect();
