"""What packs must be, by full prefixes and dense masks.

Nothing here knows how packs are made: a token's path is read off the mask, and compared
with the rows token by token.
"""

import pyarrow as pa

from tests.oracles.rows import lcp
from trajkit.schema import ROWS


def paths_of(packs):
    """The tokens that each token of each pack attends, as ids with itself at the end.

    A pack's list has the paths of its prefix first.
    """
    known = []
    for line, pack in enumerate(packs):
        n_prefix = len(pack["prefix_end"])
        ids, ends, before = [], [], []
        if pack["prefix_pack"] is not None:
            assert pack["prefix_pack"] == line - 1
            before = [known[line - 1][at] for at in pack["prefix_source"]]
            ids = [path[-1] for path in before]
            ends = [end + n_prefix for end in pack["prefix_end"]]
        assert n_prefix == len(ids)
        ids = ids + pack["input_ids"]
        ends = ends + [end + n_prefix for end in pack["subtree_end"]]
        mask = [[k <= q < ends[k] for k in range(len(ids))] for q in range(len(ids))]
        paths = [
            [token for token, seen in zip(ids, line_of, strict=True) if seen]
            for line_of in mask
        ]
        assert paths[:n_prefix] == before
        positions = [len(path) - 1 for path in paths[n_prefix:]]
        assert pack["position_ids"] == positions
        known.append(paths)
    return known


def edges_of(rows):
    """Every trained token of every row: (row, position), its prefix, id and logprob."""
    found = {}
    for line, row in enumerate(rows):
        for at, trained in enumerate(row["loss_mask"]):
            if trained:
                found[line, at] = (
                    row["input_ids"][:at],
                    row["input_ids"][at],
                    row["logprobs"][at],
                )
    return found


def check_packs(packs, rows, max_tokens=None):
    """Assert that packs have every edge of the rows once, in the context of its row."""
    wanted = edges_of(rows)
    paths = paths_of(packs)
    for pack, known in zip(packs, paths, strict=True):
        n_prefix = len(pack["prefix_end"])
        n = pack["n_tokens"]
        if max_tokens is not None:
            assert len(pack["input_ids"]) <= max_tokens
        for at in range(n, len(pack["input_ids"])):
            assert pack["subtree_end"][at] == at + 1
            assert known[n_prefix + at] == [0]
        for source, target, row, position, logprob in zip(
            pack["edge_source"],
            pack["edge_target"],
            pack["edge_row"],
            pack["edge_position"],
            pack["edge_logprob"],
            strict=True,
        ):
            assert 0 <= source < n
            context, token, recorded = wanted.pop((row, position))
            assert known[n_prefix + source] == context
            assert target == token
            assert logprob == recorded
            assert rows[row]["session_id"] in pack["sessions"]
    assert wanted == {}


def n_distinct(rows, groups=False):
    """Tokens of rows, each prefix of a session (or of a group) counted once."""
    found = set()
    for row in rows:
        name = (groups and row["group_id"]) or row["session_id"]
        for at in range(len(row["input_ids"])):
            found.add((name, *row["input_ids"][: at + 1]))
    return len(found)


def random_rows(random, n_sessions=1, max_rows=7, max_tokens=12, group=None):
    """Rows of sessions, as dicts, of few different ids, so that they share and repeat.

    A row begins with a part of an earlier one of its session, or is equal to it.
    """
    rows = []
    for session in range(n_sessions):
        own = []
        joins = random.choice([group, None])
        for index in range(random.randint(1, max_rows)):
            begin = []
            if own and random.random() < 0.85:
                begin = random.choice(own)["input_ids"]
                if random.random() < 0.8:
                    begin = begin[: random.randint(0, len(begin))]
            n = random.randint(0 if begin else 1, max_tokens - len(begin))
            ids = begin + [random.randint(1, 3) for _ in range(n)]
            shares = [lcp(ids, other["input_ids"]) for other in own]
            longest = max(shares, default=0)
            mask = [at > 0 and random.random() < 0.6 for at in range(len(ids))]
            own.append(
                {
                    "session_id": f"s{session}",
                    "row_index": index,
                    "group_id": joins,
                    "input_ids": ids,
                    "prompt_length": 0,
                    "loss_mask": mask,
                    "logprobs": [
                        -random.randrange(64) / 16
                        if trained and random.random() < 0.9
                        else None
                        for trained in mask
                    ],
                    "spans": [],
                    "parent_row": shares.index(longest) if longest else None,
                    "shared_length": longest,
                    "row_weight": random.random(),
                    "advantage": random.choice([None, random.uniform(-1, 1)]),
                    "mark": [random.randint(0, 9) for _ in ids],
                }
            )
        total = sum(sum(row["loss_mask"]) for row in own)
        rows += [{**row, "rollout_mask_sum": total} for row in own]
    return rows


def in_order(rows):
    """The rows of a session as a pack has them: own tokens first, then branches.

    The deepest branch comes first. Of branches at one token, the one that an earlier row
    opened.
    """
    if not rows:
        return []
    trunk, *others = rows
    depths = {id(row): lcp(row["input_ids"], trunk["input_ids"]) for row in others}
    order = [trunk]
    for depth in sorted(set(depths.values()), reverse=True):
        branches = {}
        for row in others:
            if depths[id(row)] != depth:
                continue
            further = row["input_ids"][depth : depth + 1]
            # a row that ends here opens no branch
            branches.setdefault(tuple(further) or id(row), []).append(row)
        for branch in branches.values():
            order += in_order(branch)
    return order


def fewest_tokens(rows, limit):
    """Tokens of the best parts of at most ``limit`` tokens that a session is cut into."""
    order = in_order(rows)
    best = [0]
    for stop in range(1, len(order) + 1):
        best.append(
            min(
                best[start] + n
                for start in range(stop)
                for n in [n_distinct(order[start:stop])]
                if n <= limit
            )
        )
    return best[-1]


def rows_table(rows):
    """Rows as `random_rows` draws them as a table."""
    schema = ROWS.append(pa.field("advantage", pa.float64()))
    schema = schema.append(pa.field("mark", pa.list_(pa.int8())))
    return pa.Table.from_pylist(rows, schema)


def random_choices(random, rows):
    """Arguments of `trajkit.pack` that these rows can be packed with."""
    oversize = random.choice(["repeat", "carry"])
    longest = max(len(row["input_ids"]) for row in rows)
    limit = random.randint(0, 12) + (longest if oversize == "repeat" else 1)
    align = random.choice([1, 1, 4])
    return {
        "max_tokens": limit + -limit % align,
        "layout": random.choice(["tree", "tree", "tree", "rows"]),
        "share": random.choice(["session", "group"]),
        "oversize": oversize,
        "align": align,
    }


def check_packed(packs, rows, choices):
    """Assert that packs are those of `random_rows` under `random_choices`."""
    packs = packs.to_pylist()
    check_packs(packs, rows, choices["max_tokens"])
    sessions = {}
    for row in rows:
        sessions.setdefault(row["session_id"], []).append(row)
    n_tokens = sum(pack["n_tokens"] for pack in packs)
    if choices["layout"] == "rows":
        assert n_tokens == sum(len(row["input_ids"]) for row in rows)
    elif choices["share"] == "group":
        assert n_tokens >= n_distinct(rows, groups=True)
        if choices["oversize"] == "carry":
            assert n_tokens <= n_distinct(rows)
    elif choices["oversize"] == "carry":
        assert n_tokens == n_distinct(rows)
    else:
        best = [fewest_tokens(s, choices["max_tokens"]) for s in sessions.values()]
        assert n_tokens == sum(best)
