"""The columns of a ``turns`` table, read through the Arrow C data interface.

Fills call and request records from a stream of struct arrays whose children are the columns,
in O(turns + validity bitmaps + log(turns) per base). Nothing per token is copied: the records
get the addresses of the table's own buffers.
"""

cdef struct ArrowArray:       # Arrow C data interface, format specification 1.0
    int64_t length
    int64_t null_count        # -1: not counted
    int64_t offset
    int64_t n_buffers
    int64_t n_children
    const void** buffers
    ArrowArray** children
    ArrowArray* dictionary
    void (*release)(ArrowArray*) noexcept nogil
    void* private_data

cdef struct ArrowArrayStream:
    int (*get_schema)(ArrowArrayStream*, void*) noexcept
    int (*get_next)(ArrowArrayStream*, ArrowArray*) noexcept
    const char* (*get_last_error)(ArrowArrayStream*) noexcept
    void (*release)(ArrowArrayStream*) noexcept
    void* private_data

cpdef enum:  # those of the delta form last (trajkit.turns.sessions)
    COL_TURN_INDEX, COL_PROMPT_IDS, COL_OUTPUT_IDS, COL_OUTPUT_LOGPROBS, COL_FINISH_REASON
    COL_MESSAGES, COL_RESPONSE, COL_USE_TOOL, COL_ILL_FORMED, COL_TRAINABLE, COL_OUTPUT_MASK
    COL_BASE_TURN, COL_SHARED_LENGTH, COL_SHARED_MESSAGES

cdef enum:
    N_COLS = COL_BASE_TURN
    N_DELTA_COLS = COL_SHARED_MESSAGES + 1

cdef enum:  # the fields of a message
    FIELD_KEY, FIELD_ROLE, FIELD_BODY
    N_FIELDS


cdef struct Run:              # one element of a list column
    int64_t start             # of its first item in the child, offset of the child aside
    int64_t n


cdef inline bint _is_valid(const ArrowArray* array, int64_t i) noexcept nogil:
    cdef const uint8_t* bits = <const uint8_t*>array.buffers[0]
    if array.null_count == 0 or bits == NULL:
        return True
    i += array.offset
    return bits[i >> 3] >> (i & 7) & 1


cdef inline bint _all_valid(const ArrowArray* array, Run run) noexcept nogil:
    cdef int64_t i
    if array.null_count == 0 or array.buffers[0] == NULL:
        return True
    for i in range(run.start, run.start + run.n):
        if not _is_valid(array, i):
            return False
    return True


cdef inline int32_t _int32(const ArrowArray* array, int64_t i) noexcept nogil:
    return (<const int32_t*>array.buffers[1])[array.offset + i]


cdef inline bint _flag(const ArrowArray* array, int64_t i, bint absent) noexcept nogil:
    cdef const uint8_t* bits = <const uint8_t*>array.buffers[1]
    if not _is_valid(array, i):
        return absent
    i += array.offset
    return bits[i >> 3] >> (i & 7) & 1


cdef inline Run _run(const ArrowArray* array, int64_t i) noexcept nogil:
    """The range of items of one element of a large list."""
    cdef const int64_t* offsets = <const int64_t*>array.buffers[1] + array.offset
    cdef Run run
    run.start = offsets[i]
    run.n = offsets[i + 1] - offsets[i]
    return run


cdef inline int64_t _at(const ArrowArray* array, int64_t i, int64_t n_bytes) noexcept nogil:
    """Address of an item of a fixed-width array; 0 if the array has no buffer."""
    if array.buffers[1] == NULL:
        return 0
    return <int64_t><intptr_t>array.buffers[1] + (array.offset + i) * n_bytes


cdef inline bint _is_word(
    const ArrowArray* array, int64_t i, const char* word, int32_t n
) noexcept nogil:
    cdef const int32_t* offsets = <const int32_t*>array.buffers[1] + array.offset
    if not _is_valid(array, i) or offsets[i + 1] - offsets[i] != n:
        return False
    return memcmp(<const char*>array.buffers[2] + offsets[i], word, n) == 0


cdef inline uint8_t _stop(const ArrowArray* array, int64_t i) noexcept nogil:
    """STOP_* of one element of finish_reason."""
    if _is_word(array, i, b"length", 6):
        return STOP_LENGTH
    return STOP_ABORT if _is_word(array, i, b"abort", 5) else STOP_OTHER


cdef bint _read_turn(
    const ArrowArray* const* columns, int64_t i, Call* call, Request* request
) noexcept nogil:
    """Read one turn of a batch, whose records come as zeros; whether it fits the schema."""
    cdef const ArrowArray* lists
    cdef const ArrowArray* items
    cdef const ArrowArray* field
    cdef int64_t within
    cdef Run run

    lists = columns[COL_PROMPT_IDS]
    run = _run(lists, i)
    if not _all_valid(lists.children[0], run):
        return False
    call.own = _at(lists.children[0], run.start, sizeof(token_t))
    call.prompt_len = run.n

    lists = columns[COL_OUTPUT_IDS]
    run = _run(lists, i)
    if not _all_valid(lists.children[0], run):
        return False
    call.out = _at(lists.children[0], run.start, sizeof(token_t))
    call.out_len = run.n

    lists = columns[COL_OUTPUT_LOGPROBS]
    if _is_valid(lists, i):
        run = _run(lists, i)
        if run.n != call.out_len:
            return False
        if run.n > 0:
            items = lists.children[0]
            call.logprobs = _at(items, run.start, sizeof(float))
            if items.null_count != 0 and items.buffers[0] != NULL:
                call.valid = <int64_t><intptr_t>items.buffers[0]
                call.valid_bit = items.offset + run.start

    call.stop = _stop(columns[COL_FINISH_REASON], i)
    call.use_tool = _flag(columns[COL_USE_TOOL], i, False)
    call.ill_formed = _flag(columns[COL_ILL_FORMED], i, False)
    call.trainable = _flag(columns[COL_TRAINABLE], i, True)

    lists = columns[COL_OUTPUT_MASK]
    if _is_valid(lists, i):
        run = _run(lists, i)
        if run.n != call.out_len:
            return False
        items = lists.children[0]
        if not _all_valid(items, run):
            return False
        if run.n > 0:
            call.mask = <int64_t><intptr_t>items.buffers[1]
            call.mask_bit = items.offset + run.start

    lists = columns[COL_MESSAGES]
    request.n_keys = -1
    if _is_valid(lists, i):
        run = _run(lists, i)
        items = lists.children[0]
        within = run.start + items.offset  # a struct's children do not know its offset
        if not _all_valid(items, run):
            return False
        run.start = within
        if not _all_valid(items.children[FIELD_KEY], run):
            return False
        request.n_keys = run.n
        request.keys = _at(items.children[FIELD_KEY], within, KEY_BYTES)
        field = items.children[FIELD_ROLE]
        request.role_offsets = _at(field, within, sizeof(int32_t))
        request.role_bytes = <int64_t><intptr_t>field.buffers[2]

    items = columns[COL_RESPONSE]
    within = i + items.offset
    if _is_valid(items, i) and _is_valid(items.children[FIELD_KEY], within):
        request.reply_key = _at(items.children[FIELD_KEY], within, KEY_BYTES)
        field = items.children[FIELD_ROLE]
        request.reply_is_assistant = _is_word(field, within, b"assistant", 9)
    return True


cdef int64_t _find_turn(
    const int32_t* turn_index, int64_t start, int64_t stop, int32_t wanted
) noexcept nogil:
    """Which of the turns start:stop, in ascending order, is the wanted one; -1: none."""
    cdef int64_t middle = stop - 1  # as most are
    while start < stop:
        if turn_index[middle] == wanted:
            return middle
        if turn_index[middle] < wanted:
            start = middle + 1
        else:
            stop = middle
        middle = start + (stop - start) // 2
    return -1


cdef bint _read_base(
    const ArrowArray* const* columns, int64_t i, const int32_t* turn_index, int64_t start,
    int64_t row, Call* calls, Request* requests,
) noexcept nogil:
    """Read what a turn in delta form shares with an earlier one of its session, start:row.

    Returns whether that one has it.
    """
    cdef Call* call = &calls[row]
    cdef Request* request = &requests[row]
    cdef int64_t base = -1, held = 0, shown = 0
    if _is_valid(columns[COL_BASE_TURN], i):
        base = _find_turn(turn_index, start, row, _int32(columns[COL_BASE_TURN], i))
        if base < 0:
            return False
        held = calls[base].prompt_len + calls[base].out_len
        if requests[base].n_keys >= 0:
            shown = requests[base].shared + requests[base].n_keys
            shown += requests[base].reply_key != 0
    call.base = <int32_t>base
    call.own_start = _int32(columns[COL_SHARED_LENGTH], i)
    if not 0 <= call.own_start <= held:
        return False
    call.prompt_len += call.own_start
    if request.n_keys >= 0 and _is_valid(columns[COL_SHARED_MESSAGES], i):
        request.shared = _int32(columns[COL_SHARED_MESSAGES], i)
        if not 0 <= request.shared <= shown:
            return False
    return True


cdef bint _is_batch(const ArrowArray* batch):
    """Whether a batch has the columns that `_read_turn` goes through."""
    cdef const ArrowArray* message
    cdef int column
    if batch.n_children not in (N_COLS, N_DELTA_COLS) or batch.offset != 0:
        return False
    for column in (
        COL_PROMPT_IDS, COL_OUTPUT_IDS, COL_OUTPUT_LOGPROBS, COL_MESSAGES, COL_OUTPUT_MASK
    ):
        if batch.children[column].n_children != 1:
            return False
    message = batch.children[COL_MESSAGES].children[0]
    return message.n_children == N_FIELDS and batch.children[COL_RESPONSE].n_children == N_FIELDS


cdef bint _read_batch(
    const ArrowArray* batch, int64_t* row, const int64_t** session, int32_t* turn_index,
    Call* calls, Request* requests,
) noexcept nogil:
    """Read the turns of a batch, from row on; row is left at the one that does not fit.

    ``session`` points at the first turn of the session of row, the next of which follows.
    """
    cdef const ArrowArray* const* columns = <const ArrowArray* const*>batch.children
    cdef int64_t i, start
    for i in range(batch.length):
        while row[0] >= session[0][1]:
            session[0] += 1
        start = session[0][0]
        turn_index[row[0]] = _int32(columns[COL_TURN_INDEX], i)
        if row[0] > start and turn_index[row[0]] <= turn_index[row[0] - 1]:
            return False
        calls[row[0]].base = -1
        if not _read_turn(columns, i, &calls[row[0]], &requests[row[0]]):
            return False
        if batch.n_children == N_DELTA_COLS and not _read_base(
            columns, i, turn_index, start, row[0], calls, requests
        ):
            return False
        row[0] += 1
    return True


cdef bint _next_batch(ArrowArrayStream* stream, ArrowArray* batch) except -1:
    """Whether another batch came. It is the caller's to release."""
    if stream.get_next(stream, batch) != 0:
        raise LayoutError(stream.get_last_error(stream).decode("utf-8", "replace"))
    return batch.release != NULL


def read_columns(
    object table not None,
    const int64_t[::1] session_offsets not None,
    int32_t[::1] turn_index not None,
    Call[::1] calls not None,
    Request[::1] requests not None,
):
    """Fill the records of all turns; return the first that does not fit its table, or -1.

    ``table`` is an "arrow_array_stream" capsule of the columns turn_index, the ids that the
    turn brings itself, output_ids, output_logprobs, finish_reason, the messages that it brings
    itself, response, use_tool, ill_formed, trainable, output_mask, and in delta form base_turn,
    shared_length, shared_messages, of the types of `trajkit.schema`. Its buffers must outlive
    the records, which must come as zeros.
    """
    cdef:
        int64_t row = 0, n = calls.shape[0]
        bint fits = True
        ArrowArrayStream* stream
        ArrowArray batch
        const int64_t* session

    stream = <ArrowArrayStream*>PyCapsule_GetPointer(table, "arrow_array_stream")
    _check_sessions(session_offsets, n)
    _check_length("turn_index", turn_index.shape[0], n)
    _check_length("requests", requests.shape[0], n)
    session = &session_offsets[0]
    while fits and _next_batch(stream, &batch):
        try:
            if not _is_batch(&batch):
                raise LayoutError("a batch is no struct of the columns of turns")
            if batch.length > n - row:
                raise LayoutError(f"calls has {n} entries, more are needed")
            if batch.length:
                with nogil:
                    fits = _read_batch(
                        &batch, &row, &session, &turn_index[0], &calls[0], &requests[0]
                    )
        finally:
            batch.release(&batch)
    return -1 if fits else row
