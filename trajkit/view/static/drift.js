"use strict";
(() => {
  TK.driftSentence = (session, links, k) => {
    const drift = links.drift.get(k);
    const parent = links.parent[k];
    const turn = session.turnIndex[parent];
    const where =
      drift.region === "last_reply"
        ? `turn ${turn}'s reply at token ${drift.lcp - session.promptLength[parent]} of ${session.outputLength[parent]}`
        : drift.region === "earlier_reply"
          ? `turn ${turn}'s path inside an earlier reply, at token ${TK.n(drift.lcp)}`
          : `turn ${turn}'s path outside its replies, at token ${TK.n(drift.lcp)}`;
    return `turn ${session.turnIndex[k]}'s prompt leaves ${where} (${TK.driftCause(links, k)})`;
  };
  TK.driftCause = (links, k) => {
    const found = links.findings && links.findings.get(k);
    const causes = found ? [...new Set(found.map((one) => one.cause))] : [links.drift.get(k).cause];
    return causes.map(TK.words).join(", ");
  };
})();
