// Sends requests to the coordinator. The secret is kept only in this tab, and is sent with every request.

const KEY = "secret";
const PATIENCE_MS = 15000;

export const secret = () => sessionStorage.getItem(KEY);
export const remember = value => sessionStorage.setItem(KEY, value);
export const forget = () => sessionStorage.removeItem(KEY);

// An error of the coordinator, with its own message.
export class Refusal extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function ask(path, {method = "GET", body = null} = {}) {
  const headers = {Authorization: `Bearer ${secret()}`};
  if (body !== null) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {method, headers, body: body === null ? null : JSON.stringify(body), signal: AbortSignal.timeout(PATIENCE_MS)});
  const found = await answer.json();
  if (!answer.ok) throw new Refusal(answer.status, found.detail ?? `error ${answer.status}`);
  return found;
}
