"""What packs must be, by full prefixes and dense masks.

Nothing here knows how packs are made: a token's path is read off the mask, and compared
with the rows token by token.
"""


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


def edges_of(rows, layout="full"):
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
        check_segments(pack, known)
    assert wanted == {}


def check_segments(pack, known):
    """Assert that segments are the longest runs of tokens without a branch inside."""
    n_prefix = len(pack["prefix_end"])
    parent = []
    ends = [end + n_prefix for end in pack["subtree_end"]]
    prefix = [end + n_prefix for end in pack["prefix_end"]]
    ends = prefix + ends
    for q in range(n_prefix, n_prefix + pack["n_tokens"]):
        above = [k for k in range(q) if q < ends[k]]
        parent.append(above[-1] - n_prefix if above else -n_prefix - 1)
    children = {}
    for token, above in enumerate(parent):
        children.setdefault(above, []).append(token)
    starts, owner = [], []
    for token, above in enumerate(parent):
        begins = above < 0 or above != token - 1 or len(children[above]) > 1
        if begins:
            starts.append(token)
        owner.append(len(starts) - 1)
    assert pack["segment_start"] == starts
    assert pack["segment_parent"] == [
        owner[parent[start]] if parent[start] >= 0 else -1 for start in starts
    ]
    trees = [token for token, above in enumerate(parent) if above == -n_prefix - 1]
    if n_prefix:
        trees = [0, *trees]
    assert pack["tree_start"] == trees
    branches = len(starts) != len(trees) or n_prefix
    stops = {pack["n_tokens"], len(pack["input_ids"])}
    assert pack["cu_seqlens"] == (None if branches else [*trees, *sorted(stops)])


def n_distinct(rows, group=False):
    """Tokens of rows, each prefix of a session (or of a group) counted once."""
    found = set()
    for row in rows:
        name = row["session_id"]
        for at in range(len(row["input_ids"])):
            found.add((name, *row["input_ids"][: at + 1]))
    return len(found)
