"""One new call, added to the paths and messages of a growing session.

Fills a `Growth`, a `Lists` and two lists from the arguments of one call, in the order of growth
of these two (forest/growth.pxi, text/message_tree.pxi).
"""


@cython.auto_pickle(False)
cdef class Intake:
    """Adds calls, one after another, to `Growth` and `Lists`.

    Most calls have buffers of int32 and float32, plain flags, no weight versions and no
    payloads. Anything else is passed to methods of the subclass, which return it in a plain
    form or refuse it:

    ``read_ids(values, name)``
        Token ids as a buffer of int32, which may contain invalid ids.
    ``read_logprobs(values, n_output)``
        Logprobs as a buffer of float32, or None for none, and which there are (None: all).
    ``read_flag(value, name)``, ``read_reason(value)``, ``read_versions(value, n_output)``, \
``read_mask(value, n_output)``
        The values to keep.
    ``read_payloads(values)`` and ``add_payloads(read)``
        Payloads to keep, and to add once the call counts.
    ``read_messages(messages)``
        The messages as a list.
    ``number(message, place)``
        See `Lists.read`.
    ``index_keys()``
        Use keys for dicts as well, since there are pairs of key and role.
    ``refusal(held, fault)``
        The error for `Growth.fault`.
    ``make_room(n_tokens, n_places)``
        Make room for one more call of ``n_tokens`` tokens, and for ``n_places`` lists.
    ``add_valid(valid)``
        Keep the validity of this call's logprobs.
    """
    cdef Growth paths
    cdef Lists lists
    cdef list held, facts
    cdef float low, high
    cdef readonly int64_t n_calls

    def begin(
        self, Growth paths not None, Lists lists not None, list held not None,
        list facts not None, float low, float high,
    ):
        """Set where calls are added.

        Parameters
        ----------
        paths : Growth
        lists : Lists
        held : list
            Filled: the result of `Growth.take` for each call.
        facts : list
            Filled: of each call finish_reason, use_tool, ill_formed, trainable,
            weight_versions and output_mask.
        low, high : float
            A logprob is above low and at most high.
        """
        self.paths, self.lists, self.held, self.facts = paths, lists, held, facts
        self.low, self.high, self.n_calls = low, high, 0

    def add(self, tuple call not None, payloads):
        """Add a call.

        What can be refused, or lack memory, is done before anything changes.

        Parameters
        ----------
        call : tuple
            prompt_ids, output_ids, output_logprobs, finish_reason, ill_formed, use_tool,
            trainable, prompt_messages, response_message, weight_versions and output_mask, as
            `trajkit.Recorder.record` takes them.
        payloads : object
            As `trajkit.Recorder.record` takes them.

        Returns
        -------
        base, shared, clean
            As of `Growth.insert`.
        """
        cdef object prompt_ids, output_ids, output_logprobs, prompt_messages, response
        cdef object reason, ill_formed, use_tool, trainable, versions, mask
        (
            prompt_ids, output_ids, output_logprobs, reason, ill_formed, use_tool, trainable,
            prompt_messages, response, versions, mask,
        ) = call
        cdef:
            const token_t[::1] prompt = self._ids(prompt_ids, "prompt_ids")
            const token_t[::1] output = self._ids(output_ids, "output_ids")
            pos_t n_output = output.shape[0]
            const float[::1] logprobs = None
            object valid = None, read = None
            int64_t n_places
            Call* record
            bytes held
            tuple found
        if output_logprobs is not None:
            logprobs = _reals(output_logprobs)
            if logprobs is None or logprobs.shape[0] != n_output:
                logprobs, valid = self.read_logprobs(output_logprobs, n_output)
        held = self.paths.take(prompt, output, logprobs, self.low, self.high)
        if self.paths.any_fault():
            # the copy was checked, so that what is kept is what was checked
            raise self.refusal(held, self.paths.fault)
        if use_tool is None:
            use_tool = isinstance(response, dict) and bool(response.get("tool_calls"))
        use_tool = self._flag(use_tool, "use_tool")
        ill_formed = self._flag(ill_formed, "ill_formed")
        trainable = self._flag(trainable, "trainable")
        if reason is not None:
            if type(reason) is not str or not (<str>reason).isascii():
                reason = self.read_reason(reason)
        if versions is not None:
            versions = self.read_versions(versions, n_output)
        if mask is not None:
            mask = self.read_mask(mask, n_output)
        if payloads is not None:
            read = self.read_payloads(payloads)
        if prompt_messages is not None and type(prompt_messages) is not list:
            prompt_messages = self.read_messages(prompt_messages)
        n_places = self.lists.read(prompt_messages, response, self)
        if self.paths.lacks_room() or self.lists.lacks_room(n_places):
            self.make_room(prompt.shape[0] + n_output, n_places)

        self.held.append(held)
        found = self.paths.insert()
        record = &self.paths.calls[self.n_calls]
        record.trainable = trainable is not False
        record.use_tool = use_tool is True
        record.ill_formed = ill_formed is True
        if reason == "length":
            record.stop = STOP_LENGTH
        elif reason == "abort":
            record.stop = STOP_ABORT
        self.lists.add(self.paths.base)
        if self.lists.has_pairs:
            self.index_keys()
        self.facts.append((reason, use_tool, ill_formed, trainable, versions, mask))
        if valid is not None:
            self.add_valid(valid)
        if read is not None:
            self.add_payloads(read)
        self.n_calls += 1
        return found

    cdef _flag(self, object value, str name):
        if value is None or value is False or value is True:
            return value
        return self.read_flag(value, name)

    cdef const token_t[::1] _ids(self, object values, str name):
        if type(values) is ndarray:  # a subclass may mean more by it, as masks do
            try:
                return values
            except ValueError:
                pass  # integers of another width, or in another order
        return self.read_ids(values, name)


cdef const float[::1] _reals(object values):
    """Values that are an array of float32, or None."""
    if type(values) is ndarray:
        try:
            return values
        except ValueError:
            pass
    return None
