"""The page in a real browser: what it shows, and what it refuses to run."""

import json

import pytest

import trajkit as tk
from trajkit import cli
from trajkit.policies import PRESETS
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


def test_policies_with_choices_count_what_simulate_counts(tab, write, long):
    policies = ["slime", tk.policy("slime", fork_threshold=64), "strict"]
    tab.open(write(long, policies))
    assert counts(tab) == simulated(long, policies)
    assert "slime(fork_threshold=64)" in counts(tab)


def test_a_click_on_a_loss_leads_to_the_drift_that_caused_it(tab, write, long):
    tab.open(write(long, ["slime"]) + "#s=long")
    assert tab.text("[role=tab][aria-selected=true]").startswith("Not trained")
    tab.click("canvas.strip", x=2)
    assert tab.text("[role=tab][aria-selected=true]").startswith("Drift")
    drift = tk.classify_drift(long, tk.link(long, "slime")).to_pylist()[0]
    assert tab.run("TK.app.session.turnIndex[TK.app.state.t]") == drift["turn_index"]


def test_every_loss_has_its_reason_in_words(tab, write, long):
    tab.open(write(long, ["slime"]) + "#s=long")
    first = tab.texts("table.losses tbody tr")[0]
    spans = tk.analysis.output_spans(long, "slime").to_pylist()
    lost = next(span for span in spans if span["kind"] != "trained")
    n = lost["output_stop"] - lost["output_start"]
    assert f"{n} of " in first
    assert "absorbed" in first
    turn = lost["turn_index"]
    assert f"turn {turn + 1}'s prompt leaves turn {turn}'s reply at token 0" in first


@pytest.mark.parametrize("policy", PRESETS)
def test_strips_name_their_counts_for_screen_readers(tab, write, long, policy):
    tab.open(write(long, [policy]) + "#s=long")
    (line,) = tk.simulate(long, [policy]).to_pylist()
    label = tab.run("document.querySelector('canvas.strip').getAttribute('aria-label')")
    assert label.startswith(f"{policy} trains {line['tokens_trained']:,} of ")


def test_the_state_is_in_the_address(tab, write, long):
    address = write(long, ["faithful", "slime"])
    tab.open(address + "#s=long&p=slime&tab=losses")
    assert tab.text("tr.chosen th") == "slime"
    tab.key("j")
    tab.key("j")
    assert "t=1" in tab.run("location.hash")
    tab.run("history.back()")
    tab.open(address + "#s=nobody")
    assert "What each policy keeps" in tab.text("main")


HOSTILE = (
    "</script><script>document.title='owned';window.owned=1</script>"
    "<img src=x onerror='window.owned=1'> \u202eevil\u2066 \x00\x1b[31m <!-- ]]> @title@"
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
    for which in ("losses", "drift", "forest", "tokens"):
        tab.go(s=name, tab=which, t=1)
        assert tab.run("window.owned") is None
        assert tab.run("document.querySelectorAll('img, b').length") == 0
        shown = tab.run("document.body.innerText")
        assert "<b>s</b>\u27e8U+202E\u27e9" in shown
        for hidden in "\u202e\u2066\x00\x1b":
            assert hidden not in shown
        assert hidden not in tab.run("document.title")


def test_a_script_that_enters_the_page_is_refused(tab, write, long):
    tab.open(write(long, ["slime"]))
    tab.run(
        "{ const e = document.createElement('script'); e.textContent = 'window.owned = 1';"
        " document.body.append(e) }"
    )
    assert tab.run("window.owned") is None
    assert any("Content Security Policy" in error for error in tab.errors)
    tab.errors.clear()


def test_a_page_without_text_has_none(write, tmp_path, demo, tokenizer):
    turns = tk.read_turns(demo)
    write(turns, ["faithful"], text=False, tokenizer=tokenizer)
    assert json.dumps(HOSTILE) not in (tmp_path / "page.html").read_text()
