"""`python -m bench.soak`: thousands of random requests, many of them wrong or cut off, and then the
books must balance.

    plan.py     what is asked, drawn from one seed, and what a scripted engine must answer
    callers.py  asking it, over HTTP and over ZMQ
    judge.py    is this answer right?
    site.py     whom we ask: a running engine, or a scripted one of our own
    books.py    live requests, KV pages, counters and memory at the end
"""
