// What an administrator sees and does: destinations of alerts, tokens, the audit.

import { get, getAll, send } from "./api.js";
import { byId, h, render } from "./dom.js";
import { ago, count, dateTime } from "./format.js";
import { notice, problemNotice, setUpTheme } from "./shell.js";

const AUDIT_PAGE = 50;
const SURE_MS = 4000;

let entries = [];
let next = null;

/** Do something and show what went wrong where all of the page sees it. */
async function guarded(work) {
  try {
    await work();
    byId("problem").replaceChildren();
  } catch (problem) {
    const words = problem.status === 403 ? notice("This needs the scope admin", problem.detail) : problemNotice(problem, load);
    byId("problem").replaceChildren(words);
  }
}

async function load() {
  await guarded(() => Promise.all([loadAlerts(), loadTokens(), loadAudit()]));
}

async function loadAlerts() {
  const { items } = await get("alerts");
  render(byId("alerts"), items, () => (items.length ? alertTable(items) : noAlerts()));
}

const noAlerts = () => notice("No destination", "Start the server with `ampwatch serve --alerts alerts.json`; docs/server.md shows the file.");

function alertTable(items) {
  const head = ["Name", "Shape", "Told of", "Sent", "Waiting", "Not sent", "Last outcome", ""];
  return table("Destinations of alerts", head, items.map((d) => [d.name, d.shape, toldOf(d), count(d.sent), count(d.waiting), count(d.not_sent), d.last_outcome ?? "–", testButton(d.name)]));
}

function toldOf({ severity, kinds }) {
  const parts = [severity && (severity === "fatal" ? "fatal" : `${severity} or worse`), ...kinds.map((kind) => kind.replaceAll("_", " "))];
  return parts.filter(Boolean).join(", ");
}

function testButton(name) {
  const told = h("span", { class: "muted small", role: "status" });
  const button = h("button", { class: "button", type: "button", "aria-label": `Send a test to ${name}`, onclick: () => test(name, button, told) }, "Send a test");
  return [button, " ", told];
}

async function test(name, button, told) {
  button.disabled = true;
  told.textContent = "Sending…";
  await guarded(async () => {
    const { sent, outcome } = await send("POST", `alerts/${encodeURIComponent(name)}/test`);
    told.textContent = sent ? `Sent: ${outcome}` : `Not sent: ${outcome}`;
  });
  button.disabled = false;
}

async function loadTokens() {
  const items = await getAll("tokens", {});
  const head = ["Id", "Name", "Scopes", "Project", "Made", "Last used", ""];
  render(byId("tokens"), items, () => table("Tokens", head, items.map((t) => [t.id, t.name, t.scopes.join(", "), t.project ?? "all", moment(t.created), t.last_used === null ? "never" : moment(t.last_used), revokeButton(t)])));
}

/** Asks once more before it revokes: jobs that use the token are refused at once. */
function revokeButton({ id, name }) {
  let sure = false;
  const button = h("button", { class: "button quiet", type: "button", "aria-label": `Revoke ${name}` }, "Revoke");
  button.addEventListener("click", () => {
    if (sure) return guarded(async () => {
      await send("DELETE", `tokens/${id}`);
      await Promise.all([loadTokens(), loadAudit()]);
    });
    sure = true;
    button.textContent = "Really revoke?";
    setTimeout(() => {
      sure = false;
      button.textContent = "Revoke";
    }, SURE_MS);
  });
  return button;
}

async function create(event) {
  event.preventDefault();
  const form = event.target;
  const scopes = [...form.querySelectorAll("[name=scope]:checked")].map((box) => box.value);
  await guarded(async () => {
    const made = await send("POST", "tokens", { name: form.elements.name.value, scopes, project: form.elements.project.value || null });
    byId("made").replaceChildren(h("p", {}, "The token ", h("strong", {}, made.name), ", shown this once:"), h("pre", { tabindex: "0" }, h("code", {}, made.token)));
    form.reset();
    await Promise.all([loadTokens(), loadAudit()]);
  });
}

async function loadAudit(cursor = null) {
  const page = await get("audit", { limit: AUDIT_PAGE, cursor });
  entries = cursor ? [...entries, ...page.items] : page.items;
  next = page.next;
  render(byId("audit"), [entries, next], () => [
    table("Audit", ["When", "Who", "What", "Of what"], entries.map((e) => [moment(e.time), e.who, e.action, h("code", {}, e.subject)])),
    next !== null && h("button", { class: "button more", type: "button", onclick: () => guarded(() => loadAudit(next)) }, "Show more"),
  ]);
}

const moment = (seconds) => h("span", { title: dateTime(seconds), class: "number" }, ago(seconds));

function table(label, head, rows) {
  const titles = head.map((name) => h("th", { scope: "col" }, name || h("span", { class: "visually-hidden" }, "Actions")));
  const lines = rows.map((row) => h("tr", {}, row.map((value) => h("td", {}, value))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", {}, h("thead", {}, h("tr", {}, titles)), h("tbody", {}, lines)));
}

setUpTheme();
byId("create").addEventListener("submit", create);
await load();
