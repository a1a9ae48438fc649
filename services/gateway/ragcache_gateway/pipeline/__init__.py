"""The way of a question through the gateway, as functions in order.

The steps are::

    read_question   check the request
    retrieve        search for chunks, unless the client wants an answer without documents; an
                    engine may compute the prompt that early stages give
    build_prompt    tokenize the conversation and the chunks that fit
    plan            choose their order and the engine, and the stored KV that it may load
    generate        have the engine answer; returns at the first token
    account         after the last token: ask the engine what the answer cost

Each step takes the value that the step before has returned. ``start_answer`` runs the steps up to
the first token, or up to the whole answer if the client wants it in one piece. Then the client gets
``relay_answer`` or ``complete``.
"""
