"""Packs: rows that share prefixes as trees of tokens, and where they are computed."""

import pyarrow as pa

from trajkit.schema.engine import NAMES, column, defined, required, table
from trajkit.schema.turns import MM_ITEM

PACKS = table(
    "packs",
    # a tree of tokens in pre-order, tree after tree; padding at the end
    required("input_ids", pa.large_list(pa.int32())),
    # tokens before it on its path from the root; 0 for padding
    required("position_ids", pa.large_list(pa.int32())),
    # where the tokens below it end: token q attends token k if k <= q < subtree_end[k].
    # A token of padding attends itself
    required("subtree_end", pa.large_list(pa.int32())),
    # tokens without the padding
    required("n_tokens", pa.int32()),
    # where each segment starts: the longest runs of tokens without a branch inside
    required("segment_start", pa.large_list(pa.int32())),
    # the segment of the pack whose last token the segment follows; -1: none. In a pack
    # with a prefix such a segment follows the prefix, unless its position_ids start at 0
    required("segment_parent", pa.large_list(pa.int32())),
    # where each tree starts
    required("tree_start", pa.large_list(pa.int32())),
    # the session of each tree; a null element: it joins sessions of a group
    required("tree_session", pa.large_list(pa.string())),
    # the sessions of all rows in the pack
    required("sessions", pa.large_list(pa.string())),
    # tree_start, and n_tokens (and the end of the padding), as attention kernels for
    # packed sequences take it. null: the pack has a branch or a prefix
    column("cu_seqlens", pa.large_list(pa.int32())),
    # an edge is a token that a row trains. The token of the pack that predicts it
    required("edge_source", pa.large_list(pa.int32())),
    # its id
    required("edge_target", pa.large_list(pa.int32())),
    # the line of its row in the table of rows
    required("edge_row", pa.large_list(pa.int64())),
    # its position in the row
    required("edge_position", pa.large_list(pa.int32())),
    # its share of the loss, without the advantage
    required("edge_weight", pa.large_list(pa.float64())),
    # as recorded. null: the engine gave none
    required("edge_logprob", pa.large_list(pa.float32())),
    # of a part of a tree: the line of the pack that has the part before it. null: the
    # pack has no prefix
    column("prefix_pack", pa.int64()),
    # the prefix: the path to the pack's first token, by position. Where each token is
    # in that pack, counted from the first token of the prefix that it has itself
    required("prefix_source", pa.large_list(pa.int32())),
    # as subtree_end, of the tokens of the prefix: q attends it if q < prefix_end
    required("prefix_end", pa.large_list(pa.int32())),
    # its images, by position in the pack; rows that share one have it once. null: none
    column("mm_items", pa.large_list(MM_ITEM)),
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
    # the line of the pack. null: the violation is of no one pack
    column("pack", pa.int64()),
    # the first token of the pack that is wrong. null: of no one token
    column("token", pa.int32()),
    # the row that it is about. null: of no one row
    column("session_id", pa.string()),
    column("row_index", pa.int32()),
    # the position in the row. null: of no one position
    column("row_token", pa.int32()),
    required("rule", NAMES),
    # the values, and how many more there are in the pack
    required("detail", pa.string()),
)
"""What breaks a rule in packs, one line per pack, row and rule."""

ASSIGNMENT = table(
    "assignment",
    # counts the optimizer steps from 0
    required("step", pa.int32()),
    required("rank", pa.int32()),
    # counts the packs of the rank in the step from 0
    required("slot", pa.int32()),
    # the line of the pack in its table. null: an empty pack, so that ranks have as many
    column("pack", pa.int64()),
    # in the unit of the costs given to `trajkit.balance`; 0 for an empty pack
    required("cost", pa.float64()),
)
"""Which rank computes which pack, one line per pack."""
