"use strict";
// Drift: where a prompt departs from the path that it continues, as a diff of token ids.

(() => {
  const { h, n } = TK;
  // tokens shown of one side of a difference, at its start and its end
  const SHOWN = 40;
  // tokens that agree, shown around a difference
  const AROUND = 6;

  TK.driftCause = (links, k) => {
    const found = links.findings && links.findings.get(k);
    const causes = found ? [...new Set(found.map((one) => one.cause))] : [links.drift.get(k).cause];
    return causes.map(TK.words).join(", ");
  };

  TK.driftSentence = (session, links, k) => {
    const drift = links.drift.get(k);
    const parent = links.parent[k];
    const turn = session.turnIndex[parent];
    const where =
      drift.region === "last_reply"
        ? `turn ${turn}'s reply at token ${drift.lcp - session.promptLength[parent]} of ${session.outputLength[parent]}`
        : drift.region === "earlier_reply"
          ? `turn ${turn}'s path at token ${n(drift.lcp)}, inside an earlier reply`
          : `turn ${turn}'s prompt at token ${n(drift.lcp)}, before any reply`;
    return `turn ${session.turnIndex[k]}'s prompt differs from ${where} (${TK.driftCause(links, k)})`;
  };

  // A token as text over its id.
  TK.token = (id, kind) => {
    const { vocabulary } = TK.app;
    const text = vocabulary ? vocabulary.text(id) : null;
    return h(
      "span",
      { class: `token ${kind || ""} ${vocabulary && vocabulary.special(id) ? "special" : ""}` },
      text !== null && h("bdi", {}, text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replace(/ /g, "\u00b7") || "\u2205"),
      h("small", {}, id),
    );
  };

  // The differences of one turn: ranges of the parent's path, and of the prompt in their place.
  const differences = (session, links, k) => {
    const found = links.findings && links.findings.get(k);
    if (found) return found;
    const drift = links.drift.get(k);
    const pathStop = drift.resync_path ?? session.pathLength(links.parent[k]);
    const promptStop = drift.resync_prompt ?? session.promptLength[k];
    return [{ cause: drift.cause, path_start: drift.lcp, path_stop: pathStop, prompt_start: drift.lcp, prompt_stop: promptStop }];
  };

  // One side of a difference: what comes before, the range, and what comes after.
  const side = (ids, start, stop, kind) => {
    const range = (from, to, name) => [...ids.subarray(Math.max(from, 0), Math.max(to, 0))].map((id) => TK.token(id, name));
    const middle =
      stop - start > 2 * SHOWN
        ? [
            range(start, start + SHOWN, kind),
            h("span", { class: "more" }, `${n(stop - start - 2 * SHOWN)} more tokens`),
            range(stop - SHOWN, stop, kind),
          ]
        : stop > start
          ? range(start, stop, kind)
          : h("span", { class: "more" }, "nothing");
    return h("div", { class: "tokens" }, range(start - AROUND, start), middle, range(stop, stop + AROUND));
  };

  const range = (start, stop) => `${TK.plural(stop - start, "token")} [${n(start)}:${n(stop)}]`;

  const difference = (session, path, prompt, one) => {
    // tokens show their text, but not all of a long side
    const long = Math.max(one.path_stop - one.path_start, one.prompt_stop - one.prompt_start) > 2 * SHOWN;
    return h(
      "section",
      { class: "difference" },
      h(
        "h3",
        {},
        TK.words(one.cause),
        h("small", {}, ` ${range(one.path_start, one.path_stop)} of the path, ${range(one.prompt_start, one.prompt_stop)} of the prompt`),
      ),
      h(
        "dl",
        { class: "sides" },
        h("dt", {}, "path as sampled"),
        h("dd", {}, side(path, one.path_start, one.path_stop, "held"), long && text(one.path_text, "held")),
        h("dt", {}, "next prompt"),
        h("dd", {}, side(prompt, one.prompt_start, one.prompt_stop, "given"), long && text(one.prompt_text, "given")),
      ),
    );
  };

  // The text of a difference, its middle left out if it is long.
  const text = (content, kind) => {
    if (!content) return null;
    let short = content;
    if (content.length > 1200)
      short = `${content.slice(0, 600)}\n\u2026 ${n(content.length - 1200)} more characters \u2026\n${content.slice(-600)}`;
    return h("pre", { class: kind }, h("bdi", {}, short));
  };

  // Whether the request repeats the reply as a message, which names who changed the tokens.
  const replyAsMessage = (session, links, k) => {
    const parent = links.parent[k];
    const before = session.request(parent);
    const now = session.request(k);
    const reply = session.response[parent];
    if (!before || !now || reply === null) return null;
    const shown = now[before.length];
    if (shown === undefined) return h("p", { class: "note" }, "The request has no message in the place of the reply.");
    if (shown === reply)
      return h(
        "p",
        { class: "note" },
        "The request repeats the reply's message unchanged: the chat template or the tokenizer made the difference.",
      );
    const bodies = [reply, shown].map((number) => session.messages[number][1]);
    if (bodies.includes(null)) return h("p", { class: "note" }, "The request shows another message in the place of the reply.");
    let same = 0;
    while (same < bodies[0].length && bodies[0][same] === bodies[1][same]) same++;
    const from = Math.max(0, same - 200);
    return [
      h("h3", {}, "The request shows another message in the place of the reply"),
      h(
        "dl",
        { class: "sides" },
        ["reply as recorded", "message in the next request"].map((name, side) => [
          h("dt", {}, name),
          h(
            "dd",
            {},
            h(
              "pre",
              {},
              h(
                "bdi",
                {},
                from ? "\u2026" : "",
                bodies[side].slice(from, same),
                h("mark", { class: side ? "given" : "held" }, bodies[side].slice(same, same + 600)),
              ),
            ),
          ),
        ]),
      ),
    ];
  };

  TK.driftPanel = (session, view, app) => {
    const { links } = view;
    const turns = [...links.drift.keys()].sort((a, b) => a - b);
    if (!turns.length) return h("p", {}, `No prompt of this session drifts as ${view.label} links its turns.`);
    const chosen = links.drift.has(app.state.t) ? app.state.t : turns[0];
    const drift = links.drift.get(chosen);
    const path = session.path(links.parent[chosen]);
    const prompt = session.path(chosen).subarray(0, session.promptLength[chosen]);
    const lost = view.lost.filter((span) => span.drift === chosen).reduce((sum, span) => sum + span.length, 0);
    const all = differences(session, links, chosen);
    return [
      h(
        "div",
        { class: "turns", role: "group", "aria-label": "Turns with drift" },
        turns.map((k) =>
          h(
            "button",
            { "aria-pressed": String(k === chosen), onclick: () => app.go({ t: k }) },
            `turn ${session.turnIndex[k]} `,
            h("small", {}, TK.driftCause(links, k)),
          ),
        ),
      ),
      h(
        "p",
        {},
        TK.driftSentence(session, links, chosen).replace(/^t/, "T"),
        `. ${TK.plural(drift.tokens_after_drift, "sampled token")} of the path ${drift.tokens_after_drift === 1 ? "comes" : "come"} after that; `,
        lost ? `${view.label} loses ${TK.plural(lost, "token")} to it.` : `${view.label} loses none to it.`,
      ),
      all.slice(0, 20).map((one) => difference(session, path, prompt, one)),
      all.length > 20 && h("p", { class: "note" }, `${all.length - 20} more differences are not shown.`),
      replyAsMessage(session, links, chosen),
    ];
  };

  // Drift over the run by cause, with examples that lead to it.
  TK.driftGroups = (groups, app) => {
    const total = groups.reduce((sum, one) => sum + one.findings, 0);
    if (!total) return h("p", {}, "No prompt of the run drifts.");
    const heads = ["cause", groups[0].region && "in", "differences", "turns", "sampled tokens after it", "what it means, and what to change"];
    const examples = (group) =>
      group.examples
        .slice(0, 6)
        .map(({ session_id: id, turn_index: turn }) => h("button", { onclick: () => app.goTurn(id, turn, "drift") }, h("bdi", {}, id), ` turn ${turn}`));
    return TK.table(
      { kind: "groups", caption: "Drift by cause", heads, numbers: [2, 3, 4], name: 0 },
      groups.map((group) => [
        TK.words(group.cause),
        group.region && TK.words(group.region),
        `${n(group.findings)} of ${n(total)}`,
        n(group.turns),
        n(group.tokens),
        [
          (app.index.causes[group.cause] || []).map((text) => h("div", {}, text.replaceAll("`", ""))),
          h("div", { class: "examples" }, examples(group)),
        ],
      ]),
    );
  };
})();
