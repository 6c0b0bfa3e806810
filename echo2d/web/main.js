// The dashboard: asks the coordinator every two seconds, and shows what has changed.

import {$} from "./dom.js";
import {ask, forget, Refusal, remember, secret} from "./connection.js";
import {long} from "./format.js";
import {drawClients} from "./clients.js";
import {drawAlerts, drawCurves, drawEvaluations, drawMoney, drawRest, drawTop, History, showCharts} from "./run.js";
import {Samples} from "./samples.js";
import {Tree} from "./tree.js";
import {Workers} from "./workers.js";

const POLL_MS = 2000;
// After a request without an answer wait this long, because a coordinator that restarts is away for seconds.
const RETRY_MS = 3000;
const TOKENS_WINDOW_S = 20;
// The browser's names for the errors of a request whose answer did not come or was cut off.
const AWAY = ["TypeError", "SyntaxError", "TimeoutError", "AbortError"];
const THEMES = ["auto", "light", "dark"];

// Everything that is known about the run. status: the newest status; seen: its number; age: its age in seconds.
const page = {role: null, seen: 0, age: 0, now: null, status: null, workers: [], history: new History(), evaluations: [], tokens_per_s: null, looks: [], stripe: 0};
page.tree = new Tree({open: id => table.open(id), choose: stripe => { page.stripe = stripe; page.tree.plan(null); soon(); }});
const table = new Workers(page), samples = new Samples();
let timer = null, last = null, asking = false, painted = false;

const clock = () => performance.now() / 1000;

function soon() { clearTimeout(timer); timer = setTimeout(poll, 0); }

async function poll() {
  clearTimeout(timer);
  if (asking || !secret()) return;
  asking = true;
  let wait = POLL_MS;
  try {
    await look();
    last = clock();
    $("fault").textContent = "";
  } catch (error) {
    wait = RETRY_MS;
    if (error instanceof Refusal && (error.status === 401 || error.status === 403)) { leave(); wait = null; }
    $("fault").textContent = error instanceof Refusal ? error.message : AWAY.includes(error.name) ? `${away()}; trying again.` : `This page has a mistake: ${error}`;
    if (!(error instanceof Refusal)) console.error(error);
  } finally { asking = false; }
  $("live").textContent = secret() ? wait === POLL_MS ? "\u25CF live" : "\u25B2 not live" : "";
  // A page in the background asks again when it becomes visible.
  if (wait !== null && !document.hidden) timer = setTimeout(poll, wait);
}

function away() { return last === null ? "The coordinator does not answer" : `The coordinator has not answered for ${long(clock() - last)}`; }

async function look() {
  const plan = page.tree.tree?.plan ?? "";
  const found = await ask(`/v1/live?seen=${page.seen}&plan=${encodeURIComponent(plan)}&stripe=${page.stripe}`);
  page.role = found.role;
  page.now = found.now;
  page.age = found.status_age_s;
  pace(found.now.tokens_accepted);
  if (found.status) take(found.seen, found.status);
  if (found.tree !== undefined) page.tree.plan(found.tree);
  $("facts").hidden = false;
  const peers = new Map([...page.workers, ...page.status.relays].map(peer => [peer.id, peer]));
  page.tree.progress(page.now.spread, peers, clock());
  draw();
  if (await catchUp()) draw();
}

function draw() {
  $("login").hidden = true;
  drawTop(page);
  drawAlerts(page.status);
  drawClients(page);
  drawMoney(page);
  drawRest(page);
  table.draw();
  if (!painted) requestAnimationFrame(() => setTimeout(() => performance.mark("painted")));
  painted = true;
}

function take(seen, status) {
  page.seen = seen;
  page.status = status;
  const {columns, rows} = status.workers;
  page.workers = rows.map(row => Object.fromEntries(columns.map((name, at) => [name, row[at]])));
  // The alerts of a peer are found by its id, because two peers may have the same name.
  status.alerts_of = id => status.alerts.filter(alert => alert.peer === id).map(alert => alert.sentence);
}

// Compute the tokens accepted per second, over the last TOKENS_WINDOW_S.
function pace(tokens) {
  page.looks.push([clock(), tokens]);
  while (page.looks.length > 2 && page.looks.at(-1)[0] - page.looks[1][0] >= TOKENS_WINDOW_S) page.looks.shift();
  const [[then, before], [now, after]] = [page.looks[0], page.looks.at(-1)];
  if (after < before) page.looks = [[now, after]];
  page.tokens_per_s = after >= before && now - then > 1 ? (after - before) / (now - then) : page.history.steps.at(-1)?.tokens_per_s ?? null;
}

// Ask for the curves if there is a new step or a new score. Returns whether there was one.
async function catchUp() {
  const newest = JSON.stringify([page.now.committed_step, page.status.evaluations.map(each => each.version)]);
  if (page.asked_at === newest) return false;
  const answer = await ask(`/v1/history?since=${page.history.newest}`);
  if (!page.history.take(answer)) page.history.take(await ask("/v1/history"));
  drawCurves(page.history, page.status.staleness_max);
  if (page.status.evaluations.length) {
    const after = page.evaluations.reduce((most, each) => Math.max(most, each.number), 0);
    page.evaluations.push(...(await ask(`/v1/evaluations?after=${after}`)).evaluations);
    drawEvaluations(page.evaluations);
  }
  page.asked_at = newest;
  samples.look();
  return true;
}

function leave() {
  forget();
  clearTimeout(timer);
  $("leave").hidden = true;
  $("facts").hidden = true;
  $("login").hidden = false;
  $("live").textContent = "";
  $("secret").focus();
}

function enter() {
  Object.assign(page, {seen: 0, history: new History(), evaluations: [], looks: [], asked_at: undefined});
  page.tree.plan(null);
  $("leave").hidden = false;
  $("login").hidden = true;
  poll();
}

// --- light and dark

function theme(name) {
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", name);
  $("theme").textContent = `theme: ${name}`;
  try { localStorage.setItem("theme", name); } catch { /* this browser keeps nothing */ }
}

function nextTheme() {
  const now = document.documentElement.getAttribute("data-theme") ?? "auto";
  theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}

function kept() { try { return localStorage.getItem("theme"); } catch { return null; } }

// --- keys

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input");
  if (event.key === "Escape") { if (!$("keys").open && !table.close() && typing) event.target.blur(); return; }
  if (typing || $("keys").open || $("facts").hidden) return;
  if (event.key === "/") { event.preventDefault(); $("filter").focus(); $("filter").select(); }
  else if (event.key === "?") $("keys").showModal();
  else if (event.key === "t") nextTheme();
});
$("theme").addEventListener("click", nextTheme);
$("keys-open").addEventListener("click", () => $("keys").showModal());
$("leave").addEventListener("click", leave);
$("login").addEventListener("submit", event => {
  event.preventDefault();
  remember($("secret").value.trim());
  $("secret").value = "";
  enter();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

theme(THEMES.includes(kept()) ? kept() : "auto");
showCharts();
if (secret()) enter();
else $("login").hidden = false;
