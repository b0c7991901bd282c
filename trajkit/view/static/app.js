"use strict";
// The page: its state, which is in the URL's hash, and what is shown for it.

(() => {
  const { h, n } = TK;
  const TABS = { __proto__: null, conversation: "Conversation", losses: "Lost", drift: "Drift", forest: "Calls", tokens: "Tokens", verify: "Verify" };
  const KEYS = [
    ["j k", "next and previous turn"],
    ["n p", "next and previous drift"],
    ["l", "next loss of the policy"],
    ["\u2190 \u2192", "previous and next token"],
    ["[ ]", "previous and next session"],
    ["1 2 3 4 5 6", Object.values(TABS).join(", ")],
    ["r", "the run"],
    ["o", "the other of two runs"],
    ["?", "this help"],
  ];
  const main = document.getElementById("main");
  const status = document.getElementById("status");

  // the state of a page that cannot have it in its URL
  let address = null;

  const app = {
    // one index per run; `index` is that of the run shown
    indexes: [],
    get index() {
      return app.indexes[app.state.r ?? 0] || app.indexes[0];
    },
    vocabularies: [],
    get vocabulary() {
      return app.vocabularies[app.state.r ?? 0];
    },
    session: null,
    // r: run, s: session, p: policy, tab, t: place of the turn, k: token of its path,
    // b: background of tokens, f: filter of sessions
    state: {},
    // policies as the server takes them, where others than those of the command are shown
    policies: [],

    view: () => app.session.policies.find((one) => one.label === app.state.p) || app.session.policies[0],

    // Changes the state. The browser's back button returns to the state before.
    go(change) {
      const next = { ...app.state, ...change };
      if ("s" in change && change.s !== app.state.s) Object.assign(next, { t: null, k: null, ...change });
      else if ("t" in change && change.t !== app.state.t && !("k" in change)) next.k = null;
      try {
        history.pushState(null, "", hashOf(next));
      } catch {
        // the frame of a notebook has no address of its own
        address = hashOf(next);
      }
      return app.show();
    },

    // Opens a session at a turn, which is given by its number.
    async goTurn(id, turnIndex, tab) {
      await app.go({ s: id, tab });
      return app.go({ t: app.session.place.get(turnIndex) });
    },

    show() {
      // the promise of what is shown last, for whoever waits for it
      return (app.shown = show());
    },
  };
  TK.app = app;

  async function show() {
    const before = app.state;
    app.state = stateOf(address ?? location.hash);
    try {
      await render(before);
    } catch (error) {
      fail(error);
      throw error;
    }
  }

  const NUMBERS = ["r", "t", "k"];
  const hashOf = (state) => {
    const kept = Object.entries(state).filter(([, value]) => value !== null && value !== undefined && value !== "");
    return "#" + new URLSearchParams([...kept, ...app.policies.map((one) => ["policy", one])]);
  };
  const stateOf = (hash) => {
    const given = new URLSearchParams(hash.slice(1));
    const state = { r: null, s: null, p: null, tab: null, t: null, k: null, b: null, f: null };
    for (const name of Object.keys(state)) if (given.get(name)) state[name] = given.get(name);
    for (const name of NUMBERS) state[name] = /^\d+$/.test(state[name] || "") ? Number(state[name]) : null;
    if (!(state.tab in TABS)) state.tab = null;
    return state;
  };

  const fail = (error) => TK.replace(status, `This page failed: ${error.message}`);

  const sessionNumber = () => app.index.sessions.id.indexOf(app.state.s);
  TK.policyNumber = () => Math.max(0, app.index.policies.findIndex((one) => one.policy === app.state.p));

  async function open(number) {
    TK.replace(status, "opening");
    const run = app.state.r ?? 0;
    const session = await TK.source.session(number, app.index.sessions.id[number], app.policies, run);
    session.run = run;
    if (app.index.tokenizer && !app.vocabulary) app.vocabularies[run] = await TK.source.vocabulary(run);
    TK.replace(status);
    return session;
  }

  async function render(before) {
    if (app.state.p === null && app.index.policies.length) app.state.p = app.index.policies[0].policy;
    const number = sessionNumber();
    if (document.documentElement.dataset.mode === "paper") {
      TK.runHead();
      return renderPaper();
    }
    document.title = (number < 0 ? "" : TK.visible(app.state.s) + " \u00b7 ") + TK.visible(app.index.title);
    TK.runHead();
    if (number < 0) {
      app.session = null;
      TK.replace(main, TK.runPage());
      return;
    }
    const isChosen = (session) => session && session.id === app.state.s && session.run === (app.state.r ?? 0);
    if (!isChosen(app.session)) {
      const session = await open(number);
      // another session was chosen while this one was unpacked
      if (!isChosen(session)) return;
      app.session = session;
    }
    if (app.state.t !== null && app.state.t >= app.session.count) app.state.t = null;
    renderSession(number, before);
  }

  function renderSession(number, before) {
    const { session, state } = app;
    const view = app.view();
    state.tab ??= firstTab(session, view);
    const scroll = before && before.s === state.s ? main.scrollTop : 0;
    TK.replace(main, sessionHead(number, view), sessionTabs(number, view));
    main.scrollTop = scroll;
    TK.afterPanel?.();
    TK.afterPanel = null;
  }

  // Facts of the session, and what policies do with its sampled tokens.
  function sessionHead(number, view) {
    const { session, state } = app;
    const choose = (view, turn, offset, span) => {
      const place = { t: turn, k: session.promptLength[turn] + offset };
      if (!span || span.kind === "trained" || !view.links.drift.has(span.drift))
        return app.go({ ...place, tab: state.tab === "drift" ? "losses" : state.tab });
      return app.go({ tab: "drift", t: span.drift });
    };
    const line = (one) => ({
      label: one.label,
      counts: one.report,
      title: `${TK.n(session.sampled)} sampled tokens of ${TK.plural(session.count, "turn")}`,
      cell: TK.strip(session, one, {
        height: session.policies.length > 4 ? 16 : 26,
        selected: state.t,
        choose: (turn, offset, span) => {
          app.state.p = one.label;
          return choose(one, turn, offset, span);
        },
      }),
    });
    const sessions = app.index.sessions;
    const facts = [
      sessions.reward[number] !== null && `reward ${sessions.reward[number]}`,
      sessions.group[number] !== null && `group ${sessions.group[number]}`,
      sessions.error[number] !== null && `error: ${sessions.error[number]}`,
      `${TK.plural(session.count, "turn")}, ${n(sessions.context[number])} tokens of context`,
      sessions.logprob[number] !== null && `mean logprob ${sessions.logprob[number].toFixed(3)}`,
    ];
    return [
      h(
        "header",
        { class: "session" },
        h("h2", {}, h("bdi", {}, session.id)),
        h("p", { class: "note" }, facts.filter(Boolean).join(" \u00b7 ")),
      ),
      TK.policyTable([line(view)], view.label, (label) => app.go({ p: label })),
      h(
        "details",
        { class: "all-policies", open: app.unfolded, ontoggle: (event) => (app.unfolded = event.target.open) },
        h("summary", {}, `${TK.plural(session.policies.length, "policy", "policies")} to choose from`),
        TK.policyTable(session.policies.map(line), view.label, (label) => app.go({ p: label })),
        TK.morePolicies(),
      ),
      TK.legend(),
    ];
  }

  function sessionTabs(number, view) {
    const { session, state } = app;
    return [
      h(
        "div",
        { class: "tabs", role: "tablist", "aria-label": "Parts of the session" },
        Object.entries(TABS)
          .filter(([tab]) => tab !== "verify" || session.violations)
          .map(([tab, name]) =>
            h(
              "button",
              {
                role: "tab",
                id: "tab-" + tab,
                "aria-selected": String(tab === state.tab),
                "aria-controls": "panel",
                onclick: () => app.go({ tab }),
              },
              name,
              tabCount(tab, view),
            ),
          ),
      ),
      h(
        "section",
        { id: "panel", role: "tabpanel", "aria-labelledby": "tab-" + state.tab, class: "panel-" + state.tab },
        panels[state.tab](view),
      ),
    ];
  }

  // On paper: the run, then one session after the other.
  const SESSIONS_ON_PAPER = 20;
  async function renderPaper() {
    const { id } = app.index.sessions;
    const shown = id.slice(0, SESSIONS_ON_PAPER);
    const parts = [TK.runPage()];
    if (shown.length < id.length)
      parts.push(h("p", { class: "note" }, `The first ${shown.length} of ${n(id.length)} sessions follow; --session and --sample choose others.`));
    for (const number of shown.keys()) {
      app.session = await open(number);
      const view = app.view();
      parts.push(sessionHead(number, view), h("h3", {}, TABS.losses), panels.losses(view));
    }
    app.session = null;
    TK.replace(main, parts);
  }

  // What a session opens with: its text, else what the policy loses, else its tokens.
  const firstTab = (session, view) => {
    if (app.index.text && session.messages.some(([, body]) => body !== null)) return "conversation";
    return view.lost.length ? "losses" : "tokens";
  };

  const tabCount = (tab, view) => {
    const counts = {
      losses: view.lost.length,
      drift: view.links.drift.size,
      forest: app.session.count,
      verify: app.index.sessions.violations?.[sessionNumber()],
    };
    return tab in counts && h("small", {}, " " + n(counts[tab]));
  };

  const panels = {
    conversation: (view) => TK.conversation(app.session, view, app),
    losses: (view) => TK.losses(app.session, view, app),
    drift: (view) => TK.driftPanel(app.session, view, app),
    forest: (view) => TK.forest(app.session, view, app),
    tokens: (view) => TK.tokens(app.session, view, app),
    verify: (view) => TK.violations(app.session, view, app),
  };

  // The next element of a sorted list after the current one, around its end.
  const around = (list, current, step) => {
    if (!list.length) return null;
    const after = step > 0 ? list.find((one) => one > current) : list.findLast((one) => one < current);
    return after ?? (step > 0 ? list[0] : list.at(-1));
  };

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select, textarea")) return;
    const { state, session } = app;
    const act = {
      "?": () => document.getElementById("help").showModal(),
      r: () => app.go({ s: null }),
      o: () => TK.otherRun(),
      "]": () => step(1),
      "[": () => step(-1),
    };
    if (session) {
      const view = app.view();
      const turn = state.t ?? -1;
      const move = (list, by, tab) => {
        const next = around(list, turn, by);
        if (next !== null) app.go({ t: next, tab: tab || state.tab });
      };
      const turns = [...Array(session.count).keys()];
      const drifts = [...view.links.drift.keys()].sort((a, b) => a - b);
      act.j = () => move(turns, 1);
      act.k = () => move(turns, -1);
      act.n = () => move(drifts, 1, "drift");
      act.p = () => move(drifts, -1, "drift");
      act.l = () => nextLoss(view);
      if (state.tab === "tokens" && state.k !== null) {
        const last = session.pathLength(state.t ?? 0) - 1;
        act.ArrowRight = () => app.go({ k: Math.min(state.k + 1, last) });
        act.ArrowLeft = () => app.go({ k: Math.max(state.k - 1, 0) });
      }
      Object.keys(TABS).forEach((tab, k) => (act[k + 1] = () => app.go({ tab })));
    }
    if (!act[event.key]) return;
    event.preventDefault();
    act[event.key]();
  }

  function nextLoss(view) {
    const { session, state } = app;
    if (!view.lost.length) return;
    const at = (span) => session.sampledBefore[span.turn] + span.output_start;
    const now = state.t === null ? -1 : session.sampledBefore[state.t] + Math.max((state.k ?? 0) - session.promptLength[state.t], 0);
    const span = view.lost.find((one) => at(one) > now) || view.lost[0];
    app.go({ t: span.turn, k: session.promptLength[span.turn] + span.output_start, tab: state.tab === "tokens" ? "tokens" : "losses" });
  }

  function step(by) {
    const ids = TK.filtered();
    const next = around([...ids.keys()], ids.indexOf(sessionNumber()), by);
    if (next !== null) app.go({ s: app.index.sessions.id[ids[next]] });
  }

  app.load = async () => {
    app.policies = new URLSearchParams(location.hash.slice(1)).getAll("policy");
    app.indexes = await TK.source.indexes(app.policies);
    app.state = stateOf(address ?? location.hash);
    app.session = null;
    TK.sidebar();
    await app.show();
    if (app.state.f) await (app.shown = TK.searchTexts());
  };

  async function start() {
    const help = document.getElementById("help");
    TK.add(help, [
      h("h2", {}, "Keys"),
      TK.table({ heads: [], name: 0 }, KEYS.map(([keys, text]) => [keys.split(" ").map((one) => h("kbd", {}, one)), text])),
      h("form", { method: "dialog" }, h("button", {}, "Close")),
    ]);
    document.getElementById("keys").addEventListener("click", () => help.showModal());
    addEventListener("keydown", key);
    addEventListener("popstate", app.show);
    addEventListener("resize", app.show);
    await app.load();
    document.documentElement.dataset.ready = "true";
    if (TK.live) TK.follow();
  }
  addEventListener("DOMContentLoaded", () =>
    start().catch((error) => {
      fail(error);
      throw error;
    }),
  );
})();
