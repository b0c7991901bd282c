"use strict";
// The data of the page. A file has its chunks in elements <script type="text/plain">; the
// server answers with the same bytes. Both are gzip, and a session is unpacked when opened.

(() => {
  const fromBase64 = (text) => {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    // a loop, since a callback per byte takes seconds for a few megabytes
    for (let k = 0; k < binary.length; k++) bytes[k] = binary.charCodeAt(k);
    return bytes;
  };

  const inflate = async (bytes) => {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  const json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

  const embedded = async (name) => {
    const element = document.getElementById("data-" + name);
    return element && inflate(fromBase64(element.textContent));
  };

  const fetched = async (name, query) => {
    const answer = await fetch("api/" + name + "?" + query);
    if (!answer.ok) throw new Error(await answer.text());
    return inflate(new Uint8Array(await answer.arrayBuffer()));
  };

  const query = (policies, more) => new URLSearchParams([...policies.map((one) => ["policy", one]), ...Object.entries(more || {})]);

  const index = async (policies, run) => json(await (TK.live ? fetched("index", query(policies, { run })) : embedded("index-" + run)));

  // A session's chunk: a JSON object, and its turns as an Arrow stream.
  const opened = (bytes) => {
    const length = new DataView(bytes.buffer).getUint32(0, true);
    return { head: json(bytes.subarray(4, 4 + length)), stream: () => bytes.slice(4 + length) };
  };

  TK.live = document.documentElement.dataset.mode === "live";
  // `policies` are names with choices, as "slime fork_threshold=256". A file has only those
  // that it was made with. `run` is 0, or 1 for the second of two runs.
  TK.source = {
    // the index of every run: of one, or of two to compare
    indexes: async (policies) => {
      const first = await index(policies, 0);
      return first.runs > 1 ? [first, await index(policies, 1)] : [first];
    },
    session: async (number, id, policies, run) =>
      new TK.Session(await (TK.live ? fetched("session", query(policies, { id, run })) : embedded(`session-${run}-${number}`))),
    // Numbers of the sessions in whose messages a reader sees a word. `goOn(done, all)` says
    // whether the result is still wanted; null if not.
    search: async (word, run, ids, goOn) => {
      const found = new Set();
      for (const [k, id] of ids.entries()) {
        if (!goOn(k, ids.length)) return null;
        const messages = TK.live
          ? json(await fetched("messages", query([], { id, run })))
          : opened(await embedded(`session-${run}-${k}`)).head.messages;
        if (messages.some(([, body]) => body !== null && TK.messageHas(body, word))) found.add(k);
      }
      return found;
    },
    vocabulary: async (run) => {
      const bytes = await (TK.live ? fetched("vocabulary", query([], { run })) : embedded("vocabulary-" + run));
      return bytes && bytes.length > 4 ? new TK.Vocabulary(json(bytes)) : null;
    },
    version: async () => json(await fetched("version", "")),
  };

  TK.Vocabulary = class {
    constructor(columns) {
      this.at = new Map(columns.id.map((id, k) => [id, k]));
      this.columns = columns;
    }

    // The text of a token, with bytes as \xE2 where it is not text on its own.
    text(id) {
      const k = this.at.get(id);
      if (k === undefined) return String(id) + " ";
      const { text, hex } = this.columns;
      return text[k] !== null ? text[k] : hex[k].replace(/../g, (byte) => "\\x" + byte.toUpperCase());
    }

    bytes(id) {
      const k = this.at.get(id);
      if (k === undefined) return null;
      const { text, hex } = this.columns;
      if (text[k] === null) return hex[k];
      return [...new TextEncoder().encode(text[k])].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    }

    special(id) {
      return Boolean(this.columns.special[this.at.get(id)]);
    }
  };

  // One session. Turns are named by their place in the session, `turnIndex` has their numbers.
  TK.Session = class {
    constructor(bytes) {
      const { head, stream } = opened(bytes);
      const table = fl.tableFromIPC(stream());
      const column = (name) => table.getChild(name);
      this.id = head.id;
      this.messages = head.messages;
      this.violations = head.violations;
      this.facts = head.turns;
      this.count = table.numRows;
      this.turnIndex = [...column("turn_index")];
      this.place = new Map(this.turnIndex.map((turn, k) => [turn, k]));
      this.base = [...column("base")];
      this.shared = [...column("shared_length")];
      this.suffix = column("suffix_ids");
      this.output = column("output_ids");
      this.logprobs = column("output_logprobs");
      this.versions = column("weight_versions");
      this.values = table.names.filter(
        (name) => name === "output_logprobs" || !/^(base|turn_index|shared_.*|suffix_ids|output_.*|weight_versions)$/.test(name),
      );
      this.column = column;
      this.sharedMessages = [...(column("shared_messages") || [])];
      this.suffixMessages = head.suffix_messages;
      this.response = head.response;
      this.outputLength = Array.from({ length: this.count }, (_, k) => this.output.at(k).length);
      this.promptLength = Array.from({ length: this.count }, (_, k) => this.shared[k] + this.suffix.at(k).length);
      // tokens sampled before each turn
      this.sampledBefore = [0];
      for (const n of this.outputLength) this.sampledBefore.push(this.sampledBefore.at(-1) + n);
      this.sampled = this.sampledBefore.at(-1);
      this.links = head.links.map((one) => new Links(this, one));
      this.policies = head.policies.map((one) => new PolicyView(this, one));
      this.paths = new Map();
      // the turns that sampled each message
      this.repliesOf = Map.groupBy([...Array(this.count).keys()], (k) => this.response[k]);
    }

    pathLength(k) {
      return this.promptLength[k] + this.outputLength[k];
    }

    // The ids of a turn's prompt and output. Few are kept: a long session has megabytes.
    path(k) {
      const known = this.paths.get(k);
      if (known) return known;
      const path = new Int32Array(this.pathLength(k));
      path.set(this.output.at(k), this.promptLength[k]);
      // each part comes from the nearest turn that has it as its own
      for (let turn = k, stop = this.promptLength[k]; turn !== null && stop > 0;) {
        const shared = Math.min(this.shared[turn], stop);
        const prompt = Math.min(stop, this.promptLength[turn]);
        if (prompt > shared) path.set(this.suffix.at(turn).slice(0, prompt - shared), shared);
        if (stop > this.promptLength[turn])
          path.set(this.output.at(turn).slice(0, stop - this.promptLength[turn]), this.promptLength[turn]);
        stop = shared;
        turn = this.base[turn];
      }
      if (this.paths.size >= 6) this.paths.delete(this.paths.keys().next().value);
      this.paths.set(k, path);
      return path;
    }

    // Numbers of the messages of a turn's request, as `messages` has them; null if unknown.
    request(k) {
      const own = this.suffixMessages[k];
      if (own === null) return null;
      const parts = [own];
      for (let turn = k, stop = this.sharedMessages[k] || 0; turn !== null && stop > 0;) {
        turn = this.base[turn];
        const list = [...this.suffixMessages[turn]];
        const shared = this.sharedMessages[turn] || 0;
        if (this.response[turn] !== null) list.push(this.response[turn]);
        if (stop > shared) parts.unshift(list.slice(0, stop - shared));
        stop = Math.min(stop, shared);
      }
      return parts.flat();
    }

    version(k, offset) {
      const list = this.versions && this.versions.at(k);
      for (const one of list || []) if (one.start <= offset && offset < one.stop) return one.version;
      return null;
    }
  };

  // What depends on the parents of turns: drift and branches.
  class Links {
    constructor(session, columns) {
      const { links, drift, branches, findings } = columns;
      const place = (turn) => (turn === null ? null : session.place.get(turn));
      this.parent = links.parent.map(place);
      this.reason = links.link_reason;
      this.drift = new Map(lines(drift).map((line) => [place(line.turn_index), line]));
      this.branches = new Map(lines(branches).map((line) => [place(line.turn_index), line]));
      this.findings = findings && Map.groupBy(lines(findings), (line) => place(line.turn_index));
      // where each turn's prompt leaves its parent's path; a request sent again ends on it
      this.leaves = this.parent.map((parent, k) =>
        parent === null ? 0 : (this.drift.get(k)?.lcp ?? Math.min(session.pathLength(parent), session.promptLength[k])),
      );
    }

    // Ranges of a turn's path that were sampled: by which turn, from which token of its output.
    sampledIn(session, k) {
      const ranges = [];
      for (let turn = k, stop = session.pathLength(k); turn !== null;) {
        const start = session.promptLength[turn];
        if (stop > start) ranges.unshift({ start, stop: Math.min(stop, session.pathLength(turn)), turn });
        stop = Math.min(stop, this.leaves[turn]);
        turn = this.parent[turn];
      }
      return ranges;
    }
  }

  class PolicyView {
    constructor(session, columns) {
      this.label = columns.label;
      this.report = columns.report;
      this.links = session.links[columns.links];
      this.rows = lines(columns.rows);
      this.spans = lines(columns.spans);
      for (const span of this.spans) {
        span.turn = session.place.get(span.turn_index);
        span.drift = span.drift_turn === null ? null : session.place.get(span.drift_turn);
        span.length = span.output_stop - span.output_start;
      }
      this.spansOf = Map.groupBy(this.spans, (span) => span.turn);
      this.lost = this.spans.filter((span) => span.kind !== "trained");
    }

    span(turn, offset) {
      return (this.spansOf.get(turn) || []).find((one) => one.output_start <= offset && offset < one.output_stop);
    }
  }

  // Columns to objects.
  function lines(columns) {
    const names = Object.keys(columns);
    const count = names.length ? columns[names[0]].length : 0;
    return Array.from({ length: count }, (_, k) => Object.fromEntries(names.map((name) => [name, columns[name][k]])));
  }
})();
