"""Make the pictures of docs/view.md from a run of the demo.

python -m tests.view.pictures RUN docs
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import trajkit as tk
from tests.view.browser import browser
from trajkit.cli.options import load_tokenizer
from trajkit.view import page

TOKENIZER = Path("shim/trajkit_shim/engines/embedded")


def main(run: str, folder: str) -> None:
    """Write one picture per part of the page."""
    turns = tk.read_turns(run)
    html = page(turns, tokenizer=load_tokenizer(TOKENIZER), title="demo")
    drift = tk.classify_drift(turns, tk.link(turns, "slime")).to_pylist()
    # the session with most drift, at the drift that puts most tokens at stake
    drifts = Counter(one["session_id"] for one in drift if one["size"])
    worst = max(
        drift, key=lambda one: (drifts[one["session_id"]], one["tokens_after_drift"])
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "page.html")
        path.write_text(html, encoding="utf-8")
        with browser(Path(scratch, "chromium")) as tab:
            tab.size(1200, 780)
            tab.open(path.as_uri())
            session, turn = worst["session_id"], worst["turn_index"]
            for name in ("losses", "drift", "forest", "tokens"):
                tab.run("TK.app.go({p: 'slime'})")
                tab.run(f"TK.app.goTurn({session!r}, {turn}, {name!r})")
                top = "document.querySelector('.tabs').offsetTop - 60"
                tab.run(
                    f"document.getElementById('main').scrollTop = "
                    f"{0 if name == 'losses' else top}"
                )
                tab.run("new Promise((done) => requestAnimationFrame(() => done(1)))")
                tab.picture(Path(folder, f"view-{name}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
