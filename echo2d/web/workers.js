// The table of workers, which can be sorted, filtered and read with the keyboard, and the details of one worker.

import {bar, facts, fill, made, $} from "./dom.js";
import {bytes, count, long, NONE, number, percent, perHour, seconds, usd} from "./format.js";
import {orders} from "./orders.js";

const ROWS_FIRST = 20;
// Workers that have been gone for longer are only counted, unless the user chooses the state "gone".
const GONE_SHOWN_S = 600;
// A glyph for each state, so that colour is never the only sign. States in trouble come first.
const STATES = {
  away: ["\u25CC", "warn"], suspected: ["\u25B2", "warn"], leaving: ["\u25D0", "warn"], draining: ["\u25D0", "warn"],
  cordoned: ["\u2298", "dim"], joined: ["\u25CF", "good"], standby: ["\u25CB", "dim"], gone: ["\u2715", "dim"],
};

export function state(worker) {
  if (worker.state !== "joined" || !worker.alive) return worker.state === "joined" ? "away" : worker.state;
  if (worker.draining) return "draining";
  if (worker.cordoned) return "cordoned";
  return worker.leaving ? "leaving" : worker.active ? "joined" : "standby";
}

// The pause of a refit, and the time in which KV caches were computed again.
export const refit = (pause, recompute) => seconds(pause) + (recompute ? ` + ${seconds(recompute)}` : "");

function reward({reward: mean, reward_above: above}) {
  if (mean === null) return NONE;
  return number(mean, 2) + (above === null ? "" : ` (${above < 0 ? "" : "+"}${number(above, 2)})`);
}

// The slots that the worker may use; if it offers more, also that number.
const slotsOf = worker => worker.usable < worker.slots ? `${worker.usable} of ${worker.slots}` : String(worker.slots);

const makes = worker => worker.mu === null || worker.state === "gone" ? NONE : `${worker.mu_sd === null ? "~" : ""}${perHour(worker.mu)}`;

// Clients of the Tinker API train no groups, so workers have no rewards and no trajectories then.
const trains = page => !page.status.tinker;

// Each column: title, text of a cell, key for sorting, whether it is a number, whether it is shown.
const COLUMNS = [
  ["worker", null, worker => byName(worker), false],
  ["state", null, worker => Object.keys(STATES).indexOf(worker.shown), false],
  ["serves", worker => worker.serving === null ? NONE : `v${worker.serving}`, worker => worker.serving ?? -1, true],
  ["lag", worker => String(worker.lag ?? NONE), worker => worker.lag ?? Infinity, true],
  ["running", worker => `${worker.running} / ${slotsOf(worker)}`, worker => worker.running, true],
  ["leases", worker => String(worker.leases), worker => worker.leases, true],
  ["accepted", worker => count(worker.accepted), worker => worker.accepted, true, trains],
  ["trajectories/h", makes, worker => worker.mu ?? -1, true, trains],
  ["used", worker => percent(worker.used), worker => worker.used, true, trains],
  ["reward", reward, worker => worker.reward ?? -Infinity, true, trains],
  ["tokens/answer", worker => worker.answer_tokens === null ? NONE : count(worker.answer_tokens), worker => worker.answer_tokens ?? -1, true, trains],
  ["audit", worker => `${worker.standing || NONE} ${worker.flagged} / ${worker.audited}`, worker => -worker.flagged, false, page => page.status.audit !== null],
  ["usd / h", worker => usd(worker.usd_per_h), worker => worker.usd_per_h, true, page => page.workers.some(worker => worker.usd_per_h)],
  ["build", worker => worker.build || NONE, worker => worker.build, false, page => page.workers.some(worker => worker.state !== "gone" && worker.build && worker.build !== page.status.build)],
  ["refit", worker => refit(worker.refit_pause_s, worker.recompute_s), worker => worker.refit_pause_s ?? -1, true],
  ["heard", worker => `${long(worker.silent_s)} ago`, worker => worker.silent_s, true],
  ["receives", null, worker => worker.share ?? 2, false, page => page.tree.spread !== null],
];

// Numbers in names are compared as numbers: gpu-9 comes before gpu-10.
const byName = worker => worker.name.toLowerCase().replace(/\d+/g, digits => digits.padStart(12, "0"));

// A key for sorting: workers in trouble come first.
const trouble = worker => [worker.state === "gone", worker.alive, -(worker.lag ?? 1e9), byName(worker)];

function compared(one, other) {
  for (const [at, value] of one.entries()) if (value !== other[at]) return value < other[at] ? -1 : 1;
  return 0;
}

export class Workers {
  constructor(page) {
    this.page = page;
    this.rows = new Map();
    this.receives = made("span");
    this.limit = ROWS_FIRST;
    this.sorted = null;
    this.chosen = null;
    this.only = null;
    this.at = null;
    $("filter").addEventListener("input", () => { this.limit = ROWS_FIRST; this.draw(); });
    $("filter").addEventListener("keydown", event => {
      if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); this._go(this.body.firstElementChild); }
      if (event.key === "Escape" && $("filter").value) { event.stopPropagation(); $("filter").value = ""; this.draw(); }
    });
    $("more").addEventListener("click", () => { this.limit = Infinity; this.draw(); });
    $("detail-close").addEventListener("click", () => this.close());
  }

  open(id) {
    if (!this.page.workers.some(worker => worker.id === id)) return;
    this.back ??= document.activeElement;
    this.chosen = id;
    this.asked = null;
    this.draw();
    $("detail-name").focus();
  }

  close() {
    if (this.chosen === null) return false;
    this.chosen = null;
    this.draw();
    this.back?.isConnected ? this.back.focus() : $("filter").focus();
    this.back = null;
    return true;
  }

  draw() {
    const all = this.page.workers;
    for (const worker of all) {
      worker.shown = state(worker);
      const at = this.page.tree.byId(worker.id);
      worker.share = at === null ? null : this.page.tree.share(at);
    }
    const long_gone = all.filter(worker => worker.state === "gone" && worker.silent_s >= GONE_SHOWN_S && this.only !== "gone");
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = all.filter(worker => !long_gone.includes(worker) && (this.only === null || worker.shown === this.only) && words.every(word => `${worker.name} ${worker.id} ${worker.shown} v${worker.serving} ${worker.standing}`.toLowerCase().includes(word)));
    shown.sort((one, other) => compared(trouble(one), trouble(other)));
    if (this.sorted !== null) {
      const key = COLUMNS[this.sorted.column][2], sign = this.sorted.down ? -1 : 1;
      shown.sort((one, other) => sign * compared([key(one)], [key(other)]));
    }
    this._states(all);
    const working = all.filter(worker => worker.shown === "joined").length;
    $("workers-about").textContent = `${shown.length === all.length ? "" : `${shown.length} shown, `}${working} working of ${all.filter(worker => worker.state === "joined").length} here${long_gone.length ? `, ${long_gone.length} long gone` : ""}${this.page.age > 5 ? `; as of ${long(this.page.age)} ago` : ""}`;
    this._table(shown);
    this._detail();
  }

  _states(all) {
    const counts = new Map();
    for (const worker of all) counts.set(worker.shown, (counts.get(worker.shown) ?? 0) + 1);
    const said = JSON.stringify([...counts, this.only]);
    if (said === this.said) return;
    this.said = said;
    fill("states", Object.keys(STATES).filter(name => counts.has(name) || this.only === name).map(name => made("button", {type: "button", "aria-pressed": String(this.only === name), onclick: () => { this.only = this.only === name ? null : name; this.limit = ROWS_FIRST; this.draw(); }}, this._mark(name), ` ${name} ${counts.get(name) ?? 0}`)));
  }

  _mark(name) {
    const [glyph, colour] = STATES[name] ?? ["?", "dim"];
    return made("span", {class: colour, "aria-hidden": "true"}, glyph);
  }

  _table(shown) {
    const columns = COLUMNS.filter(column => !column[4] || column[4](this.page));
    const titles = JSON.stringify([columns.map(([title]) => title), this.sorted]);
    if (titles !== this.titles) {
      this.titles = titles;
      this.rows.clear();
      this.body = made("tbody", {onkeydown: event => this._key(event)});
      const head = columns.map(([title, , , numeric]) => this._head(title, numeric));
      fill("workers", made("table", {"aria-label": "workers"}, made("thead", {}, made("tr", {}, head)), this.body));
    }
    this.receives.textContent = `receives v${this.page.tree.spread?.version}`;
    const part = shown.slice(0, this.limit), wanted = part.map(worker => this._row(worker, columns));
    wanted.forEach((row, at) => { if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null); });
    while (this.body.children.length > wanted.length) this.body.lastElementChild.remove();
    const focus = part.some(worker => worker.id === this.at) ? this.at : part[0]?.id;
    part.forEach((worker, at) => { wanted[at].tabIndex = worker.id === focus ? 0 : -1; });
    if (!part.length) this.body.replaceChildren(made("tr", {}, made("td", {colspan: columns.length, class: "dim"}, this.page.workers.length ? "no worker fits this filter" : "no worker has joined yet")));
    $("more").hidden = shown.length <= part.length;
    $("more").textContent = `show the other ${shown.length - part.length}`;
  }

  _head(title, numeric) {
    const column = COLUMNS.findIndex(([name]) => name === title), sorted = this.sorted?.column === column;
    const click = () => { this.sorted = !sorted ? {column, down: numeric} : this.sorted.down === numeric ? {column, down: !numeric} : null; this.draw(); };
    const label = title === "receives" ? this.receives : title;
    return made("th", {scope: "col", class: numeric ? "n" : null, "aria-sort": sorted ? this.sorted.down ? "descending" : "ascending" : null}, made("button", {type: "button", onclick: click}, label, sorted ? this.sorted.down ? " \u2193" : " \u2191" : ""));
  }

  _row(worker, columns) {
    let row = this.rows.get(worker.id);
    if (!row || row.children.length !== columns.length) {
      row = made("tr", {onclick: () => { this.at = worker.id; this.open(worker.id); }}, columns.map(([, , , numeric]) => made("td", {class: numeric ? "n" : null})));
      row.dataset.id = worker.id;
      row.said = [];
      this.rows.set(worker.id, row);
    }
    row.setAttribute("aria-selected", String(worker.id === this.chosen));
    columns.forEach(([title, show], at) => {
      const text = show ? show(worker) : title === "worker" ? worker.name : title === "state" ? `${worker.shown} ${worker.reachable}` : `${worker.share?.toFixed(2)} ${this.page.tree.spread?.version}`;
      if (row.said[at] === text) return;
      row.said[at] = text;
      const cell = row.children[at];
      if (show || title === "worker") { cell.textContent = text; if (title === "worker") cell.title = text; }
      else if (title === "state") cell.replaceChildren(this._mark(worker.shown), ` ${worker.shown}${worker.reachable === false ? ", not dialable" : ""}`);
      else cell.replaceChildren(...this._arrival(worker));
    });
    return row;
  }

  _arrival(worker) {
    if (worker.share === null) return [NONE];
    const said = this.page.tree.of(worker.id);
    return [bar(worker.share, said.words, said.failed ? "failed" : said.verified ? "done" : ""), ` ${said.verified ? "\u2713" : said.failed ? "\u2715" : percent(worker.share)}`];
  }

  _key(event) {
    const row = event.target.closest("tr");
    const next = {ArrowDown: row?.nextElementSibling, ArrowUp: row?.previousElementSibling, Home: this.body.firstElementChild, End: this.body.lastElementChild}[event.key];
    if (event.key === "ArrowUp" && row && !row.previousElementSibling) { event.preventDefault(); $("filter").focus(); }
    else if (next) { event.preventDefault(); this._go(next); }
    else if (event.key === "Enter" && row?.dataset.id) { event.preventDefault(); this.open(row.dataset.id); }
  }

  _go(row) {
    if (!row?.dataset.id) return;
    for (const other of this.body.children) other.tabIndex = -1;
    this.at = row.dataset.id;
    row.tabIndex = 0;
    row.focus();
  }

  // --- one worker

  _detail() {
    const worker = this.page.workers.find(each => each.id === this.chosen);
    $("detail").hidden = !worker;
    if (!worker) { this.chosen = null; return; }
    $("detail-name").replaceChildren(this._mark(worker.shown), ` ${worker.name}`);
    const order = `${worker.id} ${worker.cordoned} ${worker.draining}`;
    if (this.asked !== order) { this.asked = order; fill("detail-orders", orders(worker, this.page.role)); }
    const way = this.page.tree.of(worker.id), version = this.page.tree.spread?.version;
    const said = this.page.status.alerts_of(worker.id);
    const part = (title, pairs) => [made("h3", {}, title), facts(pairs)];
    fill("detail-facts",
      said.length ? [made("h3", {}, "Alerts"), made("ul", {}, said.map(sentence => made("li", {}, sentence)))] : null,
      ...part("Now", [
        ["state", worker.shown + (worker.quarantined ? ", quarantined" : "")], ["heard", `${long(worker.silent_s)} ago`],
        ["running", `${worker.running} of ${slotsOf(worker)} slots`], ["leases", worker.leases ? `${worker.leases}, ${worker.leased} samples` : "none"],
        ["leases end, if it stays silent", worker.leases_end_s === null ? null : `in ${long(Math.max(0, worker.leases_end_s))}`],
        ["other peers can dial it", worker.reachable === null ? "not tested yet" : worker.reachable ? "yes" : "no"],
        ["echo2d", worker.build ?? null],
      ]),
      ...part("Versions", [
        ["serves", worker.serving === null ? "none yet" : `v${worker.serving}${worker.lag ? `, ${worker.lag} behind` : ""}`],
        ...(way ? [[`version ${version}`, way.words], ["receives it from", way.from], ["passes it on to", way.to.length ? way.to.slice(0, 8).join(", ") + (way.to.length > 8 ? ` and ${way.to.length - 8} more` : "") : "nobody"]] : []),
        ["last refit", refit(worker.refit_pause_s, worker.recompute_s)], ["tokens computed again", worker.recomputed_tokens === null ? null : count(worker.recomputed_tokens)],
        ["weights in memory", worker.memory_ok === null ? "not checked" : worker.memory_ok ? "as published" : "NOT those of its version"],
        ["uplink", worker.uplink ? `${bytes(worker.uplink)}/s` : NONE], ["disk left for versions", worker.disk_free_bytes == null ? null : bytes(worker.disk_free_bytes)],
      ]),
      ...part("What it makes", [
        ["trajectories per hour", makes(worker)], ["accepted, trained", `${count(worker.accepted)}, ${count(worker.trained)}`], ["share that is trained on", percent(worker.used)],
        ["mean reward", reward(worker)], ["tokens of an answer", worker.answer_tokens === null ? NONE : count(worker.answer_tokens)],
        ["logprobs, by the learner", worker.learner_k === null ? null : `K ${number(worker.learner_k, 4)}, Z ${number(worker.learner_z, 2)}`],
        ["audit", worker.audited || worker.standing ? `${worker.standing || NONE}, ${worker.flagged} of ${worker.audited} flagged` : null], ["verdict", worker.verdict || null],
      ]),
      ...part("Money", [
        ["usd per hour", usd(worker.usd_per_h)], ["since the coordinator started", worker.cost_usd === undefined ? null : `${usd(worker.cost_usd)} usd`], ["usd per trajectory", usd(worker.rho)], ["received, passed on", worker.received_bytes === undefined ? null : `${bytes(worker.received_bytes)}, ${bytes(worker.sent_bytes)}`], ["usd per GB down, up", `${usd(worker.usd_per_gb_down)}, ${usd(worker.usd_per_gb_up)}`],
      ]),
      made("p", {class: "dim"}, worker.id),
    );
  }
}
