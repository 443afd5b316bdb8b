"""The samples of one request: streams of their own that share the KV blocks of their prompt."""

from __future__ import annotations

from dataclasses import replace

from hotswap.request import Request, RequestId
from hotswap.view import InstanceId

__all__ = ["SampleGroup", "samples_of"]


def samples_of(request: Request) -> tuple[Request, ...]:
    """Return a request for each sample that a request asks for; the request itself if it asks for one."""
    sampling = request.sampling
    if sampling.n == 1:
        return (request,)
    return tuple(
        replace(request, id=RequestId(f"{request.id}-{index}"), sampling=sampling.sample(index))
        for index in range(sampling.n)
    )


class SampleGroup:
    """Where samples of one request may begin, so that an instance computes their prompt once.

    An instance is *ready* once a sample has got a token there: its prefix cache has the prompt. Until then
    one sample, the leader, runs ahead, and the others wait for its first token.

    Args:
        request: The request that they are samples of.
        leader: The sample that begins.

    Attributes:
        request: That request.
        leader: The sample that has been sent to an instance to compute the prompt there, if one has.
    """

    def __init__(self, request: RequestId, leader: RequestId) -> None:
        self.request = request
        self.leader: RequestId | None = leader
        self._ready: dict[InstanceId, None] = {}

    @property
    def ready(self) -> tuple[InstanceId, ...]:
        """The instances that have the prompt, in the order in which they got it."""
        return tuple(self._ready)

    def assigned(self, sample: RequestId, instance: InstanceId) -> None:
        """Note where a sample is sent; it leads if the instance is not ready."""
        if instance not in self._ready:
            self.leader = sample

    def got_token(self, sample: RequestId, instance: InstanceId) -> bool:
        """Note a token of a sample; return whether others may begin that could not before."""
        was_ready = instance in self._ready
        self._ready[instance] = None
        return self.left(sample) or not was_ready

    def left(self, sample: RequestId) -> bool:
        """Note that a sample runs nowhere, or need not lead any more; return whether it led."""
        led = self.leader == sample
        if led:
            self.leader = None
        return led

    def forget(self, instance: InstanceId) -> None:
        """Note that an instance may have lost the prompt."""
        self._ready.pop(instance, None)

    def __repr__(self) -> str:
        return f"<SampleGroup [ready: {', '.join(self._ready) or 'none'} | leader: {self.leader}]>"
