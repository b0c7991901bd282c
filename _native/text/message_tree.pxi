"""The message lists of a session: each message and each common prefix of lists stored once.

Fills places, calls and the distinct messages from the lists of new calls. A call costs O(its
messages + size of the messages that are compared).
"""

cdef enum:
    TRIES = 8  # messages at one place that are compared one by one


@cython.auto_pickle(False)
@cython.final
cdef class Lists:
    """Lists of messages as paths of a tree, so common prefixes are stored once.

    A node represents the list along its path; node 0 the empty list. A call's messages are
    read, which numbers the new ones, and then added; between the two nothing has changed, and
    the call may be refused. The arrays are Python's (`attach`).

    Parameters
    ----------
    said : list
        Filled: every distinct message, by its number: a copy, or a tuple of its key and its
        role; an empty tuple never matches.
    by_hash : dict
        Filled: the numbers of copies by their hash.
    counted : list
        Filled: the numbers of messages that were added with a call, in order.
    """
    cdef Place[::1] places
    cdef Heard[::1] heard
    cdef list said, counted
    cdef dict by_hash
    cdef bytearray has_counted  # by number
    cdef bint has_pairs   # of key and role
    cdef int32_t n_places
    cdef int32_t n_calls
    cdef int32_t n_placed  # messages that may stand in the tree: those with a smaller number
    # what was read and not added
    cdef bint silent
    cdef int32_t reached  # the node of its first messages, as far as there is one
    cdef list new         # numbers of the messages after those
    cdef int32_t reply    # -1: none

    def __cinit__(self, list said not None, dict by_hash not None, list counted not None):
        self.said, self.by_hash, self.counted = said, by_hash, counted
        self.new, self.has_counted = [], bytearray()
        self.has_pairs = False
        self.n_places = self.n_calls = self.n_placed = 0
        self.silent, self.reached, self.reply = True, 0, -1

    def attach(self, Place[::1] places not None, Heard[::1] heard not None):
        """Use these arrays from now on; they begin with the contents of the previous ones.

        Parameters
        ----------
        places : buffer of Place
            A node each, at least those in use and the root.
        heard : buffer of Heard
            A call each, at least those that were added.
        """
        _check_length("places", places.shape[0], max(1, self.n_places))
        _check_length("heard", heard.shape[0], self.n_calls)
        self.places, self.heard = places, heard
        if self.n_places == 0:
            self._add_place(-1, -1)

    cdef int32_t _add_place(self, int32_t parent, int32_t message) noexcept nogil:
        """A new newest child: `attach` leaves room for the root, `add` for a call's places."""
        cdef int32_t node = self.n_places
        self.n_places += 1
        self.places[node].message = message
        self.places[node].parent = parent
        self.places[node].depth = 0
        self.places[node].child = self.places[node].sibling = -1
        if parent >= 0:
            self.places[node].depth = self.places[parent].depth + 1
            self.places[node].sibling = self.places[parent].child
            self.places[parent].child = node
        return node

    def match(self, list messages not None, int32_t base, object other not None):
        """Find the call whose messages a list begins with for longest, and add nothing.

        Parameters
        ----------
        messages : list of dict and pairs of key and role
        base : int
            Compare with this call alone; -1: compare with every call, the first of
            equals counts.
        other : object
            Its method ``find`` returns the number of a message that has no copy, given it and
            its index, or -1; or it raises.

        Returns
        -------
        call : int
            ``base``, or -1 where no call shares a message.
        shared : int
            Messages at the start of the list that the call's messages and reply begin with.
        """
        cdef Py_ssize_t i
        cdef int32_t number, child, call, node, meet
        self.reached = 0
        if self.n_calls == 0:
            return -1, 0
        i = self._follow(messages, 0)
        while i < len(messages):
            number = self._find(messages[i], i, other)
            child = self._child(self.reached, number) if number >= 0 else -1
            if child < 0:
                break
            self.reached = child
            i = self._follow(messages, i + 1)
        if base >= 0:
            if base >= self.n_calls:
                raise LayoutError(f"there are {self.n_calls} calls, and no call {base}")
            return base, self.places[self._meet(self.reached, self.heard[base].shown)].depth
        for call in range(self.n_calls if self.reached else 0):
            if self._meet(self.reached, self.heard[call].shown) == self.reached:
                return call, self.places[self.reached].depth
        return -1, 0

    cdef int32_t _meet(self, int32_t node, int32_t other) noexcept nogil:
        """The last node that two paths have in common; no list at all has the root."""
        if other < 0:
            return 0
        while node != other:
            if self.places[node].depth >= self.places[other].depth:
                node = self.places[node].parent
            else:
                other = self.places[other].parent
        return node

    cdef bint lacks_room(self, int64_t n_places) noexcept:
        """Whether there is no room for one more call, or for ``n_places`` places."""
        return self.n_calls >= self.heard.shape[0] or n_places > self.places.shape[0]

    cpdef int64_t read(self, list messages, object reply, object other) except -1:
        """Number a call's messages; nothing changes until `add`.

        Parameters
        ----------
        messages : list of dict and pairs of key and role, or None
        reply : dict, pair of key and role, or None
        other : object
            Its method ``number`` numbers a message that has no copy, given it and its place
            (-1: the reply): it puts it into ``said``, or finds it there, or raises.

        Returns
        -------
        int
            Nodes that are in use once the call is added, at most.
        """
        cdef Py_ssize_t i = 0
        cdef int32_t number, child
        if self.n_places == 0:
            raise LayoutError("there is no room for lists")
        self.silent, self.reached, self.reply = messages is None, 0, -1
        self.new = []
        while messages is not None and i < len(messages):
            if not self.new:
                i = self._follow(messages, i)
                if i >= len(messages):
                    break
            # a message known elsewhere, or one of many that stand at this place
            number = self._number(messages[i], i, other)
            child = -1 if self.new else self._child(self.reached, number)
            if child < 0:
                self.new.append(number)
            else:
                self.reached = child
            i += 1
        if reply is not None:
            self.reply = self._number(reply, -1, other)
        return self.n_places + len(self.new) + 1

    cdef Py_ssize_t _follow(self, list messages, Py_ssize_t i) except -1:
        """Go down the tree while it has the messages from i on; return the first it has not.

        At most `TRIES` children of a node are compared, newest first, so a message that is
        not found may still be there.
        """
        cdef int32_t node
        cdef int tries
        cdef object message
        while i < len(messages):
            message = messages[i]
            node, tries = self.places[self.reached].child, 0
            while node >= 0 and tries < TRIES:
                if self._is_said(self.places[node].message, message):
                    break
                node = self.places[node].sibling
                tries += 1
            if node < 0 or tries == TRIES:
                break
            self.reached = node
            i += 1
        return i

    cdef bint _is_said(self, int32_t number, object message) except -1:
        """Whether a message is the one with this number."""
        cdef object known = self.said[number]
        if type(known) is dict:
            return _same(known, message, 0)
        # a pair, which cannot change
        return type(message) is tuple and _same_pair(<tuple>known, <tuple>message)

    cdef int32_t _number(self, object message, Py_ssize_t place, object other) except -1:
        """The number of a message, which is new or known elsewhere."""
        cdef uint64_t digest = 0
        cdef object copy = _copy_of(message, &digest)
        cdef int32_t number
        if copy is not NotImplemented:
            number = self._one_of(digest, copy)
            if number < 0:
                number = <int32_t>len(self.said)
                self.said.append(copy)
                self.by_hash.setdefault(digest, []).append(number)
            return number
        self.has_pairs |= isinstance(message, tuple)
        number = other.number(message, place)
        if not 0 <= number < len(self.said):
            raise LayoutError(f"message {number} is outside the {len(self.said)} recorded")
        return number

    cdef int32_t _find(self, object message, Py_ssize_t place, object other) except -2:
        """The number of a message, or -1 for one that is new."""
        cdef uint64_t digest = 0
        cdef object copy = _copy_of(message, &digest)
        if copy is not NotImplemented:
            return self._one_of(digest, copy)
        return other.find(message, place)

    cdef int32_t _one_of(self, uint64_t digest, object copy) except -2:
        """The number of the message with an equal copy, or -1."""
        cdef int32_t number
        for number in self.by_hash.get(digest, ()):
            if _same(self.said[number], copy, 0):
                return number
        return -1

    cdef int32_t _child(self, int32_t node, int32_t message) noexcept:
        """The child of a node whose last message has this number, or -1."""
        cdef int32_t at = -1
        if message < self.n_placed:
            at = self.places[node].child
            while at >= 0 and self.places[at].message != message:
                at = self.places[at].sibling
        return at

    cdef int32_t _step(self, int32_t node, int32_t message) noexcept:
        """The node of a node's list and one message more."""
        cdef int32_t known = self._child(node, message)
        self.n_placed = max(self.n_placed, message + 1)
        return known if known >= 0 else self._add_place(node, message)

    def add(self, int32_t base):
        """Let the messages of the call that was read count.

        Parameters
        ----------
        base : int
            An earlier call; -1: none.
        """
        cdef int32_t end = self.reached
        cdef object number
        cdef Heard* call
        if not -1 <= base < self.n_calls:
            raise LayoutError(f"call {self.n_calls} has the base {base}")
        _check_length("heard", self.heard.shape[0], self.n_calls + 1)
        _check_length("places", self.places.shape[0], self.n_places + len(self.new) + 1)
        call = &self.heard[self.n_calls]
        call.shared, call.end, call.shown, call.reply = 0, -1, -1, self.reply
        if not self.silent:
            for number in self.new:
                end = self._step(end, number)
            if base >= 0:
                call.shared = self.places[self._meet(end, self.heard[base].shown)].depth
            call.end = end
            call.shown = end if self.reply < 0 else self._step(end, self.reply)
        for number in self.new:
            self._count(number)
        if self.reply >= 0:
            self._count(self.reply)
        self.n_placed = <int32_t>len(self.said)
        self.n_calls += 1
        self.silent, self.reply = True, -1
        self.new = []

    cdef _count(self, int32_t number):
        cdef Py_ssize_t n = len(self.has_counted)
        if n < len(self.said):
            self.has_counted.extend(bytes(len(self.said) - n))
        if not self.has_counted[number]:
            self.has_counted[number] = 1
            self.counted.append(number)

    cdef Py_ssize_t _n_suffixes(self) noexcept:
        """Messages of all calls that their bases do not supply."""
        cdef int32_t i
        cdef Py_ssize_t size = 0
        for i in range(self.n_calls):
            if self.heard[i].end >= 0:
                size += self.places[self.heard[i].end].depth - self.heard[i].shared
        return size

    cdef Py_ssize_t _fill_suffix(self, int32_t call, int32_t[::1] numbers, Py_ssize_t start):
        """Fill the messages of a call that its base does not supply; return where they end."""
        cdef int32_t node = self.heard[call].end
        cdef Py_ssize_t stop, at
        if node < 0:
            return start
        stop = at = start + self.places[node].depth - self.heard[call].shared
        while at > start:
            at -= 1
            numbers[at] = self.places[node].message
            node = self.places[node].parent
        return stop

    def fill_suffixes(self, int32_t[::1] numbers not None):
        """The messages of every call that its base does not supply.

        Parameters
        ----------
        numbers : buffer of int32
            Filled, call by call. As long as there are such messages.
        """
        cdef int32_t i
        cdef Py_ssize_t at = 0, size = self._n_suffixes()
        if numbers.shape[0] != size:
            raise LayoutError(f"numbers has {numbers.shape[0]} places for {size} messages")
        for i in range(self.n_calls):
            at = self._fill_suffix(i, numbers, at)

    def requests(self, list keys not None, list roles not None, Request[::1] requests not None):
        """Fill the requests of every call, with keys that are equal if the messages are.

        Parameters
        ----------
        keys, roles : list of bytes, list of str
            By message number.
        requests : buffer of Request, shape (n_calls,)

        Returns
        -------
        tuple
            The buffers that ``requests`` refer to.
        """
        cdef Py_ssize_t n = self._n_suffixes(), k = 0, stop, j
        cdef int32_t i, number
        cdef int64_t[:, ::1] own = zeros((n + self.n_calls, 2), "i8")
        cdef int32_t[::1] numbers = empty(n, "i4"), ends = empty(n + 1, "i4")
        cdef bytes text
        cdef list texts = []
        cdef Request* request
        _check_length("requests", requests.shape[0], self.n_calls)
        ends[0] = 0
        for i in range(self.n_calls):
            request = &requests[i]
            request.shared = self.heard[i].shared
            request.keys = <int64_t><intptr_t>&own[k, 0]
            request.role_offsets = <int64_t><intptr_t>&ends[k]
            stop = self._fill_suffix(i, numbers, k)
            request.n_keys = stop - k if self.heard[i].end >= 0 else -1
            for j in range(k, stop):
                self._put_key(keys, numbers[j], &own[j, 0])
                text = (<str>roles[numbers[j]]).encode()
                texts.append(text)
                ends[j + 1] = ends[j] + <int32_t>len(text)
            k = stop
            number = self.heard[i].reply
            request.reply_key = request.reply_is_assistant = 0
            if number >= 0:
                self._put_key(keys, number, &own[n + i, 0])
                request.reply_key = <int64_t><intptr_t>&own[n + i, 0]
                request.reply_is_assistant = <str>roles[number] == "assistant"
        text = b"".join(texts)
        for i in range(self.n_calls):
            requests[i].role_bytes = <int64_t><intptr_t>PyBytes_AS_STRING(text)
        return own.base, ends.base, text

    cdef int _put_key(self, list keys, int32_t number, int64_t* own) except -1:
        """The part of a message's key that is equal for messages that are ``==``."""
        cdef bytes key = keys[number]
        _check_length("key", len(key), KEY_BYTES)
        memcpy(own, PyBytes_AS_STRING(key), VALUE_BYTES)
        return 0


cdef object _copy_of(object message, uint64_t* digest):
    """A copy of a message that is a dict, and its hash; NotImplemented if it has none."""
    cdef object role = message.get("role") if isinstance(message, dict) else None
    if isinstance(role, str) and str.isascii(role):
        return _copied(message, 0, digest)
    return NotImplemented


cdef bint _same_pair(tuple a, tuple b):
    return len(a) == 2 == len(b) and (
        a is b
        or type(a[0]) is bytes is type(b[0])
        and type(a[1]) is str is type(b[1])
        and <bytes>a[0] == <bytes>b[0]
        and <str>a[1] == <str>b[1]
    )
