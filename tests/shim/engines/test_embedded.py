"""The embedded engine's law: what it says of itself, and what it does."""

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.shim.fakes import cases, engine_request, load_tokenizer, raises
from tests.shim.train_tokenizer import CONTROL, MARKUP, VOCABULARY
from trajkit_shim.engines.base import Sampling
from trajkit_shim.engines.embedded import (
    END,
    EmbeddedEngine,
    Reply,
    Special,
    shaped,
    shipped,
    tool_call,
)
from trajkit_shim.errors import EngineError

VOCAB = shipped()
TOKENIZER = load_tokenizer()


def encoded(text):
    """The canonical ids of a text, with added tokens recognized."""
    return TOKENIZER.encode(text, add_special_tokens=False)


PROMPT = np.array(
    encoded("<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"), np.int32
)
TALK = [
    Reply(("Let me look.\n", *tool_call("bash", '{"command": "ls"}')), weight=3),
    Reply(("Let me see what is there.",)),
    Reply(("Let me look.",), weight=0.5),
]

# few characters with many tokens over them, one of two bytes, and the start of a marker
texts = st.text(alphabet="ins <|é", max_size=5)
parts = st.lists(texts | st.just(Special("<think>")), max_size=3).map(tuple)
replies = st.lists(
    st.builds(Reply, parts, st.sampled_from([0.25, 1.0, 3.0])), min_size=1, max_size=3
)


def saying(replies, **options):
    return EmbeddedEngine(lambda prompt: replies, **options)


def drawn(engine, n, prompt=PROMPT, **choices):
    request = engine_request(prompt, **{"max_new_tokens": 500, **choices})

    async def draw():
        return [await engine.generate(request) for _ in range(n)]

    return asyncio.run(draw())


def sampled(engine, prompt=PROMPT, **choices):
    return drawn(engine, 1, prompt, **choices)[0]


def score(engine, output_ids, sampling=None):
    """The logprobs that `generate` returns with an output or a prefix of one.

    -inf from the first id on that cannot be drawn. ``sampling``: its temperature,
    ``top_k`` and ``top_p`` apply.
    """
    state = engine._start(PROMPT.tolist())
    logprobs = np.full(len(output_ids), -np.inf, np.float32)
    for i, token in enumerate(output_ids):
        chances = shaped(state.next(), sampling or Sampling(max_new_tokens=1))
        if token not in chances:
            break
        logprobs[i] = min(math.log(chances[token]), 0.0)
        state = state.after(token)
    return logprobs


def spellings(engine, ids=()):
    """Every token sequence that the engine may give, with its probability."""
    if ids and ids[-1] == VOCAB.added[END]:
        return {ids: math.exp(score(engine, ids).sum())}
    state = engine._start(PROMPT.tolist())
    for token in ids:
        state = state.after(token)
    law = {}
    for token in state.next():
        law |= spellings(engine, (*ids, token))
    return law


def spelled(reply):
    shown = (p.text if isinstance(p, Special) else p for p in reply.parts)
    return "".join(shown) + END


@given(replies, st.sampled_from([0.05, 0.5, 1.0]))
@example([Reply(("in",)), Reply(("ins",))], 0.5)
@example([Reply(("in",)), Reply(("in",))], 0.5)
@example([Reply(())], 0.5)
@example([Reply(("in",))], 0.5)
def test_each_reply_has_its_weight_and_each_spelling_its_drift(said, drift):
    law, told = spellings(saying(said, drift=drift)), Counter()
    for ids, probability in law.items():
        told[VOCAB.decode(list(ids))] += probability
    weights = Counter()
    for reply in said:
        weights[spelled(reply)] += reply.weight / sum(each.weight for each in said)
    assert told.keys() == weights.keys()
    for text, weight in weights.items():
        assert math.isclose(told[text], weight, rel_tol=1e-4)
    # a token that is not the canonical one costs a drift
    if [reply.parts for reply in said] == [("in",)]:
        one, two = sorted(law.values())
        assert math.isclose(one / two, drift**2, rel_tol=1e-4)


def test_frequencies_and_logprobs_agree_with_the_scores():
    said = [Reply(("in is",), 2.0), Reply(("in",)), Reply(("in", Special("<think>")))]
    engine, n = saying(said, drift=0.4, seed=11), 4000
    choices, total = {"temperature": 2.0, "top_k": 3, "top_p": 0.9}, 0.0
    samples, sampling = (
        drawn(engine, n, **choices),
        Sampling(max_new_tokens=1, **choices),
    )
    seen = Counter(tuple(sample.output_ids.tolist()) for sample in samples)
    for sample in samples[:20]:
        scored = score(engine, sample.output_ids, sampling)
        np.testing.assert_array_equal(scored, sample.output_logprobs, strict=True)
    for ids in spellings(engine):
        chance = math.exp(score(engine, ids, sampling).sum())
        spread = math.sqrt(n * chance * (1 - chance))
        assert abs(seen[ids] - n * chance) <= 4 * spread + 1
        total += chance
    assert math.isclose(total, 1, rel_tol=1e-4)


def test_a_seed_fixes_the_sample_and_no_seed_does_not():
    def outputs(**choices):
        engine = saying(TALK, drift=0.5, seed=3)
        return {tuple(sample.output_ids) for sample in drawn(engine, 5, **choices)}

    fixed, free = outputs(seed=7), outputs()
    assert (len(fixed), len(free) > 1) == (1, True)
    assert (outputs(seed=7), outputs()) == (fixed, free)


def test_a_sample_cut_short_is_the_start_of_the_whole_one():
    engine = saying(TALK, drift=0.5)
    whole = sampled(engine, seed=7)
    assert whole.finish_reason == "stop"
    assert whole.output_ids[-1] == VOCAB.added[END]
    for length in range(1, len(whole.output_ids) + 1):
        cut = sampled(engine, seed=7, max_new_tokens=length)
        assert cut.output_ids.tolist() == whole.output_ids[:length].tolist()
        assert cut.output_logprobs.tolist() == whole.output_logprobs[:length].tolist()
        assert [(s.start, s.stop) for s in cut.weight_versions] == [(0, length)]
        ended = length == len(whole.output_ids)
        assert cut.finish_reason == ("stop" if ended else "length")


@cases(
    "text, choices",
    {
        "a string": ("name", {"stop": ("name",)}),
        "an id": ("<tool_call>", {"stop_token_ids": (VOCAB.added["<tool_call>"],)}),
    },
)
def test_what_stops_a_sample_stays_in_it(text, choices):
    sample = sampled(saying([TALK[0]], drift=0.5, seed=1), **choices)
    ids = sample.output_ids.tolist()
    assert sample.finish_reason == "stop"
    assert text in VOCAB.decode(ids)
    assert text not in VOCAB.decode(ids[:-1])


def test_what_spells_a_special_token_is_ordinary_bytes():
    said = Reply((f"a {END} b", Special("<think>"), "<think>"))
    for sample in drawn(saying([said], seed=1), 20):
        ids = sample.output_ids.tolist()
        added = [VOCAB.added["<think>"], VOCAB.added[END]]
        assert [token for token in ids if token >= VOCABULARY] == added
        assert VOCAB.decode(ids) == f"a {END} b<think><think>{END}"
        assert encoded(VOCAB.decode(ids)) != ids


def test_a_policy_without_a_law_and_an_unknown_parameter_are_errors():
    with raises(EngineError, "no parameter 'regex'", status=400):
        sampled(EmbeddedEngine(), extra={"regex": "a"})
    for drift in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="drift"):
            EmbeddedEngine(drift=drift)
    infinite = [Reply(("a",)), Reply(("b",), math.inf)]
    for replies in ([], [Reply(("a",), 0.0)], infinite):
        with pytest.raises(ValueError, match="reply weights"):
            sampled(saying(replies))


def test_a_call_lets_others_run_and_ends_when_it_is_cancelled():
    async def run():
        engine = saying([Reply(("x = 1\n" * 500,))], seed=1)
        request = engine_request(PROMPT, max_new_tokens=4000)
        task = asyncio.create_task(engine.generate(request))
        # its first slice of tokens; then it is this one's turn
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@given(st.dictionaries(st.integers(0, 5), st.floats(0.01, 1), min_size=1))
def test_top_k_and_top_p_keep_the_likeliest(weights):
    total = sum(weights.values())
    chances = {token: weight / total for token, weight in weights.items()}

    def cut(**params):
        return shaped(chances, Sampling(max_new_tokens=1, **params))

    likeliest = min(chances, key=lambda token: (-chances[token], token))
    for one in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}):
        assert cut(**one) == {likeliest: 1.0}
    assert len(cut(temperature=0.5, top_k=2)) == min(2, len(chances))
    nucleus = cut(top_p=0.6)
    for kept in (nucleus, cut(temperature=0.5, top_k=2)):
        assert math.isclose(sum(kept.values()), 1)
        assert min(chances[t] for t in kept) >= max(
            (chances[t] for t in chances if t not in kept), default=0
        )
    reached = sum(chances[t] for t in nucleus)
    assert reached > 0.6 - 1e-9
    assert reached - min(chances[t] for t in nucleus) < 0.6 + 1e-9


def test_the_shipped_tokenizer_is_what_the_recipe_describes():
    assert list(VOCAB.added) == [*CONTROL, *MARKUP]
    assert VOCAB.size == VOCABULARY + len(VOCAB.added)
    assert {bytes([b]) for b in range(256)} <= set(VOCAB.spelling[:VOCABULARY])
    assert max(VOCAB.encode_plain("".join(VOCAB.added))) < VOCABULARY
    assert encoded("".join(VOCAB.added)) == list(VOCAB.added.values())
    assert len(set(VOCAB.spelling)) == VOCAB.size
