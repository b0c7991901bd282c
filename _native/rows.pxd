"""Integer widths. Declarations and inline functions only."""
from libc.stdint cimport int32_t, int64_t

ctypedef int32_t token_t  # a vocabulary id, as the tokenizer emits it
ctypedef int64_t pos_t    # a position in, or a length of, a run of tokens
