"""The spans in which two token sequences differ, between the runs that both have.

Fills ``out`` from the two sequences and the special tokens in them. From each position where
they differ, the search is for the nearest position where they agree for ``run`` tokens: the
number of tokens skipped in both is smallest. Looking ahead by n tokens ends at a position
that is reached by skipping n tokens or more, so all of it takes O(tokens of a and b).
"""

cdef enum:
    # Cost, in tokens, of a special token (a message's border) that only one side skips: text
    # that occurs in two messages does not lead from one into the other.
    BORDER = 64

cdef enum:  # trajkit.analysis.drift_text.Stretch: the columns of align's out
    DIFFERENCE_PATH_START, DIFFERENCE_PATH_STOP
    DIFFERENCE_PROMPT_START, DIFFERENCE_PROMPT_STOP
    DIFFERENCE_WIDTH

ENUMS["Difference"] = {
    "path_start": DIFFERENCE_PATH_START, "path_stop": DIFFERENCE_PATH_STOP,
    "prompt_start": DIFFERENCE_PROMPT_START, "prompt_stop": DIFFERENCE_PROMPT_STOP,
}


cdef struct Sides:            # the two sequences, and the positions of each run in a
    const token_t* a
    const token_t* b
    pos_t n_a
    pos_t n_b
    const int32_t* borders_a  # special tokens before each position
    const int32_t* borders_b
    pos_t run
    uint64_t* hashes
    int32_t* heads            # per slot: its next position; -1: a free slot
    int32_t* following        # per position: the next one with the same run; -1: none
    int64_t mask
    pos_t last                # the first position of b, from the current one, with a's last token


cdef int64_t _run_slot(const Sides* sides, const token_t* tokens) noexcept nogil:
    """The slot of the run at tokens, or the free slot for it."""
    cdef uint64_t hashed = 0
    cdef int64_t slot
    cdef pos_t k
    for k in range(sides.run):
        hashed = hashed * <uint64_t>0x9E3779B97F4A7C15 + <uint64_t>(tokens[k] + 1)
    slot = <int64_t>_mixed(hashed) & sides.mask
    while sides.heads[slot] >= 0 and not (
        sides.hashes[slot] == hashed
        and memcmp(sides.a + sides.heads[slot], tokens, sides.run * sizeof(token_t)) == 0
    ):
        slot = (slot + 1) & sides.mask
    if sides.heads[slot] < 0:
        sides.hashes[slot] = hashed
    return slot


cdef inline int64_t _cost(
    const Sides* sides, pos_t i, pos_t to_i, pos_t j, pos_t to_j
) noexcept nogil:
    """What it costs to continue at (to_i, to_j)."""
    cdef int64_t odd = (sides.borders_a[to_i] - sides.borders_a[i]) - (
        sides.borders_b[to_j] - sides.borders_b[j]
    )
    return (to_i - i) + (to_j - j) + BORDER * (odd if odd >= 0 else -odd)


cdef void _find_agreement(
    Sides* sides, pos_t i, pos_t j, pos_t* to_i, pos_t* to_j
) noexcept nogil:
    """Find the nearest position where both agree from (i, j) on, or their ends."""
    cdef const token_t* x = sides.a
    cdef const token_t* y = sides.b
    cdef pos_t n_a = sides.n_a, n_b = sides.n_b, at, ahead
    cdef int64_t slot, cost, cheapest = -1
    sides.last = max(sides.last, j)
    while sides.last < n_b and y[sides.last] != x[n_a - 1]:
        sides.last += 1
    if sides.last < n_b:  # a ends there, so a shorter run is enough
        ahead = 1
        while (
            n_a - 1 - ahead >= i and sides.last - ahead >= j
            and x[n_a - 1 - ahead] == y[sides.last - ahead]
        ):
            ahead += 1
        to_i[0] = n_a - ahead
        to_j[0] = sides.last + 1 - ahead
        cheapest = _cost(sides, i, to_i[0], j, to_j[0])
    ahead = j
    while ahead <= n_b - sides.run and (cheapest < 0 or ahead - j < cheapest):
        slot = _run_slot(sides, y + ahead)
        # positions before i are never needed again
        while 0 <= sides.heads[slot] < i and sides.following[sides.heads[slot]] >= 0:
            sides.heads[slot] = sides.following[sides.heads[slot]]
        at = sides.heads[slot]
        if at >= i:
            cost = _cost(sides, i, at, j, ahead)
            if cheapest < 0 or cost < cheapest:
                cheapest = cost
                to_i[0] = at
                to_j[0] = ahead
        ahead += 1
    if cheapest < 0:
        to_i[0] = n_a
        to_j[0] = j
        while to_j[0] < n_b and sides.borders_b[to_j[0] + 1] == sides.borders_b[to_j[0]]:
            to_j[0] += 1


cdef int64_t _align(Sides* sides, int64_t[:, ::1] out) noexcept nogil:
    """Write the differences; return how many there are."""
    cdef pos_t i = 0, j = 0, to_i = 0, to_j = 0, at
    cdef int64_t slot, n_found = 0
    memset(sides.heads, 0xFF, (sides.mask + 1) * sizeof(int32_t))
    for at in range(sides.n_a - sides.run, -1, -1):
        slot = _run_slot(sides, sides.a + at)
        sides.following[at] = sides.heads[slot]
        sides.heads[slot] = <int32_t>at
    while True:
        while i < sides.n_a and j < sides.n_b and sides.a[i] == sides.b[j]:
            i += 1
            j += 1
        if i == sides.n_a:
            return n_found
        _find_agreement(sides, i, j, &to_i, &to_j)
        # After each difference i advances by a token at least: n_a + 1 at most.
        out[n_found, DIFFERENCE_PATH_START] = i
        out[n_found, DIFFERENCE_PATH_STOP] = to_i
        out[n_found, DIFFERENCE_PROMPT_START] = j
        out[n_found, DIFFERENCE_PROMPT_STOP] = to_j
        n_found += 1
        i = to_i
        j = to_j


def align(
    const token_t[::1] a not None,
    const token_t[::1] b not None,
    const int32_t[::1] borders_a not None,
    const int32_t[::1] borders_b not None,
    int64_t run,
    int64_t[:, ::1] out not None,
):
    """Fill ``out`` with the spans where a and b differ; return how many there are.

    Columns: start and stop in a, start and stop in b; one line more than a has tokens. What b
    has beyond the end of a is no difference. ``borders`` count the special tokens before each
    position (one entry more than a, b).
    """
    cdef pos_t n_a = a.shape[0], n_b = b.shape[0]
    cdef int64_t n_table = 2, n_found
    cdef Sides sides

    _check_length("borders_a", borders_a.shape[0], n_a + 1)
    _check_length("borders_b", borders_b.shape[0], n_b + 1)
    _check_length("out", out.shape[0], n_a + 1)
    _check_length("out", out.shape[1], DIFFERENCE_WIDTH)
    if run < 1:
        raise LayoutError(f"run is {run}: expected 1 or more")
    if n_a == 0:
        return 0
    if n_b == 0:
        out[0, DIFFERENCE_PATH_START] = 0
        out[0, DIFFERENCE_PROMPT_START] = out[0, DIFFERENCE_PROMPT_STOP] = 0
        out[0, DIFFERENCE_PATH_STOP] = n_a
        return 1
    while n_table < 2 * n_a:
        n_table *= 2
    cdef uint64_t[::1] hashes = empty(n_table, "u8")
    cdef int32_t[::1] heads = empty(n_table, "i4")
    cdef int32_t[::1] following = empty(n_a, "i4")
    sides.a, sides.b, sides.n_a, sides.n_b = &a[0], &b[0], n_a, n_b
    sides.borders_a, sides.borders_b = &borders_a[0], &borders_b[0]
    sides.run, sides.mask, sides.last = run, n_table - 1, 0
    sides.hashes, sides.heads, sides.following = &hashes[0], &heads[0], &following[0]
    with nogil:
        n_found = _align(&sides, out)
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
