// Server-sent events, read from the body of an answer. Comments are kept: the steps come in them.

/** Yields {comment} or {event, data} (data parsed as JSON) as they arrive. */
export async function* readEvents(stream) {
  let event = "message";
  for await (const line of lines(stream)) {
    if (line.startsWith(":")) {
      yield { comment: line.slice(1).trim() };
    } else if (line.startsWith("event:")) {
      event = line.slice(6).trim();
    } else if (line.startsWith("data:")) {
      yield { event, data: JSON.parse(line.slice(5)) }; // the server writes one line an event
    } else if (line === "") {
      event = "message";
    }
  }
}

/** Whole lines of a stream of UTF-8; a picture is one line of megabytes, so parts are joined once. */
async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return; // what has no line end was cut off
    const [first, ...rest] = value.split("\n");
    parts.push(first);
    for (const next of rest) {
      yield parts.join("").replace(/\r$/, "");
      parts = [next];
    }
  }
}
