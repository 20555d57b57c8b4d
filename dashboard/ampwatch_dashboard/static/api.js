// The REST API of the server that this module came from, under whatever path a proxy has put it.

export const ROOT = new URL("../", import.meta.url);

/** An answer that is not the data: what went wrong and what to do, from the server's problem document. */
export class Problem extends Error {
  constructor(status, title, detail) {
    super(title);
    this.status = status;
    this.detail = detail;
  }
}

export function url(path, query = {}) {
  const target = new URL(`v1/${path}`, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value != null && value !== "") target.searchParams.set(name, value);
  }
  return target;
}

export const get = (path, query) => ask(url(path, query), { headers: { Accept: "application/json" } });

/** Change something: "PATCH", "POST" or "DELETE". Answers what the server does, null where that is nothing. */
export function send(method, path, body, query) {
  const content = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  return ask(url(path, query), { method, ...content });
}

async function ask(target, options) {
  let response;
  try {
    response = await fetch(target, options);
  } catch {
    throw new Problem(0, "The server does not answer", "Is it still running? This page tries again by itself.");
  }
  if (response.status === 204) return null;
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  if (response.status === 401) {
    throw new Problem(401, "You are not signed in", "Open the link that the server printed last: it signs this browser in.");
  }
  throw new Problem(response.status, body?.title ?? `The server answered ${response.status}`, body?.detail ?? "");
}

/** All items of a paged list; with `most` no page more once there are so many. */
export async function getAll(path, query, most = Infinity) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(path, { ...query, cursor });
    items.push(...page.items);
    cursor = page.next;
  } while (cursor !== null && items.length < most);
  return items;
}

export const runPath = (run, rest = "") => `runs/${encodeURIComponent(run)}${rest}`;
