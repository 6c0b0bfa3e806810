// A line chart over train steps: axes, grid, values below zero, and the values under the cursor.
// The mouse, a finger, or the arrow keys move the cursor.

import {drawn, made} from "./dom.js";
import {tick} from "./format.js";

const LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 18;
const TICKS_Y = 4, TICK_WIDTH = 90;
const NAME_CHARS = 20;

// The kinds of lines in one chart. Each kind has its own colour and dashes.
export const KINDS = ["", "second", "third", "fourth", "fifth"];

const short = name => name.length > NAME_CHARS ? `${name.slice(0, NAME_CHARS - 1)}\u2026` : name;

// About `wanted` multiples of 1, 2 or 5 times a power of ten, between low and high.
export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find(each => each * power >= rough - 1e-12) ?? 10);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step + 0);
  return {step, at: found};
}

// The lowest and the highest value, with some room at both ends. A flat line is drawn in the middle.
export function span(values, {floor = null, ceiling = null} = {}) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (floor !== null) low = Math.min(low, floor);
  if (ceiling !== null) high = Math.max(high, ceiling);
  if (low === high) { const room = Math.abs(low) * 0.1 || 0.5; low -= low === floor ? 0 : room; high += room; }
  const room = 0.06 * (high - low);
  return [low === floor ? low : low - room, high === ceiling ? high : high + room];
}

// A smoother line: at each point the mean of the last `width` values.
export function smoothed(points, width) {
  const found = [], window = [];
  let sum = 0;
  for (const [x, y] of points) {
    if (y === null) { found.push([x, null]); continue; }
    window.push(y); sum += y;
    if (window.length > width) sum -= window.shift();
    found.push([x, sum / window.length]);
  }
  return found;
}

export class Chart {
  // show: formats a value. floor: the axis begins here unless values are lower. ceiling: the axis ends here unless
  // values are higher. named: values are shown in a row of their own, with the names of their lines.
  constructor(title, {show, floor = null, ceiling = null, named = false}) {
    this.show = show;
    this.named = named;
    this.bounds = {floor, ceiling};
    this.series = [];
    this.limit = null;
    this.cursor = null;
    this.said = made("output", {class: "dim"});
    this.svg = drawn("svg", {role: "img", tabindex: 0, "aria-label": title});
    this.title = title;
    this.node = made("figure", {class: named ? "chart named" : "chart"}, made("figcaption", {}, made("b", {}, title), this.said), this.svg);
    this.svg.addEventListener("pointermove", event => this._point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this._move(null));
    this.svg.addEventListener("blur", () => this._move(null));
    this.svg.addEventListener("keydown", event => this._key(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  // series: [{name, points: [[step, value or null]], kind: one of KINDS, dots}]. limit: a dashed line, [value, name].
  set(series, limit = null) {
    this.series = series.filter(each => each.points.some(([, y]) => y !== null));
    this.limit = limit;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const all = this.series.flatMap(each => each.points.filter(([, y]) => y !== null));
    if (!all.length) {
      this.svg.replaceChildren(drawn("text", {class: "none", x: width / 2, y: height / 2, "text-anchor": "middle"}, "no step yet"));
      this.svg.setAttribute("aria-label", `${this.title}: no step yet`);
      this.said.textContent = "";
      return;
    }
    const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
    if (this.limit) ys.push(this.limit[0]);
    let [left, right] = [Math.min(...xs), Math.max(...xs)];
    if (left === right) { left -= 1; right += 1; }
    const [low, high] = span(ys, this.bounds);
    this.x = step => LEFT + (width - LEFT - RIGHT) * (step - left) / (right - left);
    this.y = value => height - BOTTOM - (height - TOP - BOTTOM) * (value - low) / (high - low);
    this.steps = [...new Set(xs)].sort((a, b) => a - b);
    const nodes = [];
    const rows = ticks(low, high, TICKS_Y), columns = ticks(left, right, Math.max(4, width / TICK_WIDTH));
    for (const value of rows.at) {
      const y = this.y(value);
      nodes.push(drawn("line", {class: Math.abs(value) < rows.step / 1e6 && low < 0 ? "zero" : "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y}));
      nodes.push(drawn("text", {x: LEFT - 6, y: y + 3.5, "text-anchor": "end"}, tick(value, rows.step)));
    }
    for (const step of columns.at.filter(Number.isInteger)) {
      const x = this.x(step);
      nodes.push(drawn("line", {class: "grid", x1: x, x2: x, y1: TOP, y2: height - BOTTOM}));
      nodes.push(drawn("text", {x, y: height - 4, "text-anchor": "middle"}, tick(step, 1)));
    }
    if (this.limit) {
      const y = this.y(this.limit[0]);
      nodes.push(drawn("line", {class: "limit", x1: LEFT, x2: width - RIGHT, y1: y, y2: y}));
      nodes.push(drawn("text", {x: width - RIGHT, y: y - 3, "text-anchor": "end"}, this.limit[1]));
    }
    for (const each of this.series) nodes.push(...this._line(each));
    this.mark = drawn("g");
    this.svg.replaceChildren(...nodes, this.mark);
    const [first] = this.series, newest = first.points.findLast(([, y]) => y !== null);
    this.svg.setAttribute("aria-label", `${this.title}: steps ${xs.reduce((a, b) => Math.min(a, b))} to ${this.steps.at(-1)}, now ${this.show(newest[1])}, lowest ${this.show(Math.min(...ys))}, highest ${this.show(Math.max(...ys))}`);
    this._move(this.cursor);
  }

  _line({points, kind = "", dots = false}) {
    let path = "", pen = "M";
    for (const [x, y] of points) {
      if (y === null) { if (!dots) pen = "M"; continue; }
      path += `${pen}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`;
      pen = "L";
    }
    const nodes = [drawn("path", {class: kind, d: path})];
    const some = points.filter(([, y]) => y !== null);
    if (dots || some.length === 1) nodes.push(...some.map(([x, y]) => drawn("circle", {class: kind, cx: this.x(x), cy: this.y(y), r: 2.5})));
    return nodes;
  }

  _point(pixel) {
    if (!this.steps?.length) return;
    this._move(this.steps.reduce((best, step) => Math.abs(this.x(step) - pixel) < Math.abs(this.x(best) - pixel) ? step : best));
  }

  _key(event) {
    const by = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (by === undefined || !this.steps?.length) return;
    event.preventDefault();
    const last = this.steps.length - 1;
    // The first key press shows the newest step.
    const to = this.cursor === null && event.key !== "Home" ? last : this.steps.indexOf(this.cursor) + by;
    this._move(this.steps[Math.max(0, Math.min(last, to))]);
  }

  _move(step) {
    this.cursor = step !== null && this.steps?.includes(step) ? step : null;
    if (!this.mark) return;
    this.mark.replaceChildren();
    const named = this.series.filter(each => each.name !== null), many = this.named || named.length > 1;
    const at = each => this.cursor === null ? each.points.findLast(([, y]) => y !== null) : each.points.find(([x, y]) => x === this.cursor && y !== null);
    const words = named.flatMap(each => {
      const point = at(each);
      if (!point) return [];
      if (this.cursor !== null) this.mark.append(drawn("circle", {class: each.kind ?? "", cx: this.x(point[0]), cy: this.y(point[1]), r: 3.5}));
      return [[each, `${many ? `${short(each.name)} ` : ""}${this.show(point[1])}`]];
    });
    if (this.cursor !== null) {
      const x = this.x(this.cursor);
      this.mark.prepend(drawn("line", {class: "cursor", x1: x, x2: x, y1: TOP, y2: this.svg.clientHeight - BOTTOM}));
    }
    const keys = words.flatMap(([each, text], place) => [many ? made("i", {class: `key ${each.kind ?? ""}`}) : null, text, place < words.length - 1 ? "\u2002" : null]);
    this.said.replaceChildren(...[this.cursor === null ? null : `step ${this.cursor}:\u2002`, ...keys].filter(each => each !== null));
  }
}
