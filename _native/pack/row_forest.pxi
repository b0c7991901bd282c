"""Rows as a forest: where each row leaves another one, their order, and where a tree is cut.

A row's own tokens are those from ``shared`` on. In pre-order, with the row's own tokens first and
then its branches from the deepest to the shallowest, they are contiguous, so a forest of tokens is
laid out as a forest of rows.
"""


cdef int64_t _attach(PackRow* rows, int64_t n) noexcept nogil:
    """Attach each row to the row whose own tokens it leaves. Return the first bad row, or -1.

    A parent may supply a prefix that it has from its own parent.
    """
    cdef int64_t r
    cdef int32_t p
    for r in range(n):
        p = rows[r].parent
        if not -1 <= p < r or rows[r].shared < 0 or rows[r].shared > rows[r].length:
            return r
        if rows[r].shared > (rows[p].length if p >= 0 else 0):
            return r
        while p >= 0 and rows[r].shared <= rows[p].shared:
            p = rows[p].parent
        rows[r].parent = p
    return -1


cdef int64_t _order(
    PackRow* rows, const int64_t* children, int64_t n, int64_t* order
) noexcept nogil:
    """Write the rows in pre-order and return how many there are."""
    cdef int64_t i, k = 0
    cdef int32_t r, root = -1
    for i in range(n):
        rows[i].child = -1
    for i in range(n - 1, -1, -1):
        r = <int32_t>children[i]
        if rows[r].parent >= 0:
            rows[r].sibling = rows[rows[r].parent].child
            rows[rows[r].parent].child = r
        else:
            rows[r].sibling = root
            root = r
    r = root
    while r >= 0 and k < n:
        order[k] = r
        k += 1
        if rows[r].child >= 0:
            r = rows[r].child
            continue
        while r >= 0 and rows[r].sibling < 0:
            r = rows[r].parent
        if r >= 0:
            r = rows[r].sibling
    return k


cdef int64_t _cut(
    const PackRow* rows,
    int64_t n,
    pos_t limit,
    pos_t* ends,
    pos_t* cost,
    int64_t* origin,
    int64_t* queue
) noexcept nogil:
    """Find for each prefix of the rows the parts that repeat the fewest tokens.

    ``cost[k]`` is what the best parts of rows[:k] repeat, ``origin[k]`` the first row of the
    last one. A part of the rows a..k has ``ends[k + 1] - ends[a] + rows[a].shared`` tokens. Its
    size falls as a grows, so the rows at which it may begin are a window that only moves on, and
    the queue has the window's candidates by rising cost. Return the first row that is longer
    than the limit, or -1.
    """
    cdef int64_t k, first = 0, head = 0, tail = 0
    cdef pos_t key
    ends[0] = cost[0] = 0
    for k in range(n):
        ends[k + 1] = ends[k] + rows[k].length - rows[k].shared
        if rows[k].length > limit:
            return k
        if rows[k].parent < 0:
            first = k
            head = tail = 0
        key = cost[k] + rows[k].shared
        while tail > head and cost[queue[tail - 1]] + rows[queue[tail - 1]].shared > key:
            tail -= 1
        queue[tail] = k
        tail += 1
        while ends[k + 1] - ends[first] + rows[first].shared > limit:
            first += 1
        while queue[head] < first:
            head += 1
        origin[k + 1] = queue[head]
        cost[k + 1] = cost[queue[head]] + rows[queue[head]].shared
    return -1


cdef void _segment_parents(
    const int32_t[::1] starts,
    const int32_t[::1] ends,
    const int64_t[::1] offsets,
    int32_t[::1] parents
) noexcept nogil:
    """Write for each segment the one that it hangs on, counted within the pack; -1: none."""
    cdef int64_t pack, k, first
    cdef int64_t p
    for pack in range(offsets.shape[0] - 1):
        first = offsets[pack]
        for k in range(first, offsets[pack + 1]):
            p = k - 1
            while p >= first and ends[p] <= starts[k]:
                p = -1 if parents[p] < 0 else first + parents[p]
            parents[k] = <int32_t>(p - first) if p >= first else -1


def attach_rows(PackRow[::1] rows not None):
    """Attach each row to the row whose own tokens it leaves.

    A row's ``parent`` is an earlier row that has its first ``shared`` tokens. Afterwards it is
    the one that has the last of these among its own tokens, or -1.

    Raises
    ------
    LayoutError
        A parent is no earlier row, or has fewer tokens than it supplies.
    """
    cdef int64_t n = rows.shape[0], bad
    if n == 0:
        return
    with nogil:
        bad = _attach(&rows[0], n)
    if bad >= 0:
        raise LayoutError(
            f"rows[{bad}] takes {rows[bad].shared} of {rows[bad].length} tokens from row "
            f"{rows[bad].parent}, which must be an earlier row that has as many"
        )


def order_rows(
    PackRow[::1] rows not None, const int64_t[::1] children not None, int64_t[::1] order not None
):
    """Write the rows, which `attach_rows` attached, in pre-order.

    ``children`` has all rows; those of one parent are in the order in which they follow it.
    """
    cdef int64_t n = rows.shape[0], i, n_ordered
    _check_length("children", children.shape[0], n)
    _check_length("order", order.shape[0], n)
    for i in range(n):
        if not 0 <= children[i] < n or not -1 <= rows[i].parent < i:
            raise LayoutError(f"children[{i}] is {children[i]}: there are {n} rows in a forest")
    if n == 0:
        return
    with nogil:
        n_ordered = _order(&rows[0], &children[0], n, &order[0])
    if n_ordered != n:
        raise LayoutError(f"children has only {n_ordered} of the {n} rows")


def cut_rows(
    const PackRow[::1] rows not None,
    pos_t limit,
    pos_t[:, ::1] sums not None,
    int64_t[:, ::1] steps not None
):
    """Cut the trees of rows in pre-order into parts of at most ``limit`` tokens.

    Parameters
    ----------
    rows : records of dtype PACK_ROW
    limit : int
    sums : int64, shape (2, n_rows + 1)
        Scratch.
    steps : int64, shape (2, n_rows + 1)
        ``steps[0, k]`` becomes the first row of the last of the parts that rows[:k] make. The
        rest is scratch.

    Returns
    -------
    int
        The first row that is longer than the limit, or -1.
    """
    cdef int64_t n = rows.shape[0], bad = -1
    for name, size in (("sums", sums.shape[1]), ("steps", steps.shape[1])):
        _check_length(name, size, n + 1)
    if sums.shape[0] < 2 or steps.shape[0] < 2:
        raise LayoutError("sums and steps have 2 lines each")
    if n == 0:
        return -1
    with nogil:
        bad = _cut(&rows[0], n, limit, &sums[0, 0], &sums[1, 0], &steps[0, 0], &steps[1, 0])
    return bad


def segment_parents(
    const int32_t[::1] starts not None,
    const int32_t[::1] ends not None,
    const int64_t[::1] offsets not None,
    int32_t[::1] parents not None,
):
    """Write for each segment the segment that it hangs on, counted within its pack; -1: none.

    Parameters
    ----------
    starts, ends : int32, shape (n_segments,)
        Where each segment and the subtree of its tokens begin and end in the pack.
    offsets : int64, shape (n_packs + 1,)
        Segments ``offsets[k]:offsets[k + 1]`` are those of pack k.
    parents : int32, shape (n_segments,)
    """
    cdef int64_t n = starts.shape[0], k
    _check_length("ends", ends.shape[0], n)
    _check_length("parents", parents.shape[0], n)
    for k in range(offsets.shape[0] - 1):
        if not 0 <= offsets[k] <= offsets[k + 1] <= n:
            raise LayoutError(f"offsets[{k}] is {offsets[k]}: there are {n} segments")
    with nogil:
        _segment_parents(starts, ends, offsets, parents)
