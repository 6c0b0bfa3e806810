// The present broadcast: how much each peer of the plan has received, and from which peer it receives.
//
// Up to LIST_MAX peers are shown as an indented list, each with a bar and a rate. More peers are shown as squares, with
// a band for each hop from the seed. A rate covers the time between two answers of the coordinator.

import {bar, fill, made, $} from "./dom.js";
import {bytes, long, percent, seconds} from "./format.js";

const LIST_MAX = 30;
// A rate covers at least this many seconds, because frames arrive in bursts.
const RATE_S = 3.5;
const SHAPES = {star: "every peer receives from the seed", chain: "from peer to peer", relay: "relay trees"};

export class Tree {
  // open: shows a peer. choose: shows another stripe of the plan.
  constructor({open, choose}) {
    this.open = open;
    this.choose = choose;
    this.tree = null;
    this.spread = null;
    this.peers = new Map();
    this.looks = [];
    this.on = null;
    $("tree").addEventListener("keydown", event => this._key(event));
  }

  // Set the plan; null: there is no plan.
  plan(tree) {
    this.tree = tree;
    this.on = null;
    this.shown = null;
    if (!tree) return;
    this.below = tree.peers.map(() => []);
    this.hops = tree.peers.map(() => 0);
    tree.parents.forEach((parent, at) => this.below[parent].push(at + 1));
    this.order = [];
    const walk = [0];
    while (walk.length) {
      const at = walk.pop();
      this.order.push(at);
      for (const child of this.below[at]) { this.hops[child] = this.hops[at] + 1; }
      walk.push(...[...this.below[at]].reverse());
    }
    this._stripes();
  }

  // Set how much each peer has received. now: seconds. peers: workers and relays by id.
  progress(spread, peers, now) {
    if (!spread || spread.plan !== this.spread?.plan) this.looks = [];
    this.spread = spread;
    this.peers = peers;
    if (spread) {
      this.looks.push([now, spread.received]);
      while (this.looks.length > 2 && now - this.looks[1][0] >= RATE_S) this.looks.shift();
    }
    this._draw();
  }

  // What is known of one peer, for its details; null: it is not in the plan.
  of(id) {
    const at = this.tree?.peers.indexOf(id) ?? -1;
    if (at < 0 || !this._agrees()) return null;
    return {words: this._words(at), from: at ? this._name(this.tree.parents[at - 1]) : null, to: this.below[at].map(child => this._name(child)), share: this.share(at), verified: this.verified(at), failed: this._failed(at)};
  }

  byId(id) {
    const at = this.tree?.peers.indexOf(id) ?? -1;
    return at < 0 || !this._agrees() ? null : at;
  }

  share(at) { return this.verified(at) ? 1 : Math.min(1, this.spread.received[at] / Math.max(1, this.spread.wire_bytes)); }
  verified(at) { return at === 0 || this.spread.state[at] === "v"; }
  _left(at) { return this.spread.wire_bytes - this.spread.received[at]; }
  _failed(at) { return this.spread.state[at] === "x"; }
  _agrees() { return this.tree && this.spread && this.tree.plan === this.spread.plan && this.tree.peers.length === this.spread.received.length; }
  _name(at) { return at === 0 ? "seed" : this.peers.get(this.tree.peers[at])?.name ?? this.tree.peers[at].slice(0, 8); }

  rate(at) {
    if (this.looks.length < 2 || at === 0) return null;
    const [[then, before], [now, after]] = [this.looks[0], this.looks.at(-1)];
    return before.length === after.length && now > then ? Math.max(0, after[at] - before[at]) / (now - then) : null;
  }

  _words(at) {
    if (at === 0) return "has the whole version";
    if (this._failed(at)) return "failed to apply the version, and tries again";
    if (this.verified(at)) return "verified";
    const rate = this.rate(at);
    const pace = rate ? `, ${bytes(rate)}/s, ${long(this._left(at) / rate)} left` : "";
    return `${percent(this.share(at))} of ${bytes(this.spread.wire_bytes)}${pace}`;
  }

  _stripes() {
    const {weights, stripe} = this.tree;
    fill("stripes", weights.length < 2 ? [] : weights.map((weight, at) => made("button", {type: "button", "aria-pressed": String(at === stripe), onclick: () => this.choose(at), title: `tree ${at + 1} carries ${percent(weight)} of the frames`}, `tree ${at + 1}: ${percent(weight)}`)));
  }

  _draw() {
    const {spread, tree} = this;
    $("stripes").hidden = !this._agrees();
    if (!this._agrees()) {
      $("tree-about").textContent = spread === null ? "no version spreads now" : "";
      fill("tree");
      $("tree-said").textContent = "";
      this.shown = null;
      return;
    }
    const peers = tree.peers.length - 1, verified = [...spread.state].filter(each => each === "v").length;
    const total = tree.parents.reduce((sum, _, at) => sum + (this.rate(at + 1) ?? 0), 0);
    const predicted = tree.predicted_s ? `, predicted ${seconds(tree.predicted_s)}` : "";
    $("tree-about").textContent = `version ${spread.version}: ${verified} of ${peers} verified; ${bytes(spread.wire_bytes)}${spread.whole ? "" : " (estimated)"} to each, ${SHAPES[tree.shape] ?? tree.shape}${predicted}${total ? `; ${bytes(total)}/s in all` : ""}`;
    if (tree.peers.length <= LIST_MAX + 1) this._list();
    else this._bands();
    if (this.on !== null) this._say();
  }

  // --- a few peers

  _list() {
    const rows = this.order.map(at => {
      const relay = this.peers.get(this.tree.peers[at])?.kind === "relay";
      const name = made("span", {}, made("span", {class: "dim"}, this.hops[at] ? "\u2003".repeat(this.hops[at] - 1) + "\u2514 " : ""), this._name(at), relay ? made("small", {}, " relay") : null);
      const kind = this._failed(at) ? "failed" : this.verified(at) ? "done" : "";
      const rate = this.verified(at) ? null : this.rate(at), uplink = this.tree.uplinks[at];
      return made("tr", {"data-at": at, class: this.on === at ? "on" : null, onclick: () => at && this.open(this.tree.peers[at])},
        made("td", {}, name), made("td", {}, bar(this.share(at), `${this._name(at)}: ${this._words(at)}`, kind)),
        made("td", {}, at === 0 ? "whole" : kind === "done" ? "\u2713 verified" : kind === "failed" ? "\u2715 failed" : `${percent(this.share(at))} received`),
        made("td", {class: "n"}, rate ? `${bytes(rate)}/s` : ""), made("td", {class: "n"}, rate ? `${long(this._left(at) / rate)} left` : ""),
        made("td", {class: "n dim"}, uplink ? `uplink ${bytes(uplink)}/s` : ""));
    });
    const wide = made("table", {class: "tree", "aria-label": "which peer receives from which, and how much each has received"}, made("tbody", {}, rows));
    fill("tree", made("div", {class: "scroll"}, wide));
    $("tree").removeAttribute("tabindex");
    $("tree-said").textContent = "";
    this.shown = null;
  }

  // --- many peers

  _bands() {
    if (this.shown !== this.tree.plan) this._makeBands();
    const {state} = this.spread;
    this.cells.forEach((cell, at) => {
      if (!cell) return;
      const kind = state[at] === "v" || at === 0 ? "full" : state[at] === "x" ? "failed" : "";
      if (cell.kind !== kind) { cell.node.classList.remove("full", "failed"); if (kind) cell.node.classList.add(kind); cell.kind = kind; }
      const height = kind === "full" ? "0" : `${Math.round(100 * this.share(at))}%`;
      if (cell.height !== height) cell.fill.style.height = cell.height = height;
    });
    for (const [hop, {places, label}] of this.bands.entries()) {
      const verified = places.filter(at => this.verified(at)).length;
      label.textContent = hop === 0 ? "the seed" : `${places.length} ${places.length === 1 ? "peer" : "peers"}, ${verified} verified`;
    }
  }

  _makeBands() {
    this.shown = this.tree.plan;
    this.cells = [];
    this.bands = [];
    for (const at of this.order) (this.bands[this.hops[at]] ??= {places: []}).places.push(at);
    const rows = this.bands.map((band, hop) => {
      band.label = made("small");
      const cells = band.places.map(at => {
        const level = made("b"), node = made("i", {"data-at": at}, level);
        this.cells[at] = {node, fill: level};
        return node;
      });
      return made("div", {class: "hop"}, made("div", {}, hop ? `hop ${hop} ` : "", band.label), made("div", {class: "cells"}, cells));
    });
    fill("tree", rows);
    const place = $("tree");
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "peers by hops from the seed; arrow keys go from one to the next");
    place.onpointerover = event => { const at = event.target.closest?.("[data-at]")?.dataset.at; if (at !== undefined) this._light(Number(at)); };
    place.onpointerleave = () => this._light(null);
    place.onfocus = () => { if (this.on === null) this._light(0); };
    place.onclick = event => { const at = Number(event.target.closest?.("[data-at]")?.dataset.at); if (at) this.open(this.tree.peers[at]); };
    $("tree-said").textContent = "Each square is a peer, and fills as it receives: green has verified, a red disc has failed. Point at one, or use the arrow keys, to see its way to the seed.";
  }

  _key(event) {
    if (!this.shown || !this._agrees()) return;
    const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1}[event.key];
    const flat = this.bands.flatMap(band => band.places);
    if (by !== undefined) {
      event.preventDefault();
      this._light(flat[Math.max(0, Math.min(flat.length - 1, flat.indexOf(this.on ?? 0) + by))]);
    } else if (event.key === "Enter" && this.on) this.open(this.tree.peers[this.on]);
  }

  // Mark a peer and all peers through which its frames arrive.
  _light(at) {
    if (!this.shown) return;
    for (const cell of this.cells) cell?.node.classList.remove("on", "line");
    this.on = at;
    if (at === null) return;
    this.cells[at].node.classList.add("on");
    for (let up = at; up > 0;) { up = this.tree.parents[up - 1]; this.cells[up].node.classList.add("line"); }
    this._say();
  }

  _say() {
    const at = this.on, to = this.below[at].length;
    const from = at ? `; from ${this._name(this.tree.parents[at - 1])}` : "";
    const uplink = this.tree.uplinks[at];
    $("tree-said").textContent = `${this._name(at)}: ${this._words(at)}${from}${to ? `, passes it on to ${to}` : ""}${uplink ? `, uplink ${bytes(uplink)}/s` : ""}`;
  }
}
