"""Prompts in delta form and back: what each shares with an earlier path, and what follows.

Fills full prompts or suffixes from call records, in O(tokens written); the shared lengths in
O(tokens compared). Lists of messages are converted in the same way, as lists of numbers.
"""


cdef void _expand(const Call* calls, const pos_t* offsets, token_t* out, int64_t i) noexcept nogil:
    """Write the prompt of call i; ``out`` has those of earlier calls.

    ``offsets`` leave room for each prompt, and a base supplies no more than its path has: both
    are checked before.
    """
    cdef const Call* call = &calls[i]
    cdef const Call* base
    cdef token_t* target = out + offsets[i]
    cdef pos_t n = 0
    check_write("out", call.own_start, call.prompt_len - call.own_start, call.prompt_len)
    if call.own_start:
        base = &calls[call.base]
        n = min(call.own_start, base.prompt_len)
        memcpy(target, out + offsets[call.base], n * sizeof(token_t))
        if n < call.own_start:
            memcpy(
                target + n, <const token_t*><intptr_t>base.out,
                (call.own_start - n) * sizeof(token_t),
            )
    n = call.prompt_len - call.own_start
    if n:
        memcpy(
            target + call.own_start, <const token_t*><intptr_t>call.own, n * sizeof(token_t)
        )


cdef _check_offsets(const pos_t[::1] offsets, int64_t n_runs, int64_t n_values):
    _check_length("offsets", offsets.shape[0], n_runs + 1)
    if offsets[0] != 0 or offsets[n_runs] > n_values:
        raise LayoutError(f"offsets leave no room: {n_values} entries in all")


def expand_prompts(
    const Call[::1] calls not None,
    const int64_t[::1] session_offsets not None,
    const pos_t[::1] offsets not None,
    token_t[::1] out not None,
):
    """Write all of each call's prompt to ``out[offsets[i]:offsets[i + 1]]``.

    What its base supplies is copied from the base's own prompt in ``out``, and from its
    output. Do not write to what the addresses in ``calls`` point to during the call.
    """
    cdef:
        int64_t n_calls = calls.shape[0], i, bad
        token_t* target = &out[0] if out.shape[0] else NULL

    _check_sessions(session_offsets, n_calls)
    _check_offsets(offsets, n_calls, out.shape[0])
    bad = _first_bad_call(calls, session_offsets, INT32_MAX)
    if bad >= 0:
        raise LayoutError(
            f"calls[{bad}] is no path: prompt_len {calls[bad].prompt_len}, own_start "
            f"{calls[bad].own_start}, base {calls[bad].base}"
        )
    for i in range(n_calls):
        if offsets[i + 1] - offsets[i] != calls[i].prompt_len:
            raise LayoutError(f"offsets[{i}] leaves no room for {calls[i].prompt_len} tokens")
    # A base is an earlier call of the session and holds what it is to supply.
    with nogil:
        for i in range(n_calls):
            _expand(&calls[0], &offsets[0], target, i)


def copy_suffixes(
    const Call[::1] calls not None,
    const pos_t[::1] starts not None,
    const pos_t[::1] offsets not None,
    token_t[::1] out not None,
):
    """Write ``starts[i]:`` of each call's prompt to ``out[offsets[i]:offsets[i + 1]]``.

    No call has a base: each brings its complete prompt.
    """
    cdef:
        int64_t n_calls = calls.shape[0], i
        token_t* target = &out[0] if out.shape[0] else NULL

    _check_length("starts", starts.shape[0], n_calls)
    _check_offsets(offsets, n_calls, out.shape[0])
    for i in range(n_calls):
        if calls[i].own_start != 0 or not 0 <= starts[i] <= calls[i].prompt_len:
            raise LayoutError(
                f"starts[{i}] = {starts[i]} is not in the {calls[i].prompt_len} tokens that "
                f"the call brings from {calls[i].own_start} on"
            )
        if offsets[i + 1] - offsets[i] != calls[i].prompt_len - starts[i]:
            raise LayoutError(f"offsets[{i}] does not fit the prompt from {starts[i]} on")
    with nogil:
        for i in range(n_calls):
            _copy(&calls[i], target + offsets[i], starts[i], calls[i].prompt_len)


def share_heads(
    const Call[::1] calls not None,
    const int32_t[::1] bases not None,
    const pos_t[::1] limits not None,
    pos_t[::1] shared not None,
):
    """Lower ``shared[i]`` to what prompt i and the path of its base have in common.

    No more than ``limits[i]`` of the prompt are looked at; without a base (-1) it is 0. No
    call has a base: each brings its complete prompt.
    """
    cdef int64_t n_calls = calls.shape[0], i
    cdef pos_t stop

    for name, n in (
        ("bases", bases.shape[0]), ("limits", limits.shape[0]), ("shared", shared.shape[0]),
    ):
        _check_length(name, n, n_calls)
    for i in range(n_calls):
        if bases[i] >= i:
            raise LayoutError(f"bases[{i}] = {bases[i]} is no earlier call")
        if limits[i] > calls[i].prompt_len or calls[i].own_start != 0:
            raise LayoutError(
                f"limits[{i}] = {limits[i]} is beyond the {calls[i].prompt_len} entries that "
                f"the call brings from {calls[i].own_start} on"
            )
    with nogil:
        for i in range(n_calls):
            stop = 0
            if bases[i] >= 0:
                stop = min(min(limits[i], shared[i]), _held_len(&calls[bases[i]]))
                stop = _match(&calls[i], &calls[bases[i]], 0, stop)
            shared[i] = stop
