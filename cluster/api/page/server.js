// What the page asks of its server, with the key that was typed in.

const STORED = "aerie-key";
const PATIENCE_MS = 5000;

export const key = () => sessionStorage.getItem(STORED) ?? "";
export const useKey = (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED));

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function answer(path, options) {
  const own = key() ? { Authorization: `Bearer ${key()}` } : {};
  const response = await fetch(path, { ...options, cache: "no-store", headers: { ...own, ...options.headers } });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(response.status, said?.error?.message ?? `the server answered ${response.status}`);
}

export async function state() {
  return (await answer("server_state", { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
}

// The chunks of a streamed answer, until it ends or `signal` aborts it.
export async function* chunks(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await answer(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment: the stream goes on
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
