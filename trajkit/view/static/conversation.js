"use strict";
// The conversation of a turn: its messages as a reader expects them, and what the policy does
// with the tokens of each reply.

(() => {
  const { h, n } = TK;
  // characters of a long text that are shown before it is unfolded
  const SHORT = 1200;
  const IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;

  // The turn whose reply a message of a request is, or undefined. Of several equal replies, one
  // of `ancestors` is preferred. A reply that the log lacks is what the next request has there.
  const turnOf = (session, numbers, k, ancestors) => {
    const matches = [null, numbers[k]].flatMap((reply) => session.repliesOf.get(reply) || []).filter((turn) => {
      const request = session.request(turn);
      return request !== null && request.length === k && request.every((number, i) => number === numbers[i]);
    });
    return matches.find((turn) => ancestors.has(turn)) ?? matches.at(-1);
  };

  const folded = (text) => {
    if (text.length <= SHORT) return h("bdi", {}, text);
    const shown = h("bdi", {}, text.slice(0, SHORT));
    const more = (event) => {
      shown.append(TK.visible(text.slice(SHORT)));
      event.target.remove();
    };
    return [shown, h("button", { onclick: more }, `show ${n(text.length - SHORT)} more characters`)];
  };

  const unfold = (name, content) => h("details", { class: "part" }, h("summary", {}, name), content);

  const json = (value) => folded(typeof value === "string" ? value : JSON.stringify(value, null, 2));

  // An object, or that of a JSON text; null if it is none.
  const objectOf = (value) => {
    try {
      const read = typeof value === "string" ? JSON.parse(value) : value;
      return read instanceof Object && !Array.isArray(read) ? read : null;
    } catch {
      return null;
    }
  };

  // The arguments of a tool call, a text with its own lines each. What is not a JSON object is
  // shown as it was sampled.
  const callArguments = (value) => {
    const named = objectOf(value);
    if (named === null) return h("pre", {}, json(value));
    const lines = Object.entries(named).map(([name, one]) => [h("dt", {}, h("bdi", {}, name)), h("dd", {}, h("pre", {}, json(one)))]);
    return h("dl", { class: "arguments" }, lines);
  };

  // The text of a part of a message's content; null if it is an image or unknown.
  const textOf = (one) => {
    const text = typeof one === "string" ? one : (one?.text ?? one?.content);
    return typeof text === "string" && /text$/.test(one.type ?? "text") ? text : null;
  };

  // A part of a message's content: text, an image, or what the page does not know, as JSON.
  const part = (one) => {
    const text = textOf(one);
    if (text !== null) return h("div", { class: "words" }, folded(text));
    const url = one?.image_url?.url ?? one?.image_url;
    if (typeof url === "string" && IMAGE.test(url)) return h("img", { src: url, alt: "image of the message", class: "thumbnail" });
    if (typeof url === "string") return h("div", { class: "note" }, "image ", h("bdi", {}, url.slice(0, 100)));
    return unfold(String(one?.type ?? "part"), h("pre", {}, json(one)));
  };

  const KNOWN = ["role", "content", "tool_calls", "tool_call_id", "name"];
  const REASONING = ["reasoning_content", "reasoning", "thinking"];

  // A message in its parts: reasoning, content, calls, and fields that the page does not know.
  const read = (body) => {
    const message = objectOf(body) ?? { content: body };
    const reasoning = REASONING.map((name) => message[name]).find((text) => typeof text === "string" && text !== "");
    const other = Object.entries(message).filter(([name, one]) => !KNOWN.includes(name) && !(REASONING.includes(name) && one === reasoning));
    const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
    return {
      reasoning,
      content: [message.content ?? []].flat().filter((one) => one !== ""),
      calls: calls.map((call) => [call?.function?.name ?? call?.name ?? "call", call?.function?.arguments ?? call?.arguments ?? call]),
      other: Object.fromEntries(other),
    };
  };

  const parts = ({ reasoning, content, calls, other }) => [
    reasoning && unfold("reasoning", h("pre", {}, folded(reasoning))),
    content.map(part),
    calls.map(([name, value]) => h("div", { class: "tool-call" }, h("b", {}, h("bdi", {}, name)), callArguments(value))),
    Object.keys(other).length > 0 && unfold(Object.keys(other).join(", "), h("pre", {}, json(other))),
  ];

  const strings = (value) => (value instanceof Object ? Object.values(value).flatMap(strings) : [String(value ?? "")]);

  // Whether a reader of a message sees a word, in lower case, whatever is folded.
  TK.messageHas = (body, word) => {
    const { reasoning, content, calls, other } = read(body);
    const seen = content.map((one) => textOf(one) ?? (one?.image_url ? "" : one));
    const given = calls.map(([name, value]) => [name, Object.entries(objectOf(value) ?? { "": value })]);
    return strings([reasoning, seen, given, other]).some((text) => text.toLowerCase().includes(word));
  };

  // What the policy does with the tokens of a reply, and the drift of the prompts that follow.
  const fate = (session, view, turn, app) => {
    const spans = view.spansOf.get(turn) || [];
    const counts = new Map();
    for (const span of spans) counts.set(span.kind, (counts.get(span.kind) ?? 0) + span.length);
    const drifts = [...view.links.drift.keys()].filter((k) => view.links.parent[k] === turn);
    const again = [...view.links.branches.values()].filter((one) => one.label === "retry" && one.other === session.turnIndex[turn]);
    return h(
      "footer",
      {},
      h(
        "span",
        { class: "sharebar", "aria-hidden": "true" },
        spans.map((span) => h("i", { style: { background: TK.color(span.kind), flexGrow: span.length } })),
      ),
      h(
        "button",
        { onclick: () => app.go({ tab: "tokens", t: turn, k: session.promptLength[turn] }) },
        `turn ${session.turnIndex[turn]}: ${TK.plural(session.outputLength[turn], "token")}`,
      ),
      h("span", { class: "note" }, [...counts].map(([kind, count]) => `${n(count)} ${TK.words(kind)}`).join(", ")),
      drifts.map((k) =>
        h(
          "button",
          { class: "drifted", onclick: () => app.go({ tab: "drift", t: k }) },
          `drift in turn ${session.turnIndex[k]}: ${TK.driftCause(view.links, k)}`,
        ),
      ),
      again.map((one) => h("button", { onclick: () => app.go({ t: session.place.get(one.turn_index) }) }, `asked again: retry in turn ${one.turn_index}`)),
    );
  };

  // Tokens of a turn's path as text, or without a vocabulary as ids.
  const tokenText = (session, turn, start, stop) => {
    const { vocabulary } = TK.app;
    const texts = [...session.path(turn).subarray(start, stop)].map((id) => vocabulary?.text(id) ?? id);
    return h("div", { class: "words" }, folded(texts.join(vocabulary ? "" : " ")));
  };

  // A message, or tokens: a reply that has no text is shown by what was sampled.
  const article = (session, view, [role, body], turn, app, tokens) => {
    const [start, stop] = turn === undefined ? [0, 0] : [session.promptLength[turn], session.pathLength(turn)];
    const shown = body === null ? [] : parts(read(body)).flat().filter(Boolean);
    if (turn !== undefined && !shown.length) shown.push(start < stop ? tokenText(session, turn, start, stop) : h("p", { class: "note" }, "No token was sampled."));
    return h(
      "article",
      {
        class: "message " + (["system", "user", "assistant", "tool"].includes(role) ? role : "other"),
        "data-turn": turn ?? null,
        style: turn === undefined ? {} : { borderColor: TK.color(mainKind(view, turn)) },
      },
      h("h3", {}, h("bdi", {}, role), role === "assistant" && turn === undefined && h("small", {}, " not a recorded reply")),
      tokens ?? (shown.length || body !== null ? shown : h("p", { class: "note" }, "The log does not have the text.")),
      turn !== undefined && fate(session, view, turn, app),
    );
  };

  // The kind that most tokens of a reply have.
  const mainKind = (view, turn) => {
    const spans = view.spansOf.get(turn) || [];
    return spans.reduce((best, span) => (span.length > best.length ? span : best), { kind: "untrainable", length: -1 }).kind;
  };

  // The last turns of the conversations: those that no turn continues.
  const leaves = (session, view) => {
    const continues = (parent, k) => parent !== null && (view.links.drift.has(k) || view.links.leaves[k] === session.pathLength(parent));
    const continued = new Set(view.links.parent.filter(continues));
    return [...Array(session.count).keys()].filter((k) => !continued.has(k));
  };

  // The turn that is shown first: the last of those with the most messages.
  const longest = (session) => {
    const size = (k) => session.request(k)?.length ?? -1;
    return [...Array(session.count).keys()].reduce((best, k) => (size(k) >= size(best) ? k : best), 0);
  };

  // The conversation of a turn without messages: what was sampled, and what came between.
  const ofTokens = (session, view, turn, app) => {
    let at = 0;
    const boxes = view.links.sampledIn(session, turn).map((one) => {
      const before = one.start > at && article(session, view, ["prompt", null], undefined, app, tokenText(session, turn, at, one.start));
      at = one.stop;
      return [before, article(session, view, ["assistant", null], one.turn, app)];
    });
    const rest = at < session.pathLength(turn) && article(session, view, ["prompt", null], undefined, app, tokenText(session, turn, at, session.pathLength(turn)));
    return h("div", { class: "conversation" }, boxes, rest);
  };

  TK.conversation = (session, view, app) => {
    const main = longest(session);
    const turn = app.state.t ?? main;
    const numbers = session.request(turn);
    const listed = [...new Set([...leaves(session, view), main, turn])].sort((a, b) => a - b);
    const agents = session.facts.agent_id;
    const choice = h(
      "select",
      { "aria-label": "Conversation", onchange: (event) => app.go({ t: Number(event.target.value) }) },
      listed.map((k) =>
        h("option", { value: String(k), selected: k === turn }, `until turn ${session.turnIndex[k]}${agents?.[k] ? `, agent ${agents[k].slice(0, 60)}` : ""}`),
      ),
    );
    const tools = h("div", { class: "tools" }, h("label", {}, "conversation ", choice));
    if (numbers === null) return [tools, h("p", { class: "note" }, "This turn was recorded without messages: these are its tokens."), ofTokens(session, view, turn, app)];
    const ancestors = new Set();
    for (let k = turn; k !== null; k = view.links.parent[k]) ancestors.add(k);
    const reply = session.response[turn];
    return [
      tools,
      h(
        "div",
        { class: "conversation" },
        numbers.map((number, k) => article(session, view, session.messages[number], turnOf(session, numbers, k, ancestors), app)),
        article(session, view, session.messages[reply] ?? ["assistant", null], turn, app),
      ),
    ];
  };
})();
