"""The part that runs in the processes of a vLLM core, and patches vLLM there.

worker     loads weights from hotswap's stores, ends with the parent, and adds methods to each worker
resume     makes requests continue that began in another engine
grammar    compiles grammars, and advances them by tokens from elsewhere
sampling   has the sampler do what vLLM's does not
blocks     methods for KV blocks, which a core's scheduler runs between two steps
connector  holds KV blocks for requests that arrive, and lets vLLM find them
pages      the KV blocks of one worker, as bytes
"""
