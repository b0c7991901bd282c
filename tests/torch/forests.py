"""Packs by a trie over tokens, one dict per node: the twin of what builds packs.

It takes rows as dicts (`Table.to_pylist`) and shares no code with trajkit.
"""

import itertools

import pyarrow as pa

LISTS = {
    "input_ids": pa.int32(),
    "position_ids": pa.int32(),
    "subtree_end": pa.int32(),
    "edge_source": pa.int32(),
    "edge_target": pa.int32(),
    "edge_row": pa.int64(),
    "edge_position": pa.int32(),
    "edge_weight": pa.float64(),
    "edge_logprob": pa.float32(),
}


def pack_line(rows, numbers, columns=(), reduce="mean"):
    """One line of a packs table that holds the rows of these numbers.

    ``columns`` are names of columns of the rows, with one value a row or a token.
    """
    line = {name: [] for name in LISTS} | {f"edge_{name}": [] for name in columns}
    roots = {}
    for number in numbers:
        row = rows[number]
        node = roots.setdefault(row["session_id"], {})
        for token in row["input_ids"]:
            node = node.setdefault(token, {})
    nodes = {}
    for session, children in roots.items():
        walk(line, nodes, (session,), children, 0)
    for number in numbers:
        add_edges(line, nodes, rows[number], number, columns, reduce)
    return line


def walk(line, nodes, path, children, depth):
    """Pre-order, with a stack of its own: rows are longer than Python's."""
    stack = [(path, depth, iter(children.items()), None)]
    while stack:
        path, depth, left, entered = stack[-1]
        token, below = next(left, (None, None))
        if below is None:
            stack.pop()
            if entered is not None:
                line["subtree_end"][entered] = len(line["input_ids"])
            continue
        here = len(line["input_ids"])
        nodes[(nodes.get(path, path), token)] = here
        line["input_ids"].append(token)
        line["position_ids"].append(depth)
        line["subtree_end"].append(None)
        name = ("node", here)
        nodes[name] = here
        stack.append((name, depth + 1, iter(below.items()), here))


def add_edges(line, nodes, row, number, columns, reduce):
    n_trained = sum(row["loss_mask"])
    weights = row.get("observation_weight") or itertools.repeat(0.0)
    before = (row["session_id"],)
    places = []
    for token in row["input_ids"]:
        places.append(nodes[(before, token)])
        before = places[-1]
    for at, (trained, weight) in enumerate(
        zip(row["loss_mask"], weights, strict=False)
    ):
        if not trained and not weight:
            continue
        line["edge_source"].append(places[at - 1])
        line["edge_target"].append(row["input_ids"][at])
        line["edge_row"].append(number)
        line["edge_position"].append(at)
        share = (row["row_weight"] or 0.0) / (n_trained if reduce == "mean" else 1)
        line["edge_weight"].append(share if trained else 0.0)
        line["edge_logprob"].append(row["logprobs"][at])
        for name in columns:
            value = row[name]
            value = value[at] if isinstance(value, list) else value
            line[f"edge_{name}"].append(value)


def packs_table(lines):
    """Lines as a table of list columns."""
    names = dict.fromkeys(name for line in lines for name in line)
    return pa.table(
        {
            name: pa.array(
                [line[name] for line in lines],
                pa.list_(LISTS.get(name, pa.float64())),
            )
            for name in names
        }
    )
