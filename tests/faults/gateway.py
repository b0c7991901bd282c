"""The faults of the gateway (`shim/trajkit_shim`)."""

GATEWAY = r"""
shim/trajkit_shim/prompting/conversation.py: shim/prompting shim/test_app
    a reply is restored whatever the arguments of its calls
        |        and _same_json(one.arguments, other.arguments)\n| -> ||
    a reply is restored whatever its reasoning
        |(thought[0] and thought[0] != thought[1])| -> |False|
    a reply that is split in two is not joined
        |for n in range(len(run), 0, -1):| -> |for n in (1,):|
    results keep the order of the client
        |for sent_id, call in calls.items() if results else ():|
        -> |for sent_id, call in ((k, calls[k]) for k in by_call):|
    a call may have no result
        |if sent_id not in by_call:| -> |if False:|
    a call may have two results
        |if same and own != same[0]:| -> |if False:|
    what a request was read from is not counted
        |restored.n_bytes += sum(map(len, restored.elements))| -> |pass|
    a message is known by its place alone
        | and places[n].index < n_same:| -> |:|
    ids of earlier turns are kept apart
        |base.kept.ids, node.kept = node.kept.ids, base.kept| -> |pass|
    a reply that is sampled again stays the earlier turn's
        |if not any(p.is_reply and p.before == node.position for p in request.places)|
        -> |if True|
    ids are never released
        |while self.n_bytes > self.max_bytes:| -> |while False:|
    a call of another reply may be this one
        |(one.call_id == other.call_id or one.call_id not in taken)| -> |True|
    a position does not depend on what was before
        |return blake2b(position + key, digest_size=16).digest()|
        -> |return blake2b(key, digest_size=16).digest()|
    of replies that look alike the first counts
        |{}).values()][::-1]| -> |{}).values()]|
shim/trajkit_shim/prompting/prompts.py: shim/prompting shim/test_app
    text before the replies may be rewritten
        |if found.hasher.digest() != base.between:| -> |if False:|
    other tools do not matter
        |"tools": node.offered != self.offered.digest| -> |"tools": False|
    a cut reply is extended
        |"unclosed": not node.closed| -> |"unclosed": False|
    a reply that stopped at another role keeps its last token
        |if self.skeleton.opens_next and between.head[between.end_at :] != ended:|
        -> |if False:|
    what the template would rewrite is not looked at
        |changed = self._rewritten(n_known)| -> |pass|
    reasoning that the template leaves out is not noticed
        |return None if thought in chat.squeezed(shown) else "reasoning"| -> |return None|
    other variables do not matter
        |as_json([tools, given])| -> |as_json([tools])|
    a template that cannot extend at a role is extended
        |any(extends[role] for role in roles)| -> |False|
    a reply may be hidden
        |if first < start:| -> |if False:|
    the text after a reply may depend on it
        |if len(tails) > 1:| -> |if False:|
    what moves on with a later message is not noticed
        |any(text.partition("questionword")[0] != before for _, text in laters)| -> |False|
    a text with marks is the prompt's, whatever else it has
        |same = clean.endswith(text)| -> |same = True|
    the start of a text is that of the earlier request
        |and text.startswith(known.head)| -> |and True|
    a token that reaches beyond a message belongs to it
        |ends, side="right")| -> |ends, side="left")|
    white space at the ends of a content is structure
        |for inside_space in (False, True):| -> |for inside_space in (True,):|
shim/trajkit_shim/prompting/render.py: shim/prompting shim/test_app
    text may forge control tokens
        |while isinstance(value, str) and spelled.search(value):| -> |while False:|
    an end token of a cut reply is not shown
        |if ended and ids and ids[-1] in self.end_ids:|
        -> |if ids and ids[-1] in self.end_ids:|
    late system messages are never refused
        |if self.late_system == "refuse":| -> |if False:|
    end tokens of the language model's own section are not read
        |for part in (config, inner if isinstance(inner, dict) else {}):|
        -> |for part in (config,):|
    calls get ids that the template refuses
        |not calling("call_0000000000")| -> |False|
    half a character reaches the tokenizer
        |return HALF.sub("\\ufffd", text)| -> |return text|
    an end token may be left of the reasoning's end
        |return int(found[0]) + 1 if len(found) else 0|
        -> |return int(found[0]) if len(found) else 0|
    a tokenizer without words is served
        |if read.strip() != "a word":| -> |if False:|
    how text is split is guessed
        |if guessed and any(| -> |if False and any(|
    a template that is not for tools is taken
        |files = "additional_chat_templates/tool_use.jinja", "chat_template.jinja"|
        -> |files = ("chat_template.jinja",)|
shim/trajkit_shim/call.py: shim/test_app shim/protocols shim/test_conformance shim/sessions
    clients see the stop string
        |text = text[:start]| -> |text = text|
    a reply that was broken off trains
        |"trainable": sample.complete and not untrained| -> |"trainable": not untrained|
    a side call trains
        |"trainable": sample.complete and not untrained| -> |"trainable": sample.complete|
    a client of a session with fixed sampling may require a form
        |required = replace(required, schema=None)| -> |pass|
shim/trajkit_shim/json_input.py: shim/test_images
    images of an earlier request are not taken again
        |if self.takes_images:| -> |if False:|
shim/trajkit_shim/app.py: shim/test_app shim/test_serve shim/sessions
    web pages may call
        |if "origin" in headers:| -> |if False:|
    a compressed body is no JSON
        |if (coding := headers.get("content-encoding", "identity")) != "identity":|
        -> |if False:|
shim/trajkit_shim/call.py: shim/sessions shim/test_app shim/test_delivery shim/test_app
        shim/test_serve shim/protocols
    one session may take all the room
        |if session.n_bytes + self._n_bytes + n_bytes| -> |if self._n_bytes + n_bytes|
    a variable that the template lacks is not counted
        |unknown = self._variables.keys() - renderer.variables| -> |unknown = ()|
    a body in chunks has the length that is stated
        | and "transfer-encoding" not in headers| -> ||
    counts of one session may take all turns
        |async with session.counting, self._gateway.counting:|
        -> |async with self._gateway.counting:|
    names of ignored fields of a session are not bounded
        |add_counts(counts.ignored, self.chat.ignored)|
        -> |counts.ignored.update(self.chat.ignored)|
    work is not bounded
        |if session.n_bytes + self._n_bytes + n_bytes > limit:| -> |if False:|
    messages are not bounded
        |if len(chat.messages) > limit:| -> |if False:|
    the session's variables do not win
        |{**gateway.options.variables, **asked, **fixed}|
        -> |{**gateway.options.variables, **fixed, **asked}|
shim/trajkit_shim/sessions/sessions.py: shim/sessions shim/test_app shim/test_delivery
    a dropped turn may train again
        |if kept := [turn for turn in turns if turn >= self.counts.dropped]:|
        -> |if kept := [*turns]:|
    one session may take all of the engine
        |asyncio.Semaphore(MAX_SAMPLED)| -> |asyncio.Semaphore(1000)|
    the end of an idle session is written once or never
        |        look = partial(|
        -> |        if self.ended_by is not None:\n            return\n        look = partial(|
    requests of one session are not bounded
        |if len(self.requests) >= MAX_REQUESTS:| -> |if False:|
    the id of a forgotten session is unknown to other workers
        |if session is None and hash(session_id) in self._forgotten:| -> |if False:|
    the id of a forgotten session may be used again
        |if known or hash(session_id) in self._forgotten:| -> |if known:|
    an ended session keeps its conversation
        |        self.conversation = Conversation()\n        self.conv|
        -> |        self.conv|
    a session with a running call is idle
        |busy = self.requests or self.closing| -> |busy = False|
    a session ends without its amendments
        |            try:\n                session.write_amendments()\n            except GatewayError:\n                # turns|
        -> |            try:\n                pass\n            except GatewayError:\n                # turns|
    a session's end does not end its calls
        |call.end(closed_error(self.session_id))| -> |pass|
    a session ends without the amendments of its end
        |        session.write_amendments()\n\n    async def finish|
        -> |\n    async def finish|
    metadata is replaced, not merged
        |{**self.outcome["metadata"], **fields.get("metadata", {})}|
        -> |{**fields.get("metadata", {})}|
    an unwritten amendment is forgotten
        |self._unwritten.append((kept, reason, trainable))|
        -> |self._unwritten[:] = [(kept, reason, trainable)]|
shim/trajkit_shim/delivery.py: shim/sessions shim/test_app shim/test_delivery
    a turn whose answer was lost trains
        |self._amend([self.turn], "undelivered", False)| -> |pass|
    a turn whose answer arrived later does not train
        |self._amend([self.turn], "delivered", None)| -> |pass|
    every request is a retry
        |return count.isdecimal() and count.strip("0") != ""| -> |return True|
    the work goes on when its last client has left
        |                    self.work.cancel()\n                    await|
        -> |                    await|
shim/trajkit_shim/prompting/conversation.py: shim/sessions
    any call started an agent
        |if start[0] in text and (not named| -> |if (not named|
    a call starts several agents
        |self._starts.remove(start)| -> |pass|
    a call of another agent may have started one
        | and (not named or start[1] == parent_id)| -> ||
    a conversation that goes on has a start
        |if restored.sampled or (named and agent_id is None):|
        -> |if named and agent_id is None:|
    the shortest prompt counts
        |max(fitting, key=lambda one: len(one[0]))|
        -> |min(fitting, key=lambda one: len(one[0]))|
    a reply that was not sent back is shared
        |n_messages + (node.after == after)| -> |n_messages + 1|
    ids are shared by their number
        |return int(np.argmax(differs)) if differs.any() else n| -> |return n|
shim/trajkit_shim/sessions/turn_log.py: shim/sessions shim/test_app
    a body is written twice
        |body = None if known else message.body| -> |body = message.body|
    bodies of a turn that could not be written are in the log
        |        new = set[bytes]()| -> |        new = bodies|
    a token without a message is content
        |None if index is None else index >= 0| -> |None if index is None else index > -2|
    a column that the log lacks is lost
        |if turn.get(name) is not None:| -> |if False:|
    a truncated log is not noticed
        |elif own.st_size != self._size:| -> |elif False:|
    half a batch stays
        |os.ftruncate(self._file, self._size)| -> |pass|
shim/trajkit_shim/sessions/client_identity.py: shim/sessions shim/test_app
    a tool's result decides what a call is for
        |has_role = message["role"] == role| -> |has_role = True|
    any value of a harness's header will do
        |if value is not None and value.startswith(harness.starts):|
        -> |if value is not None:|
shim/trajkit_shim/pauses.py: shim/test_pauses shim/test_client
    a pause that ended is renewed
        |            if renew:| -> |            if False:|
    weights change while the engine samples
        |if not self.paused:| -> |if False:|
    a lease never ends
        |await asyncio.sleep(seconds)| -> |await asyncio.sleep(1e6)|
    a pause that came too late holds
        |                await asyncio.shield(self._go_on())| -> |                pass|
shim/trajkit_shim/protocols/anthropic.py: shim/protocols shim/test_conformance shim/test_app
    parallel calls are what was refused
        |"parallel": not choice.flag(| -> |"parallel": choice.flag(|
    the billing line is shown to the model
        |if t.startswith(_BILLING)| -> |if False|
    cached tokens are counted twice
        |reply.usage.prompt_tokens - cached| -> |reply.usage.prompt_tokens|
    hosted tools are offered
        |if kind != "custom":| -> |if False:|
shim/trajkit_shim/protocols/openai.py: shim/protocols shim/test_conformance shim/test_app
    a chosen tool is not required
        |given, names = "required", (_named(choice),)| -> |given = "required"|
    usage comes whether it was asked for or not
        |    if request.include_usage:| -> |    if True:|
    reasoning that is sent back is lost
        |thought = thought if isinstance(thought, str) else ""| -> |thought = ""|
    two turns become one message
        |any(_thoughts(read)) and not all(_thoughts(turn))| -> |False|
    a namespace is lost
        |item["namespace"], item["name"] = request.namespaces[block.name]| -> |pass|
    a cut reply is complete
        |"status": "incomplete" if reply.cut else "completed",| -> |"status": "completed",|
shim/trajkit_shim/protocols/gemini.py: shim/protocols shim/test_conformance shim/test_app
    two results without ids are of one call
        |waiting.remove(calls[0])| -> |pass|
    types of schemas stay in upper case
        |schema.lower() if key == "type" and schema in _TYPES else schema| -> |schema|
shim/trajkit_shim/protocols/base.py: shim/protocols shim/test_conformance shim/test_app
        shim/sessions:finishing
    a line break in arguments ends an event
        |raw.text.replace("\\n", " ").replace("\\r", " ")| -> |raw.text|
    half a character ends the connection
        |    except TypeError:| -> |    except KeyError:|
shim/trajkit_shim/replies.py: shim/replies shim/test_app
    an unclosed thought is text
        |return inside, rest.lstrip("\\n") if closed else ""|
        -> |return ("", text) if not closed else (inside, rest.lstrip("\\n"))|
    a call that cannot be read is well formed
        |ill_formed, stop = True, max(| -> |ill_formed, stop = False, max(|
    a key may come twice
        |if key in values:| -> |if False:|
    a string that spells a number becomes one
        |return text if kind != "string" and kind in kinds else _dumps(written)|
        -> |return text if kind != "string" else _dumps(written)|
    an unknown format is served as text
        |if not renderer.shows_tools:| -> |if True:|
    a form need not read all that the template writes for calls
        |if read == wanted and not found.text.strip():| -> |if read == wanted:|
    the header of a reply is text
        |rest.removeprefix(self.frame[0])| -> |rest|
    a token that ends no reply is served as text
        |if fault and name is None:| -> |if False:|
    reasoning is always in the tags of most families
        |if found := re.search(shown, thinks):| -> |if found := None:|
shim/trajkit_shim/replies.py: shim/replies shim/test_app shim/protocols
    a session's own grammar is replaced
        |    if own:| -> |    if False:|
    a required tool need not be offered
        |if wanted or (required.call and not tools):| -> |if False:|
shim/trajkit_shim/engines/checks.py: shim/engines/test_servers
    an id is in a mask twice
        |if len({*allowed}) < len(allowed):| -> |if False:|
    a reply ended without an id
        |if sample.ended and not len(ids):| -> |if False:|
    a paused engine is waited for without a word
        |call_later(_SLOW_SECONDS, sys| -> |call_later(9e9, sys|
    a reply of another request is recorded
        |need(request_id == own, | -> |need(True, |
    a reply whose counts differ is recorded
        |need(same, name, count, f"{number} were counted")| -> |pass|
    logprobs may be of other ids
        |if type(label) is not int or label != token:| -> |if False:|
    a null weight version is a name
        |known = all(span.version is not None for span in versions)| -> |known = True|
    an impossible count of cached tokens is recorded
        |possible = type(cached) is int and 0 <= cached <= n_prompt| -> |possible = True|
    ids may follow the end of a reply
        |if end is not None and not| -> |if False and not|
    a mask may lack what was drawn
        |if ids[i] not in allowed:| -> |if False:|
shim/trajkit_shim/engines/http.py: shim/engines/test_servers
    an error with status 200 is a reply
        |if value.get("error"):| -> |if False:|
    a mask that is missing allows each id
        |[*meta["output_token_sampling_mask"]]| -> |meta["output_token_sampling_mask"]|
    logprobs are from before the cut
        |scored = [(new, token) for new, (_, token) in zip(cut, scored, strict=True)]|
        -> |pass|
    a token that the server put in the place of another trains
        |word = "matched" if finish.get("matched") == "NaN happened" else "type"|
        -> |word = "type"|
    a greedy call has logprobs of the model
        |if params["temperature"] == 0:| -> |if False:|
    a client that leaves does not abort its call
        |await self._abort(server, request.request_id)| -> |pass|
    sessions move between servers
        |zlib.crc32(request.session_id.encode())|
        -> |zlib.crc32(request.request_id.encode())|
shim/trajkit_shim/chat/request.py: shim/protocols shim/test_conformance shim/test_app
    a parameter has no effect, because the gateway sets it
        |for name in extra.keys() & {| -> |for name in set() & {|
    an effort that the template refuses is given to it
        |if takes(name, value)]| -> |if takes(name, None)]|
    a client decides what the session fixes
        |return name not in client and bool(fixed)| -> |return False|
    no reply is longer than the default
        |[*(either or [max_tokens]), room]| -> |[*either, max_tokens, room]|
    a client may sample longer than the session
        |limit = min([*(either or [max_tokens]), room])|
        -> |limit = min([max_tokens, room])|
shim/trajkit_shim/json_input.py: shim/protocols shim/test_conformance shim/test_app
    a field that nobody reads is not counted
        |if value or value == {}:| -> |if False:|
    numbers need not be finite
        |    if math.isinf(number):| -> |    if False:|
    a body may be nested without limit
        |        if not level:| -> |        if True:|
    ignored fields are counted without limit
        |if shown in counts or len(counts) < _MOST_IGNORED:| -> |if True:|
    all messages are read as the first
        |.encode() + orjson.dumps(item)| -> |.encode()|
    what another protocol read is known
        |return self.protocol.encode() + orjson.dumps(item)| -> |return orjson.dumps(item)|
    large integers are rounded
        |raise OverflowError| -> |pass|
shim/trajkit_shim/workers.py: shim/test_serve
    all sessions are the first worker's
        |loads.index(min(loads)))| -> |0)|
    a web page may ask another worker
        |"content-type", "origin")| -> |"content-type")|
    each worker pauses the engine itself
        |(first and path.startswith("/engine"))| -> |path.startswith("/engine")|
    an id may be used at every worker
        |self._owners.get(hash(session_id), loads| -> |(lambda _, i: i)(0, loads|
shim/trajkit_shim/client.py: shim/test_client
    a lost lease is not noticed
        |self._lost = error| -> |pass|
    sessions are all opened at one gateway
        |self._owners[begun] = url| -> |self._owners[begun] = ""|
    a pause that failed at one gateway stays at the others
        |await asyncio.shield(self.resume())| -> |pass|
"""
