"""The page in a real browser: what it shows, and what it refuses to run."""

import json

import pyarrow as pa
import pytest

import trajkit as tk
from trajkit import cli
from trajkit.schema import SESSIONS
from trajkit.view import page

pytestmark = pytest.mark.browser


@pytest.fixture
def write(tmp_path):
    """Write the page of a run, and return its address."""

    def written(turns, *args, **options):
        path = tmp_path / "page.html"
        path.write_text(page(turns, *args, **options), encoding="utf-8")
        return path.as_uri()

    return written


def counts(tab):
    """What the table of policies shows, by policy."""
    return {
        line["policy"]: {name: int(line[name]) for name in line if name != "policy"}
        for line in tab.run(
            "[...document.querySelectorAll('tr[data-policy]')].map((e) => ({...e.dataset}))"
        )
    }


def simulated(turns, policies=None):
    return {
        line["policy"]: {
            "trained": line["tokens_trained"],
            "lost": line["tokens_lost"],
            "rows": line["rows"],
            "forward": line["tokens_forward"],
        }
        for line in tk.simulate(turns, policies).to_pylist()
    }


def test_the_demo_s_page_counts_what_simulate_counts(tab, demo, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert cli.main(["view", str(demo), "-o", str(path)]) == cli.DONE
    assert f"written to {path}" in capsys.readouterr().out
    tab.open(path.as_uri())
    turns = tk.read_turns(demo)
    assert counts(tab) == simulated(turns)
    (session,) = turns["session_id"].unique().to_pylist()
    tab.go(s=session)
    assert counts(tab) == simulated(turns)
    # and the strips cover every sampled token once, those trained twice aside
    spans = tab.run(
        "TK.app.session.policies.map((one) => [one.label,"
        " one.lost.reduce((sum, span) => sum + span.length, 0)])"
    )
    lost = {name: one["lost"] for name, one in simulated(turns).items()}
    assert dict(spans) == lost


RULES = {
    "faithful": "Where a prompt drifts: a new row starts.",
    "slime": "fewer than 1,024 tokens",
    "segments": "No token of a reply that drifted is then trained.",
    "trl": "trained up to the drift",
    "polar": "keeps the reply as sampled",
    "miles": "A call is refused if its prompt drifts by 1 or more tokens.",
    "per_call": "Every call is a row.",
}


def test_policies_are_said_in_words(tab, write, short):
    tab.open(write(short) + "#s=short")
    strips = tab.run(
        "[...document.querySelectorAll('.all-policies canvas.strip')]"
        ".map((e) => e.getAttribute('aria-label'))"
    )
    for label, line in zip(strips, tk.simulate(short).to_pylist(), strict=True):
        start = f"{line['policy']} trains {line['tokens_trained']:,} of "
        assert label.startswith(start)
    for policy, rule in RULES.items():
        tab.go(s=None, p=policy)
        assert rule in tab.text("#rule")


def test_a_click_on_a_loss_leads_to_the_drift_that_caused_it(tab, write, long):
    tab.open(write(long, ["slime"]) + "#s=long&tab=losses")
    assert tab.text("[role=tab][aria-selected=true]").startswith("Lost")
    # each has its reason in words
    first = tab.texts("table.losses tbody tr")[0]
    spans = tk.analysis.output_spans(long, "slime").to_pylist()
    lost = next(span for span in spans if span["kind"] != "trained")
    turn, n = lost["turn_index"], lost["output_stop"] - lost["output_start"]
    reason = f"turn {turn + 1}'s prompt differs from turn {turn}'s reply at token 0"
    for text in (f"{n} of ", "absorbed", reason):
        assert text in first
    tab.click("canvas.strip", x=2)
    assert tab.text("[role=tab][aria-selected=true]").startswith("Drift")
    drift = tk.classify_drift(long, tk.link(long, "slime")).to_pylist()[0]
    assert tab.run("TK.app.session.turnIndex[TK.app.state.t]") == drift["turn_index"]


@pytest.mark.parametrize("decoded", [False, True])
def test_a_prompt_that_is_sent_again_is_no_drift(tab, write, tokenizer, decoded):
    calls = [
        ([1, 2, 3], [4, 5]),
        ([1, 2, 3], [6, 7]),  # a retry
        ([1, 2, 3, 6, 7, 8], [9]),
        ([1, 2, 3, 6, 7, 8], [10]),  # a retry
        ([1, 2, 3], [11]),  # a rollback
        ([1, 2, 3, 12], [13]),  # drift: its reply came back as another token
    ]
    turns = tk.from_records(
        [
            {"session_id": "s", "prompt_ids": prompt, "output_ids": output}
            for prompt, output in calls
        ]
    )
    tab.open(write(turns, ["trl"], tokenizer=tokenizer if decoded else None))
    assert len(tab.texts("table.groups tbody tr")) == 1
    assert "1 of 1" in tab.text("table.groups tbody")
    assert "1 drift" in tab.text("#side .line")
    tab.go(s="s", tab="losses")
    reasons = [line.split("\t")[3] for line in tab.texts("table.losses tbody tr")]
    assert reasons[0] == "turn 1 is a retry: the prompt of turn 0 again"
    assert reasons[1] == "turn 3 is a retry: the prompt of turn 2 again"
    assert reasons[-1].startswith("turn 5's prompt differs from turn 4's reply")
    # a click on what a retry replaced stays with the losses
    tab.click("canvas.strip", x=2)
    assert tab.run("[TK.app.state.tab, TK.app.state.t]") == ["losses", 0]
    tab.go(tab="drift")
    assert len(tab.texts(".turns button")) == 1
    tab.go(tab="conversation")
    until = [one.split()[2] for one in tab.texts("[aria-label=Conversation] option")]
    assert until == ["0", "2", "3", "5"]


def test_the_state_is_in_the_address(tab, write, short):
    address = write(short, ["faithful", "slime"])
    tab.open(address + "#s=short&p=slime&tab=losses")
    assert tab.text("tr.chosen th") == "slime"
    # names of JavaScript's own are no parts of the page
    tab.open(address + "#s=short&tab=constructor")
    assert len(tab.texts("[role=tab][aria-selected=true]")) == 1
    tab.open(address + "#s=short&p=slime&tab=losses")
    tab.key("j")
    tab.key("j")
    assert "t=1" in tab.run("location.hash")
    tab.run("history.back()")
    tab.open(address + "#s=nobody")
    assert "What each policy keeps" in tab.text("main")


HOSTILE = (
    "</script><script>document.title='owned';window.owned=1</script>"
    "<img src=x onerror='window.owned=1'> \u202eevil\u2066 \x00\x1b[31m <!-- ]]> @title@"
    + "w"
    * 400
)


def test_hostile_text_is_shown_and_does_nothing(tab, write):
    name = "<b>s</b>\u202e"
    messages = [{"role": HOSTILE, "content": HOSTILE + "x" * 10_000_000}]
    reply = {"role": "assistant", "content": HOSTILE}
    turns = tk.from_records(
        [
            {
                "session_id": name,
                "prompt_ids": [1, 2],
                "output_ids": [3, 4],
                "prompt_messages": messages,
                "response_message": reply,
                "agent_id": HOSTILE,
                "model": HOSTILE,
            },
            {
                "session_id": name,
                "prompt_ids": [1, 2, 3, 9],
                "output_ids": [5],
                "prompt_messages": [*messages, reply, messages[0]],
                "response_message": reply,
            },
        ]
    )
    tab.open(write(turns, ["slime"], title=HOSTILE))
    for which in ("conversation", "losses", "drift", "forest", "tokens"):
        tab.go(s=name, tab=which, t=1)
        assert tab.run("window.owned") is None
        assert tab.run("document.querySelectorAll('img, b').length") == 0
        for part in ("html", "#main", "#panel"):
            wide = tab.run(f"document.querySelector('{part}').scrollWidth")
            assert wide <= 1400
        shown = tab.run("document.body.innerText")
        assert "<b>s</b>\u27e8U+202E\u27e9" in shown
        for hidden in "\u202e\u2066\x00\x1b":
            assert hidden not in shown
        assert hidden not in tab.run("document.title")


def test_a_script_that_enters_the_page_is_refused(tab, write, short):
    tab.open(write(short, ["slime"]))
    tab.run(
        "{ const e = document.createElement('script'); e.textContent = 'window.owned = 1';"
        " document.body.append(e) }"
    )
    assert tab.run("window.owned") is None
    assert any("Content Security Policy" in error for error in tab.errors)
    tab.errors.clear()


def test_a_page_without_text_has_none(tab, write, recorded, tokenizer):
    turns, session = recorded
    tab.open(write(turns, ["faithful"], text=False, tokenizer=tokenizer))
    tab.go(s=session, tab="tokens")
    assert tab.run("TK.app.session.messages.map(([, body]) => body).join('')") == ""
    assert tab.run("TK.app.vocabulary") is None
    assert tab.run("document.querySelector('#data-vocabulary-0')") is None


def chips(tab, side):
    """The ids and texts of the marked tokens of the first difference."""
    return tab.run(
        f"[...document.querySelector('.difference').querySelectorAll('.token.{side}')]"
        ".map((e) => [Number(e.querySelector('small').textContent),"
        " e.querySelector('bdi')?.textContent])"
    )


def test_drift_is_a_difference_of_ids_and_text_with_its_cause(
    tab, write, recorded, tokenizer
):
    turns, _ = recorded
    findings = tk.analysis.explain_drift(turns, tk.link(turns), tokenizer)
    found = findings.to_pylist()[0]
    tab.open(write(turns, ["faithful"], tokenizer=tokenizer))
    groups = {
        line.split("\t")[0]: line.split("\t")[2:4]
        for line in tab.texts("table.groups tbody tr")
    }
    causes = [one["cause"] for one in findings.to_pylist()]
    assert groups.keys() == {cause.replace("_", " ") for cause in causes}
    n = causes.count(found["cause"])
    assert groups[found["cause"].replace("_", " ")][0] == f"{n} of {len(causes)}"

    tab.run(
        f"TK.app.goTurn({json.dumps(found['session_id'])}, {found['turn_index']}, 'drift')"
    )
    full = {line["turn_index"]: line for line in tk.expand(turns).to_pylist()}
    path = full[found["parent"]]["prompt_ids"] + full[found["parent"]]["output_ids"]
    prompt = full[found["turn_index"]]["prompt_ids"]
    held, given = chips(tab, "held"), chips(tab, "given")
    assert [id for id, _ in held] == path[found["path_start"] : found["path_stop"]]
    assert [id for id, _ in given] == prompt[
        found["prompt_start"] : found["prompt_stop"]
    ]
    shown = "".join(text for _, text in held)
    assert shown.replace("·", " ").replace("↵", "\n") == found["path_text"]


def test_calls_are_bars_in_lanes_of_rows_with_their_labels(tab, write, recorded):
    turns, session = recorded
    tab.open(write(turns, ["slime"]))
    tab.go(s=session, tab="forest")
    assert len(tab.texts("g.call")) == turns.num_rows
    rows = tk.linearize(turns, "slime")
    assert len(tab.texts("table.rows tbody tr")) == rows.num_rows
    reasons = tk.analysis.why(turns, "slime")["sentence"].to_pylist()
    shown = tab.texts("table.rows tbody tr td:last-child")
    assert [f"row {k} {text}" for k, text in enumerate(shown)] == reasons
    label = tab.run("document.querySelector('svg.forest').getAttribute('aria-label')")
    branches = tk.analysis.label_branches(turns, tk.link(turns, "slime"))
    for branch in branches["label"].to_pylist():
        assert branch.replace("_", "-") in label


def test_a_session_of_131072_tokens_shows_every_token_where_it_is(tab, write, long):
    tab.open(write(long, ["slime", "faithful"]) + "#s=long&p=slime&tab=tokens&t=127")
    last = long.slice(127, 1).to_pylist()[0]
    path = last["prompt_ids"] + last["output_ids"]
    assert len(path) == 131_072
    assert tab.run("[...TK.app.session.path(127)]") == path
    # the lines in view only
    assert tab.run("document.querySelectorAll('.text [data-k]').length") < 2_000
    at = len(last["prompt_ids"]) + 5
    tab.go(k=at)
    facts = dict(
        zip(tab.texts(".facts dt"), tab.texts(".facts dd"), strict=True),
    )
    assert facts["id"] == str(path[at])
    assert facts["sampled by"].startswith("turn 127, token 5 of")
    assert float(facts["logprob"]) == pytest.approx(
        last["output_logprobs"][5], abs=1e-4
    )
    assert facts["slime"].startswith("trained")
    assert tab.text(".text .chosen").strip() == str(path[at])
    # and scrolling moves to other tokens
    tab.run("document.querySelector('.reader .virtual').scrollTop = 0")
    tab.run("new Promise((done) => requestAnimationFrame(() => done(true)))")
    assert tab.text(".text [data-k='0']").strip() == str(path[0])


def test_tokens_of_every_turn_are_those_recorded(tab, write, recorded):
    turns, session = tk.expand(recorded[0]), recorded[1]
    tab.open(write(turns, ["faithful"]))
    tab.go(s=session)
    paths = tab.run(
        "[...Array(TK.app.session.count).keys()].map((k) => [...TK.app.session.path(k)])"
    )
    assert paths == [
        line["prompt_ids"] + line["output_ids"] for line in turns.to_pylist()
    ]
    requests = tab.run(
        "[...Array(TK.app.session.count).keys()].map((k) => TK.app.session.request(k)"
        ".map((number) => TK.app.session.messages[number]))"
    )
    bodies = {}
    for line in turns.to_pylist():
        for message in [*line["messages"], line["response"]]:
            if message["body"] is not None:
                bodies[message["key"]] = message["body"]
    assert requests == [
        [[message["role"], bodies[message["key"]]] for message in line["messages"]]
        for line in turns.to_pylist()
    ]


def test_half_characters_are_shown_as_bytes(tab, write, tokenizer):
    text = "h\u00e9\U0001f642"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    call = {"session_id": "s", "prompt_ids": ids, "output_ids": ids}
    tab.open(write(tk.from_records([call]), ["per_call"], tokenizer=tokenizer))
    tab.go(s="s", tab="tokens", t=0)
    shown = tab.texts(".text [data-k]")
    assert "h" in shown[0]
    joined = "".join(shown[: len(ids)])
    assert "\\xF0" in joined
    assert bytes.fromhex("".join(shown[: len(ids)][-4:]).replace("\\x", "")) == (
        text[-1].encode()
    )


def test_a_bar_filters_the_sessions(tab, write):
    turns = [
        {"session_id": f"s{k}", "turn_index": t, "prompt_ids": [1], "output_ids": [2]}
        for k in range(6)
        for t in range(k + 1)
    ]
    # of three groups, "a" has equal rewards, and "c" has one session
    rewards = {
        "session_id": [f"s{k}" for k in range(6)],
        "reward": [1.0, 1.0, 0.0, 1.0, None, 0.5],
        "group_id": ["a", "a", "b", "b", None, "c"],
        "error": [None] * 6,
    }
    sessions = pa.table(rewards, schema=SESSIONS)
    tab.open(write(tk.from_records(turns), ["per_call"], sessions=sessions))
    assert "1 of 3 groups have the same reward" in tab.text("main")
    assert len(tab.texts("#side .line")) == 6
    tab.run(
        "document.querySelector('[aria-label^=\"turns 5\"]')"
        ".dispatchEvent(new MouseEvent('click'))"
    )
    tab.run("TK.app.shown")
    assert tab.texts("#side .line bdi") == ["s4"]
    assert "f=turns" in tab.run("location.hash")


def test_violations_are_shown_with_the_row_s_tokens(tab, write, recorded):
    turns, _ = recorded
    rows = tk.linearize(turns)
    masks = rows["loss_mask"].to_pylist()
    masks[1][-2] = False
    column = pa.array(masks, rows.schema.field("loss_mask").type)
    at = rows.schema.get_field_index("loss_mask")
    rows = rows.set_column(at, rows.schema.field(at), column)
    (found,) = tk.verify(rows, turns, "faithful").to_pylist()
    tab.open(write(turns, ["faithful"], rows=rows))
    assert "mask" in tab.text("table.compared")
    tab.go(s=found["session_id"], tab="verify")
    (line,) = tab.texts(".panel-verify tbody tr")
    assert found["detail"] in line
    ids = rows["input_ids"][found["row_index"]].as_py()
    assert tab.text(".token.wrong small") == str(ids[found["token"]])
    assert tab.run("document.querySelector('.token.wrong.masked')") is None
    tab.open(write(turns, ["faithful"], rows=tk.linearize(turns)))
    assert "No violations." in tab.text("main")
    tab.go(s=found["session_id"], tab="verify")
    assert "break no rule" in tab.text("#panel")


def test_two_runs_are_compared(tab, write, recorded, long):
    turns, _ = recorded
    policies = ["faithful", "slime"]
    tab.open(write(turns, policies, title="A", against=("B", long, None)))
    table = tab.texts("table.compared")[0].splitlines()
    for name, one, two in zip(
        policies,
        simulated(turns, policies).values(),
        simulated(long, policies).values(),
        strict=True,
    ):
        (line,) = [line for line in table if line.startswith(name)]
        for counts_, shown in zip((one, two), line.split("\t")[1:3], strict=True):
            share = counts_["trained"] / (counts_["trained"] + counts_["lost"])
            assert float(shown.removesuffix(" %")) == pytest.approx(
                100 * share, abs=0.05
            )
    tab.key("o")
    assert counts(tab) == simulated(long, policies)
    assert tab.texts("#side .line bdi") == ["long"]
    tab.go(s="long", tab="tokens")
    assert tab.run("TK.app.session.count") == 128


def test_the_keys_move_by_turn_drift_and_loss(tab, write, long):
    tab.open(write(long, ["slime"]) + "#s=long")

    spans = tk.analysis.output_spans(long, "slime").to_pylist()
    lost = [span["turn_index"] for span in spans if span["kind"] != "trained"]
    after = next(turn for turn in lost if turn > 0)
    moves = [("n", 1, "drift"), ("n", 2, "drift"), ("p", 1, "drift"), ("k", 0, "drift")]
    for key, *state in [*moves, ("5", 0, "tokens"), ("l", after, "tokens")]:
        tab.key(key)
        assert tab.run("[TK.app.state.t, TK.app.state.tab]") == state
    tab.key("?")
    assert tab.run("document.getElementById('help').open")
    tab.run("document.getElementById('help').close()")
    tab.key("r")
    assert "What each policy keeps" in tab.text("main")


def test_the_page_follows_the_colour_scheme(tab, write, short):
    tab.open(write(short, ["slime"]))
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.run(paper) == "rgb(255, 255, 255)"
    tab.scheme("dark")
    assert tab.run(paper) == "rgb(20, 23, 27)"
    tab.scheme("light")


def test_every_control_has_a_name(tab, write, recorded, tokenizer):
    turns, session = recorded
    tab.open(write(turns, ["slime"], tokenizer=tokenizer))
    unnamed = (
        "[...document.querySelectorAll('button, input, select, canvas, svg, "
        '[role=button], [tabindex="0"]\')].filter((e) => !(e.textContent.trim() || '
        "e.getAttribute('aria-label') || e.closest('label') || "
        "e.closest('[aria-hidden]'))).length"
    )
    assert tab.run(unnamed) == 0
    for which in ("conversation", "losses", "drift", "forest", "tokens"):
        tab.go(s=session, tab=which)
        assert tab.run(unnamed) == 0


def test_a_notebook_s_frame_works_without_an_address(tab, tmp_path, short):
    shown = page(short, ["slime"])
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><body>{shown._repr_html_()}", encoding="utf-8")
    tab.open_frame(path.as_uri())
    tab.go(s="short", tab="tokens", t=3)
    assert tab.text(".tools select") != ""
    assert tab.run("TK.app.state.t") == 3
    assert counts(tab) == simulated(short, ["slime"])


def test_runs_without_turns_or_sampled_tokens_are_shown(tab, write):
    tab.open(write(tk.from_records([])))
    assert "The run has no turns." in tab.text("main")
    call = {"session_id": "s", "prompt_ids": [1], "output_ids": []}
    tab.open(write(tk.from_records([call])))
    for which in ("conversation", "losses", "drift", "forest", "tokens"):
        tab.go(s="s", tab=which)
    assert [one.strip() for one in tab.texts(".text [data-k]")] == ["1"]
