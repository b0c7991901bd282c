"""Integer widths and the records that kernels share. Declarations only.

Each struct has a numpy dtype of the same name and layout in trajkit/_kernel_names.py; a buffer of
another layout is refused when it is passed.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t

ctypedef int32_t token_t  # a vocabulary id, as the tokenizer emits it
ctypedef int64_t pos_t    # a position in, or a length of, a run of tokens


cdef struct Call:             # one model call; addresses are of buffers that Python holds
    int64_t own               # the call's own prompt ids
    pos_t own_start           # what its base supplies: own is prompt[own_start:]
    pos_t prompt_len
    int64_t out               # the output ids
    pos_t out_len
    int64_t logprobs          # one float32 per output id, or 0: none
    int64_t valid             # validity bitmap of those, or 0: all valid
    int64_t valid_bit         # position of the first of them in the bitmap
    int64_t mask              # bitmap of the output tokens that may be trained, or 0: all
    int64_t mask_bit          # position of the first of them in the bitmap
    int32_t base              # the call whose path supplies the first own_start ids, or -1
    uint8_t trainable
    uint8_t stop              # why the output ended: Stop
    uint8_t use_tool
    uint8_t ill_formed


cdef struct Request:          # the chat messages of one call
    int64_t keys              # 16-byte keys of the call's own messages
    int64_t n_keys            # how many; -1: the call has no list of messages
    int64_t role_offsets      # int32 offsets of their roles ...
    int64_t role_bytes        # ... in these bytes
    int64_t reply_key         # 16-byte key of the reply, or 0: none
    int32_t shared            # messages that the base supplies before them
    int32_t reply_is_assistant


cdef struct Node:             # a range of a token path (forest.pxi)
    pos_t start
    pos_t stop
    int32_t parent            # -1: a root
    int32_t source            # the call that first had its tokens
    token_t first             # the token at start
    int32_t child             # the child added last, or -1
    int32_t sibling           # the next child of the same parent, or -1


cdef struct Message:          # a node of the message tree (route.pxi)
    int64_t key               # address of its 16 bytes, or 0: matches nothing
    int32_t parent            # -1: the root
    int32_t call              # the call that generated it, or -1
    int32_t above             # the nearest call at or above it, or -1
    int32_t depth             # messages from the root down to it
    int32_t child             # the first child, or -1
    int32_t last_child
    int32_t sibling           # the next child of the same parent, or -1
    int32_t n_assistants      # children with the role assistant
    int32_t assistant         # one of them, or -1
    int32_t equal             # the next sibling with the same key, or -1
    int32_t tools             # of a root: the tools that its requests offer


cdef struct Link:             # a call and its parent
    pos_t lcp                 # tokens that the parent's path and this prompt share; -1: none
    int32_t parent            # -1: none
    int32_t order             # rank in the policy's traversal; -1: not in it
    int32_t rewritten_by        # -1: not rewritten
    int32_t link_reason       # index into trajkit.schema.LINK_REASONS
    int32_t segment           # index into trajkit.schema.SEGMENT_KINDS plus 1; 0: none


cdef struct Row:              # one training sequence, before its columns are written
    pos_t n_tokens
    pos_t prompt_len
    pos_t n_trained
    pos_t shared
    pos_t end                 # tokens from here on are not in the row
    int32_t last              # the call whose path the row is
    int32_t n_calls           # calls in the row, counted upwards from last
    int32_t owner             # the chain that the row belongs to
    int32_t parent_row        # -1: none
    int32_t session
    int32_t n_spans
    uint8_t truncated
    uint8_t use_tool
    uint8_t ill_formed
    uint8_t reserved
    int32_t index             # counts the session's rows


cdef struct PackRow:          # a row on its way into a pack; addresses are of Python's buffers
    int64_t ids               # the row's ids
    pos_t length              # tokens of the row
    int64_t mask              # bitmap of the row's edges
    int64_t mask_bit
    int64_t logprobs          # one float32 per id
    int64_t valid             # validity bitmap of those, or 0: all valid
    int64_t valid_bit
    int64_t line              # the row's line in its table
    pos_t shared              # tokens that the parent supplies
    pos_t start               # where the row's own tokens begin in the packs
    pos_t base                # where its pack begins
    pos_t open                # of its own tokens, those from here on know where their subtree ends
    int32_t parent            # the row that supplies the tokens before its own, or -1


cdef struct Choices:          # what the kernels of rows.pxi read of a policy
    int64_t fork_threshold
    int64_t max_tokens        # of a row
    int64_t max_rows          # of a session: the first ones and the last
    int32_t on_drift          # ON_DRIFT_*
    int32_t train_in          # TRAIN_IN_*
    uint8_t keep_prefix       # an absorbed output stays trained up to where drift starts
    uint8_t keep_untrained
    uint8_t keep_empty        # rows without a response
    uint8_t chain_flags       # a row has the flags of its chain, not of its own calls
    uint8_t main_only         # one chain: the first of the root that was created first
    uint8_t cut_at_calls      # a row truncated inside a prompt ends with the call before it
    uint8_t need_logprob      # a token without a logprob is not trained
    uint8_t reserved
