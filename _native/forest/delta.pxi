"""Prompts of calls, from the forest of token paths, in O(tokens written + nodes of the paths).

Lists of messages and rows of the suffix layout are copied in the same way, as such paths.
"""


def copy_prompts(
    CallForest forest not None,
    const pos_t[::1] starts not None,
    const pos_t[::1] offsets not None,
    token_t[::1] out not None,
):
    """Write ``starts[i]:`` of each call's prompt to ``out[offsets[i]:offsets[i + 1]]``."""
    cdef int64_t n_calls = forest.n_calls, i
    cdef Paths paths
    cdef const Call* call

    _check_length("starts", starts.shape[0], n_calls)
    _check_length("offsets", offsets.shape[0], n_calls + 1)
    if offsets[0] != 0 or offsets[n_calls] > out.shape[0]:
        raise LayoutError(f"offsets leave no room: {out.shape[0]} entries in all")
    if n_calls == 0:
        return
    paths = _paths(forest)
    for i in range(n_calls):
        call = &paths.calls[i]
        if not 0 <= starts[i] <= call.prompt_len:
            raise LayoutError(f"starts[{i}] = {starts[i]}: the prompt has {call.prompt_len} tokens")
        if offsets[i + 1] - offsets[i] != call.prompt_len - starts[i]:
            raise LayoutError(f"offsets[{i}] does not fit the prompt from {starts[i]} on")
    cdef int32_t[::1] chain = empty(forest.n_nodes, "i4")
    with nogil:
        for i in range(n_calls):
            call = &paths.calls[i]
            if starts[i] < call.prompt_len:
                _copy_path(
                    &paths, paths.ends[i], starts[i], call.prompt_len, &out[offsets[i]],
                    &chain[0], False,
                )
