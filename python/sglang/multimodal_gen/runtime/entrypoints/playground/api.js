// The server's HTTP API, as this page uses it. Addresses are relative: a proxy may add a prefix.

import { readEvents } from "./events.js";

const PREVIEWS = 3; // of a picture; what the API allows

/** An error in the one shape of the API. `status` 0: none was answered, or a stream had begun. */
export class ApiError extends Error {
  constructor({ message, code, param }, status, headers) {
    super(message);
    Object.assign(this, { code, param, status });
    this.retryAfter = headers?.get("Retry-After") ?? null; // seconds
    this.requestId = headers?.get("X-Request-Id") ?? null;
  }
}

export class Api {
  key = null;

  /** The settings, limits and defaults of the server. */
  async info() {
    return (await this.#call("server_info")).json();
  }

  /** null when pictures can be made, else the ApiError that says why not. */
  async whyNotReady() {
    try {
      await this.#call("health");
      return null;
    } catch (error) {
      if (error instanceof ApiError) return error;
      throw error;
    }
  }

  /** Ends the request with that id within one step. */
  async cancel(id) {
    await this.#call(`v1/images/${id}/cancel`, { method: "POST" });
  }

  /**
   * Makes pictures. Yields {kind: "queued"}, {kind: "progress", label, step, total},
   * {kind: "preview", index, step, total, blob}, {kind: "picture", blob, seed, report, warnings}.
   */
  async *generate(asked, id, signal) {
    const body = { ...asked, stream: true, partial_images: PREVIEWS, response_format: "b64_json" };
    const answer = await this.#call("v1/images/generations", {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", "X-Request-Id": id },
      signal,
    });
    for await (const { comment, event, data } of readEvents(answer.body)) {
      if (event === "error") throw new ApiError(data.error, 0, answer.headers);
      const told = comment === undefined ? pictureOf(event, data) : progressOf(comment);
      if (told) yield told;
    }
  }

  async #call(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    const answer = await reach(path, { ...options, headers });
    if (!answer.ok) throw await errorOf(answer);
    return answer;
  }
}

/** An id of our own, so that the request can be cancelled. randomUUID needs TLS, this does not. */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function reach(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const message = "The server does not answer. Is it still running?";
    throw new ApiError({ message, code: "unreachable", param: null }, 0);
  }
}

async function errorOf(answer) {
  const text = await answer.text();
  try {
    return new ApiError(JSON.parse(text).error, answer.status, answer.headers);
  } catch {
    // A proxy on the way has its own shape.
    const message = `${answer.status} ${answer.statusText}: ${text.slice(0, 200)}`;
    return new ApiError({ message, code: "not_the_server", param: null }, answer.status);
  }
}

function progressOf(comment) {
  const told = comment.startsWith("{") ? JSON.parse(comment) : {};
  if (told.type === "image_generation.queued") return { kind: "queued" };
  if (told.type !== "image_generation.progress") return null; // a later server's, or a proxy's
  return { kind: "progress", label: told.label, step: told.step, total: told.total_steps };
}

function pictureOf(event, data) {
  const blob = () => blobOf(data.b64_json, data.output_format);
  if (event === "image_generation.partial_image") {
    const { image_index: index, step, total_steps: total } = data;
    return { kind: "preview", index, step, total, blob: blob() };
  }
  if (event !== "image_generation.completed") return null;
  const { seed, report, warnings } = data;
  return { kind: "picture", blob: blob(), seed, report, warnings };
}

function blobOf(base64, format) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return new Blob([bytes], { type: `image/${format}` });
}
