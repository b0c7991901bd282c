"""The faults: one piece of text of one file each, and what it becomes.

A fault of a kernel is an expression, or a statement of one line (which becomes nothing). All
of them are built into one extension, and a variable of the environment selects one.
"""

from tests.faults.form import Change, Place
from tests.faults.form import place as _place
from tests.faults.gateway import GATEWAY
from tests.faults.rollouts import ROLLOUTS

PYTHON = (
    _place(
        "trajkit/packs/packing.py",
        "tests/training/test_packs.py tests/training/test_packs_verify.py",
        (
            "a row that shares what its parent shares hangs on it",
            "shared <= shared[parents]",
            "shared < shared[parents]",
        ),
        (
            "a part of a tree begins with the shallowest row",
            "queue[-1][0] > repeated",
            "queue[-1][0] < repeated",
        ),
    ),
    _place(
        "trajkit/schema/engine.py",
        "tests/turns/test_validation.py tests/turns/test_images.py "
        "tests/turns/test_delta.py tests/rows/test_links.py "
        "tests/rows/test_twins.py",
        (
            "-9999 itself is a logprob",
            "(numbers <= NO_LOGPROB, ",
            "(numbers < NO_LOGPROB, ",
        ),
        (
            "a logprob of 1e-4 is refused",
            "(numbers > MAX_LOGPROB, POSITIVE)",
            "(numbers >= MAX_LOGPROB, POSITIVE)",
        ),
        (
            "an id of -1 is an id",
            "numbers < 0 if numbers.min",
            "numbers < -1 if numbers.min",
        ),
        (
            "a parent may be a negative turn",
            "good = (values >= 0) & fits(",
            "good = fits(",
        ),
    ),
    _place(
        "trajkit/analysis/sampled_tokens.py",
        "tests/analysis/test_sampled_tokens.py",
        (
            "a token is lost to a later departure than the first",
            "np.minimum.accumulate(lcp[chain[k + 1 :]])",
            "np.maximum.accumulate(lcp[chain[k + 1 :]])",
        ),
        (
            "a row over max_rows is one that was cut",
            'kind[trained] = _CODES["over_max_rows"]',
            'kind[trained] = _CODES["cut"]',
        ),
        (
            "drift right after a row's first prompt restarts it",
            "lcp[call] < opened",
            "lcp[call] <= opened",
        ),
    ),
    _place(
        "trajkit/analysis/branches.py",
        "tests/analysis/test_branches.py",
        (
            "a prompt that was continued is tried again",
            "if other in children:",
            "if False:",
        ),
        (
            "a request as long as the one before is a compaction",
            "if len(ids) >= n_prompt[other]",
            "if len(ids) > n_prompt[other]",
        ),
        (
            "an agent has several first turns",
            "latest[agent] = asked[prompt] = call",
            "asked[prompt] = call",
        ),
        (
            "a retry is drift",
            "labels.get((name, turn), causes[k])",
            "causes[k]",
        ),
    ),
    _place(
        "trajkit/schema/engine.py",
        "tests/turns/test_validation.py tests/turns/test_delta.py "
        "tests/turns/test_records.py",
        (
            "a span of weights may run backwards",
            "(low != due) | (high < low)",
            "(low != due)",
        ),
        (
            "an empty span of weights is refused",
            "(low != due) | (high < low)",
            "(low != due) | (high <= low)",
        ),
        (
            "weights may end before the output does",
            "(last != n_output)",
            "(last > n_output)",
        ),
        (
            "a turn may be its own base",
            "(base_row >= np.arange(len(table)))",
            "(base_row > np.arange(len(table)))",
        ),
        (
            "messages are shared with a base without a list",
            "np.where(none | unlisted[base_row], 0, total[base_row])",
            "np.where(none, 0, total[base_row])",
        ),
    ),
    _place(
        "trajkit/schema/engine.py",
        "tests/turns/test_validation.py tests/rows/test_links.py "
        "tests/rows/test_twins.py",
        (
            "parents come first in order in every session",
            "(before >= order) & np.isin(session, later)",
            "(before >= order)",
        ),
        (
            "resync_length may be null alone",
            "(path != prompt) | (path != length)",
            "(path != prompt)",
        ),
    ),
    _place(
        "trajkit/schema/engine.py",
        "tests/turns/test_validation.py tests/verification/test_verify.py",
        (
            "a row without a response is refused",
            "broken(values > n_ids, rule, values, n_ids)",
            "broken(values >= n_ids, rule, values, n_ids)",
        ),
        (
            "a row may share tokens with no row",
            "broken(nulls(parent) & (shared > 0), rule, shared)",
            "broken(nulls(parent) & (shared < 0), rule, shared)",
        ),
        (
            "a row that its parent contains is refused",
            "found & (shared > of_parent)",
            "found & (shared >= of_parent)",
        ),
        (
            "the sum of a rollout is not compared with the row",
            "broken(sums < n_trained, rule, sums, n_trained)",
            "broken(sums < 0, rule, sums, n_trained)",
        ),
        (
            "an output range may run backwards",
            "(out_start < 0) | (out_stop < out_start)",
            "(out_start < 0)",
        ),
        ("a weight of 1 is refused", "(values <= 1)", "(values < 1)"),
        (
            "trained tokens outside of spans are not counted",
            "broken(claimed != masked, rule, masked, claimed)",
            "broken(claimed > masked, rule, masked, claimed)",
        ),
    ),
    _place(
        "trajkit/files/tables.py",
        "tests/files/test_dedup.py",
        (
            "a trained token may be left to the parent",
            "np.minimum(first, ids.lengths), np.where(",
            "ids.lengths, np.where(",
        ),
        (
            "a parent that is not in the table stores the prefix",
            "np.where(found, ids.lengths[parent], 0)\n    )",
            "ids.lengths[parent]\n    )",
        ),
        (
            "tokens that differ from the parent's are left to it",
            "start[row] = here[differs[::-1]] - ids.offsets[row]",
            "start[row] = start[row]",
        ),
        (
            "a stored row may begin before its first token",
            "(start < 0) | (start > most)",
            "(start > most)",
        ),
        (
            "a row may be its own parent in a file",
            "    found &= parent < np.arange(len(parent))\n    most = np.where",
            "    most = np.where",
        ),
    ),
    _place(
        "trajkit/turns/validation.py",
        "tests/turns/test_validation.py tests/turns/test_images.py",
        (
            "a body in another session counts",
            "of_session = session_numbers(table)[rows] * (len(keys) + 1) + codes(keys)",
            "of_session = codes(keys)",
        ),
        (
            "the role in a body is not compared",
            'if message.get("role") != role:',
            'if not message.get("role"):',
        ),
    ),
    _place(
        "trajkit/turns/validation.py",
        "tests/turns/test_validation.py tests/training/test_packs.py",
        (
            "a list of null becomes an empty one",
            "to_arrow(nulls(column), column.type)",
            "to_arrow(None, column.type)",
        ),
        (
            "the last reason is given, not the first",
            "if name not in reasons:",
            "if name is not None:",
        ),
        (
            "null ids are not found before rows are packed",
            'read_ids |= any(one.values.null_count for one in rows.column("input_ids").chunks)',
            "read_ids |= False",
        ),
    ),
    _place(
        "trajkit/turns/records.py",
        "tests/turns/test_records.py tests/turns/test_messages.py",
        (
            "calls stay in the order of records",
            "in_order = [self.calls[k] for k in order]",
            "in_order = self.calls",
        ),
        (
            "extra columns stay in the order of records",
            "in_turn = [values[k] for k in order]",
            "in_turn = values",
        ),
        (
            "turn_index may be 2**31",
            "0 <= turn_index < 2**31",
            "0 <= turn_index <= 2**31",
        ),
        (
            "use_tool=None is derived",
            'elif name == "use_tool" and name not in record:',
            'elif name == "use_tool":',
        ),
        (
            "a fraction of a token is cut off",
            'if read[i] == one else "expected integers"',
            'if True else "expected integers"',
        ),
        (
            "2 is a bool of a mask",
            "(mask != 0) & (mask != 1)",
            "(mask < 0) | (mask > 2)",
        ),
    ),
    _place(
        "trajkit/turns/images.py",
        "tests/turns/test_images.py tests/verification/test_verify.py",
        (
            "an image may end beyond the prompt",
            "inside = start < end if may_be_cut else stop <= end",
            "inside = start < end",
        ),
        (
            "an image may have no token",
            "last <= start < stop and inside",
            "last <= start <= stop and inside",
        ),
        (
            "the first content id is an id of the engine",
            "0 <= id_ < FIRST_CONTENT_ID",
            "0 <= id_ <= FIRST_CONTENT_ID",
        ),
        (
            "content ids of no item are not seen",
            "    if known is not None:\n",
            "    if known is None:\n",
        ),
        (
            "images of other sources are known",
            "elif known is not None and same_image(item) not in known:",
            "elif False:",
        ),
    ),
    _place(
        "trajkit/turns/records.py",
        "tests/turns/test_records.py tests/recorder/test_recorder.py",
        (
            "ids of 2**31 and above wrap around",
            "(array < 0) | (array > 0x7FFFFFFF)",
            "array < 0",
        ),
        (
            "an empty array of logprobs for no output is a list",
            "len(values) == n_outputs > 0:",
            "len(values) == n_outputs:",
        ),
        (
            "nulls of an Arrow array become NaN",
            "return values.to_numpy() if values.null_count == 0 else values.to_pylist()",
            "return values.to_numpy(zero_copy_only=False)",
        ),
        (
            "what a mask hides is read",
            "return list(values.tolist())  # None where masked",
            "array = np.asarray(values)",
        ),
        (
            "bytes are a list of ids",
            "None if view.itemsize == 1",
            "None if view.itemsize == 0",
        ),
    ),
    _place(
        "trajkit/turns/delta.py",
        "tests/turns/test_delta.py tests/files/test_run.py",
        (
            "attribution of shared tokens is lost where it says something",
            "clear = counts[begins + np.minimum(shared, n)] == counts[begins]",
            "clear = np.ones(len(n), np.bool_)",
        ),
        (
            "a null list of attribution gets elements",
            "(n == n_prompt - shared) & ~absent",
            "(n == n_prompt - shared)",
        ),
        (
            "a prompt does not share the base's reply",
            "if replied[base]:",
            "if False:",
        ),
        (
            "a message with a body is shared",
            "own[call][: bare[call]]",
            "own[call]",
        ),
        (
            "messages of other roles are shared",
            "(roles.max(initial=0) + 1) + roles",
            "(roles.max(initial=0) + 1)",
        ),
        (
            "messages whose body is another one are shared",
            "    numbers += np.append(current.places, current.replies)\n",
            "",
        ),
        (
            "a reply counts without a list of messages",
            "np.logical_and(known, reply)",
            "reply",
        ),
    ),
    _place(
        "trajkit/turns/session_metadata.py",
        "tests/rows/test_rows.py tests/learn/test_session_rewards.py",
        (
            "a reward of None does not contradict the turns",
            "same = pc.equal(own, given).fill_null(False)",
            "same = pc.equal(own, given).fill_null(True)",
        ),
        (
            "a column of nulls in sessions counts",
            "stated = [n for n in OF_TURNS if table.column(n).null_count < len(table)]",
            "stated = list(OF_TURNS)",
        ),
    ),
    _place(
        "trajkit/turns/amendments.py",
        "tests/turns/test_amendments.py",
        (
            "an amendment without trainable makes context",
            'pc.equal(found.column("trainable"), False).fill_null(False)',
            'pc.equal(found.column("trainable"), False).fill_null(True)',
        ),
        (
            "amendments of other turns count",
            "pa.array(at, mask=at < 0)",
            "pa.array(np.maximum(at, 0))",
        ),
    ),
    _place(
        "trajkit/turns/sessions.py",
        "tests/rows/test_forest_routes.py tests/rows/test_recorded_parents.py "
        "tests/rows/test_twins.py",
        (
            "retries are not ranked by request_id",
            'keys = [self._ranks("request_id"), self.calls["prompt_len"], self.session]',
            'keys = [self.calls["prompt_len"], self.session]',
        ),
        (
            "request_id goes before started_at",
            '[self._ranks("request_id"), self._ranks("started_at")]',
            '[self._ranks("started_at"), self._ranks("request_id")]',
        ),
        (
            "equal times rank by turn before request_id",
            'tiebreaker="min"',
            'tiebreaker="first"',
        ),
    ),
    _place(
        "trajkit/turns/flat_buffers.py",
        "tests/rows/test_policies.py tests/rows/test_rows.py tests/rows/test_twins.py",
        (
            "tokens of an aborted turn of context are lost twice",
            'now = aborted_calls(calls) & (calls.calls["trainable"] != 0)',
            "now = aborted_calls(calls)",
        ),
        (
            "turns of context need logprobs",
            'missing * (calls.calls["trainable"] != 0)',
            "missing",
        ),
    ),
    _place(
        "trajkit/turns/messages.py",
        "tests/turns/test_message_equality.py tests/rows/test_graph.py "
        "tests/rows/test_twins.py",
        (
            "an empty tool_call_id is a missing one",
            '(name == "content" and value == "")',
            'value == ""',
        ),
        (
            "reasoning of a user counts",
            'if not missing and its_role in ("", role):',
            "if not missing:",
        ),
        (
            "an empty list is a value",
            'value is not None and value != "" and value != []',
            'value is not None and value != ""',
        ),
        (
            "a tool call without a function has no name",
            "holder = function if isinstance(function, dict) else call",
            "holder = function if isinstance(function, dict) else {}",
        ),
        (
            "cache_control within objects counts",
            "within += value.values()",
            "within += ()",
        ),
    ),
    _place(
        "trajkit/turns/messages.py",
        "tests/turns/test_messages.py tests/turns/test_records.py "
        "tests/recorder/test_message_lists.py",
        (
            "a body that comes after its key is not stored",
            "self._numbers.get(pair if body is None else body, -1)",
            "self._numbers.get(pair, -1)",
        ),
        (
            "a float keeps its type",
            "return int(value) if value.is_integer() else value",
            "return value",
        ),
        (
            "a message with an integer is plain",
            "int not in types",
            "True",
        ),
        (
            "numbers are written alike that are ==",
            "return message if is_plain else _NO_MESSAGE",
            "return message",
        ),
        (
            "a body is shown once for each key",
            "new[order] = ~again | (np.diff(ids[order], prepend=-1) != 0)",
            "new[order] = ~again",
        ),
        (
            "a body that its key last had is shown again",
            "new[order] = ~again | (np.diff(ids[order], prepend=-1) != 0)",
            "new[order] = True",
        ),
    ),
    _place(
        "trajkit/turns/delta.py",
        "tests/turns/test_messages.py",
        (
            "keys without a body are whole",
            "padded = prefix + bytes(KEY_BYTES - _EQUAL_BYTES)",
            "padded = key",
        ),
        (
            "shared messages of the delta form lose their bodies",
            'if book.respelled and stored == "suffix_messages":',
            "if False:",
        ),
    ),
    _place(
        "trajkit/rows/linearize.py",
        "tests/rows/test_links.py tests/rows/test_rows.py tests/rows/test_twins.py",
        (
            "empty lists are not counted as routed by tokens",
            'which |= calls.requests["n_keys"] + calls.requests["shared"] == 0',
            "which |= False",
        ),
        (
            "an lcp may be negative",
            "other | (lcp < 0) | (lcp > most)",
            "other | (lcp > most)",
        ),
        (
            "an order may be the number of calls",
            'links["order"] >= np.diff(calls.offsets)[calls.session]',
            'links["order"] > np.diff(calls.offsets)[calls.session]',
        ),
    ),
    _place(
        "trajkit/rows/plan.py",
        "tests/rows/test_payloads.py",
        (
            "a null element hides the last turn's",
            "new = valid[sources] & (at[places] < 0)",
            "new = at[places] < 0",
        ),
        (
            "elements come from beyond what a base shares",
            "np.minimum(end, forest.shared[run.call]) - run.first",
            "end - run.first",
        ),
        (
            "a start may be negative",
            "given & ((starts < 0) | (starts + length > n_path))",
            "given & (starts + length > n_path)",
        ),
        (
            "nothing comes before a given start",
            "given & (first > 0) & (length >= 0)",
            "np.zeros_like(given)",
        ),
    ),
    _place(
        "trajkit/rows/plan.py",
        "tests/rows/test_rows.py tests/rows/test_payloads.py",
        (
            "the last weights are those of the first output",
            "((out_start, 1), (out_stop - 1, -1))",
            "((out_start, 1), (out_stop - 1, 1))",
        ),
        (
            "outputs that are lost have weights",
            "& (stop > start)",
            "& (stop >= start)",
        ),
        (
            "the token after the last span has its weights",
            "(token < stop[at])",
            "(token <= stop[at])",
        ),
    ),
    _place(
        "trajkit/rows/plan.py",
        "tests/rows/test_rows.py tests/rows/test_policies.py tests/rows/test_bounds.py "
        "tests/rows/test_twins.py",
        (
            "numbers stay under nulls",
            "logprobs[drops] = 0.0",
            "logprobs[:0] = 0.0",
        ),
        (
            "a later batch has the columns of the first rows",
            "column[lo:hi] for name",
            "column[: hi - lo] for name",
        ),
    ),
    _place(
        "trajkit/rows/splice.py",
        "tests/rows/test_splice.py tests/rows/test_twins.py",
        (
            "stop_sequence does not end a turn",
            '("stop", "tool_calls", "stop_sequence")',
            '("stop", "tool_calls")',
        ),
        (
            "a prompt that skips tokens begins its row",
            '(links["lcp"] == path_end) & (path_end == starts)',
            'links["lcp"] == path_end',
        ),
        (
            "payloads of prompts behind a splice count",
            "heads = (parent >= 0) & (other == other[offsets[:-1]][row])",
            "heads = parent >= 0",
        ),
        (
            "a call that opens a spliced row is a root",
            'plan.counted("roots")[:] = self.roots',
            'plan.counted("roots")[:] += 0',
        ),
        (
            "calls after one that was dropped are in the row",
            "before_each(missing) + missing[placed] > 0",
            "missing[placed] > 0",
        ),
        (
            "dropped tokens count as unrouted, too",
            'plan.counted("lost_unrouted")[:] -= lost',
            'plan.counted("lost_unrouted")[:] -= 0 * lost',
        ),
        (
            "an end of turn at the end of the previous prompt is not seen",
            "low = np.where(linked, n_prompt[before], n_prompt)",
            "low = np.where(linked, n_prompt[before] + 1, n_prompt)",
        ),
    ),
    _place(
        "trajkit/rows/routes.py",
        "tests/rows/test_forest_routes.py tests/rows/test_golden.py "
        "tests/rows/test_recorded_parents.py "
        "tests/rows/test_twins.py",
        (
            "equal paths are no ambiguity",
            "ambiguous[ranked] = first[node], several[node]",
            "ambiguous[ranked] = first[node], False",
        ),
        (
            "a chain below a quarantined call is sound",
            "parent < 0 or (parent in sound and parent != scored)",
            "parent != scored",
        ),
        (
            "a call after the scored one is in its chain",
            "parent < 0 or (parent in sound and parent != scored)",
            "parent < 0 or parent in sound",
        ),
    ),
    _place(
        "trajkit/rows/routes.py",
        "tests/rows/test_recorded_parents.py tests/rows/test_twins.py",
        (
            "a recorded parent whose path is not in the prompt counts",
            "if shared == self.calls.path_len[parent]:",
            "if shared >= 0:",
        ),
        (
            "a missing parent is found though several paths begin the prompt",
            'name is not None and self.reasons[call] == "tokens"',
            "name is not None and self.parents[call] >= 0",
        ),
    ),
    _place(
        "trajkit/rows/routes.py",
        "tests/rows/test_forest_routes.py tests/rows/test_golden.py "
        "tests/rows/test_twins.py",
        (
            "drift as long as the threshold may be trimmed",
            "n_missing >= policy.fork_threshold",
            "n_missing > policy.fork_threshold",
        ),
        (
            "a generation is not found where an equal call was refused",
            "n_open[end] -= 1",
            "n_open[end] = 0",
        ),
    ),
    _place(
        "trajkit/rows/routes.py",
        "tests/rows/test_segments.py tests/rows/test_golden.py "
        "tests/rows/test_twins.py",
        (
            "a repeated prompt continues itself",
            "0 < opening <= shared and opening < prompt_len[call]",
            "0 < opening <= shared",
        ),
        (
            "a sub-agent starts a sub-agent",
            "if is_main and dispatches[call] >= 0:",
            "if dispatches[call] >= 0:",
        ),
        (
            "the first of several dispatches counts",
            "numbers.setdefault(ids[-1], len(numbers))",
            "numbers.setdefault(ids[0], len(numbers))",
        ),
        (
            "any tool starts a sub-agent",
            "_tool_calls(messages[k]) if name in tools]",
            "_tool_calls(messages[k]) if name]",
        ),
    ),
    _place(
        "trajkit/rows/linearize.py",
        "tests/rows/test_rows.py tests/rows/test_policies.py tests/rows/test_twins.py",
        (
            "links of a later part refer to the first",
            "here[name][here[name] >= 0] -= lo",
            "here[name][here[name] >= 0] -= 0",
        ),
        (
            "aborted tokens count as untrainable, too",
            'plan.counted("lost_untrainable")[:] -= aborted',
            'plan.counted("lost_untrainable")[:] -= 0 * aborted',
        ),
        (
            "text that a policy compares is not looked at",
            "(by_body and policy.parent_by in BY_MESSAGES)",
            "False",
        ),
    ),
    _place(
        "trajkit/policies.py",
        "tests/rows/test_policies.py tests/verification/test_verify.py "
        "tests/rows/test_splice.py "
        "tests/rows/test_twins.py",
        (
            "the last token id ends no turn",
            "if token > _LAST_TOKEN:",
            "if token >= _LAST_TOKEN:",
        ),
        (
            "a policy of one chain keeps everything",
            'return self.places_all and self.row_selection == "all"',
            "return self.places_all",
        ),
        (
            "generations place every turn",
            '            "prefix",\n            "generations",\n        )',
            '            "prefix",\n        )',
        ),
    ),
    _place(
        "trajkit/files/tables.py",
        "tests/files/test_run.py",
        (
            "turns out of order are read as they are",
            "if (before and not continues) or (index is not None and falls):",
            "if before and not continues:",
        ),
        (
            "a run that continues leaves out its first turns twice",
            "skip = max(skip - table.num_rows, 0)",
            "skip = max(skip, 0)",
        ),
        (
            "a session that appears while a log is grouped has no words",
            "if name not in buckets:",
            "if name is None:",
        ),
        (
            "a session whose lines are no turns is rejected for its nulls",
            'self._misread.pop(line["session_id"], line["reason"])',
            'line["reason"]',
        ),
    ),
    _place(
        "trajkit/files/arrow.py",
        "tests/files/test_damage.py",
        (
            "rows that Arrow passes over are not missed",
            "if n_rows != group.num_rows:",
            "if n_rows > group.num_rows:",
        ),
        (
            "values that a page lacks are not missed",
            "found.tolist() != due:",
            "found.tolist() > due:",
        ),
    ),
    _place(
        "trajkit/files/run.py",
        "tests/files/test_run.py",
        (
            "a run of other options continues the parts",
            "if known == self._job:",
            "if known:",
        ),
        (
            "files of any job are taken for parts",
            'any(n[0] != "." for n in os.listdir(one))',
            'any(n[0] == "." for n in os.listdir(one))',
        ),
        (
            "an output that the stage never makes is not missed",
            "for name in files.keys() - made:",
            "for name in made - {*files, *made}:",
        ),
    ),
    _place(
        "trajkit/files/formats.py",
        "tests/files/test_tables.py",
        (
            "lines are written to a file of one JSON value",
            "if not (writing and is_one_value(one))",
            "if one or not is_one_value(one)",
        ),
    ),
    _place(
        "trajkit/verification/rules.py",
        "tests/verification/test_verify.py",
        (
            "the token at the cap must train",
            "+ at < self.cap\n",
            "+ at <= self.cap\n",
        ),
        (
            "a list that its base supplies is empty",
            '(requests["n_keys"] != 0) | (requests["shared"] != 0)',
            '(requests["n_keys"] != 0)',
        ),
        (
            "NaN is a logprob",
            "nothing: Bools = (logprobs == 0) | np.isnan(logprobs)",
            "nothing: Bools = logprobs == 0",
        ),
        ("weights may be off by a thousandth", "_ROUNDING = 1e-9", "_ROUNDING = 1e-3"),
        (
            "tokens without a logprob must train",
            'self.policy.missing_logprobs == "untrain"',
            'self.policy.missing_logprobs == "untrained"',
        ),
    ),
    _place(
        "trajkit/verification/rules.py",
        "tests/verification/test_verify.py tests/rows/test_splice.py "
        "tests/rows/test_twins.py",
        (
            "a row may end anywhere in its path",
            "if len(ids) == (n if case.cap is None else min(n, case.cap)):",
            "if case.cap is None or len(ids) == min(n, case.cap):",
        ),
        (
            "turns need not end with last_turn",
            "if last is not None and listed[-1:] != [last]:",
            "if last is not None and last not in listed:",
        ),
        (
            "weights of an empty range count",
            'if start < min(one["stop"], spans.out_stop[k]):',
            'if start <= min(one["stop"], spans.out_stop[k]):',
        ),
        (
            "use_tool of a row may be true for no turn",
            "append(flag if flag or of_row else given[name][row])",
            "append(flag if flag else given[name][row])",
        ),
        (
            "a logprob may be where the engine gave none",
            "differ = (has != given) | (given & (rows.logprobs != due))",
            "differ = given & (rows.logprobs != due)",
        ),
        (
            "every row trains a token once: counted over all rows",
            "key = source + counted.row[owner] * len(case.turns.outputs.values)",
            "key = source",
        ),
        (
            "the first output of a spliced row follows any end of its prompt",
            "due = prompt if before < 0 else prompt[",
            "due = prompt[",
        ),
        (
            "a spliced row may end before its last turn",
            'return order[-1:] if ends or not calls.calls["out_len"][order[-1]] else []',
            "return order[-1:]",
        ),
    ),
    _place(
        "trajkit/verification/run.py",
        "tests/verification/test_verify.py tests/rows/test_splice.py "
        "tests/rows/test_twins.py",
        (
            "only tokens are compared with the rows of the policy",
            "if not (own and equal):",
            "if True:",
        ),
        (
            "spans may come in any order",
            'if not alone and row["spans"] != due["spans"]:',
            "if False:",
        ),
    ),
    _place(
        "trajkit/verification/foreign_rows.py",
        "tests/verification/test_verify.py",
        (
            "outputs are found between two ids",
            "if at % _ID_BYTES == 0:",
            "if at % 1 == 0:",
        ),
        (
            "a part of a reply counts before a complete one",
            "return wrong, not complete, -n_due",
            "return wrong, complete, -n_due",
        ),
        (
            "equal replies take each other's tokens",
            "again = bool((self.trained_by[mine] >= 0).any())",
            "again = False",
        ),
    ),
    _place(
        "trajkit/analysis/drift.py",
        "tests/analysis/test_drift_findings.py",
        (
            "a span is split though a part has no cause",
            "if len(explained) == len(pieces):",
            "if explained:",
        ),
        (
            "reasoning that the prompt has as well is dropped",
            "if not still and answer == other:",
            "if answer == other:",
        ),
        (
            "whole floats are no integers",
            "return int(value) if value.is_integer() else value",
            "return value",
        ),
        (
            "words are cut at the span",
            "return _squeezed(_in_json(head[::-1] + text + rest))",
            "return _squeezed(_in_json(text))",
        ),
    ),
    _place(
        "trajkit/importers/reader.py",
        "tests/importers/test_nothing_lost.py tests/importers/test_sources_and_maps.py "
        "tests/importers/test_importers.py tests/importers/test_strangers.py",
        (
            "a record without a session beside others has the file's",
            "        if keyed:",
            "        if False:",
        ),
        (
            "a turn whose usage contradicts trains",
            'self.contradicted == "untrain"',
            'self.contradicted == "train"',
        ),
        (
            "a record that is left out has no number",
            "self.numbers[session] += 1",
            "self.numbers[session] += not found.problem",
        ),
        (
            "equal requests take each other's reply",
            "if len(several) > 1:",
            "if len(several) > 2:",
        ),
        (
            "calls of a second file may start over",
            'session if self.session_prefix != "no" else None',
            "None",
        ),
    ),
    _place(
        "trajkit/importers/formats.py",
        "tests/importers/test_nothing_lost.py tests/importers/test_sources_and_maps.py "
        "tests/importers/test_importers.py tests/importers/test_text.py "
        "tests/importers/test_recorded.py tests/importers/test_strangers.py",
        (
            "a trial's reward stays in its result",
            "yield from _trajectories({**_of_trial(result), **root})",
            "yield from _trajectories(root)",
        ),
        (
            "logprobs of other ids are taken",
            "if len(logprobs) == len(listed) and (ids is None or ids == listed):",
            "if len(logprobs) == len(listed):",
        ),
        (
            "a response counts before a mapping",
            "{**values, **one, **kept, ",
            "{**values, **kept, **one, ",
        ),
        (
            "a mask that marks part of an output is passed over",
            "if n and marks_tokens(path, value, first, n):",
            "if False:",
        ),
        (
            "the token that begins the next role ends no reply",
            "return np.append(output, np.int32(end))",
            "return output",
        ),
        (
            "a capture of a newer version is read",
            "not 1 <= version <= _NEWEST_GYM:",
            "not 1 <= version:",
        ),
        (
            "sampled ids are anywhere in a node",
            "if not all(listed[start:]):",
            "if not any(listed[start:]):",
        ),
        (
            "cached tokens are none of a prompt",
            'usage.get("cached_input_tokens") or 0]',
            "0]",
        ),
    ),
    _place(
        "trajkit/turns/keys.py",
        "tests/importers/test_strangers.py",
        (
            "an empty name of a run names nothing",
            "bool(EMPTY_RUN.fullmatch(word))",
            "False",
        ),
    ),
    _place(
        "trajkit/files/pickles.py",
        "tests/importers/test_importers.py",
        (
            "a tensor begins a byte too late",
            "start = offset * storage.itemsize",
            "start = offset * storage.itemsize + 1",
        ),
    ),
    _place(
        "trajkit/importers/containers.py",
        "tests/importers/test_importers.py tests/importers/test_nothing_lost.py",
        (
            "what is unread counts for every choice",
            "unread=self.unread if first else {},",
            "unread=self.unread,",
        ),
    ),
    _place(
        "trajkit/analysis/rows.py",
        "tests/analysis/test_row_check.py tests/analysis/test_row_reasons.py",
        (
            "equal tokens before a row are no padding",
            "for k in (0, run - 1, run) if k >= 0",
            "for k in (0,)",
        ),
        (
            "what a policy loses is missing",
            "due[positions(self.outputs.offsets[lost] + start, stop - start)] = False",
            "due[positions(self.outputs.offsets[lost] + start, stop - start)] = True",
        ),
        (
            "a mask that trains too little is shifted",
            "if not (moved & ~due).any() and int((due & ~moved).sum()) < missed:",
            "if not (moved & ~due).any():",
        ),
        (
            "a row is opened by its first turn",
            "if (name, one) not in seen), turns[-1])",
            "), turns[-1])",
        ),
        (
            "shifted logprobs are wrong ones",
            "if n >= least:",
            "if n > len(at):",
        ),
    ),
    _place(
        "trajkit/turns/messages.py",
        "tests/recorder/test_message_lists.py tests/recorder/test_recorder.py",
        (
            "the reply of a base is not shared",
            '+ array("i", [self.reply] * replied)',
            '+ array("i")',
        ),
        (
            "messages whose body is not the last of their key are shared",
            "        if not respelled or not n:\n            return n\n",
            "        return n\n",
        ),
        (
            "a reply is not the last body of its key",
            "[*one.own(), one.reply]",
            "[*one.own()]",
        ),
        (
            "a message is not copied",
            "comparable(copy, encoded.is_plain)",
            "comparable(message, encoded.is_plain)",
        ),
    ),
    _place(
        "trajkit/recorder/session.py",
        "tests/recorder/test_recorder.py tests/recorder/test_message_lists.py",
        (
            "masks of calls are not checked",
            "for check in (*checks_of(TURNS, _OF_IDS), mm_items):",
            "for check in (mm_items,):",
        ),
    ),
    _place(
        "trajkit/recorder/session.py",
        "tests/recorder/test_sessions_end.py",
        (
            "a time without a zone is taken",
            "if not fits or (isinstance(value, datetime) and value.tzinfo is None):",
            "if not fits:",
        ),
        (
            "metadata overwrites payloads",
            "        if name in result:\n",
            "        if name in {}:\n",
        ),
    ),
    _place(
        "trajkit/tables/canonical.py",
        "tests/turns/test_validation.py tests/turns/test_table.py tests/tables",
        (
            "ids beyond int32 wrap around",
            "safe=not pa.types.is_floating(target)",
            "safe=False",
        ),
        (
            "offsets of a slice are not copied",
            "if first or array.offset:",
            "if first:",
        ),
    ),
    _place(
        "trajkit/tables/stages.py",
        "tests/tables/test_streams.py",
        (
            "a session may come twice in a batch",
            "if name in ended or name == current:",
            "if name in ended:",
        ),
    ),
    _place(
        "trajkit/tables/stages.py",
        "tests/tables/test_streams.py tests/verification/test_verify.py",
        (
            "a session that comes too late is skipped",
            "earlier.update(names)",
            "earlier.update(())",
        ),
    ),
    _place(
        "trajkit/cli/options.py",
        "tests/cli/test_files.py tests/cli/test_cli.py",
        (
            "a session that is left out has no file and line",
            "reason = log.placed(reason) if k < 10 else reason",
            "reason = reason",
        ),
        (
            "an existing file is replaced all the same",
            "clobber=not any(given)",
            "clobber=True",
        ),
        (
            "a threshold that the policy ignores is taken",
            'if "fork_threshold" in choices and not _forks(policy):',
            "if False:",
        ),
    ),
    _place(
        "trajkit/cli/data.py",
        "tests/cli/test_cli.py tests/cli/test_files.py",
        (
            "a finding has the tokens before it",
            'path_tokens=(pl.col("path_stop") - pl.col("path_start")).sum(),',
            'path_tokens=pl.col("path_stop").sum(),',
        ),
        (
            "check ends with 0 where rows are wrong",
            "return BAD_DATA if wrong else DONE",
            "return DONE",
        ),
    ),
    _place(
        "trajkit/view/tables.py",
        "tests/view/test_files.py tests/view/test_server.py",
        (
            "a sample depends on the order of sessions",
            "sorted(names, key=draw.__getitem__)[:sample]",
            "names[:sample]",
        ),
    ),
    _place(
        "trajkit/view/pages.py",
        "tests/view/test_server.py",
        (
            "every path has the token",
            "if not secrets.compare_digest(token.encode(), self.server.token.encode()):",
            "if False:",
        ),
    ),
    _place(
        "trajkit/plot/figures.py",
        "tests/plot",
        ("a lane is free only later", "if until <= start)", "if until < start)"),
        (
            "a prompt has no roles of its parent",
            "path[:lcp] = paths[parent][:lcp]",
            "pass",
        ),
    ),
)

NATIVE = (
    _place(
        "_native/rows.pxi",
        "tests/rows/test_policies.py tests/rows/test_segments.py "
        "tests/rows/test_splice.py tests/files/test_dedup.py "
        "tests/rows/test_forest_routes.py tests/rows/test_links.py "
        "tests/rows/test_rows.py "
        "tests/rows/test_twins.py",
        (
            "drift at the end of the first prompt restarts a row",
            "return DRIFT_ABSORBS if link.lcp >= opened else DRIFT_RESTARTS",
            "link.lcp > opened",
            "link.lcp >= opened",
        ),
        (
            "drift at the start of a reply forks",
            "if link.lcp < parent.prompt_len:",
            "link.lcp <= parent.prompt_len",
            "link.lcp < parent.prompt_len",
        ),
        (
            "a reply as long as the threshold is short",
            "return DRIFT_ABSORBS if calls[call].out_len < choices.fork_threshold else DRIFT_FORKS",
            "calls[call].out_len <= choices.fork_threshold",
            "calls[call].out_len < choices.fork_threshold",
        ),
        (
            "drift as long as the threshold is short",
            "if choices.on_drift == ON_DRIFT_ABSORB_SHORT_DRIFT and "
            "drift < choices.fork_threshold:",
            "drift <= choices.fork_threshold",
            "drift < choices.fork_threshold",
        ),
        (
            "duplicates of other chains are not counted",
            "if owned or part.kind in (SPAN_DUPLICATE, SPAN_UNTRAINABLE):",
            "owned",
            "owned or part.kind in (SPAN_DUPLICATE, SPAN_UNTRAINABLE)",
        ),
        (
            "a row that ends with a prompt at the cap is not cut to a call",
            "row.n_calls > 1 and calls[row.last].prompt_len >= plan.choices.max_tokens",
            "calls[row.last].prompt_len > plan.choices.max_tokens",
            "calls[row.last].prompt_len >= plan.choices.max_tokens",
        ),
        (
            "a reply that was replaced wholly keeps its tokens when its successor is cut",
            "if plan.choices.keep_prefix and lcp >= calls[row.last].prompt_len:",
            "lcp > calls[row.last].prompt_len",
            "lcp >= calls[row.last].prompt_len",
        ),
        (
            "absorbed tokens of a cut row are lost twice",
            "totals[SPAN_CUT] = before - totals[SPAN_TRAINED] - totals[SPAN_ABSORBED]",
            "before - totals[SPAN_TRAINED]",
            "before - totals[SPAN_TRAINED] - totals[SPAN_ABSORBED]",
        ),
        (
            "a row shares more than its parent has",
            "row.shared = min(min(nodes[node].stop, row.n_tokens), plan.rows[by].n_tokens)",
            "min(nodes[node].stop, row.n_tokens)",
            "min(min(nodes[node].stop, row.n_tokens), plan.rows[by].n_tokens)",
        ),
        (
            "a row that ends where its prompt does is kept",
            "if row.n_tokens < full and row.n_tokens <= row.prompt_len:",
            "row.n_tokens < row.prompt_len",
            "row.n_tokens <= row.prompt_len",
        ),
        (
            "tokens of an empty row that was cut are not counted",
            "report[REPORT_LOST_CUT] += totals[SPAN_CUT]  # if it was cut to a call",
            "",
        ),
        (
            "duplicates of removed rows are counted",
            "report[REPORT_TOKENS_DUPLICATED] -= totals[SPAN_DUPLICATE]",
            "",
        ),
        (
            "the main chain is the last of its root",
            "if best < 0 or plan.created_rank[plan.roots[leaf]] < plan.created_rank[plan.roots[best]]:",
            "plan.created_rank[plan.roots[leaf]] <= plan.created_rank[plan.roots[best]]",
            "plan.created_rank[plan.roots[leaf]] < plan.created_rank[plan.roots[best]]",
        ),
        (
            "flags of a chain begin at a fork",
            "plan.flags[i] |= plan.flags[parent] & CALL_CHAIN_FLAGS",
            "",
        ),
        (
            "rows above what is new are not counted",
            "report[REPORT_ROWS_UNTRAINED] += plan.forks[top]",
            "",
        ),
    ),
    _place(
        "_native/rows.pxi",
        "tests/rows/test_rows.py tests/rows/test_policies.py tests/rows/test_splice.py "
        "tests/rows/test_twins.py",
        (
            "the logprobs of a later part are those of the first",
            "if _has_logprob(call, span.out_start + i):",
            "i",
            "span.out_start + i",
        ),
        (
            "an earlier drift is forgotten behind a later one",
            "after = min(after, plan.links[calls[k]].lcp)",
            "plan.links[calls[k]].lcp",
            "min(after, plan.links[calls[k]].lcp)",
        ),
    ),
    _place(
        "_native/forest.pxi",
        "tests/rows/test_bounds.py tests/turns/test_delta.py "
        "tests/rows/test_policies.py "
        "tests/rows/test_twins.py",
        (
            "a node loses its siblings when it is split",
            "nodes[upper].sibling = nodes[node].sibling",
            "",
        ),
        (
            "a base may be in an earlier session",
            "elif base < session_offsets[s] or base >= i:",
            "base < 0",
            "base < session_offsets[s]",
        ),
    ),
    _place(
        "_native/route.pxi",
        "tests/rows/test_links.py tests/rows/test_graph.py "
        "tests/rows/test_forest_routes.py tests/rows/test_policies.py "
        "tests/rows/test_twins.py",
        (
            "a reply as long as the threshold is rewritten",
            "or self.forest.calls[reply.call].out_len >= self.merge_threshold",
            "self.forest.calls[reply.call].out_len > self.merge_threshold",
            "self.forest.calls[reply.call].out_len >= self.merge_threshold",
        ),
        (
            "a reply that was continued is rewritten",
            "reply.call < 0 or reply.child >= 0",
            "False",
            "reply.child >= 0",
        ),
        (
            "a reply with siblings is rewritten",
            "if self.merge_threshold <= 0 or self.nodes[node].n_assistants != 1:",
            "self.nodes[node].n_assistants < 1",
            "self.nodes[node].n_assistants != 1",
        ),
        (
            "of equal paths any call is the parent",
            "size < least or size == least and call < best",
            "size < least",
            "size < least or size == least and call < best",
        ),
        (
            "the first of several paths that are repeated is the parent",
            "better = shared == size and call > best",
            "shared == size and best < 0",
            "shared == size and call > best",
        ),
        (
            "messages of a base with other tools are those of the call",
            "if request.shared > 0 and self._tools_of(base) == tools:",
            "True",
            "self._tools_of(base) == tools",
        ),
        (
            "messages of the call before with other tools are those of the call",
            "and self._tools_of(before) == tools",
            "True",
            "self._tools_of(before) == tools",
        ),
        (
            "a rewritten reply still is above what follows",
            "reply.above = self.nodes[node].above",
            "",
        ),
        (
            "a rewritten call is continued by tokens if it was indexed",
            "self.rewrote_indexed = True",
            "",
        ),
        (
            "a rewritten call is continued by tokens if it was not indexed",
            "if self.node_of[call] >= 0 and self.links[call].rewritten_by < 0:",
            "True",
            "self.links[call].rewritten_by < 0",
        ),
    ),
    _place(
        "_native/route.pxi",
        "tests/rows/test_links.py tests/rows/test_graph.py "
        "tests/rows/test_forest_routes.py tests/rows/test_policies.py "
        "tests/rows/test_twins.py",
        (
            "of equally long repeats the last counts",
            "if other >= 0 and calls[other].prompt_len <= prompt_len:",
            "calls[other].prompt_len < prompt_len",
            "calls[other].prompt_len <= prompt_len",
        ),
        (
            "a reply that repeats no more than a path goes before it",
            "if nodes[node].stop <= prompt_len and self.ended[node] >= 0:",
            "nodes[node].stop < prompt_len",
            "nodes[node].stop <= prompt_len",
        ),
        (
            "a call continues one with its own prompt",
            "if other >= 0 and calls[other].prompt_len < prompt_len:",
            "calls[other].prompt_len <= prompt_len",
            "calls[other].prompt_len < prompt_len",
        ),
    ),
    _place(
        "_native/route.pxi",
        "tests/rows/test_links.py tests/rows/test_splice.py tests/rows/test_golden.py "
        "tests/rows/test_twins.py",
        (
            "of equal ends the last chain wins",
            "length > longest or length == longest and first[call] < first[best[0]]",
            "first[call] > first[best[0]]",
            "first[call] < first[best[0]]",
        ),
        (
            "an empty prompt continues a chain",
            "if of_prompts and prompt_len == 0:",
            "False",
            "prompt_len == 0",
        ),
    ),
    _place(
        "_native/drift.pxi",
        "tests/analysis/test_drift.py",
        (
            "a short resync is the last in the prompt",
            "if k > 0 and k >= longest:",
            "k > longest",
            "k >= longest",
        ),
        (
            "replies that a prompt lost count as earlier ones",
            "reach = min(reach, links[x].lcp)",
            "",
        ),
        (
            "drift at the start of a reply is in the prompt",
            "if start <= lcp < min(stop, reach):",
            "start < lcp < min(stop, reach)",
            "start <= lcp < min(stop, reach)",
        ),
    ),
    _place(
        "_native/packs.pxi",
        "tests/training/test_packs.py tests/training/test_packs_verify.py",
        (
            "a segment hangs on one that ends where it starts",
            "while p >= first and ends[p] <= starts[k]:",
            "ends[p] < starts[k]",
            "ends[p] <= starts[k]",
        ),
        (
            "a null logprob of an edge is given",
            "given[stop + e] = 0",
            "",
        ),
    ),
    _place(
        "_native/arrow.pxi",
        "tests/turns/test_table.py tests/rows/test_rows.py tests/tables",
        (
            "validity of sliced logprobs begins at their buffer",
            "call.valid_bit = items.offset + run.start",
            "run.start",
            "items.offset + run.start",
        ),
        (
            "a sliced mask begins at its buffer",
            "call.mask_bit = items.offset + run.start",
            "run.start",
            "items.offset + run.start",
        ),
        (
            "sliced messages begin at their buffer",
            "within = run.start + items.offset  # a struct's children do not know its offset",
            "run.start",
            "run.start + items.offset",
        ),
    ),
    _place(
        "_native/forest.pxi",
        "tests/recorder tests/rows/test_twins.py",
        (
            "the first child is followed, whatever its first token",
            "while node >= 0 and nodes[node].first != token:",
            "nodes[node].first < -1",
            "nodes[node].first != token",
        ),
        (
            "a call that leaves a path where a node begins is in that node",
            "while nodes[node].start >= position:",
            "nodes[node].start > position",
            "nodes[node].start >= position",
        ),
    ),
)


def all_faults() -> list[tuple[Place, Change]]:
    """Every fault with its place, in order."""
    return [
        (one, change)
        for one in (*PYTHON, *GATEWAY, *ROLLOUTS, *NATIVE)
        for change in one.changes
    ]
