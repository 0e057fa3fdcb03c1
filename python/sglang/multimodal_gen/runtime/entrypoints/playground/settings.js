// The form: filled in from the server's defaults and limits, read as a request's body.

import { ApiError } from "./api.js";
import { byId } from "./dom.js";

// field of the API -> input
const INPUTS = {
  prompt: "prompt",
  negative_prompt: "negative",
  size: "width",
  width: "width",
  height: "height",
  num_inference_steps: "steps",
  seed: "seed",
  n: "n",
  quality: "quality",
  Authorization: "key",
};
const RANDOM_SEEDS = 2 ** 32;

/** Fills in what the server says; texts that were typed stay. */
export function fillIn({ defaults, abilities, http_args: limits }) {
  const values = {
    width: defaults.width,
    height: defaults.height,
    steps: defaults.num_inference_steps,
    seed: defaults.seed,
  };
  for (const [id, value] of Object.entries(values)) byId(id).value = value;
  byId("quality").value = defaults.quality;
  for (const id of ["width", "height"]) byId(id).step = abilities.size_multiple;
  byId("steps").max = limits.max_steps;
  byId("n").max = limits.max_images;
  // Elsewhere a negative prompt acts only with a second guidance, which this page does not ask for.
  byId("negative-field").hidden = !(defaults.true_cfg_scale > 1);
  byId("negative").placeholder = defaults.negative_prompt || "what to avoid";
}

/** The body of a request. Raises ApiError for a number that JSON cannot carry. */
export function asked() {
  const body = {
    prompt: byId("prompt").value,
    size: `${byId("width").value}x${byId("height").value}`,
    num_inference_steps: number("steps", "num_inference_steps"),
    seed: number("seed", "seed"),
    n: number("n", "n"),
    quality: byId("quality").value,
  };
  const negative = byId("negative");
  if (negative.value && !byId("negative-field").hidden) body.negative_prompt = negative.value;
  return body;
}

/** Writes the settings of a picture back into the form. */
export function reuse(body, seed) {
  byId("prompt").value = body.prompt;
  byId("negative").value = body.negative_prompt ?? "";
  [byId("width").value, byId("height").value] = body.size.split("x");
  byId("steps").value = body.num_inference_steps;
  byId("seed").value = seed;
  byId("quality").value = body.quality;
  byId("n").value = 1;
}

export function randomSeed() {
  byId("seed").value = crypto.getRandomValues(new Uint32Array(1))[0] % RANDOM_SEEDS;
}

/** Marks the input that an error is about, and goes there. */
export function markWrong(error) {
  const input = byId(INPUTS[error.param] ?? "");
  if (!input) return;
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-errormessage", "error");
  input.focus();
}

export function unmark() {
  for (const input of document.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-errormessage");
  }
}

function number(id, param) {
  const text = byId(id).value.trim();
  if (text === "") return null; // the server's default
  const value = Number(text);
  if (Number.isSafeInteger(value)) return value;
  const message = `${param}: got ${text}, expected an integer of at most ${Number.MAX_SAFE_INTEGER}`;
  throw new ApiError({ message, code: "invalid_parameter", param }, 0);
}
