"""KV events of real servers: received, decoded, recorded, followed and published.

It adds the verb `record`, and the workload `kv-events`: the requests behind a recording. To
read, in this order::

    model.py          the events, in one vocabulary for all formats
    vllm.py, tensorrt_llm.py, dynamo.py, mooncake.py   a format each: fields of an engine's own
    formats.py        which format a payload has; decodes and encodes all of them
    sequencer.py      the batches of a publisher: each once, in order, with the gaps
    subscriber.py     a subscription over ZMQ to the publishers of a server
    recording.py      files of events: written from a subscription, and read
    block_tracker.py  the blocks that a stream leaves resident, and contradictions in it
    workload.py       the requests behind a recording
    publisher.py      publishes events as an engine does
    cli.py            the verb
"""
