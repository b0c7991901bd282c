"""Packs: rows that share prefixes as trees of tokens, and where they are computed."""

from trajkit.schema.engine import columns, defined, table
from trajkit.schema.turns import MM_ITEM

PACKS = table(
    "packs",
    *columns(
        """
    input_ids [int32]: a tree of tokens in pre-order, tree after tree; padding at the end
    position_ids [int32]: tokens before it on its path from the root; 0 for padding
    subtree_end [int32]: where the tokens below it end: token q attends token k if k <= q
        < subtree_end[k]. A token of padding attends itself
    n_tokens int32: tokens without the padding
    segment_start [int32]: where each segment starts: the longest runs of tokens without a
        branch inside
    segment_parent [int32]: the segment of the pack whose last token the segment follows;
        -1: none. In a pack with a prefix such a segment follows the prefix, unless its
        position_ids start at 0
    tree_start [int32]: where each tree starts
    tree_session [text]: the session of each tree; a null element: it joins sessions of a
        group
    sessions [text]: the sessions of all rows in the pack
    cu_seqlens [int32]?: tree_start, and n_tokens (and the end of the padding), as
        attention kernels for packed sequences take it. null: the pack has a branch or a
        prefix
    edge_source [int32]: an edge is a token that a row trains. The token of the pack that
        predicts it
    edge_target [int32]: its id
    edge_row [int64]: the line of its row in the table of rows
    edge_position [int32]: its position in the row
    edge_weight [float64]: its share of the loss, without the advantage
    edge_logprob [float32]: as recorded. null: the engine gave none
    prefix_pack int64?: of a part of a tree: the line of the pack that has the part before
        it. null: the pack has no prefix
    prefix_source [int32]: the prefix: the path to the pack's first token, by position.
        Where each token is in that pack, counted from the first token of the prefix that
        it has itself
    prefix_end [int32]: as subtree_end, of the tokens of the prefix: q attends it if q <
        prefix_end
    mm_items [image]?: its images, by position in the pack; rows that share one have it
        once. null: none
    """,
        image=MM_ITEM,
    ),
)
"""Rows that share prefixes as trees of tokens, one line per micro-batch. ``columns`` of
`trajkit.pack` add a list ``edge_<name>`` each."""

PACK_RULES = defined("""What `trajkit.verify_packs` looks at.

length: The lists of a pack's tokens, segments, trees and edges are as long as one
    another.
range: Tokens, rows and positions that a pack names exist, and no id is null or negative.
max_tokens: No pack is longer than asked.
subtree_end: The tokens that it spans are nested: each subtree lies in that of the token
    above.
position: It counts the tokens that the token attends, without itself.
padding: A token of padding attends itself, and no token below it; no edge is there.
prefix: It is the path to the pack's first token, in the pack that it names.
segment, tree: They agree with subtree_end.
sessions: The sessions of a pack and of a tree are those of its rows.
cu_seqlens: It agrees with subtree_end.
not_trained: Every edge is a token that its row trains, or observes.
context: The tokens that an edge's source attends are those before the edge in its row.
target: An edge's target is its token in the row.
weight, logprob, column: They are those of the row.
mm_items: The images of a pack are the rows', and its content ids are theirs.
packed_twice, not_packed: Every token that a row trains has one edge.
""")

PACK_VIOLATIONS = table(
    "pack_violations",
    *columns("""
    pack int64?: the line of the pack. null: the violation is of no one pack
    token int32?: the first token of the pack that is wrong. null: of no one token
    session_id text?: the row that it is about. null: of no one row
    row_index int32?
    row_token int32?: the position in the row. null: of no one position
    rule name
    detail text: the values, and how many more there are in the pack
    """),
)
"""What breaks a rule in packs, one line per pack, row and rule."""

ASSIGNMENT = table(
    "assignment",
    *columns("""
    step int32: counts the optimizer steps from 0
    rank int32
    slot int32: counts the packs of the rank in the step from 0
    pack int64?: the line of the pack in its table. null: an empty pack, so that ranks
        have as many
    cost float64: in the unit of the costs given to `trajkit.balance`; 0 for an empty pack
    """),
)
"""Which rank computes which pack, one line per pack."""
