"use strict";
// Two runs next to each other, and what verify finds in rows.

(() => {
  const { h, n } = TK;

  // Two runs: what each policy keeps, and drift by cause, in both.
  TK.comparison = () => {
    const { indexes } = TK.app;
    if (indexes.length < 2) return null;
    const number = TK.policyNumber();
    const turns = indexes.map((one) => one.policies[number].turns);
    const causes = new Map();
    indexes.forEach((one, run) => {
      for (const group of one.drift[number]) {
        const name = [group.cause, group.region].filter(Boolean).map(TK.words).join(", ");
        if (!causes.has(name)) causes.set(name, [0, 0]);
        causes.get(name)[run] += group.turns;
      }
    });
    const share = (counts) => counts.tokens_trained / Math.max(counts.tokens_sampled, 1);
    const points = (a, b) => `${b >= a ? "+" : "\u2212"}${Math.abs(100 * (b - a)).toFixed(1)}`;
    const titles = indexes.map((one) => h("bdi", {}, one.title));
    const table = (caption, lines) =>
      TK.table({ kind: "compared", caption, shown: true, heads: ["", ...titles, "points"], numbers: [1, 2, 3], name: 0 }, lines);
    return [
      h("h2", {}, "Two runs"),
      h(
        "div",
        { class: "side-by-side" },
        table(
          "kept by each policy",
          indexes[0].policies.map((one, k) => {
            const other = indexes[1].policies[k];
            return [
              one.policy,
              TK.percent(one.tokens_trained, one.tokens_sampled),
              TK.percent(other.tokens_trained, other.tokens_sampled),
              points(share(one), share(other)),
            ];
          }),
        ),
        table(
          `turns with drift, as ${indexes[0].policies[number].policy} links them`,
          [...causes].map(([name, counts]) => [
            name,
            ...counts.map((count, run) => `${n(count)} of ${n(turns[run])}`),
            points(counts[0] / Math.max(turns[0], 1), counts[1] / Math.max(turns[1], 1)),
          ]),
        ),
      ),
    ];
  };

  // The same session in the other run, or that run.
  TK.otherRun = () => {
    const { indexes, state } = TK.app;
    if (indexes.length < 2) return;
    const run = state.r ? 0 : 1;
    const known = state.s !== null && indexes[run].sessions.id.includes(state.s);
    TK.app.go({ r: run || null, s: known ? state.s : null });
  };

  TK.rules = (counts) => {
    const lines = counts.map(([rule, count]) => [TK.words(rule), n(count)]);
    if (!lines.length) return h("p", {}, "No violations.");
    return TK.table({ kind: "compared", heads: ["rule", "violations"], numbers: [1], name: 0 }, lines);
  };

  // The violations of a session's rows, each with the row's tokens around it.
  TK.violations = (session, view, app) => {
    if (!session.violations.length) return h("p", {}, "The rows of this session break no rule.");
    const tokens = (one) =>
      h(
        "div",
        { class: "tokens" },
        one.ids.map((id, k) => TK.token(id, (one.mask[k] ? "masked" : "") + (one.start + k === one.token ? " wrong" : ""))),
      );
    const heads = ["row", "turn", "rule", "what is wrong", ""];
    return TK.table(
      { kind: "groups", caption: "Violations", heads, numbers: [0, 1], name: 2 },
      session.violations.map((one) => {
        const turn = session.place.get(one.turn_index);
        const go = turn !== undefined && h("button", { onclick: () => app.go({ t: turn, tab: "tokens" }) }, "tokens");
        return [one.row_index, one.turn_index, TK.words(one.rule), [one.detail, one.ids && tokens(one)], h("div", { class: "go" }, go)];
      }),
    );
  };
})();
