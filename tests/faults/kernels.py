"""The faults of the kernels, all of which one extension has."""

KERNELS = r"""
_native/rows.pxi: rows/test_twins:these rows/test_twins:-twins files/test_dedup
    drift at the end of the first prompt restarts a row
        |return DRIFT_ABSORBS if «link.lcp >= opened» else DRIFT_RESTARTS|
        -> |link.lcp > opened|
    drift at the start of a reply forks
        |if «link.lcp < parent.prompt_len»:| -> |link.lcp <= parent.prompt_len|
    a reply as long as the threshold is short
        |return DRIFT_ABSORBS if «calls[call].out_len < choices.fork_threshold» else DRIFT_FORKS|
        -> |calls[call].out_len <= choices.fork_threshold|
    drift as long as the threshold is short
        |if choices.on_drift == ON_DRIFT_ABSORB_SHORT_DRIFT and «drift < choices.fork_threshold»:|
        -> |drift <= choices.fork_threshold|
    duplicates of other chains are not counted
        |if «owned or part.kind in (SPAN_DUPLICATE, SPAN_UNTRAINABLE)»:| -> |owned|
    a row that ends with a prompt at the cap is not cut to a call
        |row.n_calls > 1 and «calls[row.last].prompt_len >= plan.choices.max_tokens»|
        -> |calls[row.last].prompt_len > plan.choices.max_tokens|
    a reply that was replaced wholly keeps its tokens when its successor is cut
        |if plan.choices.keep_prefix and «lcp >= calls[row.last].prompt_len»:|
        -> |lcp > calls[row.last].prompt_len|
    absorbed tokens of a cut row are lost twice
        |totals[SPAN_CUT] = «before - totals[SPAN_TRAINED] - totals[SPAN_ABSORBED]»|
        -> |before - totals[SPAN_TRAINED]|
    a row that ends where its prompt does is kept
        |if row.n_tokens < full and «row.n_tokens <= row.prompt_len»:|
        -> |row.n_tokens < row.prompt_len|
    tokens of an empty row that was cut are not counted
        |report[REPORT_LOST_CUT] += totals[SPAN_CUT]  # if it was cut to a call| -> ||
    duplicates of removed rows are counted
        |report[REPORT_TOKENS_DUPLICATED] -= totals[SPAN_DUPLICATE]| -> ||
    the main chain is the last of its root
        |if best < 0 or «plan.created_rank[plan.roots[leaf]] < plan.created_rank[plan.roots[best]]»:|
        -> |plan.created_rank[plan.roots[leaf]] <= plan.created_rank[plan.roots[best]]|
    flags of a chain begin at a fork
        |plan.flags[i] |= plan.flags[parent] & CALL_CHAIN_FLAGS| -> ||
    rows above what is new are not counted
        |report[REPORT_ROWS_UNTRAINED] += plan.forks[top]| -> ||
_native/rows.pxi: rows/test_rows:shares
    a row shares more than its parent has
        |row.shared = «min(min(nodes[node].stop, row.n_tokens), plan.rows[by].n_tokens)»|
        -> |min(nodes[node].stop, row.n_tokens)|
_native/rows.pxi: rows/test_twins:these rows/test_twins:-twins
    the logprobs of a later part are those of the first
        |if _has_logprob(call, «span.out_start + i»):| -> |i|
    an earlier drift is forgotten behind a later one
        |after = «min(after, plan.links[calls[k]].lcp)»| -> |plan.links[calls[k]].lcp|
_native/forest.pxi: rows/test_bounds turns/test_delta rows/test_twins
    a node loses its siblings when it is split
        |nodes[upper].sibling = nodes[node].sibling| -> ||
    a base may be in an earlier session
        |elif «base < session_offsets[s]» or base >= i:| -> |base < 0|
_native/route.pxi: rows/test_twins:these rows/test_twins:-twins rows/test_twins:graph
    a reply as long as the threshold is rewritten
        |or «self.forest.calls[reply.call].out_len >= self.merge_threshold»|
        -> |self.forest.calls[reply.call].out_len > self.merge_threshold|
    a reply that was continued is rewritten
        |reply.call < 0 or «reply.child >= 0»| -> |False|
    a reply with siblings is rewritten
        |if self.merge_threshold <= 0 or «self.nodes[node].n_assistants != 1»:|
        -> |self.nodes[node].n_assistants < 1|
    of equal paths any call is the parent
        |«size < least or size == least and call < best»| -> |size < least|
    the first of several paths that are repeated is the parent
        |better = «shared == size and call > best»| -> |shared == size and best < 0|
    messages of a base with other tools are those of the call
        |if request.shared > 0 and «self._tools_of(base) == tools»:| -> |True|
    messages of the call before with other tools are those of the call
        |and «self._tools_of(before) == tools»| -> |True|
    a rewritten reply still is above what follows
        |reply.above = self.nodes[node].above| -> ||
    a rewritten call is continued by tokens if it was indexed
        |self.rewrote_indexed = True| -> ||
    a rewritten call is continued by tokens if it was not indexed
        |if self.node_of[call] >= 0 and «self.links[call].rewritten_by < 0»:| -> |True|
    of equally long repeats the last counts
        |if other >= 0 and «calls[other].prompt_len <= prompt_len»:|
        -> |calls[other].prompt_len < prompt_len|
    a reply that repeats no more than a path goes before it
        |if «nodes[node].stop <= prompt_len» and self.ended[node] >= 0:|
        -> |nodes[node].stop < prompt_len|
    a call continues one with its own prompt
        |if other >= 0 and «calls[other].prompt_len < prompt_len»:|
        -> |calls[other].prompt_len <= prompt_len|
_native/route.pxi: rows/test_twins:these rows/test_twins:-twins rows/test_twins:graph
    of equal ends the last chain wins
        |length > longest or length == longest and «first[call] < first[best[0]]»|
        -> |first[call] > first[best[0]]|
    an empty prompt continues a chain
        |if of_prompts and «prompt_len == 0»:| -> |False|
_native/drift.pxi: analysis/test_drift
    a short resync is the last in the prompt
        |if k > 0 and «k >= longest»:| -> |k > longest|
    replies that a prompt lost count as earlier ones
        |reach = min(reach, links[x].lcp)| -> ||
    drift at the start of a reply is in the prompt
        |if «start <= lcp < min(stop, reach)»:| -> |start < lcp < min(stop, reach)|
_native/packs.pxi: training/test_packs training/test_packs_verify
    a null logprob of an edge is given
        |given[stop + e] = 0| -> ||
_native/arrow.pxi: turns/test_delta turns/test_table rows/test_rows tables
    validity of sliced logprobs begins at their buffer
        |call.valid_bit = «items.offset + run.start»| -> |run.start|
    a sliced mask begins at its buffer
        |call.mask_bit = «items.offset + run.start»| -> |run.start|
    sliced messages begin at their buffer
        |within = «run.start + items.offset»  # a struct's children do not know its offset|
        -> |run.start|
_native/forest.pxi: recorder rows/test_twins
    the first child is followed, whatever its first token
        |while node >= 0 and «nodes[node].first != token»:| -> |nodes[node].first < -1|
    a call that leaves a path where a node begins is in that node
        |while «nodes[node].start >= position»:| -> |nodes[node].start > position|
"""
