// Makes elements. Everything that comes from the run is inserted as text: the page's policy (trusted-types 'none')
// forbids every way to insert it as HTML.

export const $ = id => document.getElementById(id);

// An element with attributes and children. A child that is no node becomes text; null is left out.
export function made(tag, attributes = {}, ...children) {
  return fitted(document.createElement(tag), attributes, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function drawn(tag, attributes = {}, ...children) {
  return fitted(document.createElementNS(SVG, tag), attributes, children);
}

function fitted(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
}

// A bar that shows a share. words: the text for screen readers.
export function bar(share, words, kind = "") {
  const fill = made("i");
  fill.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  return made("span", {class: `bar ${kind}`, role: "img", "aria-label": words, title: words}, fill);
}

// Pairs of a name and a value; those whose value is null are left out.
export function facts(pairs) {
  const shown = pairs.filter(pair => pair && pair[1] !== null && pair[1] !== undefined);
  return made("dl", {class: "facts"}, shown.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, value))));
}

// A table. columns: [title, is a number]. rows: of cells, which are text or nodes.
export function table(columns, rows) {
  const kind = at => columns[at][1] ? "n" : null;
  const head = made("tr", {}, columns.map(([title], at) => made("th", {scope: "col", class: kind(at)}, title)));
  const lines = rows.map(cells => made("tr", {}, cells.map((cell, at) => made("td", {class: kind(at) ?? (columns[at][2] ? "wrap" : null)}, cell))));
  return made("table", {}, made("thead", {}, head), made("tbody", {}, lines));
}

export function fill(id, ...children) {
  $(id).replaceChildren(...children.flat().filter(child => child !== null && child !== undefined));
}
