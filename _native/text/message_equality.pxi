"""Which stored body each message refers to.

Fills the place of a body per message, from keys and from where bodies are stored. A session
stores a body when its key has no body yet, or last had another one; elsewhere the key refers
to its last body. O(messages).
"""


cdef inline int64_t* _body_slot(int64_t* table, int64_t mask, int64_t key) noexcept nogil:
    """The entry (address of the key, place of its body) of a key, or the free one for it."""
    cdef uint64_t[2] words  # equal messages differ in the second alone
    cdef int64_t slot
    memcpy(words, <const void*><intptr_t>key, KEY_BYTES)
    slot = <int64_t>(words[0] ^ (words[0] >> 32) ^ (words[1] >> 32)) & mask
    while table[2 * slot] != 0 and memcmp(
        <const void*><intptr_t>table[2 * slot], <const void*><intptr_t>key, KEY_BYTES
    ) != 0:
        slot = (slot + 1) & mask
    return &table[2 * slot]


cdef inline int64_t _body_of(
    int64_t* table, int64_t mask, int64_t key, bint has_body, int64_t place, bint* replaced
) noexcept nogil:
    """The place whose body the key refers to from here on, or -1."""
    cdef int64_t* entry = _body_slot(table, mask, key)
    if has_body:
        replaced[0] |= entry[0] != 0
        entry[0] = key
        entry[1] = place
    elif entry[0] == 0:
        return -1
    return entry[1]


cdef int64_t _count_places(
    const Request[::1] requests, const int64_t[::1] session_offsets,
    const uint8_t[::1] has_body, int64_t n_places, int64_t* most
) noexcept nogil:
    """Places of all requests; ``most`` becomes the largest number of bodies in a session."""
    cdef int64_t s, i, k, n, place = 0
    most[0] = 0
    for s in range(session_offsets.shape[0] - 1):
        n = 0
        for i in range(session_offsets[s], session_offsets[s + 1]):
            for k in range(max(requests[i].n_keys, 0)):
                if place < n_places:
                    n += has_body[place]
                place += 1
            n += requests[i].reply_key != 0
        most[0] = max(most[0], n)
    return place


def find_bodies(
    const Request[::1] requests not None,
    const int64_t[::1] session_offsets not None,
    const uint8_t[::1] has_body not None,
    const uint8_t[::1] reply_has_body not None,
    int64_t[::1] places not None,
    int64_t[::1] replies not None,
):
    """Fill the place whose body each message refers to, -1 if no body was stored.

    Places count the messages that the requests bring themselves, in order, and then the
    replies, one per call. ``has_body`` and ``places`` have an entry per message,
    ``reply_has_body`` and ``replies`` one per call.
    """
    cdef:
        int64_t n_calls = requests.shape[0], n_places = has_body.shape[0], s, i, k, n
        int64_t place = 0, before, n_before, n_table = 2, largest, mask, key
        int64_t* entries
        bint replaced

    _check_sessions(session_offsets, n_calls)
    n = _count_places(requests, session_offsets, has_body, n_places, &largest)
    if n != n_places:
        raise LayoutError(f"has_body has {n_places} entries, {n} are needed")
    _check_length("places", places.shape[0], n_places)
    _check_length("reply_has_body", reply_has_body.shape[0], n_calls)
    _check_length("replies", replies.shape[0], n_calls)
    if n_calls == 0:
        return
    while n_table < 2 * largest + 2:
        n_table *= 2
    cdef int64_t[::1] table = empty(2 * n_table, "i8")
    entries = &table[0]
    mask = n_table - 1
    with nogil:
        for s in range(session_offsets.shape[0] - 1):
            memset(entries, 0, 2 * (mask + 1) * sizeof(int64_t))
            replaced = False
            before = n_before = 0
            for i in range(session_offsets[s], session_offsets[s + 1]):
                n = max(requests[i].n_keys, 0)
                for k in range(n):
                    key = requests[i].keys + KEY_BYTES * k
                    # Most of a request repeats the previous one.
                    if (
                        k < n_before and not replaced and not has_body[place + k]
                        and memcmp(
                            <const void*><intptr_t>(requests[i - 1].keys + KEY_BYTES * k),
                            <const void*><intptr_t>key, KEY_BYTES,
                        ) == 0
                    ):
                        places[place + k] = places[before + k]
                        continue
                    places[place + k] = _body_of(
                        entries, mask, key, has_body[place + k], place + k, &replaced
                    )
                replies[i] = -1
                if requests[i].reply_key != 0:
                    replies[i] = _body_of(
                        entries, mask, requests[i].reply_key, reply_has_body[i],
                        n_places + i, &replaced,
                    )
                before = place
                n_before = n
                place += n
