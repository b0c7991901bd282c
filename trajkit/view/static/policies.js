"use strict";
// Policies: what each keeps and costs, strips of the sampled tokens, and the losses.

(() => {
  const { h, n } = TK;

  // The words are those of the report and the terminal (trajkit/analysis/words.py).
  TK.reasonText = (kind) => TK.app.index.losses[kind]?.[1] ?? "A row trains it.";
  TK.group = (kind) => (kind === "trained" ? kind : (TK.app.index.losses[kind]?.[0] ?? "context"));
  // The colours are in the style sheet: Okabe and Ito's, distinct with colour blindness.
  TK.color = (kind) => TK.css("--" + TK.group(kind));

  TK.legend = () =>
    h(
      "ul",
      { class: "legend", "aria-label": "Colours" },
      Object.entries(TK.app.index.groups).map(([group, text]) =>
        h("li", {}, h("i", { class: "swatch", style: { background: `var(--${group})` } }), text),
      ),
    );

  // "1,210 absorbed, 4 masked"
  TK.lossText = (counts) =>
    Object.keys(TK.app.index.losses)
      .filter((reason) => counts["lost_" + reason])
      .map((reason) => `${n(counts["lost_" + reason])} ${TK.words(reason)}`)
      .join(", ");

  const lost = (counts) => counts.tokens_sampled - counts.tokens_trained;

  TK.policySentence = (label, counts) => {
    const rows = `${TK.plural(counts.rows, "row")} of ${n(counts.tokens_forward)} tokens`;
    const kept = `${label} trains ${n(counts.tokens_trained)} of ${n(counts.tokens_sampled)} sampled tokens`;
    if (!lost(counts)) return `${kept}, in ${rows}. It loses none.`;
    return `${kept} (${TK.percent(counts.tokens_trained, counts.tokens_sampled)}), in ${rows}. It loses ${n(lost(counts))}: ${TK.lossText(counts)}.`;
  };

  // A bar of a policy's shares, for the run and for sessions that are not open.
  TK.shareBar = (counts) => {
    const parts = [["trained", counts.tokens_trained]];
    for (const reason of Object.keys(TK.app.index.losses)) parts.push([reason, counts["lost_" + reason] || 0]);
    return h(
      "div",
      { class: "sharebar", "aria-hidden": "true" },
      parts
        .filter(([, count]) => count)
        .map(([kind, count]) =>
          h("i", { style: { background: TK.color(kind), flexGrow: count }, title: `${TK.words(kind)}: ${n(count)}` }),
        ),
    );
  };

  // The table at the top: a line per policy, with a strip of the session or bars of the run.
  // `lines` have label, counts, and a cell to draw.
  TK.policyTable = (lines, chosen, choose) => {
    const titled = (text, title) => h("span", { title }, text);
    const words = TK.app.index.heads;
    const forward = titled(words.tokens_forward, "tokens of all rows, which a forward pass computes");
    const tree = titled(words.tokens_forward_shared, "the same with each shared prefix computed once");
    const heads = ["policy", words.share, lines[0] && lines[0].title, words.tokens_lost, words.rows, forward, tree];
    const props = (line) => {
      const { label, counts } = lines[line];
      return {
        class: label === chosen && "chosen",
        "data-policy": label,
        "data-trained": counts.tokens_trained,
        "data-lost": lost(counts),
        "data-rows": counts.rows,
        "data-forward": counts.tokens_forward,
      };
    };
    return TK.table(
      { kind: "policies", caption: "What each policy trains, loses and costs", heads, numbers: [1, 3, 4, 5, 6], name: 0, props },
      lines.map(({ label, counts, cell }) => [
        h("button", { "aria-pressed": String(label === chosen), onclick: () => choose(label) }, label),
        TK.percent(counts.tokens_trained, counts.tokens_sampled),
        cell,
        titled(n(lost(counts)), TK.lossText(counts)),
        n(counts.rows),
        n(counts.tokens_forward),
        n(counts.tokens_forward_shared),
      ]),
    );
  };

  // The sampled tokens of a session in order, in the colours of what the policy does.
  TK.strip = (session, view, { height, selected, choose }) => {
    const scale = (width) => width / Math.max(session.sampled, 1);
    const label = TK.policySentence(view.label, view.report);
    const draw = (context, width) => {
      const x = scale(width);
      // losses last, at least a pixel wide: one lost token of 60,000 must be seen
      for (const trained of [true, false])
        for (const span of view.spans) {
          if ((span.kind === "trained") !== trained) continue;
          const start = (session.sampledBefore[span.turn] + span.output_start) * x;
          context.fillStyle = TK.color(span.kind);
          context.fillRect(start, 0, Math.max(span.length * x, trained ? 0.5 : 1), height);
        }
      context.fillStyle = TK.css("--paper");
      if (width / session.count > 8)
        for (let k = 1; k < session.count; k++) context.fillRect(session.sampledBefore[k] * x - 0.5, 0, 1, height);
      if (selected !== null) {
        context.strokeStyle = TK.css("--ink");
        context.lineWidth = 2;
        const start = session.sampledBefore[selected] * x;
        context.strokeRect(start + 1, 1, Math.max(session.outputLength[selected] * x - 2, 2), height - 2);
      }
    };
    const canvas = TK.canvas(height, label, draw, { class: "strip" });
    const at = (event) => {
      const token = Math.floor(event.offsetX / scale(canvas.clientWidth));
      let turn = session.sampledBefore.findIndex((before) => before > token) - 1;
      if (turn < 0) turn = session.count - 1;
      return { turn, offset: token - session.sampledBefore[turn] };
    };
    canvas.addEventListener("click", (event) => {
      const { turn, offset } = at(event);
      choose(turn, offset, view.span(turn, offset));
    });
    canvas.addEventListener("mousemove", (event) => {
      const { turn, offset } = at(event);
      const span = view.span(turn, offset);
      canvas.title = span
        ? TK.visible(`turn ${session.turnIndex[turn]}, sampled token ${offset}: ${TK.words(span.kind)}. ${TK.reasonText(span.kind)}`)
        : "";
    });
    return canvas;
  };

  // Why a loss happened, as a sentence.
  TK.lossReason = (session, view, span) => {
    if (view.links.drift.has(span.drift)) return TK.driftSentence(session, view.links, span.drift);
    const branch = view.links.branches.get(span.drift);
    return branch ? `turn ${branch.turn_index} is a ${TK.label(branch)}: ${branch.evidence}` : TK.reasonText(span.kind);
  };

  // The losses of the chosen policy, a line for each range of tokens.
  TK.losses = (session, view, app) => {
    const count = view.lost.length;
    if (!count) return h("p", { class: "note" }, TK.policySentence(view.label, view.report));
    const shown = view.lost.slice(0, 500);
    const swatch = (kind) => h("i", { class: "swatch", style: { background: TK.color(kind) } });
    const go = (name, change) => h("button", { onclick: () => app.go({ tab: name, ...change }) }, name);
    return [
      h("p", {}, TK.policySentence(view.label, view.report)),
      TK.table(
        {
          kind: "losses",
          caption: `Tokens that ${view.label} loses`,
          heads: ["turn", "sampled tokens", "", "why", ""],
          numbers: [0],
          props: (line) => ({ class: shown[line].turn === app.state.t && "chosen" }),
        },
        shown.map((span) => [
          session.turnIndex[span.turn],
          [`${n(span.length)} of ${n(session.outputLength[span.turn])}`, h("small", {}, ` [${span.output_start}:${span.output_stop}]`)],
          h("span", { class: "kind" }, swatch(span.kind), TK.words(span.kind)),
          TK.lossReason(session, view, span),
          h(
            "div",
            { class: "go" },
            view.links.drift.has(span.drift) && go("drift", { t: span.drift }),
            go("tokens", { t: span.turn, k: session.promptLength[span.turn] + span.output_start }),
          ),
        ]),
      ),
      count > shown.length && h("p", { class: "note" }, `${n(count - shown.length)} more ranges are not listed.`),
    ];
  };
})();
