// Requests to the server that this page came from. The API key lives in this module's memory only.

let key = "";

export function useKey(text) {
  key = text.trim();
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Yields the data of each server-sent event of an answer, as text. Throws Refused for an answer that is an error.
export async function* events(path, { body, signal } = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const method = body ? "POST" : "GET";
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store", credentials: "omit" });
  if (!answer.ok) throw new Refused(answer.status, await problem(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function problem(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.trim() || `HTTP ${answer.status}`;
  }
}
