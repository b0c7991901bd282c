"use strict";
// The run: the list of sessions, what policies do over all of them, and drift by cause.

(() => {
  const { h, n } = TK;
  const side = document.getElementById("side");
  let list = null;

  // Words of the filter, and the ranges among them. A word with a colon may also be of a name.
  const RANGE = /^(\w+):(?:([^:]*):([^:]*)$)?/;
  const isRange = (word) => word.match(RANGE)?.[1] in MEASURES;
  const filterWords = () => (TK.app.state.f || "").toLowerCase().split(" ").filter(Boolean);

  // Sessions whose messages contain a word, by run and word.
  const textMatches = new Map();
  const matchKey = (word) => `${TK.app.state.r ?? 0} ${word}`;

  // Looks for the filter's words in the messages of all sessions.
  TK.searchTexts = async () => {
    const run = TK.app.state.r ?? 0;
    const text = TK.app.state.f;
    for (const word of filterWords().filter((one) => !isRange(one) && !textMatches.has(matchKey(one)))) {
      const key = matchKey(word);
      const found = await TK.source.search(word, run, TK.app.index.sessions.id, (done, all) => {
        note(`searching the messages: ${n(done)} of ${n(all)} sessions`);
        return TK.app.state.f === text;
      });
      if (found === null) return; // the filter was changed meanwhile
      textMatches.set(key, found);
    }
    note(null);
    await TK.app.show();
  };

  const note = (text) => TK.replace(side.querySelector(".filter-note"), text);

  const hasWord = (word, k) => {
    const { id, group, error } = TK.app.index.sessions;
    return textMatches.get(matchKey(word))?.has(k) || `${id[k]} ${group[k] ?? ""} ${error[k] ?? ""}`.toLowerCase().includes(word);
  };

  // What is wrong with the filter, if anything.
  const filterFault = () => {
    for (const word of filterWords()) {
      const [, name, low, high] = word.match(RANGE) || [];
      if (name === undefined || TK.app.index.sessions.id.some((_, k) => hasWord(word, k))) continue;
      if (!(name in MEASURES)) return `unknown filter ${name}: expected one of ${Object.keys(MEASURES).join(", ")}`;
      for (const end of [low, high]) if (Number.isNaN(Number(end))) return `${word}: expected numbers, such as ${name}:0:20`;
    }
    return null;
  };

  // Numbers of the sessions that the filter shows, in the chosen order.
  TK.filtered = () => {
    const { sessions } = TK.app.index;
    const tests = filterWords().map((word) => {
      const [, name, low, high] = word.match(RANGE) || [];
      if (name in MEASURES && low !== undefined)
        return (k) => {
          const value = MEASURES[name].value(k);
          return value !== null && value >= (low === "" ? -Infinity : Number(low)) && value < (high === "" ? Infinity : Number(high));
        };
      return (k) => hasWord(word, k);
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
  const column = (name) => (k) => TK.app.index.sessions[name]?.[k] ?? null;
  const MEASURES = {
    __proto__: null,
    lost: { text: "share lost", value: lostShare, worst: -1 },
    logprob: { text: "mean logprob", value: column("logprob"), worst: 1 },
    drifts: { text: "turns with drift", value: column("drifts"), worst: -1 },
    reward: { text: "reward", value: column("reward"), worst: 1 },
    turns: { text: "turns", value: column("turns"), worst: -1 },
    reply: { text: "tokens per reply", value: (k) => column("sampled")(k) / column("turns")(k), worst: -1 },
    sampled: { text: "sampled tokens", value: column("sampled"), worst: -1 },
    context: { text: "longest context", value: column("context"), worst: -1 },
    violations: { text: "violations", value: column("violations"), worst: -1 },
  };
  let sortBy = "";

  TK.runHead = () => {
    const { index, state } = TK.app;
    const total = index.sessions.sampled.reduce((sum, k) => sum + k, 0);
    TK.replace(
      document.getElementById("title"),
      TK.app.indexes.map((one, run) =>
        h(
          "button",
          { onclick: () => TK.app.go({ s: null, r: run || null }), "aria-current": one === index ? "page" : null },
          h("bdi", {}, one.title),
        ),
      ),
      h(
        "span",
        { class: "note" },
        `${TK.plural(index.sessions.id.length, "session")} \u00b7 ${TK.plural(
          index.sessions.turns.reduce((sum, k) => sum + k, 0),
          "turn",
        )} \u00b7 ${TK.plural(total, "sampled token")}`,
      ),
    );
    refresh();
  };

  // The list of sessions on the left.
  TK.sidebar = () => {
    list = new TK.VirtualList({
      rowHeight: 46,
      label: "Sessions",
      role: "list",
      rowRole: "listitem",
      render: (line) => {
        const { sessions } = TK.app.index;
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
            h(
              "i",
              { class: "meter", title: `${TK.percent(share, 1)} trained` },
              h("i", { style: { width: 100 * share + "%", background: TK.color("trained") } }),
            ),
          ),
        );
      },
    });
    const search = h("input", {
      type: "search",
      placeholder: "filter",
      title: "Enter searches the messages of all sessions",
      "aria-label": "Filter sessions; Enter searches the messages",
      value: TK.app.state.f || "",
      oninput: () => {
        TK.app.state.f = search.value;
        TK.app.go({ f: search.value });
      },
      onkeydown: (event) => event.key === "Enter" && (TK.app.shown = TK.searchTexts()),
    });
    const order = h(
      "select",
      {
        "aria-label": "Order of sessions",
        onchange: () => {
          sortBy = order.value;
          refresh();
        },
      },
      h("option", { value: "" }, "as recorded"),
      Object.entries(MEASURES).map(([name, { text }]) => h("option", { value: name }, "sort by " + text)),
    );
    TK.replace(side, h("div", { class: "filter" }, search, order), h("p", { class: "filter-note note", role: "status" }), list.element);
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
    note(filterFault());
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
      TK.morePolicies(),
      h("p", { id: "sentence" }, TK.policySentence(chosen.policy, chosen)),
      h("p", { id: "rule" }, index.rules[TK.policyNumber()]),
      h(
        "p",
        { class: "note" },
        "Click a policy to choose it, a session to see its tokens. forward: tokens of all rows; shared once: each shared prefix counts once.",
        !index.tokenizer && index.text && " Tokens are shown as ids; with --tokenizer the page has their text.",
      ),
      chosen.tokens_out_of_context > 0 &&
        h(
          "p",
          { class: "note" },
          `${n(chosen.tokens_out_of_context)} of its trained tokens are in a row that, up to them, differs from the path they were sampled after.`,
        ),
      TK.comparison(),
      index.violations && [h("h2", {}, "What verify finds in the rows"), TK.rules(index.violations)],
      h("h2", {}, "Drift by cause"),
      TK.driftGroups(index.drift[TK.policyNumber()], TK.app),
      h("h2", {}, "Sessions"),
      h(
        "p",
        { class: "note" },
        `${n(TK.shown.length)} of ${TK.plural(index.sessions.id.length, "session")} match the filter. A bar filters by its range.`,
        state.f && [" ", h("button", { onclick: () => TK.setFilter("") }, "show all")],
      ),
      h("div", { class: "histograms" }, Object.keys(MEASURES).map(histogram)),
      rewards(),
      groupTable(),
    ];
  };

  const BINS = 20;
  const [WIDE, HIGH] = [220, 64];

  // How a measure is distributed over sessions; those that match the filter are darker.
  function histogram(name) {
    const { text, value } = MEASURES[name];
    const ids = TK.app.index.sessions.id.map((_, k) => k).filter((k) => value(k) !== null);
    const values = ids.map(value);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (!(high > low)) return null;
    const integers = values.every(Number.isInteger);
    const step = integers ? Math.max(1, Math.ceil((high - low + 1) / BINS)) : (high - low) / BINS;
    const count = Math.min(BINS, Math.floor((high - low) / step) + 1);
    const bin = (k) => Math.min(Math.floor((value(k) - low) / step), count - 1);
    const [all, match] = [new Array(count).fill(0), new Array(count).fill(0)];
    const shown = new Set(TK.shown);
    for (const k of ids) {
      all[bin(k)]++;
      if (shown.has(k)) match[bin(k)]++;
    }
    const most = Math.max(...all);
    const format = (x) => (integers ? n(x) : x.toPrecision(3));
    const bar = (number) => {
      const [from, to] = [low + number * step, low + (number + 1) * step];
      const last = number === count - 1;
      const act = () => TK.setFilter(`${name}:${number ? from : ""}:${last ? "" : to}`);
      const rect = (counted, props) =>
        h("rect", {
          x: (number * WIDE) / count,
          width: WIDE / count - 1,
          y: HIGH * (1 - counted / most),
          height: (HIGH * counted) / most,
          ...props,
        });
      return h(
        "g",
        {
          class: "bar",
          role: "button",
          tabindex: all[number] ? "0" : null,
          "aria-label": `${text} ${format(from)} to ${format(last ? high : to)}: ${TK.plural(all[number], "session")}`,
          onclick: act,
          onkeydown: (event) => event.key === "Enter" && act(),
        },
        h("rect", { x: (number * WIDE) / count, width: WIDE / count, y: 0, height: HIGH, fill: "transparent" }),
        rect(all[number], { fill: "var(--prompt)" }),
        rect(match[number], { fill: "var(--trained)" }),
      );
    };
    return h(
      "figure",
      {},
      h("figcaption", {}, text),
      h("svg", { width: WIDE, height: HIGH, role: "group", "aria-label": text }, [...Array(count).keys()].map(bar)),
      h("div", { class: "axis" }, h("small", {}, format(low)), h("small", {}, `at most ${TK.plural(most, "session")}`), h("small", {}, format(high))),
    );
  }

  // Reward against sampled tokens, a point per session.
  function rewards() {
    const { sessions } = TK.app.index;
    const ids = TK.shown.filter((k) => sessions.reward[k] !== null);
    if (ids.length < 2) return null;
    const span = (values) => [Math.min(...values), Math.max(...values)];
    const [low, high] = span(ids.map((k) => sessions.reward[k]));
    const [least, most] = span(ids.map((k) => sessions.sampled[k]));
    const height = 180;
    const place = (k, width) => [
      10 + ((width - 20) * (sessions.sampled[k] - least)) / Math.max(most - least, 1),
      height - 10 - ((height - 20) * (sessions.reward[k] - low)) / (high - low || 1),
    ];
    const canvas = TK.canvas(
      height,
      `Reward, ${low} to ${high}, against sampled tokens, ${n(least)} to ${n(most)}, of ${TK.plural(ids.length, "session")}`,
      (context, width) => {
        context.fillStyle = TK.css("--trained");
        context.globalAlpha = 0.6;
        for (const k of ids) {
          const [x, y] = place(k, width);
          context.beginPath();
          context.arc(x, y, 4, 0, 7);
          context.fill();
        }
      },
      { class: "scatter" },
    );
    canvas.addEventListener("click", (event) => {
      const distance = (k) => {
        const [x, y] = place(k, canvas.clientWidth);
        return (x - event.offsetX) ** 2 + (y - event.offsetY) ** 2;
      };
      TK.app.go({ s: sessions.id[ids.reduce((best, k) => (distance(k) < distance(best) ? k : best))] });
    });
    return h(
      "figure",
      { class: "wide" },
      h("figcaption", {}, "reward against sampled tokens", h("small", {}, ` reward ${low} to ${high}, ${n(least)} to ${n(most)} tokens`)),
      canvas,
    );
  }

  // Groups of rollouts. One whose rewards are all equal has no advantage to learn from.
  function groupTable() {
    const { sessions } = TK.app.index;
    const groups = Map.groupBy(
      [...sessions.id.keys()].filter((k) => sessions.group[k] !== null),
      (k) => sessions.group[k],
    );
    if (!groups.size) return null;
    const lines = [...groups].map(([name, ids]) => {
      const known = ids.map((k) => sessions.reward[k]).filter((reward) => reward !== null);
      const mean = known.reduce((sum, reward) => sum + reward, 0) / known.length;
      const deviation = Math.sqrt(known.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / known.length);
      return { name, ids, known, mean, deviation };
    });
    const open = (k) => h("button", { onclick: () => TK.app.go({ s: sessions.id[k] }) }, h("bdi", {}, sessions.id[k]));
    const flat = lines.filter(({ known, deviation }) => known.length > 1 && deviation === 0);
    return [
      h("h2", {}, "Groups"),
      h(
        "p",
        {},
        `${n(flat.length)} of ${TK.plural(lines.length, "group")} have the same reward in every session, so they give no gradient under a group baseline.`,
      ),
      TK.table(
        { kind: "groups", heads: ["group", "sessions", "mean reward", "standard deviation", ""], numbers: [1, 2, 3], name: 0 },
        lines
          .sort((a, b) => flat.includes(b) - flat.includes(a))
          .slice(0, 200)
          .map(({ name, ids, mean, deviation }) => [
            h("bdi", {}, name),
            n(ids.length),
            TK.fixed(mean, 3),
            TK.fixed(deviation, 3),
            h("div", { class: "examples" }, ids.slice(0, 8).map(open)),
          ]),
      ),
    ];
  }

  // Only a served page can show other policies: their tables are made when asked for.
  TK.morePolicies = () => {
    if (!TK.live) return null;
    const field = h("input", { placeholder: "slime fork_threshold=256", "aria-label": "Another policy, with its choices", size: "32" });
    const submit = (event) => {
      event.preventDefault();
      TK.addPolicy(field.value.trim());
    };
    return h("form", { class: "tools", onsubmit: submit }, field, h("button", {}, "show this policy"));
  };

  TK.addPolicy = async (text) => {
    const policies = [...TK.app.index.texts, text];
    const status = document.getElementById("status");
    try {
      TK.app.indexes = await TK.source.indexes(policies);
    } catch (error) {
      return TK.replace(status, error.message);
    }
    TK.replace(status);
    Object.assign(TK.app, { policies, session: null });
    return TK.app.go({ p: TK.app.index.policies.at(-1).policy });
  };

  // A running gateway appends turns: look for them now and then.
  TK.look = async () => {
    try {
      if ((await TK.source.version()) !== TK.app.index.version) await TK.app.load();
    } catch (error) {
      // the next look may succeed: a turn may have been half written
      TK.replace(document.getElementById("status"), error.message);
    }
  };
  TK.follow = () => TK.app.index.follow && setInterval(TK.look, 2000);
})();
