// The server: JSON requests, and chat completions as a stream of server-sent events.

const url = (path) => new URL(path, document.baseURI).href;

/** What went wrong, in a sentence for the user; `status` is 0 when there was no HTTP answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function request(path, options) {
  let response;
  try {
    response = await fetch(url(path), { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`No answer from ${location.host}. Is m40llm serve still running there?`);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** A 4xx or 5xx as a sentence; the server's own words (OpenAI's error shape) come first. */
async function refusal(response) {
  const { status } = response;
  const text = await response.text().catch(() => "");
  let said = "";
  try {
    const body = JSON.parse(text);
    said = body.error?.message ?? body.message ?? "";
  } catch {
    said = text.length < 200 && !text.includes("<") ? text.trim() : "";
  }
  const reason = said || response.statusText || `HTTP status ${status}`;
  if (status === 401 || status === 403) return new ApiError(`The server wants an API key (${reason}). Enter it in the settings.`, status);
  if (status === 429) {
    const wait = response.headers.get("Retry-After");
    return new ApiError(`The server is busy: ${reason}${wait ? ` Try again in ${wait} s.` : ""}`, status);
  }
  if (status === 503) return new ApiError(`The server is not ready: ${reason}`, status);
  return new ApiError(`The server refused (${status}): ${reason}`, status);
}

export async function getJson(path, key) {
  const response = await request(path, { headers: headers(key) });
  return response.json();
}

/** Yields each chunk of a chat completion, in order. Throws ApiError; AbortError when `signal` fires. */
export async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(`The server gave up: ${chunk.error.message ?? "no reason given"}`, 500);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(error instanceof SyntaxError ? "The server sent something that is not JSON." : "The connection to the server broke.");
  }
  throw new ApiError("The connection closed before the answer was complete.");
}

/** The data of each server-sent event; comments (heartbeats) and other fields are passed over. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const lines = buffer.split(/\r\n|\n/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // closes the connection if the loop was left early; it may be closed already
  }
}
