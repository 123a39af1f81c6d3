// The page's requests to its server, with the API key that the user typed in.

const STORAGE_KEY = "aerie-key";
const STATE_TIMEOUT_MS = 5000;

export const key = () => sessionStorage.getItem(STORAGE_KEY) ?? "";
export const storeKey = (value) => (value ? sessionStorage.setItem(STORAGE_KEY, value) : sessionStorage.removeItem(STORAGE_KEY));

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options) {
  const authorization = key() ? { Authorization: `Bearer ${key()}` } : {};
  const response = await fetch(path, { ...options, cache: "no-store", headers: { ...authorization, ...options.headers } });
  if (response.ok) return response;
  const errorBody = await response.json().catch(() => null);
  throw new RequestError(response.status, errorBody?.error?.message ?? `the server answered ${response.status}`);
}

export async function fetchState() {
  return (await request("server_state", { signal: AbortSignal.timeout(STATE_TIMEOUT_MS) })).json();
}

// The chunks of a streamed answer, until it ends or `signal` aborts it.
export async function* streamChunks(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let incompleteEvent = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const events = (incompleteEvent + value).split("\n\n");
    incompleteEvent = events.pop();
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
