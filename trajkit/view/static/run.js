"use strict";
// The run: the list of sessions, what policies do over all of them, and drift by cause.

(() => {
  const { h, n } = TK;
  const side = document.getElementById("side");
  let list = null;

  // Numbers of the sessions that the filter shows, in the chosen order.
  TK.filtered = () => {
    const { sessions } = TK.app.index;
    const words = (TK.app.state.f || "").toLowerCase().split(" ").filter(Boolean);
    const tests = words.map((word) => {
      const [, name, low, high] = word.match(/^(\w+):([^:]*):([^:]*)$/) || [];
      if (name in MEASURES)
        return (k) => {
          const value = MEASURES[name].value(k);
          return value !== null && value >= (low === "" ? -Infinity : Number(low)) && value < (high === "" ? Infinity : Number(high));
        };
      return (k) => `${sessions.id[k]} ${sessions.group[k] ?? ""} ${sessions.error[k] ?? ""}`.toLowerCase().includes(word);
    });
    const found = sessions.id.map((_, k) => k).filter((k) => tests.every((test) => test(k)));
    const by = MEASURES[sortBy];
    if (!by) return found;
    const value = (k) => by.value(k) ?? -Infinity;
    return found.sort((a, b) => by.worst * (value(a) - value(b)) || a - b);
  };

  const lostShare = (k) => {
    const { trained, sampled } = TK.app.index.sessions;
    return sampled[k] ? 1 - trained[k][TK.policyNumber()] / sampled[k] : 0;
  };
  // What sessions are compared by: a value each, and 1 if the worst has the lowest value.
  const column = (name) => (k) => TK.app.index.sessions[name][k];
  const MEASURES = {
    lost: { text: "share not trained", value: lostShare, worst: -1 },
    logprob: { text: "mean logprob", value: column("logprob"), worst: 1 },
    drifts: { text: "turns with drift", value: column("drifts"), worst: -1 },
    reward: { text: "reward", value: column("reward"), worst: 1 },
    turns: { text: "turns", value: column("turns"), worst: -1 },
    sampled: { text: "sampled tokens", value: column("sampled"), worst: -1 },
    context: { text: "longest context", value: column("context"), worst: -1 },
  };
  TK.measures = MEASURES;
  let sortBy = "";

  TK.runHead = () => {
    const { index, state } = TK.app;
    const total = index.sessions.sampled.reduce((sum, k) => sum + k, 0);
    TK.replace(
      document.getElementById("title"),
      h("button", { onclick: () => TK.app.go({ s: null }), "aria-current": state.s === null ? "page" : null }, h("bdi", {}, index.title)),
      h(
        "span",
        { class: "note" },
        `${TK.plural(index.sessions.id.length, "session")} \u00b7 ${TK.plural(index.sessions.turns.reduce((sum, k) => sum + k, 0), "turn")} \u00b7 ${TK.plural(total, "sampled token")}`,
      ),
    );
    refresh();
  };

  // The list of sessions on the left.
  TK.sidebar = () => {
    const { sessions } = TK.app.index;
    list = new TK.VirtualList({
      rowHeight: 46,
      label: "Sessions",
      role: "list",
      rowRole: "listitem",
      render: (line) => {
        const k = TK.shown[line];
        const chosen = sessions.id[k] === TK.app.state.s;
        const share = 1 - lostShare(k);
        return h(
          "div",
          { class: "line" + (chosen ? " chosen" : "") },
          h(
            "button",
            { onclick: () => TK.app.go({ s: sessions.id[k] }), "aria-current": chosen ? "true" : null },
            h("bdi", {}, sessions.id[k]),
            h(
              "small",
              {},
              `${TK.plural(sessions.turns[k], "turn")} \u00b7 ${TK.plural(sessions.drifts[k], "drift")}`,
              sessions.reward[k] !== null && ` \u00b7 reward ${TK.fixed(sessions.reward[k], 2)}`,
              sessions.error[k] !== null && " \u00b7 error",
            ),
            h("i", { class: "meter", title: `${TK.percent(share, 1)} trained` }, h("i", { style: { width: 100 * share + "%", background: TK.color("trained") } })),
          ),
        );
      },
    });
    const search = h("input", {
      type: "search",
      placeholder: "filter",
      "aria-label": "Filter sessions",
      value: TK.app.state.f || "",
      oninput: () => {
        TK.app.state.f = search.value;
        TK.app.go({ f: search.value });
      },
    });
    const order = h(
      "select",
      { "aria-label": "Order of sessions", onchange: () => { sortBy = order.value; refresh(); } },
      h("option", { value: "" }, "as recorded"),
      Object.entries(MEASURES).map(([name, { text }]) => h("option", { value: name }, "worst: " + text)),
    );
    TK.replace(side, h("div", { class: "filter" }, search, order), list.element);
    TK.setFilter = (text) => {
      search.value = text;
      return TK.app.go({ f: text, s: null });
    };
  };

  function refresh() {
    if (!list) return;
    const search = side.querySelector("input");
    if (document.activeElement !== search) search.value = TK.app.state.f || "";
    TK.shown = TK.filtered();
    list.resize(TK.shown.length);
  }

  TK.runPage = () => {
    const { index, state, go } = TK.app;
    if (!index.sessions.id.length) return h("p", {}, "The run has no turns.");
    const lines = index.policies.map((counts) => ({
      label: counts.policy,
      counts,
      title: `${n(counts.tokens_sampled)} sampled tokens`,
      cell: TK.shareBar(counts),
    }));
    const chosen = index.policies[TK.policyNumber()];
    return [
      h("h2", {}, "What each policy keeps and costs"),
      TK.policyTable(lines, chosen.policy, (label) => go({ p: label })),
      TK.legend(),
      h("p", { id: "sentence" }, TK.policySentence(chosen.policy, chosen)),
      chosen.tokens_out_of_context > 0 &&
        h("p", { class: "note" }, `${n(chosen.tokens_out_of_context)} of its trained tokens are in a row that, up to them, differs from the path they were sampled after.`),
      h("h2", {}, "Drift by cause"),
      TK.driftGroups(index.drift[TK.policyNumber()], TK.app),
    ];
  };
})();
