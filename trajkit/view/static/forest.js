"use strict";
// The calls of a session as bars over their tokens. A bar begins where the call leaves the
// path of its parent; a lane is a row of the chosen policy.

(() => {
  const { h, n } = TK;
  const LANE = 24;
  const BAR = 15;
  const TOP = 22;
  const LEFT = 150;
  const MOST = 500;

  // Each call is in the lane of the first row that has it; calls in no row have their own.
  const lanesOf = (session, view) => {
    const seen = new Set();
    const lanes = view.rows.map((row) => {
      const calls = row.turns.map((turn) => session.place.get(turn)).filter((k) => !seen.has(k));
      calls.forEach((k) => seen.add(k));
      return { name: `row ${row.row_index}`, row, calls };
    });
    for (let k = 0; k < session.count; k++)
      if (!seen.has(k)) {
        const parent = view.links.parent[k];
        const open = lanes.find((lane) => !lane.row && lane.calls.at(-1) === parent);
        if (open) open.calls.push(k);
        else lanes.push({ name: "in no row", row: null, calls: [k] });
      }
    return lanes.filter((lane) => lane.calls.length);
  };

  TK.label = (branch) => branch.label.replace("_", "-");

  const summary = (session, view, lanes) => {
    const labels = [...view.links.branches.values()].map(TK.label);
    const counts = [...new Set(labels)].map((label) => `${labels.filter((one) => one === label).length} ${label}`);
    return `${TK.plural(session.count, "call")} in ${TK.plural(view.rows.length, "row")} of ${view.label}; branches: ${counts.join(", ") || "none"}.`;
  };

  TK.forest = (session, view, app) => {
    const { links } = view;
    const all = lanesOf(session, view);
    const lanes = all.slice(0, MOST);
    const width = Math.max(640, document.getElementById("main").clientWidth - 56);
    const height = TOP + LANE * lanes.length + 8;
    const roots = [...Array(session.count).keys()].filter((k) => links.parent[k] === null);
    // the first prompt is long and uniform: most of it is left out on the left
    const low = Math.floor(0.9 * Math.min(...roots.map((k) => session.promptLength[k])));
    const high = Math.max(...Array.from({ length: session.count }, (_, k) => session.pathLength(k)));
    const x = (token) => LEFT + ((width - LEFT - 8) * Math.max(token - low, 0)) / Math.max(high - low, 1);
    const laneOf = new Map(lanes.flatMap((lane, number) => lane.calls.map((k) => [k, number])));
    const y = (k) => TOP + LANE * laneOf.get(k);
    const rect = (from, to, top, props) =>
      h("rect", { x: x(from).toFixed(1), y: top, width: Math.max(x(to) - x(from), 0.5).toFixed(1), height: BAR, ...props });

    const bar = (k) => {
      const start = session.promptLength[k];
      const spans = view.spansOf.get(k) || [];
      const branch = links.branches.get(k);
      const drift = links.drift.get(k);
      const about = [
        `turn ${session.turnIndex[k]}: ${n(start)} tokens of prompt, ${n(session.outputLength[k])} sampled`,
        branch && `${TK.label(branch)}: ${branch.evidence}`,
        drift && TK.driftSentence(session, links, k),
        session.facts.agent_id?.[k] && `agent ${session.facts.agent_id[k]}`,
      ];
      const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
      title.textContent = TK.visible(about.filter(Boolean).join("\n"));
      return h(
        "g",
        { class: "call" + (k === app.state.t ? " chosen" : ""), "data-call": k, onclick: () => app.go({ t: k }) },
        title,
        rect(links.leaves[k], start, y(k), { fill: "var(--prompt)" }),
        spans.map((span) => rect(start + span.output_start, start + span.output_stop, y(k), { fill: `var(--${TK.group(span.kind)})` })),
        drift && h("rect", { x: x(links.leaves[k]) - 1, y: y(k) - 2, width: 3, height: BAR + 4, fill: "var(--drift)" }),
        k === app.state.t && rect(links.leaves[k], session.pathLength(k), y(k), { class: "outline" }),
      );
    };

    const edge = (k) => {
      const parent = links.parent[k];
      if (parent === null || !laneOf.has(parent) || laneOf.get(parent) === laneOf.get(k)) return null;
      const at = x(links.leaves[k]).toFixed(1);
      return h("path", { class: links.drift.has(k) ? "edge drifted" : "edge", d: `M${at} ${y(parent) + BAR}V${y(k)}` });
    };

    const label = (lane, number) => {
      const names = lane.calls.filter((k) => links.branches.has(k)).map((k) => TK.label(links.branches.get(k)));
      return h(
        "g",
        { class: "lane" },
        h("rect", { x: 0, y: TOP + LANE * number - 4, width, height: LANE, class: "band" }),
        h("text", { x: 4, y: TOP + LANE * number + 12 }, lane.name),
        h("text", { x: 62, y: TOP + LANE * number + 12, class: "branch" }, [...new Set(names)].join(", ")),
      );
    };

    const drawn = [...laneOf.keys()];
    return [
      h("p", {}, summary(session, view, all)),
      h(
        "svg",
        { class: "forest", width, height, role: "img", "aria-label": summary(session, view, all) },
        h("text", { x: LEFT, y: 12, class: "branch" }, `tokens ${n(low)} to ${n(high)}`),
        lanes.map(label),
        drawn.map(edge),
        drawn.map(bar),
      ),
      all.length > MOST && h("p", { class: "note" }, `${n(all.length - MOST)} more lanes are not drawn.`),
      app.state.t !== null && callText(session, view, app),
      rowTable(session, view, app),
    ];
  };

  // The chosen call in words.
  const callText = (session, view, app) => {
    const k = app.state.t;
    const branch = view.links.branches.get(k);
    const parent = view.links.parent[k];
    return h(
      "p",
      { "aria-live": "polite" },
      `Turn ${session.turnIndex[k]}: ${n(session.promptLength[k])} tokens of prompt, ${n(session.outputLength[k])} sampled; `,
      parent === null
        ? `no parent (${TK.words(view.links.reason[k])}). `
        : `continues turn ${session.turnIndex[parent]} (${TK.words(view.links.reason[k])}). `,
      branch && `It is a ${TK.label(branch)}: ${branch.evidence}. `,
      view.links.drift.has(k) && h("button", { onclick: () => app.go({ tab: "drift" }) }, "drift"),
      " ",
      h("button", { onclick: () => app.go({ tab: "tokens" }) }, "tokens"),
    );
  };

  // Why each row begins where it does (trajkit.analysis.why).
  const rowTable = (session, view, app) =>
    TK.table(
      { kind: "rows", caption: `Rows of ${view.label}`, heads: ["row", "turns", "tokens", "trained", "why it begins there"], numbers: [0, 1, 2, 3] },
      view.rows
        .slice(0, MOST)
        .map((row) => [
          h("button", { onclick: () => app.go({ t: session.place.get(row.turns.at(-1)) }) }, row.row_index),
          row.turns.length,
          n(row.tokens),
          n(row.trained),
          row.sentence.replace(/^row \d+ opens/, "opens"),
        ]),
    );
})();
