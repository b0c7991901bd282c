"""How a call's prompt departs from the path of the call that it continues."""

cdef enum:  # in the order of trajkit.schema.REGIONS
    REGION_NONE, REGION_LAST_REPLY, REGION_EARLIER_REPLY, REGION_PROMPT

cdef enum:  # in the order of trajkit.schema.CAUSES
    CAUSE_CLEAN, CAUSE_TRUNCATED, CAUSE_HEAD_DROPPED, CAUSE_MIDDLE_EDITED
    CAUSE_TAIL_CHANGED, CAUSE_DIVERGED


cdef struct Windows:          # the runs of one length in a sequence, found by their tokens
    uint64_t* hashes
    int32_t* starts           # -1: free
    int64_t mask


cdef inline uint64_t _mixed(uint64_t rolling) noexcept nogil:
    return rolling ^ (rolling >> 29)


cdef void _copy_range(
    const Call* calls, const Node* nodes, int32_t node, pos_t start, pos_t stop,
    token_t* target,
) noexcept nogil:
    """Tokens start:stop of the path that ends at the node's stop.

    ``target`` has room for ``stop - start``, and no more is written.
    """
    cdef pos_t low, high
    while nodes[node].parent >= 0 and nodes[node].stop > start:
        low = max(nodes[node].start, start)
        high = min(nodes[node].stop, stop)
        if low < high:
            _copy(&calls[nodes[node].source], target + (low - start), low, high)
        node = nodes[node].parent


cdef bint _common_run(
    const token_t* a, pos_t n_a, const token_t* b, pos_t n_b, pos_t length,
    Windows* windows, pos_t* at_a, pos_t* at_b,
) noexcept nogil:
    """Whether a and b have a run of this length in common; the first in b, its first in a."""
    cdef uint64_t base = 0x9E3779B97F4A7C15, power = 1, rolling
    cdef int64_t slot
    cdef pos_t i, k, start
    cdef int32_t like  # an earlier place in a where the run at the place before stands too
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
                # Goes on as the run that it repeats goes on, so that a loop of many equal
                # runs is read once and not compared run by run.
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
    """Length of the longest end of the tail that stands in b, the first there; 0: none.

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


cdef pos_t _back_in_step(
    const token_t* a, pos_t n_a, pos_t boundary, const token_t* b, pos_t n_b, pos_t min_run,
    Windows* windows, pos_t* at_a, pos_t* at_b,
) noexcept nogil:
    """Length of the longest common run of min_run tokens or more, or failing that of the
    longest that ends where ``a[:boundary]`` does; 0: none. Where it stands, in at_a, at_b."""
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


def describe_drift(
    const Call[::1] calls not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    const Link[::1] links not None,
    int64_t min_run,
    token_t[:, ::1] tails not None,
    uint64_t[::1] hashes not None,
    int32_t[::1] starts not None,
    int64_t[:, ::1] out not None,
):
    """Fill ``out`` (n_calls by 6) for every call with a parent.

    Columns: region, resync_path, resync_prompt, resync_length (initially -1, and left so without a
    resync), tokens_after_drift (initially 0), cause. ``tails`` is 2 by the longest path;
    ``hashes`` and ``starts`` have a power of two entries, at least twice that.
    """
    cdef:
        int64_t n_calls = calls.shape[0], i, n_table = starts.shape[0], longest = 0
        int32_t x, parent, steps
        pos_t lcp, held, reach, stop, boundary, at_a = 0, at_b = 0, n
        Windows windows
        token_t* a
        token_t* b

    for name, m in (("ends", ends.shape[0]), ("links", links.shape[0]), ("out", out.shape[0])):
        _check_length(name, m, n_calls)
    _check_length("out", out.shape[1], 6)
    _check_parents(links, n_calls)
    _check_forest(nodes, ends)
    for i in range(n_calls):
        longest = max(longest, calls[i].prompt_len + calls[i].out_len)
        parent = links[i].parent
        if parent >= 0 and not (
            0 <= links[i].lcp <= min(_held_len(&calls[parent]), calls[i].prompt_len)
        ):
            raise LayoutError(f"links[{i}]: lcp {links[i].lcp} is not within both paths")
    _check_length("tails", tails.shape[0], 2)
    _check_length("tails", tails.shape[1], longest)
    if n_table & (n_table - 1) or n_table < 2 * longest or n_table < 2:
        raise LayoutError(f"starts has {n_table} entries: not a power of two, or too few")
    _check_length("hashes", hashes.shape[0], n_table)
    if min_run < 1:
        raise LayoutError(f"min_run is {min_run}: expected 1 or more")
    if longest == 0:  # nothing to drift: all clean
        return
    a = &tails[0, 0]
    b = &tails[1, 0]
    windows.hashes = &hashes[0]
    windows.starts = &starts[0]
    with nogil:
        for i in range(n_calls):
            parent = links[i].parent
            if parent < 0:
                continue
            lcp = links[i].lcp
            held = _held_len(&calls[parent])
            if lcp == held:
                out[i, 0] = REGION_NONE
                out[i, 5] = CAUSE_CLEAN
                continue
            # Upwards over the replies that stand in held: `reach` is how far held and the
            # path of x agree.
            out[i, 0] = REGION_PROMPT
            reach = boundary = held
            x = parent
            steps = 0  # parents of calls without an order may run in a circle
            while x >= 0 and reach > lcp and steps < n_calls:
                steps += 1
                stop = min(_held_len(&calls[x]), reach)
                out[i, 4] += max(stop - max(calls[x].prompt_len, lcp), 0)
                if calls[x].prompt_len <= lcp < stop:
                    out[i, 0] = REGION_LAST_REPLY if x == parent else REGION_EARLIER_REPLY
                if lcp < calls[x].prompt_len <= reach:
                    boundary = min(boundary, calls[x].prompt_len)
                if lcp < _held_len(&calls[x]) <= reach:
                    boundary = min(boundary, _held_len(&calls[x]))
                if links[x].parent >= 0:
                    reach = min(reach, links[x].lcp)
                x = links[x].parent
            if lcp == calls[i].prompt_len:
                out[i, 5] = CAUSE_TRUNCATED
                continue
            check_write("tails", 0, max(held, calls[i].prompt_len) - lcp, tails.shape[1])
            _copy_range(&calls[0], &nodes[0], ends[parent], lcp, held, a)
            _copy_range(&calls[0], &nodes[0], ends[i], lcp, calls[i].prompt_len, b)
            windows.mask = 1
            while windows.mask < 2 * (held - lcp):
                windows.mask *= 2
            check_write("starts", 0, windows.mask, n_table)  # half of it is a border, too
            windows.mask -= 1
            n = _back_in_step(
                a, held - lcp, boundary - lcp, b, calls[i].prompt_len - lcp, min_run, &windows,
                &at_a, &at_b,
            )
            if n > 0:
                out[i, 1] = lcp + at_a
                out[i, 2] = lcp + at_b
                out[i, 3] = n
            if n >= min_run:
                out[i, 5] = CAUSE_HEAD_DROPPED if at_b == 0 else CAUSE_MIDDLE_EDITED
            elif out[i, 0] == REGION_LAST_REPLY:
                out[i, 5] = CAUSE_TAIL_CHANGED
            else:
                out[i, 5] = CAUSE_DIVERGED
