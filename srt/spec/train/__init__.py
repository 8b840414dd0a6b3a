"""Training of drafts: text the target writes itself, an EAGLE-3 draft that learns to foresee it.

    words, bank, overlap, hot     pure: prompts of eight kinds, what was held out, the hot tokens
    target, writing, corpus       the target as a dense batched model, and what it writes
    attention, network, unroll    the draft's network and its loss over several guesses
    acceptance                    how many guesses a greedy chain would have had accepted
    loop, export                  the training itself, and the folder it leaves

Method: EAGLE-3 (arXiv 2503.01840): features of three layers, training-time test.
"""
