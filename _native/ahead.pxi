"""Messages asked for before they are compared, so that they are in the caches by then.

A message is dicts and lists within others: what is in one is known only once it has come from
memory. A scout walks messages breadth first, some ahead of the comparison and a level at a
step: what it looks into at one step, it asked for at the step before. Nothing is decided by
what it sees.
"""

cdef enum:
    SCOUTED = 64     # objects under way, a power of two
    FAR = 12         # steps, and as many levels: how far ahead a message is asked for
    MOST_PARTS = 16  # of a dict or list that are asked for
    FORM_LINES = 4


cdef struct Sight:
    PyObject* one
    PyObject** cell  # of the form that it is compared with, where it begins; NULL: not known
    bint opened      # what is in it was asked for, too


cdef struct Scout:
    Sight[SCOUTED] sights  # a ring
    uint32_t first, last
    bint any_other         # a value was seen that is no one object with the form's


cdef inline void _see(Scout* scout, PyObject* one, PyObject** cell, bint opened) noexcept nogil:
    """Look at an object at the next step; not at all where there are many."""
    cdef Sight* sight
    if scout.last - scout.first < SCOUTED:
        sight = &scout.sights[scout.last % SCOUTED]
        sight.one, sight.cell, sight.opened = one, cell, opened
        scout.last += 1


cdef inline void _scout(Scout* scout, PyObject* one, PyObject* form) noexcept nogil:
    """Ask for a message, which is compared with a form."""
    __builtin_prefetch(one)
    _see(scout, one, tuple_cells(form, 0), False)


cdef inline void _ask_for_form(PyObject* form) noexcept nogil:
    cdef int i
    for i in range(FORM_LINES):
        __builtin_prefetch(<char*>form + i * LINE)


cdef void _advance(Scout* scout) noexcept:
    """A step: look into all that was asked for before."""
    cdef uint32_t last = scout.last
    cdef Sight sight
    cdef char* contents
    while scout.first != last:
        sight = scout.sights[scout.first % SCOUTED]
        scout.first += 1
        if sight.opened:
            if is_dict(sight.one):
                _scout_pairs(scout, sight.one, sight.cell)
            else:
                _scout_values(scout, sight.one, sight.cell)
        elif is_dict(sight.one):
            contents = <char*>TK_KEYS(sight.one)
            __builtin_prefetch(contents)
            __builtin_prefetch(contents + LINE)
            __builtin_prefetch(contents + 2 * LINE)
            _see(scout, sight.one, sight.cell, True)
        elif is_list(sight.one):
            __builtin_prefetch(TK_ITEMS(sight.one))
            _see(scout, sight.one, sight.cell, True)


cdef inline void _scout_pairs(Scout* scout, PyObject* pairs, PyObject** cell) noexcept:
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t place = 0, n = _n_parts(A_DICT, cell)
    cdef PyObject** at = NULL if cell == NULL else cell + 2
    if at != NULL and not scout.any_other and _all_leaves(at, n):
        return  # what is in it are most likely the very objects: nothing is to be read
    while n > 0 and next_pair(pairs, &place, &key, &value):
        at = _scout_part(scout, value, NULL if at == NULL else at + 1)
        n -= 1


cdef inline bint _all_leaves(PyObject** cell, Py_ssize_t n) noexcept nogil:
    """Whether a form goes on with n keys and values that are no dicts and lists."""
    cdef Py_ssize_t i
    for i in range(n):
        if cell[2 * i + 1] == A_DICT or cell[2 * i + 1] == A_LIST:
            return False
    return True


cdef inline void _scout_values(Scout* scout, PyObject* values, PyObject** cell) noexcept:
    cdef Py_ssize_t i, n = _n_parts(A_LIST, cell)
    cdef PyObject** at = NULL if cell == NULL else cell + 2
    for i in range(min(n, list_size(values))):
        at = _scout_part(scout, list_item(values, i), at)


cdef inline Py_ssize_t _n_parts(PyObject* head, PyObject** cell) noexcept:
    if cell == NULL:
        return MOST_PARTS
    return min(as_size(cell[1]), <Py_ssize_t>MOST_PARTS) if cell[0] == head else 0


cdef inline PyObject** _scout_part(
    Scout* scout, PyObject* value, PyObject** cell
) noexcept nogil:
    """Ask for what is to be read of a value; returns the cell behind its own, if known."""
    if cell == NULL:
        __builtin_prefetch(value)
        _see(scout, value, NULL, False)
        return NULL
    if cell[0] == value:  # nothing is
        return cell + 1
    __builtin_prefetch(value)
    if cell[0] == A_DICT or cell[0] == A_LIST:
        _see(scout, value, cell, False)
        return NULL
    # texts, most of the time
    scout.any_other = True
    __builtin_prefetch(TK_TEXT(value))
    __builtin_prefetch(cell[0])
    __builtin_prefetch(TK_TEXT(cell[0]))
    return cell + 1
