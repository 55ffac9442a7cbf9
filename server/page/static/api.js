// Requests to the server that serves this page. Keys stay in these two variables.
let apiKey = "", adminKey = "";

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// An empty one leaves the key that is known.
export function useKeys(key, admin) { apiKey = key || apiKey; adminKey = admin || adminKey; }

export async function request(path, { body, signal, admin = false } = {}) {
  const headers = {}, key = admin ? adminKey || apiKey : apiKey;
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store", credentials: "omit",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    let message = `${answer.status} ${answer.statusText}`;
    try { message = (await answer.json()).error.message || message; } catch { /* not JSON */ }
    throw new ApiError(answer.status, message);
  }
  return answer;
}

// The data of server-sent events, one after the other; `[DONE]` ends them.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6);
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}
