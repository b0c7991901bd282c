"""Where two runs of tokens differ: stretches between the runs that both have.

From each place where they differ on goes the search for the nearest place where they agree for
``run`` tokens: the sum of what is passed over in both is least. Looking ahead by n tokens ends
at a place that n tokens or more are passed over to reach, so all of it takes linear time.
"""

cdef enum:
    # What a special token (a message's border) that one side alone passes over weighs, in
    # tokens: text that stands in two messages does not lead from one into the other.
    BORDER = 64


cdef struct Runs:             # where each run of tokens stands in a
    const token_t* a
    pos_t run
    uint64_t* hashes
    int32_t* heads            # by slot: its next place; -1: a free slot
    int32_t* following        # by place: the next place with the same run; -1: none
    int64_t mask


cdef int64_t _run_slot(const Runs* runs, const token_t* tokens) noexcept nogil:
    """The slot of the run at tokens, or the free one where it would be."""
    cdef uint64_t hashed = 0
    cdef int64_t slot
    cdef pos_t k
    for k in range(runs.run):
        hashed = hashed * <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>(tokens[k] + 1)
    slot = <int64_t>_mixed(hashed) & runs.mask
    while runs.heads[slot] >= 0 and not (
        runs.hashes[slot] == hashed
        and memcmp(runs.a + runs.heads[slot], tokens, runs.run * sizeof(token_t)) == 0
    ):
        slot = (slot + 1) & runs.mask
    if runs.heads[slot] < 0:
        runs.hashes[slot] = hashed
    return slot


cdef inline int64_t _passed(
    pos_t i, pos_t to_i, pos_t j, pos_t to_j, const int32_t* borders_a, const int32_t* borders_b
) noexcept nogil:
    """What it costs to go on at (to_i, to_j)."""
    cdef int64_t odd = (borders_a[to_i] - borders_a[i]) - (borders_b[to_j] - borders_b[j])
    return (to_i - i) + (to_j - j) + BORDER * (odd if odd >= 0 else -odd)


def align(
    const token_t[::1] a not None,
    const token_t[::1] b not None,
    const int32_t[::1] borders_a not None,
    const int32_t[::1] borders_b not None,
    int64_t run,
    uint64_t[::1] hashes not None,
    int32_t[::1] heads not None,
    int32_t[::1] following not None,
    int64_t[:, ::1] out not None,
):
    """Fill ``out`` with the stretches where a and b differ; how many there are.

    Columns: start and stop in a, start and stop in b. What b has beyond the end of a is no
    difference. ``borders`` count the special tokens before each place (one longer than a, b).
    ``hashes`` and ``heads`` have a power of two entries, at least twice those of a;
    ``following`` as many as a, ``out`` one row more.
    """
    cdef:
        pos_t n_a = a.shape[0], n_b = b.shape[0], i = 0, j = 0, to_i = 0, to_j = 0, at, ahead
        pos_t last = 0  # the first place of b, from j on, that has the last token of a
        int64_t n_table = heads.shape[0], slot, cost, least, n_found = 0
        const token_t* x
        const token_t* y
        Runs runs

    _check_length("borders_a", borders_a.shape[0], n_a + 1)
    _check_length("borders_b", borders_b.shape[0], n_b + 1)
    _check_length("following", following.shape[0], n_a)
    _check_length("out", out.shape[0], n_a + 1)
    _check_length("out", out.shape[1], 4)
    _check_length("hashes", hashes.shape[0], n_table)
    if n_table & (n_table - 1) or n_table < 2 * n_a or n_table < 2:
        raise LayoutError(f"heads has {n_table} entries: not a power of two, or too few")
    if run < 1:
        raise LayoutError(f"run is {run}: expected 1 or more")
    if n_a == 0:
        return 0
    if n_b == 0:
        out[0, 0] = out[0, 2] = out[0, 3] = 0
        out[0, 1] = n_a
        return 1
    x = &a[0]
    y = &b[0]
    runs.a = x
    runs.run = run
    runs.hashes = &hashes[0]
    runs.heads = &heads[0]
    runs.following = &following[0]
    runs.mask = n_table - 1
    with nogil:
        memset(runs.heads, 0xFF, n_table * sizeof(int32_t))
        for at in range(n_a - run, -1, -1):
            slot = _run_slot(&runs, x + at)
            runs.following[at] = runs.heads[slot]
            runs.heads[slot] = <int32_t>at
        while True:
            while i < n_a and j < n_b and x[i] == y[j]:
                i += 1
                j += 1
            if i == n_a:
                break
            least = -1
            last = max(last, j)
            while last < n_b and y[last] != x[n_a - 1]:
                last += 1
            if last < n_b:
                # held ends here, so that a shorter run will do
                ahead = 1
                while (
                    n_a - 1 - ahead >= i and last - ahead >= j
                    and x[n_a - 1 - ahead] == y[last - ahead]
                ):
                    ahead += 1
                to_i = n_a - ahead
                to_j = last + 1 - ahead
                least = _passed(i, to_i, j, to_j, &borders_a[0], &borders_b[0])
            ahead = j
            while ahead <= n_b - run and (least < 0 or ahead - j < least):
                slot = _run_slot(&runs, y + ahead)
                # what lies behind i is passed for good
                while 0 <= runs.heads[slot] < i and runs.following[runs.heads[slot]] >= 0:
                    runs.heads[slot] = runs.following[runs.heads[slot]]
                at = runs.heads[slot]
                if at >= i:
                    cost = _passed(i, at, j, ahead, &borders_a[0], &borders_b[0])
                    if least < 0 or cost < least:
                        least = cost
                        to_i = at
                        to_j = ahead
                ahead += 1
            if least < 0:
                to_i = n_a
                to_j = j
                while to_j < n_b and borders_b[to_j + 1] == borders_b[to_j]:
                    to_j += 1
            # Behind each stretch i moves on by a token at least: they are n_a + 1 at most.
            out[n_found, 0] = i
            out[n_found, 1] = to_i
            out[n_found, 2] = j
            out[n_found, 3] = to_j
            n_found += 1
            i = to_i
            j = to_j
    return n_found


def copy_path(
    CallForest forest not None, int64_t call, int64_t start, token_t[::1] out not None
):
    """Copy as many tokens of a call's path (prompt, then output) from start on as fit ``out``."""
    cdef Paths paths
    if not 0 <= call < forest.n_calls:
        raise LayoutError(f"call is {call}: expected one of {forest.n_calls}")
    paths = _paths(forest)
    if not 0 <= start <= _held_len(&paths.calls[call]) - out.shape[0]:
        raise LayoutError(
            f"{out.shape[0]} tokens from {start} on: the path has "
            f"{_held_len(&paths.calls[call])}"
        )
    if out.shape[0]:
        with nogil:
            _copy_range(
                paths.calls, paths.nodes, paths.ends[call], start, start + out.shape[0], &out[0]
            )
