"""What runs in the processes of a vLLM core, and teaches vLLM what it does not know.

worker     weights from our stores, and an end when the parent ends; what each worker is asked for
resume     requests that go on as if they had begun here
blocks     what a core's scheduler is asked about KV blocks between two steps
connector  KV blocks held for who arrives, and how vLLM finds them
pages      the KV blocks of one worker, as bytes
"""
