"""How a call's prompt departs from its parent's path.

Fills a line per column of the drift table from the links, whose ``lcp`` is known. Per call,
O(n log n) in the tokens of path and prompt beyond the lcp, and O(calls) for its ancestors.
"""

cpdef enum:  # trajkit.schema.REGIONS
    REGION_NONE, REGION_LAST_REPLY, REGION_EARLIER_REPLY, REGION_PROMPT

cpdef enum:  # the lines of describe_drift's out (trajkit.analysis.drift)
    DRIFT_REGION, DRIFT_RESYNC_PATH, DRIFT_RESYNC_PROMPT, DRIFT_RESYNC_LENGTH
    DRIFT_TOKENS_AFTER_DRIFT, DRIFT_CAUSE

cpdef enum:  # trajkit.schema.CAUSES
    CAUSE_CLEAN, CAUSE_TRUNCATED, CAUSE_HEAD_DROPPED, CAUSE_MIDDLE_EDITED
    CAUSE_TAIL_CHANGED, CAUSE_DIVERGED


cdef struct Windows:          # the runs of one length in a sequence, found by their tokens
    uint64_t* hashes
    int32_t* starts           # -1: free
    int64_t mask


cdef inline uint64_t _mixed(uint64_t rolling) noexcept nogil:
    return rolling ^ (rolling >> 29)


cdef bint _common_run(
    const token_t* a, pos_t n_a, const token_t* b, pos_t n_b, pos_t length,
    Windows* windows, pos_t* at_a, pos_t* at_b,
) noexcept nogil:
    """Whether a and b have a run of this length in common; the first in b, its first in a."""
    cdef uint64_t base = 0x9E3779B97F4A7C15, power = 1, rolling
    cdef int64_t slot
    cdef pos_t i, k, start
    cdef int32_t like  # an earlier position in a with the run of the previous position
    if length > n_a or length > n_b:
        return False
    for k in range(length - 1):
        power *= base
    memset(windows.starts, 0xFF, (windows.mask + 1) * sizeof(int32_t))
    for k in range(2):  # the runs of a are stored, then those of b looked up
        rolling = 0
        like = -1
        for i in range((n_a if k == 0 else n_b)):
            if i >= length:
                rolling -= power * <uint64_t>((a if k == 0 else b)[i - length] + 1)
            rolling = rolling * base + <uint64_t>((a if k == 0 else b)[i] + 1)
            if i < length - 1:
                continue
            start = i - length + 1
            if like >= 0 and a[like + length] == a[i]:
                # The run that this one repeats continues in the same way: a loop of many
                # equal runs is read once and not compared run by run.
                like += 1
                continue
            slot = <int64_t>_mixed(rolling) & windows.mask
            while windows.starts[slot] >= 0:
                if windows.hashes[slot] == rolling and memcmp(
                    a + windows.starts[slot], (a if k == 0 else b) + start,
                    length * sizeof(token_t),
                ) == 0:
                    break
                slot = (slot + 1) & windows.mask
            if k == 0:
                like = windows.starts[slot]
                if like < 0:
                    windows.starts[slot] = <int32_t>start
                    windows.hashes[slot] = rolling
            elif windows.starts[slot] >= 0:
                at_a[0] = windows.starts[slot]
                at_b[0] = start
                return True
    return False


cdef pos_t _ending_run(
    const token_t* tail, pos_t n_tail, const token_t* b, pos_t n_b, pos_t boundary,
    int32_t* border, pos_t* at_a, pos_t* at_b,
) noexcept nogil:
    """Length of the longest end of the tail that b contains, at its first position; 0: none.

    Knuth, Morris and Pratt's search, backwards: ``border[k]`` is the longest proper end of the
    tail's last k tokens that they also start with. It has room for n_tail.
    """
    cdef pos_t k = 0, i, longest = 0
    if n_tail == 0:
        return 0
    border[0] = 0  # of one token
    for i in range(1, n_tail):
        while k > 0 and tail[n_tail - 1 - i] != tail[n_tail - 1 - k]:
            k = border[k - 1]
        if tail[n_tail - 1 - i] == tail[n_tail - 1 - k]:
            k += 1
        border[i] = <int32_t>k
    k = 0
    for i in range(n_b - 1, -1, -1):
        if k == n_tail:
            k = border[k - 1]
        while k > 0 and b[i] != tail[n_tail - 1 - k]:
            k = border[k - 1]
        if b[i] == tail[n_tail - 1 - k]:
            k += 1
        if k > 0 and k >= longest:
            longest = k
            at_a[0] = boundary - k
            at_b[0] = i
    return longest


cdef pos_t _resync(
    const token_t* a, pos_t n_a, pos_t boundary, const token_t* b, pos_t n_b, pos_t min_run,
    Windows* windows, pos_t* at_a, pos_t* at_b,
) noexcept nogil:
    """Length of the longest common run; its positions are written to at_a and at_b.

    A run has min_run tokens or more. Without one, it is the longest run that ends where
    ``a[:boundary]`` does, or 0.
    """
    cdef pos_t low = min_run, high = min(n_a, n_b), half
    if _common_run(a, n_a, b, n_b, low, windows, at_a, at_b):
        # What is common at one length is common at every smaller one.
        while low < high:
            half = low + (high - low + 1) // 2
            if _common_run(a, n_a, b, n_b, half, windows, at_a, at_b):
                low = half
            else:
                high = half - 1
        _common_run(a, n_a, b, n_b, low, windows, at_a, at_b)
        return low
    high = min(min(boundary, n_b), min_run - 1)
    return _ending_run(a + boundary - high, high, b, n_b, boundary, windows.starts, at_a, at_b)


cdef struct DriftFinder:      # the scratch of one describe_drift
    token_t* a                # path and prompt beyond the lcp, as long as the longest path
    token_t* b
    int64_t room              # entries of each of them
    int32_t* chain            # see _copy_path
    Windows windows


cdef pos_t _locate_drift(
    CallForest forest, const Link* links, int32_t call, int64_t[:, ::1] out
) noexcept nogil:
    """Fill region and tokens_after_drift; return where the message in which drift starts ends.

    Climbs over the replies that the parent's path contains unchanged: ``reach`` is how far
    that path and the path of ``x`` agree.
    """
    cdef const Call* calls = forest.calls
    cdef int32_t parent = links[call].parent, x = parent, steps = 0
    cdef pos_t lcp = links[call].lcp, reach = _held_len(&calls[parent]), boundary = reach
    cdef pos_t start, stop
    out[DRIFT_REGION, call] = REGION_PROMPT
    # parents of calls without an order may be a circle
    while x >= 0 and reach > lcp and steps < forest.n_calls:
        steps += 1
        start, stop = calls[x].prompt_len, _held_len(&calls[x])
        out[DRIFT_TOKENS_AFTER_DRIFT, call] += max(min(stop, reach) - max(start, lcp), 0)
        if start <= lcp < min(stop, reach):
            out[DRIFT_REGION, call] = REGION_LAST_REPLY if x == parent else REGION_EARLIER_REPLY
        if lcp < start <= reach:
            boundary = min(boundary, start)
        if lcp < stop <= reach:
            boundary = min(boundary, stop)
        if links[x].parent >= 0:
            reach = min(reach, links[x].lcp)
        x = links[x].parent
    return boundary


cdef int _describe_call(
    CallForest forest, const Link* links, int32_t call, pos_t min_run, DriftFinder* finder,
    int64_t[:, ::1] out,
) noexcept nogil:
    """Fill the lines of a call with a parent, but its cause, which is returned (CAUSE_*)."""
    cdef int32_t parent = links[call].parent
    cdef pos_t lcp = links[call].lcp, path_len = _held_len(&forest.calls[parent])
    cdef pos_t prompt_len = forest.calls[call].prompt_len, boundary, n, at_a = 0, at_b = 0
    if lcp == path_len:
        out[DRIFT_REGION, call] = REGION_NONE
        return CAUSE_CLEAN
    boundary = _locate_drift(forest, links, call, out)
    if lcp == prompt_len:
        return CAUSE_TRUNCATED
    check_write("tails", 0, max(path_len, prompt_len) - lcp, finder.room)
    _copy_path(forest, forest.ends[parent], lcp, path_len, finder.a, finder.chain, False)
    _copy_path(forest, forest.ends[call], lcp, prompt_len, finder.b, finder.chain, False)
    finder.windows.mask = 1
    while finder.windows.mask < 2 * (path_len - lcp):
        finder.windows.mask *= 2
    check_write("starts", 0, finder.windows.mask, 4 * finder.room)
    finder.windows.mask -= 1
    n = _resync(
        finder.a, path_len - lcp, boundary - lcp, finder.b, prompt_len - lcp, min_run,
        &finder.windows, &at_a, &at_b,
    )
    if n > 0:
        out[DRIFT_RESYNC_PATH, call] = lcp + at_a
        out[DRIFT_RESYNC_PROMPT, call] = lcp + at_b
        out[DRIFT_RESYNC_LENGTH, call] = n
    if n >= min_run:
        return CAUSE_HEAD_DROPPED if at_b == 0 else CAUSE_MIDDLE_EDITED
    return CAUSE_TAIL_CHANGED if out[DRIFT_REGION, call] == REGION_LAST_REPLY else CAUSE_DIVERGED


def describe_drift(
    CallForest forest not None,
    const Link[::1] links not None,
    int64_t min_run,
    int64_t[:, ::1] out not None,
):
    """Fill ``out``, shape (6, n_calls), for every call with a parent.

    Lines: region, resync_path, resync_prompt, resync_length (initially -1, and unchanged
    without a resync), tokens_after_drift (initially 0), cause.
    """
    cdef int64_t n_calls = forest.n_calls, i, longest = 1
    cdef int32_t parent
    cdef DriftFinder finder

    _check_length("links", links.shape[0], n_calls)
    _check_length("out", out.shape[0], DRIFT_CAUSE + 1)
    _check_length("out", out.shape[1], n_calls)
    _check_parents(forest, links)
    if min_run < 1:
        raise LayoutError(f"min_run is {min_run}: expected 1 or more")
    for i in range(n_calls):
        longest = max(longest, _held_len(&forest.calls[i]))
        parent = links[i].parent
        if parent >= 0 and not (
            0 <= links[i].lcp <= min(_held_len(&forest.calls[parent]), forest.calls[i].prompt_len)
        ):
            raise LayoutError(f"links[{i}]: lcp {links[i].lcp} is not within both paths")
    cdef token_t[:, ::1] tails = empty((2, longest), "i4")
    # a power of two, at least twice the longest path: less than four times
    cdef uint64_t[::1] hashes = empty(4 * longest, "u8")
    cdef int32_t[::1] starts = empty(4 * longest, "i4"), chain = empty(forest.n_nodes + 1, "i4")
    finder.a, finder.b, finder.room = &tails[0, 0], &tails[1, 0], longest
    finder.chain = &chain[0]
    finder.windows.hashes, finder.windows.starts = &hashes[0], &starts[0]
    with nogil:
        for i in range(n_calls):
            if links[i].parent >= 0:
                out[DRIFT_CAUSE, i] = _describe_call(
                    forest, &links[0], <int32_t>i, min_run, &finder, out
                )


# ---
# The spans in which two token sequences differ, between the runs that both have.
#
# Fills ``out`` from the two sequences and the special tokens in them. From each position where
# they differ, the search is for the nearest position where they agree for ``run`` tokens: the
# number of tokens skipped in both is smallest. Looking ahead by n tokens ends at a position
# that is reached by skipping n tokens or more, so all of it takes O(tokens of a and b).

cdef enum:
    # Cost, in tokens, of a special token (a message's border) that only one side skips: text
    # that occurs in two messages does not lead from one into the other.
    BORDER = 64

cpdef enum:  # the columns of align's out (trajkit.analysis.drift.Stretch)
    DIFFERENCE_PATH_START, DIFFERENCE_PATH_STOP
    DIFFERENCE_PROMPT_START, DIFFERENCE_PROMPT_STOP


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
    _check_length("out", out.shape[1], DIFFERENCE_PROMPT_STOP + 1)
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
