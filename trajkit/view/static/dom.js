"use strict";
// Small helpers for the page. Every text of a run is hostile: it only ever enters the page as
// a text node (`textContent`, `append`), never as markup.

const TK = {};

(() => {
  // Characters that are invisible, move the cursor, or change the direction of the text
  // around them. They are shown by their code point.
  const HIDDEN =
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

  TK.visible = (text) => text.replace(HIDDEN, (c) => "\u27e8U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9");

  // An element: h("td", {class: "n", onclick: f, "aria-label": "x"}, "text", child, ...).
  // `style` is an object, since the content security policy forbids style attributes.
  TK.h = (tag, props, ...children) => {
    const svg = TK.h.svgTags.has(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(props || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(element.style, value);
      else if (name === "value" || name === "checked") element[name] = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    TK.add(element, children);
    return element;
  };
  TK.h.svgTags = new Set(["svg", "g", "path", "rect", "line", "circle", "text"]);

  TK.add = (element, children) => {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : TK.visible(String(child)));
    }
    return element;
  };

  // A table of lines, each a list of cells. `numbers` are the columns of numbers, `name` the one
  // that names a line, and `props(line)` the attributes of a line, which is counted from 0.
  TK.table = ({ kind, caption, shown, heads, numbers = [], name, props = () => null }, lines) => {
    const right = (k) => (numbers.includes(k) ? "n" : null);
    const cell = (content, k) => (k === name ? TK.h("th", { scope: "row" }, content) : TK.h("td", { class: right(k) }, content));
    const head = (text, k) => TK.h("th", { scope: "col", class: right(k) }, text);
    return TK.h(
      "table",
      { class: kind },
      caption && TK.h("caption", { class: !shown && "hidden" }, caption),
      TK.h("thead", {}, TK.h("tr", {}, heads.map(head))),
      TK.h(
        "tbody",
        {},
        lines.map((cells, line) => TK.h("tr", props(line), cells.map(cell))),
      ),
    );
  };

  TK.replace = (element, ...children) => {
    element.replaceChildren();
    return TK.add(element, children);
  };

  const NUMBER = new Intl.NumberFormat("en-US");
  TK.n = (x) => (x === null || x === undefined ? "\u2013" : NUMBER.format(x));
  TK.plural = (count, noun, many = noun + "s") => `${TK.n(count)} ${count === 1 ? noun : many}`;
  TK.percent = (part, total) => {
    if (!total) return "\u2013";
    const share = (100 * part) / total;
    // 99.96 % must not look like everything
    if (part < total && share > 99.9) return "99.9 %";
    return (part === total ? "100" : share.toFixed(1)) + " %";
  };
  TK.words = (name) => name.replaceAll("_", " ");
  TK.fixed = (x, digits) => (x === null || x === undefined || Number.isNaN(x) ? "\u2013" : x.toFixed(digits));

  // A list of lines of one height that renders only the lines in view.
  TK.VirtualList = class {
    constructor({ rowHeight, render, label, role, rowRole }) {
      this.rowHeight = rowHeight;
      this.render = render;
      this.count = 0;
      this.rowRole = rowRole;
      this.spacer = TK.h("div", { class: "spacer" });
      this.element = TK.h("div", { class: "virtual", role, "aria-label": label, tabindex: "0", onscroll: () => this.draw() }, this.spacer);
      new ResizeObserver(() => this.draw()).observe(this.element);
    }

    // Shows this number of lines; keeps the scroll position.
    resize(count) {
      this.count = count;
      this.spacer.style.height = count * this.rowHeight + "px";
      this.draw();
    }

    draw() {
      const top = this.element.scrollTop;
      const first = Math.max(0, Math.floor(top / this.rowHeight) - 8);
      const last = Math.min(this.count, Math.ceil((top + this.element.clientHeight) / this.rowHeight) + 8);
      const lines = [];
      for (let k = first; k < last; k++) {
        const line = this.render(k);
        line.style.top = k * this.rowHeight + "px";
        if (this.rowRole) {
          line.setAttribute("role", this.rowRole);
          line.setAttribute("aria-posinset", k + 1);
          line.setAttribute("aria-setsize", this.count);
        }
        lines.push(line);
      }
      this.spacer.replaceChildren(...lines);
      if (this.ondraw) this.ondraw(first, last);
    }

    show(k) {
      const top = k * this.rowHeight;
      const { scrollTop, clientHeight } = this.element;
      if (top < scrollTop || top + this.rowHeight > scrollTop + clientHeight) this.element.scrollTop = Math.max(0, top - clientHeight / 3);
      this.draw();
    }
  };

  // A canvas of the given height that fills the width of its parent, and draws itself again
  // when that or the colour scheme changes. `draw(context, width, height)` is in CSS pixels.
  TK.canvas = (height, label, draw, props) => {
    const element = TK.h("canvas", { role: "img", "aria-label": label, ...props });
    element.style.height = height + "px";
    const paint = () => {
      const width = element.clientWidth;
      if (!width) return;
      const ratio = window.devicePixelRatio || 1;
      element.width = Math.round(width * ratio);
      element.height = Math.round(height * ratio);
      const context = element.getContext("2d");
      context.scale(ratio, ratio);
      draw(context, width, height);
    };
    new ResizeObserver(paint).observe(element);
    element.paint = paint;
    return element;
  };

  // A colour of the style sheet. Canvases ask for thousands, so they are kept.
  let known = new Map();
  TK.css = (name) => {
    if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
    return known.get(name);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    known = new Map();
    for (const element of document.querySelectorAll("canvas")) element.paint?.();
  });
})();
