"""A session that grows call by call: where a prompt leaves it, and which messages it knows."""

cdef enum:
    TRIES = 8  # messages that may stand at one place and are looked at one by one
    WORD = 16  # characters


@cython.auto_pickle(False)
@cython.final
cdef class Growth:
    """The forest of a session's paths, grown call by call.

    It holds the arrays that Python made (`attach`), so that a call does not have their layout
    checked again. Calls bring what `find` says that they share with no path; between the two,
    nothing is changed, and the call may be refused.
    """
    cdef Call[::1] calls
    cdef Node[::1] nodes
    cdef int32_t[::1] stack
    cdef int32_t[::1] ends
    cdef token_t[::1] path
    cdef int64_t n_calls
    cdef int64_t n_room
    cdef Cursor cursor

    def __cinit__(self):
        self.n_calls = self.n_room = 0
        memset(&self.cursor, 0, sizeof(Cursor))

    def attach(
        self,
        Call[::1] calls not None,
        Node[::1] nodes not None,
        int32_t[::1] stack not None,
        int32_t[::1] ends not None,
    ):
        """Go on in these arrays, which begin as those before did.

        Parameters
        ----------
        calls : buffer of Call, shape (n,)
        nodes : buffer of Node, shape (2 * n + 1,)
        stack : buffer of int32, shape (2 * n + 1,)
        ends : buffer of int32, shape (n,)
            As for `grow_forest`.
        """
        cdef int64_t n = calls.shape[0]
        _check_length("calls", n, self.n_calls)
        _check_length("nodes", nodes.shape[0], 2 * n + 1)
        _check_length("stack", stack.shape[0], 2 * n + 1)
        _check_length("ends", ends.shape[0], n)
        self.calls, self.nodes, self.stack, self.ends = calls, nodes, stack, ends
        self.n_room = n
        if n:
            self.cursor.stack = &stack[0]

    @property
    def room(self):
        """Calls for which there is room."""
        return self.n_room

    @property
    def length(self):
        """Tokens of the call inserted last."""
        return self.cursor.path_len

    def hold_path(self, token_t[::1] path not None):
        """Keep the path of the call inserted last in one piece, or do not.

        It is compared at once, where calls that bring little would be one by one.

        Parameters
        ----------
        path : buffer of int32
            Filled, and with room for every call that is inserted later. Empty: not kept.
        """
        cdef int32_t slot, node
        if path.shape[0]:
            _check_length("path", path.shape[0], self.cursor.path_len)
        self.path = path
        self.cursor.path = &path[0] if path.shape[0] else NULL
        if self.cursor.path == NULL:
            return
        for slot in range(1, self.cursor.depth):
            node = self.stack[slot]
            _copy(
                &self.calls[self.nodes[node].source], &path[self.nodes[node].start],
                self.nodes[node].start, self.nodes[node].stop,
            )

    cdef int32_t _slot_of(self, pos_t position) noexcept nogil:
        """Where on the stack the node is that holds a position, or ends there."""
        cdef int32_t low = 0, high = self.cursor.depth - 1, middle
        while low < high:
            middle = (low + high) // 2
            if self.nodes[self.stack[middle]].stop < position:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, const token_t[::1] prompt not None):
        """How many tokens of a prompt start like a path, and a call that has them.

        Do not write to the prompt during the call.

        Returns
        -------
        shared : int
        base : int
            The call that had these tokens first; -1: none shares a token.
        """
        cdef:
            pos_t position = 0, start, n = prompt.shape[0]
            int32_t node, child, slot = 0, depth = self.cursor.depth
            const Node* nodes
            const Call* call
            const token_t* run
        if self.n_calls == 0 or n == 0:
            return 0, -1
        nodes = &self.nodes[0]
        node = self.stack[0]
        with nogil:
            if self.cursor.path != NULL:
                position = _lcp(self.cursor.path, &prompt[0], min(self.cursor.path_len, n))
                slot = self._slot_of(position)
                node = self.stack[slot]
            while position < n and position == nodes[node].stop:
                # it goes on as the call before, most of the time
                slot += 1
                child = self.stack[slot] if slot < depth else -1
                if child < 0 or nodes[child].first != prompt[position]:
                    depth = 0
                    child = nodes[node].child
                    while child >= 0 and nodes[child].first != prompt[position]:
                        child = nodes[child].sibling
                    if child < 0:
                        break
                start = position
                call = &self.calls[nodes[child].source]
                # the output stands right behind the ids of the prompt
                run = <const token_t*><intptr_t>call.own + (start - call.own_start)
                position += _lcp(run, &prompt[start], min(nodes[child].stop, n) - start)
                node = child
        return position, nodes[node].source

    def insert(
        self,
        const token_t[::1] held not None,
        pos_t shared,
        pos_t n_new,
        pos_t out_len,
        int32_t base,
    ):
        """Add a call where `find` found that it departs.

        Parameters
        ----------
        held : buffer of int32
            ``n_new`` ids of the prompt from ``shared`` on, and ``out_len`` of the output; more
            may stand behind. It must stay where it is for as long as this object is used.
        shared, base : int
            What `find` gave.

        Returns
        -------
        base : int
            The call that had the prompt's first ``shared`` tokens, and those of the output as
            far as a path goes on as it does; -1: none.
        base_held : int
            Tokens of its prompt and output.
        """
        cdef:
            Call* call
            int64_t index = self.n_calls
            pos_t reached = 0
            int32_t had = -1
        if index >= self.n_room:
            raise LayoutError(f"there is room for {self.n_room} calls, and they are there")
        if not -1 <= base < index:
            raise LayoutError(f"call {index} has the base {base}")
        if not 0 <= shared <= (_held_len(&self.calls[base]) if base >= 0 else 0):
            raise LayoutError(f"call {index} shares {shared} tokens with call {base}")
        if self.cursor.path != NULL:
            _check_length("path", self.path.shape[0], shared + n_new + out_len)
        if n_new < 0 or out_len < 0 or n_new + out_len > held.shape[0]:
            raise LayoutError(
                f"call {index} holds {held.shape[0]} ids: {n_new} and {out_len} are needed"
            )
        call = &self.calls[index]
        memset(call, 0, sizeof(Call))
        call.own = <int64_t><intptr_t>(&held[0] if held.shape[0] else NULL)
        call.own_start = shared
        call.prompt_len = shared + n_new
        call.out = call.own + n_new * <int64_t>sizeof(token_t)
        call.out_len = out_len
        call.base = base
        with nogil:
            if index == 0:
                _plant(&self.nodes[0], &self.cursor)
            _insert(
                &self.calls[0], &self.nodes[0], &self.cursor, &self.ends[0],
                <int32_t>index, &reached, &had,
            )
        if shared:
            call.base = base = had
        self.n_calls = index + 1
        return base, _held_len(&self.calls[base]) if base >= 0 else 0


def take_call(
    const token_t[::1] prompt not None,
    const token_t[::1] output not None,
    const float[::1] logprobs not None,
    token_t[::1] held not None,
    float low,
    float high,
):
    """Copy what a call brings into one piece, and check the copy.

    Parameters
    ----------
    prompt, output : buffer of int32
    logprobs : buffer of float32
        As many as the output has ids, or none.
    held : buffer of int32
        Filled: prompt, output, and the bytes of logprobs. As long as the three.
    low, high : float
        A logprob is above low and at most high.

    Returns
    -------
    prompt_at, output_at, logprobs_at : int
        The first value of each that breaks its rule (ids: not negative), or -1.
    """
    cdef:
        pos_t n_prompt = prompt.shape[0], n_output = output.shape[0]
        pos_t n = logprobs.shape[0], i
        token_t* at
        float* numbers
        int64_t faults[3]
        bint within = True
    if held.shape[0] != n_prompt + n_output + n:
        raise LayoutError(
            f"{n_prompt} + {n_output} + {n} values do not fill {held.shape[0]} places"
        )
    faults[0] = faults[1] = faults[2] = -1
    if held.shape[0]:
        at = &held[0]
        with nogil:
            if n_prompt:
                faults[0] = _copy_ids(&prompt[0], at, n_prompt)
            if n_output:
                faults[1] = _copy_ids(&output[0], at + n_prompt, n_output)
            if n:
                numbers = <float*>(at + n_prompt + n_output)
                for i in range(n):
                    numbers[i] = logprobs[i]
                    within &= (numbers[i] > low) & (numbers[i] <= high)
                i = 0
                while not within and low < numbers[i] <= high:
                    i += 1
                if not within:
                    faults[2] = i
    return faults[0], faults[1], faults[2]


cdef int64_t _copy_ids(const token_t* ids, token_t* copy, pos_t n) noexcept nogil:
    """Copy token ids; the index of the first negative one of the copy, or -1."""
    cdef pos_t i
    cdef token_t bits = 0
    for i in range(n):
        copy[i] = ids[i]
        bits |= copy[i]
    if bits >= 0:
        return -1
    i = 0
    while copy[i] >= 0:
        i += 1
    return i


def known_messages(
    list messages not None,
    Py_ssize_t start,
    int32_t node,
    list said not None,
    const int32_t[::1] message_of not None,
    const int32_t[::1] child not None,
    const int32_t[::1] sibling not None,
    int32_t[::1] ids not None,
    int32_t[::1] nodes not None,
):
    """Follow a list of messages down a tree of lists for as long as it is there.

    Parameters
    ----------
    messages : list
        A call's messages, dicts and pairs of key and role.
    start : int
        The first one to look at.
    node : int
        The node of the list of those before it.
    said : list of tuple
        Every distinct message, by its id: a pair, or what `flat_message` makes of a dict.
    message_of, child, sibling : buffer of int32, shape (n_nodes,)
        Of each node the id of its last message, its newest child and its parent's next older
        child (-1: none).
    ids, nodes : buffer of int32, shape (len(messages),)
        Filled from ``start`` on: the id of each message, and the node of the list that ends
        with it.

    Returns
    -------
    int
        The first message that is not found. At most `TRIES` children of a node are looked at,
        so that it may be there all the same.
    """
    cdef Py_ssize_t i, n = len(messages)
    cdef int32_t at
    cdef int tries
    _check_tree(node, message_of, child, sibling)
    if ids.shape[0] != n or nodes.shape[0] != n or start < 0:
        raise LayoutError("one id and one node are needed for each message")
    for i in range(start, n):
        at, tries = child[node], 0
        while at >= 0 and tries < TRIES:
            if _is_said(said, message_of[at], messages, i):
                break
            at = sibling[at]
            tries += 1
        if at < 0 or tries == TRIES:
            return i
        ids[i] = message_of[at]
        nodes[i] = node = at
    return n


def realign_messages(
    list messages not None,
    Py_ssize_t start,
    int32_t node,
    list said not None,
    const int32_t[::1] message_of not None,
    const int32_t[::1] child not None,
    int32_t[::1] ids not None,
):
    """Find messages in the newest list that begins as they do, though others came between.

    Parameters
    ----------
    messages, start, node, said, message_of, child
        As for `known_messages`: where it ended.
    ids : buffer of int32, shape (len(messages),)
        Filled from ``start`` on: the id of a message that the list has behind the one found
        before; -1 where it has it not, or looking for it would take longer than the two are
        long.
    """
    cdef Py_ssize_t i, n = len(messages), budget = 64 + 4 * (n - start)
    cdef int32_t at
    _check_tree(node, message_of, child, child)
    if ids.shape[0] != n or start < 0:
        raise LayoutError("one id is needed for each message")
    node = child[node]
    for i in range(start, n):
        ids[i] = -1
        at = node
        while at >= 0 and budget > 0:
            if _is_said(said, message_of[at], messages, i):
                ids[i] = message_of[at]
                node = child[at]
                break
            at = child[at]
            budget -= 1


cdef _check_tree(
    int32_t node, const int32_t[::1] message_of, const int32_t[::1] child,
    const int32_t[::1] sibling,
):
    if child.shape[0] != message_of.shape[0] or sibling.shape[0] != message_of.shape[0]:
        raise LayoutError("message_of, child and sibling differ in length")
    if not 0 <= node < child.shape[0]:
        raise LayoutError(f"node {node} is none of {child.shape[0]}")


def child_with(
    const int32_t[::1] message_of not None,
    const int32_t[::1] child not None,
    const int32_t[::1] sibling not None,
    int32_t node,
    int32_t message,
):
    """The child of a node whose last message has this id, or -1. See `known_messages`."""
    cdef int32_t at
    _check_tree(node, message_of, child, sibling)
    at = child[node]
    while at >= 0 and message_of[at] != message:
        at = sibling[at]
    return at


cdef bint _is_said(
    list said, int32_t number, list messages, Py_ssize_t place
) except -1:
    """Whether a message is the one with this number. Nothing here runs code of the caller's."""
    cdef PyObject* held
    cdef PyObject* message
    cdef Py_ssize_t at = 0
    if not 0 <= number < len(said):
        raise LayoutError(f"message {number} is none of {len(said)}")
    held, message = PyList_GET_ITEM(said, number), PyList_GET_ITEM(messages, place)
    if held == message:  # a pair, which cannot change
        return True
    if type(<object>message) is tuple:
        return _same_pair(<tuple>held, <tuple>message)
    return type(<object>message) is dict and _same_flat(<tuple>held, &at, <object>message)


cdef bint _same_pair(tuple a, tuple b):
    return (
        len(a) == 2 == len(b)
        and type(a[0]) is bytes is type(b[0])
        and type(a[1]) is str is type(b[1])
        and <bytes>a[0] == <bytes>b[0]
        and <str>a[1] == <str>b[1]
    )


def flat_message(dict message not None):
    """A message's dicts and lists in one tuple, to compare others with.

    A dict is the type, its length, and its keys and values; a list the type, its length and
    its values; anything else can't change and stands there itself. Empty for a message that
    is nested deeper than 32 levels, which nothing is found equal to.
    """
    cdef list flat = []
    return tuple(flat) if _flatten(message, flat, 0) else ()


cdef bint _flatten(object value, list flat, int depth) except -1:
    cdef object key, inner
    if not isinstance(value, (dict, list)):
        flat.append(_shared_word(value))
        return True
    if depth == 32:
        return False
    flat.append(dict if isinstance(value, dict) else list)
    flat.append(len(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            flat.append(_shared_word(key))
            if not _flatten(inner, flat, depth + 1):
                return False
        return True
    for inner in value:
        if not _flatten(inner, flat, depth + 1):
            return False
    return True


cdef object _shared_word(object value):
    """The one object for a short word, so that keys and roles stay in the caches."""
    return intern(value) if type(value) is str and len(<str>value) <= WORD else value


cdef bint _same_flat(tuple flat, Py_ssize_t* at, object value) except -1:
    """Whether a value is written the same as the one that stands in ``flat`` from ``at`` on.

    False is no promise: keys in another order and types that are not exactly JSON's own
    always differ.
    """
    cdef PyObject* held
    cdef PyObject* key
    cdef PyObject* inner
    cdef Py_ssize_t i, n, place = 0
    if at[0] >= len(flat):
        return False
    held = PyTuple_GET_ITEM(flat, at[0])
    at[0] += 1
    if held == <PyObject*>dict:
        if type(value) is not dict:
            return False
        n = PyLong_AsSsize_t(<object>PyTuple_GET_ITEM(flat, at[0]))
        at[0] += 1
        if len(<dict>value) != n:
            return False
        while PyDict_Next(value, &place, &key, &inner):
            if not _same_leaf(PyTuple_GET_ITEM(flat, at[0]), key):
                return False
            at[0] += 1
            if not _same_flat(flat, at, <object>inner):
                return False
        return True
    if held == <PyObject*>list:
        if type(value) is not list:
            return False
        n = PyLong_AsSsize_t(<object>PyTuple_GET_ITEM(flat, at[0]))
        at[0] += 1
        if len(<list>value) != n:
            return False
        for i in range(n):
            if not _same_flat(flat, at, <object>PyList_GET_ITEM(value, i)):
                return False
        return True
    return _same_leaf(held, <PyObject*>value)


cdef bint _same_text(str a, str b):
    """Whether two texts are equal; long ones are read ahead of, as runs of token ids are."""
    cdef Py_ssize_t n = len(a), whole
    cdef int kind = PyUnicode_KIND(a)
    cdef const char* at
    cdef const char* other
    if len(b) != n or PyUnicode_KIND(b) != kind:
        return False
    n *= kind
    at, other = <const char*>PyUnicode_DATA(a), <const char*>PyUnicode_DATA(b)
    whole = n // <Py_ssize_t>sizeof(token_t)
    if _lcp(<const token_t*>at, <const token_t*>other, whole) < whole:
        return False
    whole *= sizeof(token_t)
    return memcmp(at + whole, other + whole, n - whole) == 0


cdef bint _same_leaf(PyObject* a, PyObject* b) except -1:
    cdef double p, q
    if a == b:
        return True
    if type(<object>a) is not type(<object>b):
        return False
    if type(<object>a) is str:
        return _same_text(<str>a, <str>b)
    if type(<object>a) is int:
        return <object>a == <object>b
    if type(<object>a) is float:
        p, q = <object>a, <object>b
        return memcmp(&p, &q, sizeof(double)) == 0  # -0.0 is written unlike 0.0
    return False
