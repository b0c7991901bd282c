"use strict";
// The tokens of one call: its prompt and what it sampled. Only the lines in view are in the
// page, so a path of 131,072 tokens scrolls like a short one.

(() => {
  const { h, n } = TK;
  // pixels
  const LINE = 20;
  const READER = 520;
  // characters of a token that is shown by its id
  const ID = 7;
  const MASK = "what the policy does";
  const VERSION = "weight version";
  const HUES = ["--trained", "--end", "--no_row", "--drift", "--context"];

  // The last element of a sorted list that begins at or before a token.
  const lineAt = (starts, k) => {
    let low = 0;
    let high = starts.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= k) low = middle;
      else high = middle;
    }
    return low;
  };

  // What lies at a token of the path: the turn that sampled it and where, or null.
  const originOf = (ranges, begins, k) => {
    const range = ranges[lineAt(begins, k)];
    return range && range.start <= k && k < range.stop ? { turn: range.turn, offset: k - range.start } : null;
  };

  // Where each line begins: after a token that ends a line of text, or at the width.
  const breakLines = (path, width) => {
    const { vocabulary } = TK.app;
    const starts = [0];
    let column = 0;
    for (let k = 0; k < path.length; k++) {
      const text = vocabulary ? vocabulary.text(path[k]) : "";
      const length = vocabulary ? Math.max(text.length, 1) : ID;
      if (column > 0 && column + length > width) {
        starts.push(k);
        column = 0;
      }
      column += length;
      if (text.endsWith("\n") && k + 1 < path.length) {
        starts.push(k + 1);
        column = 0;
      }
    }
    return starts;
  };

  const mix = (color, share) => `color-mix(in srgb, var(${color}) ${Math.round(100 * share)}%, transparent)`;

  // Colours of a token's background by what is asked for; null: none.
  const painter = (session, view, by) => {
    if (by === VERSION) {
      const known = [];
      return ({ turn, offset }) => {
        const version = session.version(turn, offset);
        if (version === null) return null;
        if (!known.includes(version)) known.push(version);
        return mix(HUES[known.indexOf(version) % HUES.length], 0.35);
      };
    }
    if (session.values.includes(by)) {
      const column = session.column(by);
      const logprob = by.includes("logprob");
      // the range of the values, so that any column shows its differences
      let bound = logprob ? 4 : 0;
      if (!logprob)
        for (let k = 0; k < session.count; k++) for (const value of column.at(k) || []) bound = Math.max(bound, Math.abs(value ?? 0));
      return ({ turn, offset }) => {
        const value = column.at(turn)?.[offset] ?? null;
        if (value === null) return null;
        const color = !logprob && value > 0 ? "--trained" : "--drift";
        return mix(color, Math.min(Math.abs(value) / (bound || 1), 1) * 0.8);
      };
    }
    return ({ turn, offset }) => {
      const span = view.span(turn, offset);
      return span ? mix("--" + TK.group(span.kind), 0.4) : null;
    };
  };

  // The list of lines of one path. It is kept while only the chosen token changes.
  let kept = null;
  const listOf = (session, view, app, turn, by) => {
    const key = [session.id, view.label, turn, by, app.index.version].join("\0");
    if (kept && kept.key === key && kept.session === session) return kept;
    const path = session.path(turn);
    const width = Math.max(20, Math.floor((document.getElementById("main").clientWidth - 240) / 7.9));
    const starts = breakLines(path, width);
    const ranges = view.links.sampledIn(session, turn);
    const paint = painter(session, view, by);
    const begins = ranges.map((one) => one.start);
    const own = { key, session, path, starts, ranges, begins, top: null, opened: false };
    const { vocabulary } = app;
    const token = (k) => {
      const origin = originOf(ranges, begins, k);
      const text = vocabulary
        ? vocabulary.text(path[k]).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5\t")
        : String(path[k]).padEnd(ID);
      const chosen = app.state.k === k ? " chosen" : "";
      const special = vocabulary && vocabulary.special(path[k]) ? " special" : "";
      return h(
        "span",
        {
          class: (origin ? "sampled" : "given-token") + chosen + special,
          "data-k": k,
          style: { background: (origin && paint(origin)) || "" },
        },
        text,
      );
    };
    own.list = new TK.VirtualList({
      rowHeight: LINE,
      label: `Tokens of turn ${session.turnIndex[turn]}`,
      render: (line) => {
        const start = starts[line];
        const stop = line + 1 < starts.length ? starts[line + 1] : path.length;
        const tokens = [];
        for (let k = start; k < stop; k++) tokens.push(token(k));
        return h("div", { class: "text" }, h("span", { class: "gutter", "aria-hidden": "true" }, n(start)), tokens);
      },
    });
    own.list.element.addEventListener("click", (event) => {
      const k = event.target.closest("[data-k]")?.dataset.k;
      if (k !== undefined) app.go({ t: turn, k: Number(k) });
    });
    const canvas = TK.canvas(READER, "", (context, mapWidth, height) => drawMap(context, mapWidth, height, own, view), {});
    canvas.addEventListener("click", (event) => {
      own.list.element.scrollTop = (event.offsetY / READER) * starts.length * LINE - own.list.element.clientHeight / 2;
    });
    const window = h("i", {});
    own.map = h("div", { class: "minimap", "aria-hidden": "true" }, canvas, window);
    own.list.ondraw = () => {
      own.top = own.list.element.scrollTop;
      const scale = READER / (starts.length * LINE);
      window.style.top = own.top * scale + "px";
      window.style.height = Math.max(own.list.element.clientHeight * scale, 5) + "px";
    };
    kept = own;
    return own;
  };

  // The path from top to bottom.
  const drawMap = (context, width, height, own, view) => {
    const scale = height / own.starts.length;
    const y = (k) => lineAt(own.starts, k) * scale;
    for (const { start, stop, turn } of own.ranges)
      for (const span of view.spansOf.get(turn) || []) {
        const from = start + span.output_start;
        const to = Math.min(start + span.output_stop, stop);
        if (from >= to) continue;
        context.fillStyle = TK.color(span.kind);
        context.fillRect(0, y(from), width, Math.max(y(to - 1) + scale - y(from), 1));
      }
  };

  // Everything that is known of the chosen token.
  const inspector = (session, view, own, k) => {
    if (k === null || k >= own.path.length)
      return h("p", { class: "note" }, "Click a token for its id, bytes, logprob, turn and row. Arrow keys move to the next one.");
    const id = own.path[k];
    const { vocabulary } = TK.app;
    const origin = originOf(own.ranges, own.begins, k);
    const span = origin && view.span(origin.turn, origin.offset);
    const values = origin
      ? session.values.map((name) => [
          TK.words(name.replace(/^output_logprobs$/, "logprob")),
          TK.fixed(session.column(name).at(origin.turn)?.[origin.offset], 4),
        ])
      : [];
    const facts = [
      ["id", id],
      vocabulary && ["text", JSON.stringify(vocabulary.text(id))],
      vocabulary && ["bytes", vocabulary.bytes(id) ?? "not in the vocabulary"],
      ["position", n(k)],
      [
        "sampled by",
        origin
          ? `turn ${session.turnIndex[origin.turn]}, token ${origin.offset} of ${session.outputLength[origin.turn]}`
          : "no turn of this path",
      ],
      ...values,
      span && [view.label, `${TK.words(span.kind)}. ${TK.reasonText(span.kind)}`],
      span && ["row", span.row_index ?? "none"],
      origin && ["weight version", session.version(origin.turn, origin.offset) ?? "\u2013"],
    ];
    return h(
      "dl",
      { class: "facts" },
      facts.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("bdi", {}, value)))),
    );
  };

  TK.tokens = (session, view, app) => {
    const turn = app.state.t ?? 0;
    const choices = [MASK, ...session.values, VERSION];
    const by = choices.includes(app.state.b) ? app.state.b : MASK;
    const own = listOf(session, view, app, turn, by);
    const k = app.state.k;
    const turns = h(
      "select",
      { "aria-label": "Turn", onchange: (event) => app.go({ t: Number(event.target.value), k: null }) },
      session.turnIndex.map((index, place) => h("option", { value: String(place), selected: place === turn }, `turn ${index}`)),
    );
    const background = h(
      "select",
      { "aria-label": "Background of tokens", onchange: (event) => app.go({ b: event.target.value }) },
      choices.map((name) => h("option", { value: name, selected: name === by }, TK.words(name.replace(/^output_logprobs$/, "logprob")))),
    );
    TK.afterPanel = () => {
      const top = own.top;
      own.list.resize(own.starts.length);
      // at first what the turn sampled is in view, later what was
      const shown = k ?? (own.opened ? null : session.promptLength[turn]);
      if (own.opened) own.list.element.scrollTop = top;
      own.opened = true;
      if (shown !== null) own.list.show(lineAt(own.starts, Math.min(shown, own.path.length - 1)));
    };
    return [
      h(
        "div",
        { class: "tools" },
        turns,
        h("label", {}, "background ", background),
        h(
          "span",
          { class: "note" },
          `${n(session.promptLength[turn])} tokens of prompt, ${n(session.outputLength[turn])} sampled`,
          session.facts.finish_reason?.[turn] && `, finished by ${session.facts.finish_reason[turn]}`,
        ),
      ),
      h("div", { class: "reader" }, own.list.element, own.map),
      h("div", { class: "inspector", "aria-live": "polite" }, inspector(session, view, own, k)),
    ];
  };
})();
