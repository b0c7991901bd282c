"""The faults of the core's Python."""

CORE = r"""
trajkit/packs/packing.py: training/test_packs training/test_packs_verify
    a row that shares what its parent shares hangs on it
        |shared <= shared[parents]| -> |shared < shared[parents]|
    a part of a tree begins with the shallowest row
        |queue[-1][0] > repeated| -> |queue[-1][0] < repeated|
trajkit/schema/engine.py: turns/test_validation turns/test_images turns/test_delta
        rows/test_links rows/test_twins
    -9999 itself is a logprob
        |(numbers <= NO_LOGPROB, | -> |(numbers < NO_LOGPROB, |
    a logprob of 1e-4 is refused
        |(numbers > MAX_LOGPROB, POSITIVE)| -> |(numbers >= MAX_LOGPROB, POSITIVE)|
    an id of -1 is an id
        |numbers < 0 if numbers.min| -> |numbers < -1 if numbers.min|
    a parent may be a negative turn
        |good = (values >= 0) & fits(| -> |good = fits(|
trajkit/analysis/sampled_tokens.py: analysis/test_sampled_tokens
    a token is lost to a later departure than the first
        |np.minimum.accumulate(lcp[chain[k + 1 :]])|
        -> |np.maximum.accumulate(lcp[chain[k + 1 :]])|
    a row over max_rows is one that was cut
        |kind[trained] = _CODES["over_max_rows"]| -> |kind[trained] = _CODES["cut"]|
    drift right after a row's first prompt restarts it
        |lcp[call] < opened| -> |lcp[call] <= opened|
trajkit/rows/agents.py: rows/test_links:edges
    an agent is called as often as a turn says what started it
        |if by >= 0 and agent not in starters:| -> |if by >= 0:|
    a prompt that was sent again is a compaction
        |(parents < 0) & ~repeats)| -> |(parents < 0))|
    a sub-agent returns to a turn that does not continue the calling one
        |while above != by and above not in apart:| -> |while False:|
    a turn that continues a side call is another agent's
        |np.where(is_history[parents], parents, -1)| -> |parents|
    what continues a sub-agent without a name is the main agent's
        |np.where(follows, parents, index)| -> |index|
trajkit/analysis/branches.py: analysis/test_branches
    a prompt that was continued is tried again
        |if other in children:| -> |if False:|
    a request as long as the one before is a compaction
        |if len(ids) >= n_prompt[other]| -> |if len(ids) > n_prompt[other]|
    an agent has several first turns
        |latest[agent] = asked[prompt] = call| -> |asked[prompt] = call|
    a retry is drift
        |labels.get((name, turn), causes[k])| -> |causes[k]|
trajkit/schema/engine.py: turns/test_validation turns/test_delta turns/test_records
    a span of weights may run backwards
        |(low != due) | (high < low)| -> |(low != due)|
    an empty span of weights is refused
        |(low != due) | (high < low)| -> |(low != due) | (high <= low)|
    weights may end before the output does
        |(last != n_output)| -> |(last > n_output)|
    a turn may be its own base
        |(base_row >= np.arange(len(table)))| -> |(base_row > np.arange(len(table)))|
    messages are shared with a base without a list
        |np.where(none | unlisted[base_row], 0, total[base_row])|
        -> |np.where(none, 0, total[base_row])|
trajkit/schema/engine.py: turns/test_validation rows/test_links rows/test_twins
    parents come first in order in every session
        |(before >= order) & np.isin(session, later)| -> |(before >= order)|
    resync_length may be null alone
        |(path != prompt) | (path != length)| -> |(path != prompt)|
trajkit/schema/engine.py: turns/test_validation verification/test_verify
    a row without a response is refused
        |broken(values > n_ids, rule, values, n_ids)|
        -> |broken(values >= n_ids, rule, values, n_ids)|
    a row may share tokens with no row
        |broken(nulls(parent) & (shared > 0), rule, shared)|
        -> |broken(nulls(parent) & (shared < 0), rule, shared)|
    a row that its parent contains is refused
        |found & (shared > of_parent)| -> |found & (shared >= of_parent)|
    the sum of a rollout is not compared with the row
        |broken(sums < n_trained, rule, sums, n_trained)|
        -> |broken(sums < 0, rule, sums, n_trained)|
    an output range may run backwards
        |(out_start < 0) | (out_stop < out_start)| -> |(out_start < 0)|
    a weight of 1 is refused
        |(values <= 1)| -> |(values < 1)|
    trained tokens outside of spans are not counted
        |broken(claimed != masked, rule, masked, claimed)|
        -> |broken(claimed > masked, rule, masked, claimed)|
trajkit/files/tables.py: files/test_dedup
    a trained token may be left to the parent
        |np.minimum(first, ids.lengths), np.where(| -> |ids.lengths, np.where(|
    a parent that is not in the table stores the prefix
        |np.where(found, ids.lengths[parent], 0)\n    )| -> |ids.lengths[parent]\n    )|
    tokens that differ from the parent's are left to it
        |start[row] = here[differs[::-1]] - ids.offsets[row]| -> |start[row] = start[row]|
    a stored row may begin before its first token
        |(start < 0) | (start > most)| -> |(start > most)|
    a row may be its own parent in a file
        |    found &= parent < np.arange(len(parent))\n    most = np.where|
        -> |    most = np.where|
trajkit/turns/validation.py: turns/test_validation turns/test_images
    a body in another session counts
        |of_session = session_numbers(table)[rows] * (len(keys) + 1) + codes(keys)|
        -> |of_session = codes(keys)|
    the role in a body is not compared
        |if message.get("role") != role:| -> |if not message.get("role"):|
trajkit/turns/validation.py: turns/test_validation training/test_packs
    a list of null becomes an empty one
        |to_arrow(nulls(column), column.type)| -> |to_arrow(None, column.type)|
    the first of two sessions is rejected for the second
        |if len(ends) == 1:| -> |if len(ends) <= 2:|
    null ids are not found before rows are packed
        |read_ids |= any(one.values.null_count for one in rows.column("input_ids").chunks)|
        -> |read_ids |= False|
trajkit/turns/records.py: turns/test_records turns/test_messages
    calls stay in the order of records
        |in_order = [self.calls[k] for k in order]| -> |in_order = self.calls|
    extra columns stay in the order of records
        |in_turn = [values[k] for k in order]| -> |in_turn = values|
    turn_index may be 2**31
        |0 <= turn_index < 2**31| -> |0 <= turn_index <= 2**31|
    use_tool=None is derived
        |elif name == "use_tool" and name not in record:| -> |elif name == "use_tool":|
    a fraction of a token is cut off
        |if read[i] == one else "expected integers"| -> |if True else "expected integers"|
    2 is a bool of a mask
        |(mask != 0) & (mask != 1)| -> |(mask < 0) | (mask > 2)|
trajkit/turns/images.py: turns/test_images verification/test_verify
    an image may end beyond the prompt
        |inside = start < end if may_be_cut else stop <= end| -> |inside = start < end|
    an image may have no token
        |last <= start < stop and inside| -> |last <= start <= stop and inside|
    the first content id is an id of the engine
        |0 <= id_ < FIRST_CONTENT_ID| -> |0 <= id_ <= FIRST_CONTENT_ID|
    content ids of no item are not seen
        |    if known is not None:\n| -> |    if known is None:\n|
    images of other sources are known
        |elif known is not None and same_image(item) not in known:| -> |elif False:|
trajkit/turns/records.py: turns/test_records recorder/test_recorder
    ids of 2**31 and above wrap around
        |(array < 0) | (array > 0x7FFFFFFF)| -> |array < 0|
    an empty array of logprobs for no output is a list
        |len(values) == n_outputs > 0:| -> |len(values) == n_outputs:|
    nulls of an Arrow array become NaN
        |return values.to_numpy() if values.null_count == 0 else values.to_pylist()|
        -> |return values.to_numpy(zero_copy_only=False)|
    what a mask hides is read
        |return list(values.tolist())  # None where masked| -> |array = np.asarray(values)|
    bytes are a list of ids
        |None if view.itemsize == 1| -> |None if view.itemsize == 0|
trajkit/turns/delta.py: turns/test_delta files/test_run
    a prompt does not share the base's reply
        |if replied[base]:| -> |if False:|
    a message with a body is shared
        |own[call][: bare[call]]| -> |own[call]|
    messages of other roles are shared
        |(roles.max(initial=0) + 1) + roles| -> |(roles.max(initial=0) + 1)|
    messages whose body is another one are shared
        |    numbers += np.append(current.places, current.replies)\n| -> ||
trajkit/turns/session_metadata.py: rows/test_rows learn/test_session_rewards
    a reward of None does not contradict the turns
        |same = pc.equal(own, given).fill_null(False)|
        -> |same = pc.equal(own, given).fill_null(True)|
    a column of nulls in sessions counts
        |stated = [n for n in OF_TURNS if table.column(n).null_count < len(table)]|
        -> |stated = list(OF_TURNS)|
trajkit/turns/amendments.py: turns/test_amendments
    an amendment without trainable makes context
        |pc.equal(found.column("trainable"), False).fill_null(False)|
        -> |pc.equal(found.column("trainable"), False).fill_null(True)|
    amendments of other turns count
        |pa.array(at, mask=at < 0)| -> |pa.array(np.maximum(at, 0))|
trajkit/turns/sessions.py: rows/test_links rows/test_twins
    retries are not ranked by request_id
        |keys = [self._ranks("request_id"), self.calls["prompt_len"], self.session]|
        -> |keys = [self.calls["prompt_len"], self.session]|
    request_id goes before started_at
        |[self._ranks("request_id"), self._ranks("started_at")]|
        -> |[self._ranks("started_at"), self._ranks("request_id")]|
    equal times rank by turn before request_id
        |tiebreaker="min"| -> |tiebreaker="first"|
trajkit/turns/flat_buffers.py: rows/test_policies rows/test_twins
    tokens of an aborted turn of context are lost twice
        |now = aborted_calls(calls) & (calls.calls["trainable"] != 0)|
        -> |now = aborted_calls(calls)|
    turns of context need logprobs
        |missing * (calls.calls["trainable"] != 0)| -> |missing|
trajkit/turns/messages.py: turns/test_message_equality turns/test_delta rows/test_twins
    a reply counts without a list of messages
        |(requests["n_keys"] >= 0) & (requests["reply_key"] != 0)| -> |requests["reply_key"] != 0|
    an empty tool_call_id is a missing one
        |(name == "content" and value == "")| -> |value == ""|
    reasoning of a user counts
        |if not missing and its_role in ("", role):| -> |if not missing:|
    an empty list is a value
        |value is not None and value != "" and value != []|
        -> |value is not None and value != ""|
    a tool call without a function has no name
        |holder = function if isinstance(function, dict) else call|
        -> |holder = function if isinstance(function, dict) else {}|
    cache_control within objects counts
        |within += value.values()| -> |within += ()|
trajkit/turns/messages.py: turns/test_messages turns/test_records
        recorder/test_message_lists
    messages of one key have one body
        |(message.key, message.role) if body is None else body|
        -> |(message.key, message.role)|
    a float keeps its type
        |return int(value) if value.is_integer() else value| -> |return value|
    a message with an integer is plain
        |int not in types| -> |True|
    numbers are written alike that are ==
        |return message if is_plain else _NO_MESSAGE| -> |return message|
    a body is shown once for each key
        |new[order] = ~again | (np.diff(ids[order], prepend=-1) != 0)|
        -> |new[order] = ~again|
    a body that its key last had is shown again
        |new[order] = ~again | (np.diff(ids[order], prepend=-1) != 0)|
        -> |new[order] = True|
trajkit/turns/delta.py: turns/test_messages
    keys without a body are whole
        |padded = prefix + bytes(KEY_BYTES - _EQUAL_BYTES)| -> |padded = key|
    shared messages of the delta form lose their bodies
        |if book.respelled and stored == "suffix_messages":| -> |if False:|
trajkit/rows/linearize.py: rows/test_links rows/test_rows rows/test_twins
    empty lists are not counted as routed by tokens
        |which |= calls.requests["n_keys"] + calls.requests["shared"] == 0|
        -> |which |= False|
    an lcp may be negative
        |other | (lcp < 0) | (lcp > most)| -> |other | (lcp > most)|
    an order may be the number of calls
        |links["order"] >= np.diff(calls.offsets)[calls.session]|
        -> |links["order"] > np.diff(calls.offsets)[calls.session]|
trajkit/rows/plan.py: rows/test_payloads
    a null element hides the last turn's
        |new = valid[sources] & (at[places] < 0)| -> |new = at[places] < 0|
    elements come from beyond what a base shares
        |np.minimum(end, forest.shared[run.call]) - run.first| -> |end - run.first|
    a start may be negative
        |given & ((starts < 0) | (starts + length > n_path))|
        -> |given & (starts + length > n_path)|
    nothing comes before a given start
        |given & (first > 0) & (length >= 0)| -> |np.zeros_like(given)|
trajkit/rows/plan.py: rows/test_twins rows/test_payloads
    the last weights are those of the first output
        |((out_start, 1), (out_stop - 1, -1))| -> |((out_start, 1), (out_stop - 1, 1))|
    outputs that are lost have weights
        |& (stop > start)| -> |& (stop >= start)|
    the token after the last span has its weights
        |(token < stop[at])| -> |(token <= stop[at])|
trajkit/rows/plan.py: rows/test_rows rows/test_twins
    numbers stay under nulls
        |logprobs[drops] = 0.0| -> |logprobs[:0] = 0.0|
    a later batch has the columns of the first rows
        |column[lo:hi] for name| -> |column[: hi - lo] for name|
trajkit/rows/splice.py: rows/test_payloads rows/test_twins
    stop_sequence does not end a turn
        |("stop", "tool_calls", "stop_sequence")| -> |("stop", "tool_calls")|
    a prompt that skips tokens begins its row
        |(links["lcp"] == path_end) & (path_end == starts)| -> |links["lcp"] == path_end|
    payloads of prompts behind a splice count
        |heads = (parent >= 0) & (other == other[offsets[:-1]][row])|
        -> |heads = parent >= 0|
    a call that opens a spliced row is a root
        |plan.counted("roots")[:] = self.roots| -> |plan.counted("roots")[:] += 0|
    calls after one that was dropped are in the row
        |before_each(missing) + missing[placed] > 0| -> |missing[placed] > 0|
    dropped tokens count as unrouted, too
        |plan.counted("lost_unrouted")[:] -= lost|
        -> |plan.counted("lost_unrouted")[:] -= 0 * lost|
    an end of turn at the end of the previous prompt is not seen
        |low = np.where(linked, n_prompt[before], n_prompt)|
        -> |low = np.where(linked, n_prompt[before] + 1, n_prompt)|
trajkit/rows/routes.py: rows/test_twins
    equal paths are no ambiguity
        |ambiguous[ranked] = first[node], several[node]|
        -> |ambiguous[ranked] = first[node], False|
    a chain below a quarantined call is sound
        |parent < 0 or (parent in sound and parent != scored)| -> |parent != scored|
    a call after the scored one is in its chain
        |parent < 0 or (parent in sound and parent != scored)|
        -> |parent < 0 or parent in sound|
trajkit/rows/routes.py: rows/test_recorded_parents rows/test_twins
    a recorded parent whose path is not in the prompt counts
        |if shared == self.calls.path_len[parent]:| -> |if shared >= 0:|
    a missing parent is found though several paths begin the prompt
        |name is not None and self.reasons[call] == "tokens"|
        -> |name is not None and self.parents[call] >= 0|
trajkit/rows/routes.py: rows/test_twins
    drift as long as the threshold may be trimmed
        |n_missing >= policy.fork_threshold| -> |n_missing > policy.fork_threshold|
    a generation is not found where an equal call was refused
        |n_open[end] -= 1| -> |n_open[end] = 0|
trajkit/rows/routes.py: rows/test_golden:segments rows/test_twins
    a repeated prompt continues itself
        |0 < opening <= shared and opening < prompt_len[call]| -> |0 < opening <= shared|
    a sub-agent starts a sub-agent
        |if is_main and dispatches[call] >= 0:| -> |if dispatches[call] >= 0:|
    the first of several dispatches counts
        |numbers.setdefault(ids[-1], len(numbers))|
        -> |numbers.setdefault(ids[0], len(numbers))|
    any tool starts a sub-agent
        |tool_calls_of(messages[k]) if name in| -> |tool_calls_of(messages[k]) if name or|
trajkit/rows/linearize.py: rows/test_twins
    links of a later part refer to the first
        |here[name][here[name] >= 0] -= lo| -> |here[name][here[name] >= 0] -= 0|
    aborted tokens count as untrainable, too
        |plan.counted("lost_untrainable")[:] -= aborted|
        -> |plan.counted("lost_untrainable")[:] -= 0 * aborted|
trajkit/rows/linearize.py: files/test_damage:bodies
    text that a policy compares is not looked at
        |(by_body and policy.parent_by in BY_MESSAGES)| -> |False|
trajkit/policies.py: rows/test_policies verification/test_verify rows/test_twins
    the last token id ends no turn
        |token > _LAST_TOKEN:| -> |token >= _LAST_TOKEN:|
    a policy of one chain keeps everything
        |return self.places_all and self.row_selection == "all"| -> |return self.places_all|
    generations place every turn
        |            "prefix",\n            "generations",\n        )|
        -> |            "prefix",\n        )|
trajkit/files/tables.py: files/test_run
    turns out of order are read as they are
        |if (before and not continues) or (index is not None and falls):|
        -> |if before and not continues:|
    a run that continues leaves out its first turns twice
        |skip = max(skip - table.num_rows, 0)| -> |skip = max(skip, 0)|
    a session that appears while a log is grouped has no words
        |if name not in groups:| -> |if name is None:|
    a session whose lines are no turns is rejected for its nulls
        |rejected[name] = self._misread[name]| -> |rejected[name] += ""|
trajkit/files/arrow.py: files/test_damage
    rows that Arrow passes over are not missed
        |if n_rows != group.num_rows:| -> |if n_rows > group.num_rows:|
    values that a page lacks are not missed
        |found.tolist() != due:| -> |found.tolist() > due:|
trajkit/files/run.py: files/test_run
    a run of other options continues the parts
        |if known == self._job:| -> |if known:|
    files of any job are taken for parts
        |any(n[0] != "." for n in os.listdir(one))|
        -> |any(n[0] == "." for n in os.listdir(one))|
    an output that the stage never makes is not missed
        |for name in files.keys() - made:| -> |for name in made - {*files, *made}:|
trajkit/files/formats.py: files/test_tables
    lines are written to a file of one JSON value
        |if not (writing and is_one_value(one))| -> |if one or not is_one_value(one)|
trajkit/verification/rules.py: verification/test_verify
    the token at the cap must train
        |+ at < self.cap\n| -> |+ at <= self.cap\n|
    a list that its base supplies is empty
        |(requests["n_keys"] != 0) | (requests["shared"] != 0)|
        -> |(requests["n_keys"] != 0)|
    weights may be off by a thousandth
        |_ROUNDING = 1e-9| -> |_ROUNDING = 1e-3|
    tokens without a logprob must train
        |self.policy.missing_logprobs == "untrain"|
        -> |self.policy.missing_logprobs == "untrained"|
trajkit/verification/rules.py: verification/test_verify rows/test_twins
    a row may end anywhere in its path
        |if len(ids) == (n if case.cap is None else min(n, case.cap)):|
        -> |if case.cap is None or len(ids) == min(n, case.cap):|
    turns need not end with last_turn
        |if last is not None and listed[-1:] != [last]:|
        -> |if last is not None and last not in listed:|
    weights of an empty range count
        |if start < min(one["stop"], spans.out_stop[k]):|
        -> |if start <= min(one["stop"], spans.out_stop[k]):|
    use_tool of a row may be true for no turn
        |append(flag if flag or of_row else given[name][row])|
        -> |append(flag if flag else given[name][row])|
    a logprob may be where the engine gave none
        |differ = (has != given) | (given & (rows.logprobs != due))|
        -> |differ = given & (rows.logprobs != due)|
    every row trains a token once: counted over all rows
        |key = source + counted.row[owner] * len(case.turns.outputs.values)|
        -> |key = source|
    the first output of a spliced row follows any end of its prompt
        |due = prompt if before < 0 else prompt[| -> |due = prompt[|
    a spliced row may end before its last turn
        |return order[-1:] if ends or not calls.calls["out_len"][order[-1]] else []|
        -> |return order[-1:]|
trajkit/verification/run.py: verification/test_verify rows/test_twins
    only tokens are compared with the rows of the policy
        |if not (has_spans and equal):| -> |if True:|
    spans may come in any order
        |if not alone and row["spans"] != due["spans"]:| -> |if False:|
trajkit/verification/row_forms.py: verification/test_verify
    NaN is a logprob
        |pa.array(own, pa.float32(), mask=np.isnan(own))| -> |pa.array(own, pa.float32())|
    an empty list of logprobs has nulls
        |if np.size(row.get(name, ()))| -> |if name in row|
trajkit/verification/foreign_rows.py: verification/test_verify
    outputs are found between two ids
        |if at % _ID_BYTES == 0:| -> |if at % 1 == 0:|
    a part of a reply counts before a complete one
        |return wrong, not complete, -n_due| -> |return wrong, complete, -n_due|
    equal replies take each other's tokens
        |again = bool((self.trained_by[mine] >= 0).any())| -> |again = False|
trajkit/analysis/drift.py: analysis/test_drift_findings
    a span is split though a part has no cause
        |if len(explained) == len(pieces):| -> |if explained:|
    reasoning that the prompt has as well is dropped
        |if not still and answer == other:| -> |if answer == other:|
    whole floats are no integers
        |return int(value) if value.is_integer() else value| -> |return value|
    words are cut at the span
        |return _squeezed(_in_json(head[::-1] + text + rest))|
        -> |return _squeezed(_in_json(text))|
trajkit/importers/reader.py: importers/test_nothing_lost importers/test_sources_and_maps
        importers/test_importers importers/test_strangers importers/test_runs_and_order
    a record without a session beside others has the file's
        |        elif named is None or named:| -> |        elif False:|
    a call that comes twice without a request id trains twice
        |if found.problem or (own is None and not len(output)):|
        -> |if found.problem or own is None:|
    a turn_index tells no equal calls apart
        |index = None if own else found.fields.get("turn_index")| -> |index = None|
    a name of a run that comes late is passed over
        |or found.run_keys) and name in self.names:| -> |or found.run_keys) and False:|
    a turn whose usage contradicts trains
        |self.contradicted == "untrain"| -> |self.contradicted == "train"|
    a record that is left out has no number
        |self.numbers[session] += 1| -> |self.numbers[session] += not found.problem|
    equal requests take each other's reply
        |if len(several) > 1:| -> |if len(several) > 2:|
    calls of a second file may start over
        |session if self.session_prefix != "no" else None| -> |None|
trajkit/importers/formats.py: importers/test_nothing_lost importers/test_sources_and_maps
        importers/test_importers importers/test_text importers/test_recorded
        importers/test_strangers importers/test_runs_and_order
    a trial's reward stays in its result
        |yield from _trajectories({**_of_trial(result), **root})|
        -> |yield from _trajectories(root)|
    logprobs of other ids are taken
        |if len(logprobs) == len(listed) and (ids is None or ids == listed):|
        -> |if len(logprobs) == len(listed):|
    a response counts before a mapping
        |{**values, **own, **kept})| -> |{**values, **kept, **own})|
    a mask that marks part of an output is passed over
        |if n and marks_tokens(path, value, first, n):| -> |if False:|
    the token that begins the next role ends no reply
        |return np.append(output, np.int32(end))| -> |return output|
    a capture of a newer version is read
        |not 1 <= version <= _NEWEST_GYM:| -> |not 1 <= version:|
    sampled ids are anywhere in a node
        |if not all(mask[start:]):| -> |if not any(mask[start:]):|
    cached tokens are none of a prompt
        |usage.get("cached_input_tokens") or 0]| -> |0]|
    an empty name of a run names nothing
        |names_empty=aside and bool(EMPTY_RUN.fullmatch(word)),| -> |names_empty=False,|
    rewards tell no runs apart
        |found.names = {**found.names, "reward": str(reward)}| -> |pass|
    a span has the versions of its row
        |one.fields["weight_versions"] = _between(versions, start, stop)|
        -> |one.fields["weight_versions"] = versions|
trajkit/cli/options.py: importers/test_strangers
    advice is about any of several files
        |[log for log in logs if log in str(error)]| -> |[]|
trajkit/turns/runs.py: importers/test_runs_and_order turns/test_records
    a line without a prompt starts a run over
        |        if not prompt:| -> |        if False:|
    values that a later call lacks are forgotten
        |        last.update(names)| -> |        self._last[session] = dict(names)|
    a key that changes within a conversation names runs
        |self._never.add(key)| -> |pass|
trajkit/files/pickles.py: importers/test_importers
    a tensor begins a byte too late
        |start = offset * storage.itemsize| -> |start = offset * storage.itemsize + 1|
trajkit/importers/containers.py: importers/test_importers importers/test_nothing_lost
        importers/test_sources_and_maps
    what is unread counts for every choice
        |unread=self.unread if first else {},| -> |unread=self.unread,|
    skipped files of an address have no line
        |for one in taken if not taken[one]]| -> |for one in taken if False]|
trajkit/analysis/rows.py: analysis/test_row_check analysis/test_row_reasons
    equal tokens before a row are no padding
        |for k in starts]| -> |for k in (0,)]|
    a token before the prompt is padding
        |or dropped < 2 or| -> |or|
    trained padding is left out
        |or mask[:dropped].any():| -> |:|
    of equal sessions the first ones are tried for every row
        |(session in self.seen, session))| -> |session)|
    a row is of no session if one of its tokens was replaced
        |if 2 * same.sum() > len(ids):| -> |if False:|
    masks that were not read have no line
        |self.unread.update(given["unread"].as_py())| -> |pass|
    a row may name another session than that of its tokens
        |if own not in (None, session):| -> |if False:|
    tokens may train twice
        |if len(twice) and not self.repeats:| -> |if False:|
    tokens may train after other tokens
        |if beyond and not self.splices:| -> |if False:|
    tokens that a row masks out are in no row
        |if row[k] >= 0:| -> |if False:|
    turns that may not be trained are due
        |self.may = np.append(may[self.owner] & self.turns.unmasked, True)|
        -> |self.may = np.append(self.turns.unmasked, True)|
    sessions that the log lacks are not counted
        |self.unknown += [name] * (own is None and name is not None)| -> |pass|
    wrong logprobs are none
        |self.add("logprobs", words, token=first + int(at[k]), tokens=n)| -> |pass|
    packed rows are one sequence
        |if (stop := self._packed(ids, mask & (source < 0))) is not None:|
        -> |if (stop := None) is not None:|
    what a policy loses is missing
        |due[positions(self.outputs.offsets[lost] + start, stop - start)] = False|
        -> |due[positions(self.outputs.offsets[lost] + start, stop - start)] = True|
    a mask that trains too little is shifted
        |if not (moved & ~due).any() and int((due & ~moved).sum()) < missed:|
        -> |if not (moved & ~due).any():|
    a row is opened by its first turn
        |if (name, one) not in seen), turns[-1])| -> |), turns[-1])|
    shifted logprobs are wrong ones
        |if n >= least:| -> |if n > len(at):|
trajkit/turns/messages.py: recorder/test_message_lists recorder/test_recorder
    the reply of a base is not shared
        |+ array("i", [self.reply] * replied)| -> |+ array("i")|
    messages whose body is not the last of their key are shared
        |        if not respelled or not n:\n            return n\n| -> |        return n\n|
    a reply is not the last body of its key
        |[*one.own(), one.reply]| -> |[*one.own()]|
    a message is not copied
        |comparable(copy, encoded.is_plain)| -> |comparable(message, encoded.is_plain)|
trajkit/recorder.py: recorder/test_recorder
    masks of calls are not checked
        |for check in (*checks_of(TURNS, _OF_IDS), mm_items, check_payloads):|
        -> |for check in (mm_items,):|
trajkit/tables/canonical.py: turns/test_validation turns/test_table tables
    ids beyond int32 wrap around
        |safe=not pa.types.is_floating(target)| -> |safe=False|
trajkit/verification/run.py: tables/test_streams
    rows that were compared are rows of a session without turns
        |store.starts.pop(name, None)| -> |store.starts.get(name)|
    a session that comes back in a stream of rows is not told
        |for name, row in tuples(batch, "session_id", "row_index"):\n            if name != current and|
        -> |for name, row in tuples(batch, "session_id", "row_index"):\n            if not current and|
trajkit/cli/options.py: cli/test_files cli/test_cli
    a session that is left out has no file and line
        |reason = log.placed(reason) if k < 10 else reason| -> |reason = reason|
    an existing file is replaced all the same
        |clobber=not any(given)| -> |clobber=True|
trajkit/verification/row_forms.py: analysis/test_row_check
    columns may contradict each other
        |            if len(wrong):\n                raise _contradiction| -> |            if False:\n                raise _contradiction|
trajkit/cli/data.py: cli/test_cli cli/test_files
    a finding has the tokens before it
        |path_tokens=(pl.col("path_stop") - pl.col("path_start")).sum(),|
        -> |path_tokens=pl.col("path_stop").sum(),|
    check ends with 0 where rows are wrong
        |return BAD_DATA if wrong else DONE| -> |return DONE|
trajkit/view/tables.py: view/test_files view/test_server
    a sample depends on the order of sessions
        |sorted(names, key=draw.__getitem__)[:sample]| -> |names[:sample]|
trajkit/view/pages.py: view/test_server
    every path has the token
        |if not secrets.compare_digest(token.encode(), self.server.token.encode()):|
        -> |if False:|
trajkit/plot/figures.py: plot
    a lane is free only later
        |if until <= start)| -> |if until < start)|
    a prompt has no roles of its parent
        |path[:lcp] = paths[parent][:lcp]| -> |pass|
"""
